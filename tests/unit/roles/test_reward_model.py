"""The reward role with a model: equal scores in every layout, any tokenizer, normalization, ensembles, failures."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.programs import inputs, metrics, program, reward_argv, rl_argv, rows_of, timeless, train
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world
from tools.train_tokenizer import train as train_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
LENGTH = 32  # tokens that the reward model reads: its tokenizer has another vocabulary than the policy's


@functools.cache
def models() -> Path:
    """Folder with two reward models, `one` and `two`, their tokenizer and template; its vocabulary is another one."""
    folder = Path(tempfile.mkdtemp(prefix="reward-", dir=inputs()))
    (folder / "chat.jinja").write_text(TEMPLATE)
    texts = [f"[user] {a}+{b}=[assistant] {a + b}" for a in range(30) for b in range(10)]
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 48, False))
    for name, seed in (("one", 5), ("two", 6)):
        start = f"--train-iters 6 --max-prompt-length 24 --max-response-length 8 --seed {seed} {reads(folder, '')}"
        train("reward", reward_argv(folder / name, start))
    return folder


def reads(folder: Path, prefix: str = "reward-") -> str:
    return f"--{prefix}tokenizer-model {folder}/tokenizer.model --{prefix}chat-template {folder}/chat.jinja"


def reward_model_flags(flags: str = "", reward: str = "model+0*exact-match", one: str = "one") -> str:
    """Flags of a run with a reward model."""
    folders = ",".join(str(models() / name) for name in one.split(","))
    own = f"{reads(models())} --reward-max-length {LENGTH} --reward-max-tokens-per-microbatch {2 * LENGTH}"
    return f"--train-iters 1 --reward {reward} --reward-model {folders} {own} {flags}"


LAYOUTS = {
    "tensor": (2, "--reward-tensor-model-parallel-size 2"),
    "pipeline of its own ranks, offloaded": (3, "--role-map actor=0;critic=0;reference=0;reward=1-2"
                                             " --reward-pipeline-model-parallel-size 2 --reward-offload"),
    "tensor and pipeline": (4, "--role-map actor=0-1;critic=2;reference=3;reward=0-3"
                            " --reward-tensor-model-parallel-size 2 --reward-pipeline-model-parallel-size 2"),
    "two replicas, offloaded": (2, "--offload"),
}  # fmt: skip


@functools.cache
def alone() -> tuple[dict, list[dict]]:
    """Metrics and samples of one rank that has all roles."""
    save = models() / "alone"
    train("rl", rl_argv(save, reward_model_flags()))
    return metrics(save)[1], rows_of(save)


@pytest.mark.parametrize("name", by_default(LAYOUTS, ("pipeline of its own ranks, offloaded",)))
def test_scores_do_not_depend_on_the_layout(name, tmp_path):
    size, flags = LAYOUTS[name]
    train("rl", rl_argv(tmp_path / "run", reward_model_flags(flags)), size)
    expected, expected_rows = alone()
    for row, other in zip(expected_rows, rows_of(tmp_path / "run"), strict=True):
        assert (row["sequence"], row["response"]) == (other["sequence"], other["response"])
        assert row["reward_values"]["model"] == pytest.approx(other["reward_values"]["model"], abs=1e-5)
        assert row["reward_values"]["exact-match"] == other["reward_values"]["exact-match"]
    found = metrics(tmp_path / "run")[1]
    assert found["reward/model/mean"] == pytest.approx(expected["reward/model/mean"], abs=1e-5)
    assert ("memory/reward/offloaded_bytes" in found) == ("offload" in name)


def test_the_reward_model_scores_the_text_in_its_own_tokens():
    """Rendered, tokenized and scored once more by hand, one text at a time."""
    found = run_world(by_hand, 1, [(row["prompt"], row["response"]) for row in alone()[1]])[0]
    assert [row["reward"] for row in alone()[1]] == pytest.approx(found, abs=1e-5)
    assert max(found) - min(found) > 0.01
    assert alone()[0]["reward/model/cut_fraction"] == 0


def by_hand(rank: int, texts: list) -> list[float]:
    from datetime import timedelta

    from megarl.checkpoint import pretrained
    from megarl.comm import role_mesh
    from megarl.mcore.model import forward_pass, gpt

    role = program("reward", reward_argv(Path("x"), reads(models(), "")), 1).roles["reward"]
    place = role_mesh.create_mesh({"reward": role}, timedelta(minutes=1))["reward"]
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(models() / "tokenizer.model"))
    network = gpt.build_frozen_model(role.megatron, tokenizer.vocab_size, place.pg_collection, value_head=True)
    pretrained.load_weights(models() / "one" / "checkpoints" / "step_00000006", network, place.pg_collection)
    scores = []
    for prompt, response in texts:
        plain = f"[user] {prompt}[assistant] "
        tokens = torch.tensor([*tokenizer.encode(plain), *tokenizer.encode(response), tokenizer.eos_id])
        with torch.no_grad():
            scores.append(float(forward_pass.sequence_scores(network[0], tokens, torch.tensor([len(tokens)]))[0]))
    return scores


def test_a_broken_reward_model_ends_the_run():
    assert run_world(broken_scores, 1, models()) == ["--reward-model: 1 of 2 scores are not finite"]


def broken_scores(rank: int, folder: Path) -> str:
    """The error of scoring two texts after the weights of one token have become NaN."""
    from datetime import timedelta

    from megarl.checkpoint.pretrained import CheckpointWeights
    from megarl.comm import microbatches as mb
    from megarl.comm import role_mesh
    from megarl.observe.timers import Timers
    from megarl.roles.reward_model import RewardModel
    from megarl.trainers.setup import build_role_encoder

    parsed = program("reward", reward_argv(Path("x"), reads(folder, "")), 1)
    role = parsed.roles["reward"]
    weights = CheckpointWeights(folder / "one" / "checkpoints" / "step_00000006")
    place, encoder = (
        role_mesh.create_mesh(parsed.roles, timedelta(minutes=1))["reward"],
        build_role_encoder(role, parsed.settings),
    )
    reward_model = RewardModel(role, place, encoder, [weights], Timers())
    alike = reward_model._read([(Prompt(0, "1+1="), answer) for answer in "23"])
    ((part, _),) = mb.role_microbatches(alike, torch.arange(2), role, place)
    assert part.host_metadata.shared.holders.tolist() == [0, 0] and part.host_metadata.shared.tokens[1] > 3  # read once
    texts = [(Prompt(0, "1+1="), "2"), (Prompt(1, "1+3="), "4")]
    (token,) = set(encoder.response(*texts[1])) - set(encoder.response(*texts[0]))
    reward_model.members[0].model[0].embedding.word_embeddings.weight.data[token] = float("nan")
    with pytest.raises(RuntimeError) as caught:
        reward_model.scores(texts)
    return str(caught.value)


@pytest.mark.parametrize("replicas", [1, long(2)])
def test_normalized_clipped_ensembles_resume_to_the_bit(replicas, tmp_path):
    """Evaluations, the first of them before the first step, have no part in the running moments."""
    flags = "--reward-ensemble min --reward-normalize --reward-clip 1.0 --save-interval 1"
    flags += f" --eval-prompts {inputs()}/heldout.jsonl --eval-interval 1"
    both = reward_model_flags(flags, "0.5*model+exact-match", "one,two").replace("--train-iters 1", "--train-iters 2")
    train("rl", rl_argv(tmp_path / "whole", both))
    start = f"--load {tmp_path}/whole/checkpoints/step_00000001"
    train("rl", rl_argv(tmp_path / "again", f"{both} {start}"), replicas)
    whole, again = (metrics(tmp_path / name)[2] for name in ("whole", "again"))
    assert replicas > 1 or timeless(whole) == timeless(again)
    assert whole["reward/mean"] == pytest.approx(again["reward/mean"], abs=1e-5)
    assert whole["reward/model/disagreement"] > 0
    first = rows_of(tmp_path / "whole")
    for row in first:
        assert set(row["reward_parts"]) == {"model", "exact-match"}
        assert abs(row["reward_parts"]["model"]) <= 0.5
        assert row["reward"] == pytest.approx(sum(row["reward_parts"].values()))
    raw = torch.tensor([row["reward_values"]["model"] for row in first], dtype=torch.float64)
    counts = 0.5 * ((raw - raw.mean()) / raw.std()).clamp(-1, 1)
    assert [row["reward_parts"]["model"] for row in first] == pytest.approx(counts.tolist(), abs=1e-9)


def test_failing_verifiers_are_counted_and_above_their_share_stop_the_run(tmp_path):
    broken = "tests.unit.roles.test_reward_model:fails_on_odd_answers"
    flags = f"--train-iters 1 --reward {broken}+0.1*length --reward-fallback -1"
    train("rl", rl_argv(tmp_path / "run", f"{flags} --reward-max-failures 1"), 2)
    found, sampled = metrics(tmp_path / "run")[1], rows_of(tmp_path / "run")
    failed = [row for row in sampled if row["reward_values"][broken] == -1]
    assert found[f"reward/{broken}/failures"] == len(failed) > 0 == found["reward/length/failures"]
    assert all(int(row["answer"]) % 2 for row in failed)
    with pytest.raises(Exception, match=f"reward {broken} failed on {len(failed)} of 12 .* allows 0 of them; .* odd"):
        train("rl", rl_argv(tmp_path / "other", f"{flags} --reward-max-failures 0"), 2)


def fails_on_odd_answers(sample) -> float:
    """A plug-in that raises on half of its samples."""
    if int(sample.answer) % 2:
        raise ValueError("an odd answer")
    return 0.5
