"""Hugging Face folders that do not fit a role or the user's flags, and multimodal ones: exit status 2 and one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import SINGLE, argv, config, line_of, smaller_vocabulary, tensors, text_config
from tests.helpers.forked_programs import accepted, check, error_line, refusal
from tests.helpers.programs import environment, write_lines
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS

PPO = "--critic-lr 1e-3 --kl-coefficient 0.05"
GRPO = "--advantage grpo --kl-coefficient 0"
MODULES = {"rl": "train_rl", "sft": "train_sft", "reward": "train_reward", "evaluate": "evaluate"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of folders that no test changes."""
    made = tmp_path_factory.mktemp("folders")
    for case in "llama2 qwen2 qwen3 mixtral qwen2_moe glm4_moe llama_reward smollm2 deepseek_v2".split():
        hf_folders.write_folder(case, made / case)
    smaller_vocabulary(112)(hf_folders.write_folder("llama2", made / "small"))
    (made / "file").write_text("no folder")
    return made


# -- what fits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program, case, flags", [
    ("sft", "llama2", ""),
    ("sft", "glm4_moe", ""),
    ("reward", "llama_reward", ""),
    ("reward", "llama2", ""),
    ("evaluate", "llama2", ""),
    ("rl", "llama2", f"{PPO} --critic-hf-model {{}}/llama_reward"),
    ("rl", "llama2", f"{GRPO} --reward model --reward-hf-model {{}}/llama_reward"),
])  # fmt: skip
def test_fitting_folders_pass_the_check(program, case, flags, folders, tmp_path):
    """Otherwise the tests below would show little."""
    command = argv(tmp_path, folders / case, program, flags.format(folders))
    assert accepted(command, program, size=2)


# -- paths -------------------------------------------------------------------------------------------------------

PATHS = {
    "no folder": ("{}/nothing", "no such folder"),
    "a file": ("{}/file", "no such folder"),
    "a file in the folder": (f"{{}}/llama2/{SINGLE}", "no such folder"),
    "a model's name": ("HuggingFaceTB/SmolLM2-135M-Instruct", "no such folder"),
    "a folder without a model": ("{}", "config.json is missing"),
    "a name that is too long": ("{}/" + "x" * 300, "no such folder"),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_are_no_folder(name, folders, tmp_path):
    path, needle = PATHS[name]
    assert f"--hf-model {path.format(folders)}: {needle}" in line_of(tmp_path, path.format(folders))


# -- roles -------------------------------------------------------------------------------------------------------

POLICY = "a sequence-classification model; a policy needs a language model"
SCORES = "a language model; a reward model is a …ForSequenceClassification"
# name -> program, folder of --hf-model, other flags, what the line must contain
ROLES = {
    "policy with a score": ("sft", "llama_reward", "", ["--hf-model {}/llama_reward", POLICY]),
    "policy of PPO with a score": ("rl", "llama_reward", PPO, ["--hf-model {}/llama_reward", POLICY]),
    "evaluation of a score": ("evaluate", "llama_reward", "", ["--hf-model {}/llama_reward", POLICY]),
    "reference with a score": ("rl", "llama2", f"{PPO} --reference-hf-model {{}}/llama_reward",
                               ["--reference-hf-model {}/llama_reward", POLICY]),
    "reward model that writes": ("rl", "llama2", f"{GRPO} --reward model --reward-hf-model {{}}/llama2",
                                 ["--reward-hf-model {}/llama2", SCORES]),
    "reward model of an evaluation": ("evaluate", "llama2", "--reward model --reward-hf-model {}/llama2",
                                      ["--reward-hf-model {}/llama2", SCORES]),
    "no folder of the reward model": ("rl", "llama2", f"{GRPO} --reward model --reward-hf-model {{}}/nothing",
                                      ["--reward-hf-model {}/nothing: no such folder"]),
    "no folder of the critic": ("rl", "llama2", f"{PPO} --critic-hf-model {{}}/file",
                                ["--critic-hf-model {}/file: no such folder"]),
    "reference of fewer tokens": ("rl", "llama2", f"{PPO} --reference-hf-model {{}}/small",
                                  ["--reference-hf-model {}/small", "the reference reads ids up to 127"]),
    "critic of fewer tokens": ("rl", "llama2", f"{PPO} --critic-hf-model {{}}/small",
                               ["--critic-hf-model {}/small", "the critic reads ids up to 127"]),
    "reward model without one": ("rl", "llama2", f"{GRPO} --reward model", ["--reward model", "--reward-hf-model"]),
    "folder of a rollout": ("rl", "llama2", f"{GRPO} --rollout-hf-model {{}}/llama2", ["--rollout-hf-model"]),
    "export of drawn weights": ("rl", "", f"{GRPO} --export-hf --num-layers 2 --hidden-size 32 --num-attention-heads 4",
                                ["--export-hf: needs --hf-model"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_folders_that_do_not_fit_their_role(name, folders, tmp_path):
    program, case, flags, needles = ROLES[name]
    command = argv(tmp_path, folders / case, program, flags.format(folders))
    line = refusal(command if case else command[2:], program, size=2)
    assert all(needle.format(folders) in line for needle in needles), line


# -- flags -------------------------------------------------------------------------------------------------------

# case -> flags that contradict its config.json
CONTRADICTIONS = {
    "llama2": [
        "--num-layers 5", "--hidden-size 128", "--ffn-hidden-size 64", "--num-attention-heads 8", "--kv-channels 32",
        "--num-query-groups 1", "--normalization LayerNorm", "--norm-epsilon 1e-3", "--rotary-base 500000",
        "--rotary-percent 0.5", "--rotary-seq-len-interpolation-factor 2", "--use-rope-scaling", "--add-qkv-bias",
        "--qk-layernorm", "--squared-relu", "--num-experts 4", "--position-embedding-type none",
        "--glu-linear-offset 1", "--activation-func-clamp-value 7",
    ],
    "smollm2": ["--untie-embeddings-and-output-weights"],
    "mixtral": [
        "--num-experts 4", "--moe-router-topk 1", "--moe-router-pre-softmax", "--moe-ffn-hidden-size 64",
        "--moe-layer-freq 2", "--moe-router-score-function sigmoid", "--moe-shared-expert-intermediate-size 64",
    ],
    "glm4_moe": ["--moe-router-topk-scaling-factor 3", "--moe-router-score-function softmax", "--rotary-percent 1",
                 "--moe-shared-expert-gate", "--moe-router-num-groups 4"],
    "deepseek_v2": ["--q-lora-rank 8", "--kv-lora-rank 8", "--qk-head-dim 8", "--qk-pos-emb-head-dim 8",
                    "--v-head-dim 8", "--latent-norm-epsilon 1e-3", "--moe-router-group-score sum"],
}  # fmt: skip


ROWS = [(case, flags) for case, each in CONTRADICTIONS.items() for flags in each]


@pytest.mark.parametrize("case, flags", by_default(ROWS, [(case, CONTRADICTIONS[case][0]) for case in CONTRADICTIONS]))
def test_flags_that_contradict_the_folder(case, flags, folders, tmp_path):
    line = line_of(tmp_path, folders / case, flags=flags)
    needles = [flags.split()[0], f"config.json of --hf-model {folders / case} describes", "leave the flag out"]
    assert all(needle in line for needle in needles), line


@pytest.mark.parametrize("flags, needles", [
    ("--critic-num-layers 5", ["critic: --num-layers 5", "--hf-model", "describes"]),
    ("--reference-norm-epsilon 1e-3", ["reference: --norm-epsilon 0.001", "--hf-model", "describes"]),
    ("--critic-hf-model {}/qwen3 --num-query-groups 1", ["--num-query-groups 1", "describes"]),
])  # fmt: skip
def test_flags_of_a_role_that_contradict_its_folder(flags, needles, folders, tmp_path):
    line = line_of(tmp_path, folders / "llama2", "rl", f"{PPO} {flags.format(folders)}")
    assert all(needle in line for needle in needles), line


def test_layouts_that_do_not_fit_the_model_name_the_folder(folders, tmp_path):
    line = line_of(tmp_path, folders / "smollm2", flags="--tensor-model-parallel-size 2")
    assert "--tensor-model-parallel-size 2" in line and f"config.json of --hf-model {folders / 'smollm2'}" in line


def test_flags_that_say_the_same_are_allowed(folders, tmp_path):
    flags = "--num-layers 3 --hidden-size 64 --swiglu --norm-epsilon 1e-5 --rotary-base 10000"
    assert accepted(argv(tmp_path, folders / "llama2", flags=flags), "sft", size=2)


def test_what_contradicts_is_a_flag_of_megatron():
    from megarl.mcore.config.megatron_flags import destinations
    from megarl.mcore.config.supported_flags import ARCHITECTURE

    assert set(destinations().values()) >= ARCHITECTURE


# -- as users do -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("program, case, flags, needle", [
    ("rl", "llama_reward", GRPO, POLICY),
    ("sft", "file", "", "no such folder"),
    ("reward", "llama2", "--num-layers 5", "describes 3"),
    ("evaluate", "qwen2", "--rotary-percent 0.5", "describes 1.0"),
])  # fmt: skip
def test_the_programs_themselves(program, case, flags, needle, folders, tmp_path):
    command = [sys.executable, "-m", f"megarl.{MODULES[program]}", *argv(tmp_path, folders / case, program, flags)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert needle in error_line((done.returncode, done.stdout, done.stderr))


def plain_names(held: dict[str, torch.Tensor]):
    """The names of a folder of text alone."""
    for name in [name for name in held if name.startswith("model.language_model.")]:
        held[name.replace("language_model.", "")] = held.pop(name)


MULTIMODAL = {
    "no text": (config(text_config=None), ["text_config None: allowed is an object"]),
    "another text model": (text_config(model_type="llama"), ["model_type 'llama': allowed is 'qwen3_vl_text'"]),
    "another class": (config(architectures=["Qwen3VLModel"]), ["['Qwen3VLModel']", "…ForConditionalGeneration"]),
    "classes a text": (config(architectures="x"), ["architectures 'x': allowed is …ForConditionalGeneration"]),
    "tying a text": (config(tie_word_embeddings="no"), ["transformers cannot read it", "'tie_word_embeddings'"]),
    "tied with another head": (config(tie_word_embeddings=True), ["ties lm_head.weight", "but row 0 differs"]),
    "missing tensor": (tensors(lambda held: held.pop("model.language_model.norm.weight")),
                       ["model.language_model.norm.weight is missing"]),
    "names of text": (tensors(plain_names), ["model.language_model.embed_tokens.weight is missing"]),
    "unknown tower": (tensors(lambda held: held.update({"model.audio.x": torch.ones(2)})), ["audio.x is a tensor"]),
    "layer after the last": (text_config(num_hidden_layers=2), ["model.language_model.layers.2.", "after those of"]),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(MULTIMODAL, ["no text", "unknown tower"]))
def test_damaged_multimodal_folders(name, tmp_path):
    damage, needles = MULTIMODAL[name]
    folder = hf_folders.write_folder("qwen3_vl", tmp_path / "folder")
    damage(folder)
    status, printed, others = check(argv(tmp_path, folder), "sft", size=2)
    line = others.splitlines()[-1]
    assert (status, printed) == (2, "") and all(needle in line for needle in [f"--hf-model {folder}", *needles]), line


UNFIT = {
    "a score": ("reward", "--export-hf", "exports with a scalar head are those of language models"),
    "gates and an exported adapter": ("sft", "--lora-rank 2 --export-peft", "gates of attention in tensors"),
}


@pytest.mark.parametrize("name", by_default(UNFIT, ["a score", "gates and an exported adapter"]))
def test_what_some_folders_cannot_do(name, tmp_path):
    program, flags, needle = UNFIT[name]
    folder = hf_folders.write_folder("afmoe" if "gates" in name else "qwen3_vl", tmp_path / "folder")
    status, _, others = check(argv(tmp_path, folder, program, flags.format(tmp_path)), program)
    assert status == 2 and needle.format(tmp_path) in others.splitlines()[-1], others


def test_prompts_with_images_are_refused(tmp_path):
    folder = hf_folders.write_folder("qwen3_vl", tmp_path / "folder")
    command = argv(tmp_path, folder)
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is it?"}]
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}])
    status, _, others = check(command, "sft")
    assert status == 2 and "has images; --hf-model" in others.splitlines()[-1], others
