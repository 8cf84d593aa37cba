"""Episodes with several rows: models read each row by itself, and an episode counts once, whatever its rows."""

import pytest
import torch

from megarl.batch import Batch
from megarl.groups import PromptGroups
from tests.helpers.models.role_stubs import PLAIN, LocalStepBatch, experience, role_of
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

FLAGS = (
    f"{PLAIN} --minibatch-size 12 --ppo-epochs 1 --clip-grad 0 --entropy-coefficient 0 --kl-coefficient 0"
    " --advantage grpo --max-turns 2 --environment x:y"
)
EPISODES = [(0, 2), (1, 3), (4, 6), (5,), (7, 8, 10), (9, 11)]  # rows of each
LAYOUTS = {
    "one rank": (1, ""),
    "CP2": (2, "--context-parallel-size 2"),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "experts": (2, "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2"
                   " --tensor-model-parallel-size 2 --sequence-parallel"),
}  # fmt: skip


class _Step(LocalStepBatch):
    """A step with as many sequences as episodes."""

    groups = PromptGroups.equal(len(EPISODES) // 2, 2)


def joined(batch: Batch) -> Batch:
    """The rows of each episode as one sequence; written by hand."""
    order = torch.tensor([row for rows in EPISODES for row in rows])
    whole = batch.select(order)
    lengths = [[int(batch.lengths[row]) for row in rows] for rows in EPISODES]
    starts, begin = torch.zeros(len(whole.tokens), dtype=torch.bool), 0
    for of_rows in lengths:
        for number, length in enumerate(of_rows):
            starts[begin] = number > 0
            begin += length
    first = torch.tensor([rows[0] for rows in EPISODES])
    of_tokens = {
        name: getattr(whole, name) for name in (
            "tokens", "response_mask", "logprobs", "reference_logprobs", "values", "returns", "advantages", "entropy",
            "rollout_logprobs",
        )
    }  # fmt: skip
    return Batch(
        sequence_ids=torch.arange(len(EPISODES)), lengths=torch.tensor([sum(of_rows) for of_rows in lengths]),
        prompt_lengths=batch.prompt_lengths[first], prompt_ids=batch.prompt_ids[first], finished=batch.finished[first],
        solved=batch.correct[first], correct=batch.correct[first], scores=batch.scores[first],
        turn_rewards=torch.zeros_like(of_tokens["values"]), row_starts=starts, **of_tokens,
    )  # fmt: skip


def weighted(batch: Batch) -> Batch:
    """The rows as sequences of their own, with the weight that a token has of its episode's mean."""
    counts = batch.response_lengths.tolist()
    for rows in EPISODES:
        whole = sum(counts[row] for row in rows)
        for row in rows:
            span = slice(*batch.cu_seqlens[row : row + 2].tolist())
            batch.advantages[span] *= counts[row] / whole
    batch.advantages *= sum(count > 0 for count in counts) / len(EPISODES)
    return batch


def updated(rank: int, parsed: dict) -> dict:
    """{aggregation: for both batches (old log-probs, metrics, log-probs after the update)}, in the order of rows."""
    order, found = torch.tensor([row for rows in EPISODES for row in rows]), {}
    for name, settings in parsed.items():
        found[name] = []
        for is_joined in (False, True):
            role, _ = role_of("actor", settings)
            batch = experience(0, 1)
            batch.advantages[~batch.response_mask] = 0
            if is_joined:
                batch, step = joined(batch), _Step
            else:
                batch, step = weighted(batch) if name.startswith("seq-mean") else batch, LocalStepBatch
            rows = []
            role._updates_on_policy = lambda *_: False
            for is_old in (True, False):
                role.old_logprobs(step(actor=batch))
                rows.append(batch.logprobs if is_joined else batch.select(order).logprobs)
                if is_old:
                    role.update(step(actor=batch), settings.settings.kl_coefficient)
                    metrics = role.metrics
                    role.metrics, batch.rollout_logprobs = {}, torch.zeros_like(batch.logprobs)
            found[name].append((rows[0], metrics, rows[1]))
    return found


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["CP2"]))
def test_an_episode_of_rows_is_a_batch_written_by_hand(layout, tmp_path):
    size, flags = LAYOUTS[layout]
    modes = ["token-mean", "seq-mean-token-mean"]
    whole = f"{FLAGS} {flags} --max-tokens-per-microbatch 60"
    parsed = {mode: program("rl", rl_argv(tmp_path, f"{whole} --loss-aggregation {mode}"), size) for mode in modes}
    for found in run_world(updated, size, parsed):
        for mode in modes:
            (old, metrics, after), (old_rows, metrics_rows, after_rows) = found[mode]
            assert torch.equal(old_rows, old) and old.any(), mode
            assert (after_rows - old_rows).abs().max() > 1e-3
            assert metrics_rows["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-6)
            torch.testing.assert_close(after_rows, after, rtol=0, atol=1e-6, msg=mode)
