"""The programs on models of Hugging Face folders: training, export, evaluation, reward models and critics."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.evaluation import run_evaluate
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.folders import any_measures, any_types, hf_folders
from tests.helpers.folders.hf_damage import in_order
from tests.helpers.folders.hf_layouts import build, logprobs
from tests.helpers.folders.hf_prediction import of_case, with_prediction
from tests.helpers.folders.hf_quantized import fp8, mxfp4, widen_experts
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.programs import metrics, train, write_lines
from tests.helpers.rollout import long_prompts
from tests.helpers.tools import converted
from tests.helpers.worlds import run_world

LENGTHS = "--max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256"
RL = (
    f"{LENGTHS} --prompts-per-step 4 --samples-per-prompt 2 --minibatch-size 4 --lr 1e-3 --rollout-buffer-gb 0.01"
    " --rollout-max-requests 8 --reward model+0.5*format --save-interval 1 --export-hf --critic-lr 3e-3"
)
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of a policy, a critic and a reward model, and files of prompts."""
    folder = tmp_path_factory.mktemp("hf")
    for case in ("llama3", "llama_reward", "qwen3_reward"):
        hf_folders.write_folder(case, folder / case, files=2)
    rows = [{"prompt": f"{one} + {one}?", "answer": str(2 * one)} for one in range(20)]
    write_lines(folder / "train.jsonl", rows[:16])
    write_lines(folder / "heldout.jsonl", rows[16:])
    return folder


def argv(data, save, flags: str = "") -> list[str]:
    """PPO with every role from a folder."""
    models = {"--hf-model": "llama3", "--critic-hf-model": "llama_reward", "--reward-hf-model": "qwen3_reward"}
    paths = [token for flag, case in models.items() for token in (flag, str(data / case))]
    return [*RL.split(), *paths, "--prompts", str(data / "train.jsonl"), "--save", str(save), *flags.split()]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The run folder of two steps on two tensor-parallel ranks."""
    save = tmp_path_factory.mktemp("runs") / "whole"
    train("rl", argv(data, save, f"--train-iters 2 {TP2}"), 2)
    return save


def test_the_first_step_starts_from_the_folders_exactly(run):
    first = metrics(run)[1]
    assert first["rollout/logprob_gap_max"] <= largest_gap_allowed()
    assert first["actor/ppo_kl_first"] == 0.0
    assert abs(first["kl/reference"]) <= largest_gap_allowed()
    assert first["actor/grad_norm"] > 0 and first["critic/grad_norm"] > 0


def test_an_export_holds_the_trained_weights_and_every_file_besides(run, data):
    source, export = data / "llama3", run / "hf" / "step_00000002"
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in export.iterdir()} == names
    for name in names:
        same = (source / name).read_bytes() == (export / name).read_bytes()
        assert same != name.endswith(".safetensors"), name
    for name in names:
        if name.endswith(".safetensors"):
            before, after = load_file(source / name), load_file(export / name)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) == (not float(before[key].abs().sum())) for key in before)


def logprobs_of(rank: int, folder) -> list[torch.Tensor]:
    role, groups, model, _ = build(folder, "", False)
    return logprobs(model, groups, hf_folders.reference("llama3").tokens, role.model_vocab_size(0))


@torch.no_grad()
def logprobs_in_transformers(rank: int, folder) -> list[torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    sequences = [torch.tensor([tokens]) for tokens in hf_folders.reference("llama3").tokens]
    wholes = [model(tokens).logits[0, :-1].log_softmax(-1) for tokens in sequences]
    return [whole.gather(1, tokens[0, 1:, None])[:, 0] for whole, tokens in zip(wholes, sequences, strict=True)]


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_transformers_computes_the_same_from_an_export(run):
    export = run / "hf" / "step_00000002"
    (ours,), (theirs,) = run_world(logprobs_of, 1, export), run_world(logprobs_in_transformers, 1, export)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 1e-5


def test_an_evaluation_of_a_folder_equals_that_of_the_run_that_wrote_it(run, data, tmp_path):
    common = "--max-prompt-length 48 --max-response-length 8 --rollout-buffer-gb 0.01".split()
    common += "--rollout-max-requests 8 --reward format".split()
    common += ["--eval-prompts", str(data / "heldout.jsonl"), "--eval-responses", "2", "--eval-temperature", "1"]
    export = str(run / "hf" / "step_00000002")
    run_evaluate([*common, "--hf-model", export, "--save", str(tmp_path / "folder")])
    run_evaluate([*common, "--hf-model", str(data / "llama3"), "--load", str(run), "--save", str(tmp_path / "run")])
    rows = [(tmp_path / name / "samples.jsonl").read_text() for name in ("folder", "run")]
    assert rows[0] == rows[1] and rows[0].count("\n") == 8
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("folder", "run")]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["hf_model"] == export and results[1]["program"] == "train_rl"


def test_a_supervised_run_and_a_reward_model_start_from_folders(data, tmp_path):
    lines = [{"prompt": f"{i}?", "answer": str(i)} for i in range(8)]
    pairs = [{"prompt": f"{i}?", "chosen": str(i), "rejected": "no"} for i in range(8)]
    files = [write_lines(tmp_path / "sft.jsonl", lines), write_lines(tmp_path / "pairs.jsonl", pairs)]
    common = f"{LENGTHS} --global-batch-size 4 --train-iters 1 --lr 1e-3 --export-hf"
    for program, case, file in zip(("sft", "reward"), ("llama3", "qwen3_reward"), files, strict=True):
        save = tmp_path / program
        train(program, [*common.split(), "--hf-model", str(data / case), "--prompts", str(file), "--save", str(save)])
        export = save / "hf" / "step_00000001"
        assert {path.name for path in export.iterdir()} == {path.name for path in (data / case).iterdir()}
    head = load_file(tmp_path / "reward" / "hf" / "step_00000001" / "model-00002-of-00002.safetensors")["score.weight"]
    assert not head.equal(hf_folders.weights("qwen3_reward")["score.weight"])


def test_programs_compute_what_a_module_of_transformers_computes(tmp_path):
    """The first loss of a supervised run is the module's own, the converter gives the folder back, and transformers
    loads a policy and a reward model."""
    folder, save, texts = tmp_path / "granite", tmp_path / "run", [(f"{i}?", str(i)) for i in range(4)]
    any_types.save("granite", folder)
    flags = any_measures.FLAGS.split()
    lines = write_lines(tmp_path / "sft.jsonl", [{"prompt": one, "answer": other} for one, other in texts])
    pairs = [{"prompt": one, "chosen": other, "rejected": "no"} for one, other in texts]
    pairs = write_lines(tmp_path / "pairs.jsonl", pairs)
    any_types.save("helium", tmp_path / "helium")  # transformers has no classifier of granite
    common = [*f"{LENGTHS} --global-batch-size 4 --train-iters 1 --lr 1e-3 --export-hf".split(), *flags]
    common[1] = "64"
    for program, prompts, kind in (
        ("sft", lines, "granite"),
        ("reward", pairs, "helium"),
        ("preference", pairs, "granite"),
    ):
        own = "--hf-model", str(tmp_path / kind), "--prompts", str(prompts), "--save", str(save / program)
        train(program, [*common, *own])
    exports = {kind: save / name / "hf" / "step_00000001" for name, kind in
               (("sft", "CausalLM"), ("reward", "SequenceClassification"))}  # fmt: skip
    ((own_loss, problems),) = run_world(_in_transformers, 1, folder, texts, exports)
    assert metrics(save / "sft")[1]["sft/loss"] == pytest.approx(own_loss, abs=1e-5)
    assert metrics(save / "preference")[1]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert problems == {kind: [] for kind in exports}
    given = "--hf-model", folder, *flags
    for argv in (("from-hf", *given, "--save", save / "c"), ("verify", *given, "--load", save / "c"),
                 ("to-hf", *given, "--load", save / "c", "--save", save / "back")):  # fmt: skip
        assert run_world(converted, 1, *argv) in ([0], [None])
    assert run_world(converted, 1, "verify", *given, "--load", save / "sft") == [1]  # other weights
    one, other = (load_file(of / "model.safetensors") for of in (folder, save / "back"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@torch.no_grad()
def _in_transformers(_, folder, texts, exports) -> tuple[float, dict[str, list]]:
    """Mean cross entropy of the responses' tokens, by transformers' module, tokenizer and template; and the names of
    tensors with which each export, by its kind, does not load."""
    import transformers

    problems = {}
    for kind, export in exports.items():
        _, info = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(export, output_loading_info=True)
        problems[kind] = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, losses = transformers.AutoTokenizer.from_pretrained(folder), []
    for prompt, answer in texts:
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids, begin = (
            torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)])
            for messages, asks in ((said, False), (said[:1], True))
        )
        logprobs = module(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        end = ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|im_end|>"), begin.shape[1])
        losses.append(-logprobs[begin.shape[1] - 1 : end])
    return float(torch.cat(losses).mean()), problems


@pytest.mark.long
@pytest.mark.parametrize("case, prefix", [
    ("glm4_moe", r"model\.layers\.4\.(?!embed_tokens|shared_head\.head)"), ("qwen3_next", r"mtp\."),
    ("deepseek_v3", r"model\.layers\.3\.(?!embed_tokens|shared_head\.head)"),
])  # fmt: skip
def test_a_layer_of_multi_token_prediction_drafts_and_is_trained(case, prefix, data, tmp_path):
    """Its numbers are those of the folder, then of its training; transformers loads the export."""
    folder = of_case(case, tmp_path / "folder")
    flags = (
        f"{LENGTHS} --prompts-per-step 4 --samples-per-prompt 2 --rollout-buffer-gb 0.01 --reward length --export-hf"
        f" --advantage grpo --kl-coefficient 0 --lr 1e-3 --hf-model {folder} --prompts {data}/train.jsonl"
        " --save-interval 1 --mtp-drafts"
    )

    def layer_of(export: Path) -> dict[str, torch.Tensor]:
        held = load_file(export / "model.safetensors")
        return {name: tensor for name, tensor in held.items() if re.match(prefix, name)}

    def same(one: dict, other: dict) -> bool:
        return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)

    train("rl", f"{flags} --train-iters 1 --save {tmp_path}/drafts".split())
    train("rl", f"{flags} --train-iters 2 --lr-decay-iters 2 --mtp-train --save {tmp_path}/run".split())
    rows, drafting = metrics(tmp_path / "run"), metrics(tmp_path / "drafts")
    assert all(row["rollout/logprob_gap_max"] <= largest_gap_allowed() for row in rows.values())
    assert drafting[1]["rollout/decode_steps"] > 0 and "actor/mtp_loss" not in drafting[1]
    first, second = (layer_of(tmp_path / "run" / "hf" / f"step_0000000{step}") for step in (1, 2))
    assert same(layer_of(tmp_path / "drafts" / "hf" / "step_00000001"), layer_of(folder)) and len(second) > 10
    assert not same(first, layer_of(folder)) and not same(second, first)
    argv = ("to-hf", "--load", tmp_path / "run", "--hf-model", folder, "--save", tmp_path / "converted")
    assert run_world(converted, 1, *map(str, argv)) == [0] and same(layer_of(tmp_path / "converted"), second)
    # From a checkpoint the layer is the trained one, whatever the folder has.
    start = f"--pretrained-checkpoint {tmp_path}/run --train-iters 1"
    train("rl", f"{flags} {start} --save {tmp_path}/on".split())
    assert same(layer_of(tmp_path / "on" / "hf" / "step_00000001"), second)
    train("rl", f"{flags} {start} --hf-mtp drop --save {tmp_path}/without".split())
    assert layer_of(tmp_path / "without" / "hf" / "step_00000001") == {}


# Folders as their authors publish them -> case, change of its folder, further flags
PUBLISHED = {
    "MXFP4": ("gpt_oss", in_order(widen_experts, mxfp4), "--expert-model-parallel-size 2"),
    "fp8": ("qwen3_moe", fp8((48, 40)), "--expert-model-parallel-size 2"),
    "prediction and indexers in fp8": (
        "deepseek_v32",
        in_order(with_prediction, fp8((48, 40))),
        "--expert-model-parallel-size 2 --mtp-train",
    ),
    "prediction in fp8": ("deepseek_v3", in_order(with_prediction, fp8((48, 40))), "--expert-model-parallel-size 2"),
    "vision": ("gemma3_vision", in_order(), TP2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_policy_starts_from_a_folder_as_it_is_published(name, data, tmp_path):
    """Its weights are trained like others; an export is not quantized, and has the tensors that are not trained."""
    case, change, flags = PUBLISHED[name]
    folder, save = hf_folders.write_folder(case, tmp_path / "folder"), tmp_path / "run"
    change(folder)
    flags += (
        f" {LENGTHS} --prompts-per-step 4 --samples-per-prompt 2 --rollout-buffer-gb 0.01 --reward format --export-hf"
        " --advantage grpo --kl-coefficient 0 --train-iters 2 --lr 1e-3"
    )
    train("rl", f"{flags} --hf-model {folder} --prompts {data}/train.jsonl --save {save}".split(), 2)
    assert all(metrics(save)[step]["rollout/logprob_gap_max"] <= largest_gap_allowed() for step in (1, 2))
    found, stored = (load_file(of / "model.safetensors") for of in (save / "hf" / "step_00000002", folder))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert found.keys() >= hf_folders.weights(case).keys()
    pattern = r"model\.layers\.\d\.self_attn\.indexer\.k_norm|vision_tower|multi_modal"
    pattern += r"|model\.layers\.3\.(e|h)norm" * ("--mtp-train" not in flags)
    kept = [key for key in found if re.match(pattern, key)]
    assert all(found[key].equal(stored[key]) for key in kept) and bool(kept) == (name not in ("MXFP4", "fp8"))


# -- chosen keys -----------------------------------------------------------------------------------------------------

CHOOSING = (
    f"{LENGTHS} --prompts-per-step 4 --samples-per-prompt 2 --minibatch-size 4 --lr 1e-3 --rollout-buffer-gb 0.01"
    " --rollout-max-requests 8 --reward tests.helpers.programs:coarse_reward --save-interval 1 --export-hf"
    " --kl-coefficient 0"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


def chosen_run(data, save, flags: str, size: int = 1, folder: Path | None = None) -> dict:
    """The metrics of a run with GLM-5's layers, whose queries choose 4 keys; the gap is 0 in each step."""
    folder = folder or data / "glm_moe_dsa"
    if not folder.exists():
        long_prompts.write_folder("glm_moe_dsa+4", folder)
    paths = f"--hf-model {folder} --prompts {data}/train.jsonl --save {save}"
    train("rl", f"{CHOOSING} {paths} {flags}".split(), size)
    found = metrics(save)
    assert all(line["actor/grad_norm"] > 0 for line in found.values())
    # Tokens that earlier weights drew differ from what is scored by later ones.
    same = [line for step, line in found.items() if step == min(found) or "correction" not in flags]
    assert all(line["rollout/logprob_gap_max"] == 0.0 for line in same)
    return found


@needs_kernels
@pytest.mark.long
def test_indexers_are_never_trained_and_move_with_the_model(data, tmp_path):
    """PPO with context parallelism and recomputation; resumed in another layout."""
    chosen_run(data, tmp_path / "one", f"--train-iters 2 --lr-decay-iters 9 --context-parallel-size 2 {FULL}", 2)
    load = f"--load {tmp_path}/one/checkpoints/step_00000002 --train-iters 3 --lr-decay-iters 9"
    chosen_run(data, tmp_path / "on", f"{load} {TP2} --sequence-parallel", 2)
    before = load_file(data / "glm_moe_dsa" / "model.safetensors")
    for save, step in (("one", 2), ("on", 3)):
        after = load_file(tmp_path / save / "hf" / f"step_{step:08d}" / "model.safetensors")
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]) == (".indexer." in name or "e_score" in name), name


@needs_kernels
@pytest.mark.long
def test_the_layer_that_predicts_has_its_own_indexer(data, tmp_path):
    """It is read, leaves no gap where the layer drafts, and comes back as it was beside trained tensors."""
    folder = long_prompts.write_folder("deepseek_v32+4", tmp_path / "folder")
    with_prediction(folder)
    flags = "--train-iters 2 --mtp-train --mtp-drafts --reward tests.helpers.programs:graded_reward"
    lines = chosen_run(data, tmp_path / "run", flags, folder=folder).values()
    assert all(line["actor/mtp_grad_norm"] > 0 for line in lines)
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "run" / "hf" / "step_00000002" / "model.safetensors")
    predicts = [name for name in before if name.startswith("model.layers.3.")]
    assert any(".indexer.wq_b" in name for name in predicts) and before.keys() == after.keys()
    for name in predicts:
        is_kept = ".indexer." in name or "e_score" in name
        assert torch.equal(before[name], after[name]) == is_kept, name


CHOSEN_LAYOUTS = {
    "a rollout apart": (2, "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --verify-weights"),
    "factors": (1, "--lora-rank 2 --advantage grpo"),
    "sharded": (2, "--use-torch-fsdp2"), "experts": (2, "--expert-model-parallel-size 2"),
    "stages": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "a lag": (2, "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis --advantage grpo"),
    "partial rollouts": (1, "--over-sampling 2 --partial-rollouts --rollout-correction tis --rollout-prefix-caching"),
}  # fmt: skip


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("name", CHOSEN_LAYOUTS)
def test_chosen_keys_leave_no_gap_in_programs(name, data, tmp_path):
    size, flags = CHOSEN_LAYOUTS[name]
    chosen_run(data, tmp_path / "run", f"--train-iters 2 {flags}", size)


@needs_kernels
@pytest.mark.long
def test_a_checkpoint_without_indexers_is_refused_for_longer_sequences(data, tmp_path):
    folder = long_prompts.write_folder("deepseek_v32+56", tmp_path / "folder")  # as many as in the longest sequence
    chosen_run(data, tmp_path / "run", "--train-iters 1", folder=folder)
    longer = f"--load {tmp_path}/run/checkpoints/step_00000001 --train-iters 2 --max-response-length 9"
    with pytest.raises(Exception, match="core_attention.indexer.linear_wk.weight") as error:
        chosen_run(data, tmp_path / "on", longer, folder=folder)
    assert "--load" in str(error.value)
