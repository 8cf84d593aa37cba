"""Runs of models with experts and multi-latent attention, or recurrent states: exact rollouts, roles on other ranks,
export."""

import pytest
from safetensors.torch import load_file

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.folders import hf_folders
from tests.helpers.programs import GRADED, metrics, train, write_lines

# By default tests/distributed/test_layouts.py and tests/unit/mcore/weights/hf/test_family.py.
pytestmark = pytest.mark.long
FLAGS = (
    "--max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256 --prompts-per-step 4"
    " --samples-per-prompt 4 --minibatch-size 8 --lr 1e-3 --rollout-buffer-gb 0.01 --rollout-max-requests 8"
    " --advantage grpo --kl-coefficient 0.05 --router-replay rollout --save-interval 1"
    f" --export-hf {GRADED}"
)
# The families of DeepSeek-V3 with YaRN, of Qwen3-Next, of Nemotron 3, and of Kimi-Linear.
MODELS = {
    "latent": ("deepseek_v3_yarn", "--rollout-prefix-caching"),
    "recurrent": ("qwen3_next", ""),
    "mamba": ("nemotron_h_latent", ""),
    "channels": ("kimi_linear", "--rollout-prefix-caching"),
}
TP2_EP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
APART = "--role-map actor=0-1;reference=0-1;reward=0-1;rollout=2 --expert-model-parallel-size 2"


@pytest.fixture(scope="module", params=MODELS)
def data(request, tmp_path_factory):
    """A model's folder, prompts, and further flags."""
    folder, (case, flags) = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    hf_folders.write_folder(case, folder / "model", files=2)
    write_lines(folder / "train.jsonl", [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(16)])
    (folder / "flags").write_text(flags)
    return folder


def argv(data, save, flags: str) -> list[str]:
    paths = {"--hf-model": data / "model", "--prompts": data / "train.jsonl", "--save": save}
    flags = f"{(data / 'flags').read_text()} {flags}"
    return [*FLAGS.split(), *(str(token) for pair in paths.items() for token in pair), *flags.split()]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The run folder of two steps on two ranks that share heads and experts."""
    save = tmp_path_factory.mktemp("runs") / "whole"
    train("rl", argv(data, save, f"--train-iters 2 {TP2_EP2}"), 2)
    return save


def check_first(first: dict):
    assert first["rollout/logprob_gap_max"] <= largest_gap_allowed() and first["actor/ppo_kl_first"] == 0.0
    assert first["router/replayed_fraction"] == 1.0 and first["router/disagreement"] == 0.0
    assert abs(first["kl/reference"]) <= largest_gap_allowed() and first["actor/grad_norm"] > 0


def test_rollout_and_training_agree_exactly(run):
    check_first(metrics(run)[1])
    assert metrics(run)[2]["rollout/logprob_gap_max"] <= largest_gap_allowed()


def test_a_rollout_on_ranks_of_its_own_gets_the_weights(data, tmp_path):
    train("rl", argv(data, tmp_path / "run", f"--train-iters 2 {APART} --rollout-expert-model-parallel-size 1"), 3)
    found = metrics(tmp_path / "run")
    check_first(found[1])
    assert found[2]["rollout/logprob_gap_max"] <= largest_gap_allowed() and found[2]["weights/sync_bytes"] > 0


def test_an_export_has_the_sources_tensors_with_other_numbers(run, data):
    source, export = data / "model", run / "hf" / "step_00000002"
    assert {path.name for path in export.iterdir()} == {path.name for path in source.iterdir()}
    for path in source.glob("*.safetensors"):
        before, after = load_file(path), load_file(export / path.name)
        assert {name: (x.shape, x.dtype) for name, x in before.items()} == {
            name: (x.shape, x.dtype) for name, x in after.items()
        }
        trained = ("kv_a_", "q_b_proj", "linear_attn", "conv1d", "f_b_proj", "A_log", "dt_bias")
        for name in (name for name in before if any(each in name for each in trained)):
            assert not before[name].equal(after[name]), name
