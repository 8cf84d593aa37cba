"""--hf-model and --reward-hf-model: which role gets which folder, tokenizer and weights."""

import functools
from pathlib import Path

import pytest

from megarl.arguments import Settings, parse
from megarl.errors import UsageError
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import argv
from tests.helpers.programs import train
from tests.helpers.texts import small_tokenizers

PPO, GRPO = "--advantage gae --kl-coefficient 0.05", "--advantage grpo --kl-coefficient 0"
SIZES = "--max-prompt-length 48 --max-response-length 16"
MODEL = "--reward model --reward-hf-model {}/llama_reward"
POLICIES = ("actor", "critic", "reference", "rollout")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders of two policies and a reward model, and other tokenizers."""
    made = tmp_path_factory.mktemp("folders")
    for case in ("llama2", "qwen3", "llama_reward"):
        hf_folders.write_folder(case, made / case)
    small_tokenizers.chatml(made / "chatml")
    small_tokenizers.sentence_piece(made / "other.model")
    return made


@functools.cache
def config(flags: str, program: str = "rl", size: int = 1):
    return parse(f"{SIZES} {flags}".split(), size, program)


def roles(folders: Path, flags: str, program: str = "rl") -> dict:
    return config(flags.format(*[folders] * flags.count("{}")), program).roles


def folder_names(found: dict) -> dict[str, str | None]:
    """Name of each role's folder."""
    return {name: role.hf_model and role.hf_model.folder.path.name for name, role in found.items()}


# -- folders -----------------------------------------------------------------------------------------------------


def test_the_common_folder_is_every_roles(folders):
    found = roles(folders, f"--hf-model {{}}/llama2 {PPO}")
    assert folder_names(found) == dict.fromkeys(["actor", "critic", "reward", "reference", "rollout"], "llama2")
    for role in found.values():
        assert role.hf_model.folder.flag == "--hf-model"
        assert (role.megatron.num_layers, role.megatron.hidden_size, role.megatron.ffn_hidden_size) == (3, 64, 128)
        assert role.model_vocab_size(100) == 128
        assert role.megatron.draws_weights is False


@pytest.mark.parametrize("program, expected", [
    ("sft", {"actor"}), ("reward", {"reward"}), ("evaluate", {"actor", "reward", "rollout"}),
])  # fmt: skip
def test_every_program_has_the_flag(program, expected, folders):
    found = roles(folders, "--hf-model {}/llama2", program)
    assert folder_names(found) == dict.fromkeys(expected, "llama2")


def test_a_role_may_have_a_folder_of_its_own(folders):
    flags = f"--hf-model {{}}/llama2 --critic-hf-model {{}}/llama_reward --reference-hf-model {{}}/qwen3 {PPO}"
    found = roles(folders, flags)
    assert folder_names(found) == {
        "actor": "llama2", "critic": "llama_reward", "reward": "llama2", "reference": "qwen3", "rollout": "llama2",
    }  # fmt: skip
    assert {name: found[name].hf_model.folder.flag for name in POLICIES} == {
        "actor": "--hf-model", "critic": "--critic-hf-model", "reference": "--reference-hf-model",
        "rollout": "--hf-model",
    }  # fmt: skip
    assert [found[name].hf_model.has_scalar_head for name in POLICIES] == [False, True, False, False]
    assert [found[name].megatron.qk_layernorm for name in POLICIES] == [False, False, True, False]


def test_the_rollout_has_the_actors_folder(folders):
    found = roles(folders, f"--hf-model {{}}/llama2 --actor-hf-model {{}}/qwen3 {PPO}")
    assert {name: folder_names(found)[name] for name in POLICIES} == {
        "actor": "qwen3", "critic": "llama2", "reference": "llama2", "rollout": "qwen3",
    }  # fmt: skip
    assert found["rollout"].megatron.qk_layernorm and not found["reference"].megatron.qk_layernorm


def test_a_role_without_a_folder_has_the_flags(folders):
    sizes = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4}
    by_role = ("actor", "critic", "reward")
    shape = " ".join(f"--{role}-{name} {size}" for role in by_role for name, size in sizes.items())
    found = roles(folders, f"--reference-hf-model {{}}/qwen3 {shape} --reward model --reward-model x {PPO}")
    assert folder_names(found) == dict.fromkeys(["actor", "critic", "reward", "rollout"]) | {"reference": "qwen3"}
    assert [found[name].megatron.hidden_size for name in POLICIES] == [32, 32, 64, 32]
    assert [found[name].megatron.draws_weights for name in POLICIES] == [True, True, False, True]
    assert [found[name].model_vocab_size(100) for name in POLICIES] == [100, 100, 128, 100]


def test_the_reward_model_has_its_own_folder(folders):
    found = roles(folders, f"--hf-model {{}}/qwen3 {MODEL} {GRPO}")
    assert folder_names(found) == {"actor": "qwen3", "reward": "llama_reward", "rollout": "qwen3"}
    assert found["reward"].has_model and found["reward"].hf_model.folder.flag == "--reward-hf-model"
    assert found["reward"].hf_model.has_scalar_head and not found["reward"].megatron.qk_layernorm


def test_a_folder_of_one_flag_is_read_once(folders):
    found = roles(folders, f"--hf-model {{}}/llama2 --critic-hf-model {{}}/qwen3 {PPO}")
    assert found["actor"].hf_model is found["reference"].hf_model is found["rollout"].hf_model
    assert found["actor"].hf_model is not found["critic"].hf_model


@pytest.mark.parametrize("flags", [f"{GRPO}", f"{PPO} --reward format"])
def test_a_folder_of_a_reward_model_that_nothing_asks_for_is_a_warning(flags, folders):
    parsed = config(f"--hf-model {folders}/llama2 --reward-hf-model {folders}/llama_reward {flags}")
    (warning,) = parsed.warnings
    assert warning.startswith("without effect: --reward-hf-model (--reward ") and "has no model" in warning
    assert parsed.settings.reward_hf_model is None and parsed.roles["reward"].hf_model.folder.path.name == "llama2"


def test_settings_hold_the_paths(folders):
    parsed = config(f"--hf-model {folders}/qwen3 {MODEL.format(folders)} {GRPO}")
    assert parsed.settings.hf_model == f"{folders}/qwen3"
    assert parsed.settings.reward_hf_model == f"{folders}/llama_reward"
    assert Settings().hf_model is Settings().reward_hf_model is None


# -- tokenizers --------------------------------------------------------------------------------------------------


def tokenizers(found: dict) -> dict[str, tuple[str, str]]:
    """Type, and name of the folder or file, of each role's tokenizer."""
    return {name: (role.tokenizer_type, Path(role.tokenizer_model).name) for name, role in found.items()}


def test_the_tokenizer_is_that_of_the_folder(folders):
    found = tokenizers(roles(folders, f"--hf-model {{}}/qwen3 {MODEL} {GRPO}"))
    assert found == {
        "actor": ("HuggingFaceTokenizer", "qwen3"),
        "reward": ("HuggingFaceTokenizer", "llama_reward"),
        "rollout": ("HuggingFaceTokenizer", "qwen3"),
    }


def test_the_users_tokenizer_comes_before_the_common_folders(folders):
    flags = "--tokenizer-model {}/chatml --tokenizer-type HuggingFaceTokenizer"
    found = tokenizers(roles(folders, f"--hf-model {{}}/qwen3 {flags} {GRPO}"))
    assert found == dict.fromkeys(["actor", "reward", "rollout"], ("HuggingFaceTokenizer", "chatml"))
    found = tokenizers(roles(folders, f"--hf-model {{}}/qwen3 --tokenizer-model {{}}/other.model {GRPO}"))
    assert found["actor"] == ("SentencePieceTokenizer", "other.model")


def test_a_roles_own_folder_comes_before_the_common_tokenizer(folders):
    found = tokenizers(roles(folders, f"--hf-model {{}}/qwen3 --tokenizer-model {{}}/other.model {MODEL} {GRPO}"))
    assert found["actor"] == ("SentencePieceTokenizer", "other.model")
    assert found["reward"] == ("HuggingFaceTokenizer", "llama_reward")


def test_a_roles_own_tokenizer_comes_first(folders):
    found = tokenizers(
        roles(folders, f"--hf-model {{}}/qwen3 --reward-tokenizer-model {{}}/other.model {MODEL} {GRPO}")
    )
    assert found["actor"] == ("HuggingFaceTokenizer", "qwen3")
    assert found["reward"] == ("SentencePieceTokenizer", "other.model")


@pytest.mark.parametrize("flags, has_template", [("", True), ("--chat-template none", False)])
def test_template_and_end_ids_are_those_of_the_folder(flags, has_template, folders):
    from megarl.trainers.setup import build_role_encoder

    parsed = config(f"--hf-model {folders}/qwen3 {GRPO} {flags}")
    encoder = build_role_encoder(parsed.roles["actor"], parsed.settings)
    assert encoder.tokenizer.vocab_size == 100 and encoder.tokenizer.end_tokens[0] == "<|im_end|>"
    assert (encoder.template is not None) == has_template


# -- weights -----------------------------------------------------------------------------------------------------


def sources(role, value_head: bool = False):
    """Kind of the role's initial weights."""
    from megarl.checkpoint.pretrained import find_pretrained

    return find_pretrained(role, role.model_vocab_size(0), value_head=value_head)


def test_weights_come_from_the_folder_or_from_a_checkpoint_before_it(folders, tmp_path):
    from megarl.checkpoint.pretrained import CheckpointWeights, FolderWeights

    train("sft", argv(tmp_path, folders / "llama2", "sft", "--train-iters 1"))
    checkpoint = f"--pretrained-checkpoint {tmp_path / 'run'}"
    weights = sources(roles(folders, f"--hf-model {{}}/llama2 {GRPO}")["actor"])
    assert isinstance(weights, FolderWeights) and weights.weight_map.model.folder.path == folders / "llama2"
    weights = sources(roles(folders, f"--hf-model {{}}/llama2 {checkpoint} {GRPO}")["actor"])
    assert isinstance(weights, CheckpointWeights) and weights.folder.is_relative_to(tmp_path / "run")
    found = roles(folders, f"--hf-model {{}}/llama2 --actor-pretrained-checkpoint {tmp_path / 'run'} {PPO}")
    kinds = [type(sources(found[name], name == "critic")) for name in ("actor", "critic", "reference")]
    assert kinds == [CheckpointWeights, FolderWeights, FolderWeights]
    with pytest.raises(UsageError, match=r"--pretrained-checkpoint .* has shape \[3, 64, 64\]; the flags of actor"):
        sources(roles(folders, f"--hf-model {{}}/qwen3 {checkpoint} {GRPO}")["actor"])


def test_a_missing_checkpoint_is_not_replaced_by_the_folder(folders):
    with pytest.raises(UsageError, match="--pretrained-checkpoint no/such: no such folder"):
        sources(roles(folders, f"--hf-model {{}}/llama2 --pretrained-checkpoint no/such {GRPO}")["actor"])


def test_a_critic_may_have_a_policys_folder(folders):
    weights = sources(roles(folders, f"--hf-model {{}}/llama2 {PPO}")["critic"], value_head=True)
    assert weights.weight_map.value_head and "lm_head.weight" not in weights.weight_map.expected()


def test_an_export_needs_a_folder_to_resemble_and_a_place(folders):
    from megarl.trainers.setup import check_training_flags

    flags = f"--prompts x --max-tokens-per-microbatch 128 --export-hf {GRPO}"
    with pytest.raises(UsageError, match="--export-hf True: needs --save"):
        config(f"--hf-model {folders}/llama2 {flags}")
    with pytest.raises(UsageError, match="--export-hf: needs --hf-model"):
        check_training_flags(config(f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --save x {flags}"))
    check_training_flags(config(f"--hf-model {folders}/llama2 --save {folders}/run {flags}"))
