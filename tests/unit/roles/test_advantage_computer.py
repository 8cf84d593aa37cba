"""Training data of actor and critic: scores and rows of real text, advantages and returns equal in every layout."""

import pytest
import torch

from megarl.batch import Batch
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.observe.timers import Timers
from megarl.rewards.base import Score
from megarl.rewards.chosen_verifiers import build_verifiers
from megarl.roles.reward import Reward
from tests.helpers.models.role_stubs import SEQUENCES, Computed, LocalStepBatch, by_sequence, compute, experience
from tests.helpers.programs import program, rl_argv, write_lines
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world
from tools.train_tokenizer import train as train_tokenizer

# -- reward ------------------------------------------------------------------------------------------------------

WORDS = [("Wie heißt du?", "Zoë"), ("数は？", "七")]


def partly_right(sample) -> Score:
    """A plug-in without components."""
    is_right = sample.response == sample.answer
    return Score(0.5 if is_right else -0.25, is_right)


def tokenizer_of(folder, byte_fallback: bool):
    """A tokenizer of text outside ASCII, in the folder of its prompts."""
    texts = [text for pair in WORDS for text in pair]
    (folder / "t.model").write_bytes(train_tokenizer(texts, 300 if byte_fallback else 40, byte_fallback))
    write_lines(folder / "p.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in WORDS])
    return build_tokenizer("SentencePieceTokenizer", str(folder / "t.model"))


def scored(folder, tokenizer, responses: list[tuple[int, list[int]]]) -> tuple[Batch, list[dict]]:
    """Batch and rows of responses to prompt lines, scored in a world of one rank."""
    parsed = program("rl", rl_argv(folder, "--reward tests.unit.roles.test_advantage_computer:partly_right"), 1)
    return run_world(score, 1, parsed, tokenizer, str(folder / "p.jsonl"), responses)[0]


def score(rank: int, parsed, tokenizer, prompts: str, responses: list) -> tuple[Batch, list[dict]]:
    from megarl.comm import role_mesh

    place = role_mesh.create_mesh(parsed.roles, SAFETY)["reward"]
    reward = Reward(
        parsed.settings, parsed.rewards, place, tokenizer.decode, build_verifiers(parsed.settings), None, Timers()
    )
    batch = written(tokenizer, responses)
    held = LocalStepBatch(reward=batch)
    held.prompts = load_prompts(prompts)
    reward.score(held)
    return batch, held.rows


def written(tokenizer, responses: list[tuple[int, list[int]]]) -> Batch:
    """A batch of prompt lines with responses; those that end with the end token are finished."""
    rows = [(tokenizer.encode(WORDS[line][0]), response) for line, response in responses]
    return Batch(
        sequence_ids=torch.arange(len(rows)) + 4, prompt_ids=torch.tensor([line for line, _ in responses]),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        lengths=torch.tensor([len(prompt) + len(response) for prompt, response in rows]),
        tokens=torch.tensor([token for prompt, response in rows for token in prompt + response]),
        finished=torch.tensor([response[-1:] == [tokenizer.eos_id] for _, response in rows]),
        response_mask=torch.tensor([i >= len(prompt) for prompt, reply in rows for i in range(len(prompt + reply))]),
    )  # fmt: skip


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_scores_and_rows_are_those_of_the_text(byte_fallback, tmp_path):
    tokenizer = tokenizer_of(tmp_path, byte_fallback)
    zoe, seven = tokenizer.encode("Zoë"), tokenizer.encode("七")
    end = [tokenizer.eos_id]
    responses = [(0, zoe + end), (0, seven + end), (1, seven + end), (1, zoe[:1]), (1, [])]
    batch, rows = scored(tmp_path, tokenizer, responses)
    assert batch.scores.tolist() == [0.5, -0.25, 0.5, -0.25, -0.25] and batch.scores.dtype == torch.float32
    assert batch.correct.tolist() == [True, False, True, False, False]
    assert [row["response"] for row in rows] == ["Zoë", "七", "七", tokenizer.decode(zoe[:1]), ""]
    assert rows[2] == {
        "sequence": 6, "prompt": "数は？", "response": "七", "answer": "七", "reward": 0.5, "correct": True,
        "reward_parts": {}, "reward_values": {"tests.unit.roles.test_advantage_computer:partly_right": 0.5},
        "extracted": None, "length": len(seven) + 1, "finished": True,
    }  # fmt: skip
    assert [row["finished"] for row in rows] == [True, True, True, False, False]


def test_a_character_that_was_cut_can_be_shown_and_is_not_the_answer(tmp_path):
    from megarl.observe.samples import write_samples

    tokenizer = tokenizer_of(tmp_path, byte_fallback=True)
    spelt = tokenizer.encode("é")  # outside the tokenizer's text: spelt in bytes
    assert len(spelt) == 2
    _, rows = scored(tmp_path, tokenizer, [(0, spelt[:1])])
    assert rows[0]["response"] == "\ufffd" and not rows[0]["correct"]
    write_samples(tmp_path, 1, rows)
    assert "\ufffd" in (tmp_path / "samples" / "step_00000001.jsonl").read_text(encoding="utf-8")


# -- experience --------------------------------------------------------------------------------------------------


def assert_same(name: str, found: list[Computed], expected: list[Computed]):
    by_number = by_sequence(expected, name)
    for number, values in by_sequence(found, name).items():
        assert values == pytest.approx(by_number[number], rel=1e-6, abs=1e-6)


ADAPTIVE = "--kl-controller adaptive --kl-target 0.1 --gamma 0.9 --gae-lambda 0.8"


@pytest.mark.parametrize("flags", ["", "--whiten-advantages false", ADAPTIVE])
def test_advantages_do_not_depend_on_the_replicas(flags, tmp_path):
    one, two = compute(tmp_path, flags, 1), compute(tmp_path, flags, 2)
    for name in ("advantages", "returns"):
        assert_same(name, two, one)
    for found in two:
        assert found.metrics == pytest.approx(one[0].metrics, rel=1e-6, abs=1e-9)
        assert found.kl_coefficient == pytest.approx(one[0].kl_coefficient)
    assert (one[0].kl_coefficient != 0.05) == ("--kl-target" in flags)


def test_returns_are_score_minus_kl_to_the_end_and_advantages_are_white(tmp_path):
    # Here responses without tokens count, too.
    flags = "--gamma 1 --gae-lambda 1 --kl-coefficient 0.3 --reward-failure fallback"
    ((batch, _, metrics, _),) = compute(tmp_path, flags)
    mask, advantages = batch.response_mask, batch.advantages.double()
    assert advantages[mask].mean().abs() < 1e-6 and abs(float(advantages[mask].std()) - 1) < 2e-2
    assert not advantages[~mask].any() and not batch.returns[~mask].any()
    kl = (batch.logprobs - batch.reference_logprobs).double() * mask
    begin = 0
    for length, score, written in zip(batch.lengths.tolist(), batch.scores.tolist(),
                                      batch.response_lengths.tolist(), strict=True):  # fmt: skip
        for t in range(begin + length - written, begin + length):
            expected = score - 0.3 * float(kl[t : begin + length].sum())
            assert float(batch.returns[t]) == pytest.approx(expected, abs=1e-5)
        begin += length
    assert metrics["reward/mean"] == pytest.approx(float(batch.scores.mean()), abs=1e-6)
    assert metrics["reward/std"] == pytest.approx(float(batch.scores.std(correction=0)), abs=1e-6)
    assert metrics["kl/reference"] == pytest.approx(float(kl.sum()) / SEQUENCES, abs=1e-5)
    assert metrics["perf/tokens"] == len(mask)
    assert metrics["rollout/response_length_mean"] == pytest.approx(int(mask.sum()) / SEQUENCES)
    assert metrics["reward/accuracy"] == 0.5 and metrics["rollout/finished_fraction"] == pytest.approx(2 / 3)


def test_advantages_and_the_kl_controller_follow_the_flags(tmp_path):
    """Backwards over each response in float64, with the penalty of the step; then β for the next one."""
    gamma, decay, beta, horizon, target = 0.9, 0.7, 0.3, 60, 0.1
    flags = f"--gamma {gamma} --gae-lambda {decay} --whiten-advantages false --reward-failure fallback"
    flags += f" --kl-controller adaptive --kl-coefficient {beta} --kl-target {target} --kl-horizon {horizon}"
    ((batch, _, metrics, coefficient),) = compute(tmp_path, flags)
    rewards = -beta * (batch.logprobs - batch.reference_logprobs).double()
    ends = batch.cu_seqlens[1:].tolist()
    for end, score, written in zip(ends, batch.scores.tolist(), batch.response_lengths.tolist(), strict=True):
        advantage, next_value, reward = 0.0, 0.0, score
        for t in range(end - 1, end - 1 - written, -1):
            reward, value = reward + float(rewards[t]), float(batch.values[t])
            advantage = reward + gamma * next_value - value + gamma * decay * advantage
            next_value, reward = value, 0.0
            assert float(batch.advantages[t]) == pytest.approx(advantage, abs=1e-5)
            assert float(batch.returns[t]) == pytest.approx(advantage + value, abs=1e-5)
    error = min(max(metrics["kl/reference"] / target - 1, -0.2), 0.2)
    assert metrics["kl/coefficient"] == beta
    assert coefficient == pytest.approx(beta * (1 + error * SEQUENCES / horizon)) != beta


@pytest.mark.parametrize("estimator, more", [
    ("gae", "--gae-length-alpha 0.3"), ("gae", "--whiten-advantages false"), ("gae", "--kl-estimator k2"),
    ("gae", "--kl-coefficient 0.1"), ("grpo", "--group-std false"), ("grpo", "--whiten-advantages true"),
])  # fmt: skip
def test_every_option_changes_the_advantages(estimator, more, tmp_path):
    plain, other = (compute(tmp_path, f"--advantage {estimator} {flags}")[0].batch for flags in ("", more))
    assert (plain.advantages - other.advantages).abs().max() > 1e-3


def equal_scores(dp_rank: int, replicas: int) -> Batch:
    """All as good as a response without tokens, which receives no score."""
    batch = experience(dp_rank, replicas)
    batch.scores.zero_()
    return batch


def unlikely_token(dp_rank: int, replicas: int) -> Batch:
    """The policy has drifted so far from the reference that exp of the difference overflows float32."""
    batch = experience(dp_rank, replicas)
    first = batch.response_mask.nonzero()[0]
    batch.reference_logprobs[first], batch.logprobs[first] = -0.1, -120.0
    return batch


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize("size", [long(1), 2])
def test_responses_of_equal_score_have_no_advantage_whatever_their_kl(estimator, size, tmp_path):
    flags = f"--advantage {estimator} --kl-coefficient 0.3"
    for batch, _, metrics, _ in compute(tmp_path, flags, size, equal_scores):
        assert metrics["kl/reference"] != 0 and not batch.advantages.any()
    assert any(found.batch.advantages.any() for found in compute(tmp_path, flags, size))


@pytest.mark.parametrize("kind", [long("k1"), long("k2"), "k3"])
def test_a_token_far_from_the_reference_leaves_finite_advantages(kind, tmp_path):
    flags = f"--advantage grpo --kl-coefficient 0.3 --kl-estimator {kind}"
    ((batch, *_),) = compute(tmp_path, flags, 1, unlikely_token)
    assert batch.advantages.any() and batch.advantages.isfinite().all()


@pytest.mark.parametrize("estimator", ["gae", long("grpo")])
def test_rewards_of_masked_responses_stay_in_the_baseline(estimator, tmp_path):
    flags = f"--advantage {estimator} --mask-truncated-responses"
    ((plain, _, metrics, _),) = expected = compute(tmp_path, f"--advantage {estimator}")
    masked = float(plain.response_lengths[~plain.finished].sum() / plain.response_lengths.sum())
    for size in (1, 2):
        found = compute(tmp_path, flags, size)
        assert_same("advantages", found, expected)
        for _, _, its_metrics, _ in found:
            assert 0 < masked < 1 and its_metrics.pop("rollout/masked_fraction") == pytest.approx(masked)
            assert its_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
