"""Partial rollouts: interrupted groups resume in the next round with the same result as without interruption."""

import functools
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import metrics, program, rl_argv, samples, train
from tests.helpers.rollout.engines import NEVER, make_requests, settings_of
from tests.helpers.rollout.policy_versions import gaps_of, rows_of
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world

STEPS = 4
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --temperature 1 --max-response-length 60 --max-tokens-per-microbatch 200"
    " --prompts-per-step 4 --minibatch-size 4 --over-sampling 2 --partial-rollouts --rollout-correction tis --lr 1e-4"
    " --keep-responses false"  # the tests change weights by hand, and use a folder again
)


ROUNDS = "--reward tests.helpers.programs:coarse_reward --group-filter reward --dynamic-sampling"


def filled(rank: int, parsed, moves: bool):
    """Steps that are filled with no update between them; `moves`: with other weights each.

    (rows of this rank of each step, metrics of each step, step that drew each line, largest gap (of one rank alone),
    tokens that wait).
    """
    from megarl.observe.timers import Timers
    from megarl.trainers.rl_trainer import RLTrainer

    run = RLTrainer(parsed, Timers())
    batcher, model = run.batcher, run.actor.trainable_model.model[0]
    drawn, draw, found, measured, weights = {}, run.batcher.collector._draw_prompts, [], [], []

    def noted(step, *args):
        prompts = draw(step, *args)
        drawn.update({prompt.line: step for prompt in prompts})
        return prompts

    batcher.collector._draw_prompts = noted
    for step in range(1, STEPS + 1):
        weights.append({name: value.clone() for name, value in model.state_dict().items() if value is not None})
        found.append(rows_of(batcher.generate(step)["rollout"]))
        measured.append(batcher.metrics)
        with torch.no_grad():
            for weight in model.parameters() if moves else ():
                weight.mul_(1.1)
    gap = 0.0
    for version, state in enumerate(weights if run.mesh.size == 1 else ()):
        model.load_state_dict(state, strict=False)
        gap = max(gap, *(number for rows in found for number in gaps_of(run, version, rows)))
    waiting = batcher.collector.partial_rollouts.rows
    return found, measured, drawn, gap, int(waiting.response_mask.sum()) if waiting else 0


def merged(results: list) -> list[list[dict]]:
    """Rows of each step from all ranks, by sequence."""
    steps = zip(*(found for found, *_ in results), strict=True)
    return [sorted({row["id"]: row for rows in ranks for row in rows}.values(), key=lambda row: row["id"])
            for ranks in steps]  # fmt: skip


@functools.cache
def steps_of(folder: Path, flags: str = "", size: int = 1, moves: bool = True) -> list:
    argv = rl_argv(folder / "none", f"{FLAGS} {flags}", warm_start=False)
    return run_world(filled, size, program("rl", argv, size), moves)


def uninterrupted(rank: int, parsed, drawn: dict[int, int]) -> dict:
    """Responses to each prompt by sample, generated without interruption."""
    from megarl.observe.timers import Timers
    from megarl.rollout.requests import PromptRequest
    from megarl.trainers.rl_trainer import RLTrainer

    run, found, limit = RLTrainer(parsed, Timers()), {}, parsed.settings.max_response_length
    for step in sorted({*drawn.values()}):
        tokens = {line: run.inputs.prompt_tokens[line] for line, of in drawn.items() if of == step}
        requests = [PromptRequest(line, of_line, 2, limit, step) for line, of_line in tokens.items()]
        batch = run.rollout.generate(requests, step)
        batch.versions = torch.zeros_like(batch.tokens)
        for row in rows_of(batch):
            found.setdefault(row["line"], []).append((row["response"], row["logprobs"], row["finished"]))
    return found


def assert_uninterrupted(folder: Path, found: list[list[dict]], drawn: dict[int, int]):
    """With constant weights each group equals, bit by bit, an uninterrupted generation."""
    argv = rl_argv(folder / "none", FLAGS, warm_start=False)
    (expected,) = run_world(uninterrupted, 1, program("rl", argv, 1), drawn)
    for rows in found:
        for one, other in zip(rows[::2], rows[1::2], strict=True):
            group = [(row["response"], row["logprobs"], row["finished"]) for row in (one, other)]
            assert group == expected[one["line"]] and one["line"] == other["line"]


def test_under_the_same_weights_a_response_is_that_of_an_uninterrupted_run(folder):
    ((found, measured, drawn, gap, waiting),) = steps_of(folder, moves=False)
    assert len({row["line"] for rows in found for row in rows}) == 4 * STEPS
    assert len(drawn) == 4 * STEPS + 4  # nothing is lost
    assert_uninterrupted(folder, found, drawn)
    assert any(len({*row["versions"]}) > 2 for rows in found for row in rows), "stopped more than once"
    assert gap <= largest_gap_allowed()
    assert sum(m["rollout/tokens"] for m in measured) == waiting + sum(len(r["response"]) for s in found for r in s)


@pytest.mark.long
def test_rounds_of_a_step_resume_the_oldest_groups_first(folder):
    ((found, measured, drawn, _, _),) = steps_of(folder, ROUNDS, moves=False)
    assert max(m["sampling/rounds"] for m in measured) > 2 and len(drawn) > 4 * STEPS + 4
    assert_uninterrupted(folder, found, drawn)
    assert 0 < max(m["rollout/carried_groups"] for m in measured) <= 4


def test_resumed_groups_are_ordered_by_new_tokens_then_age(folder):
    ((found, measured, drawn, _, _),) = steps_of(folder)
    assert [len(rows) for rows in found] == [8] * STEPS
    for step, (rows, measure) in enumerate(zip(found, measured, strict=True), start=1):
        ages = [step - 1 - version for row in rows for version in row["versions"]]
        assert measure["rollout/staleness"] == pytest.approx(sum(ages) / len(ages))
        assert measure["rollout/staleness_max"] == max(ages)
        assert measure["rollout/carried_fraction"] == sum(age > 0 for age in ages) / len(ages)
        shares = [measure[f"rollout/staleness_share_{age}"] for age in range(max(ages) + 1)]
        assert shares == [ages.count(age) / len(ages) for age in range(max(ages) + 1)]
        assert sum(shares) == pytest.approx(1)
        assert f"rollout/staleness_share_{max(ages) + 1}" not in measure
        mixed = [len({*row["versions"]}) > 1 for row in rows]
        assert measure["rollout/mixed_version_fraction"] == sum(mixed) / len(rows)
        assert measure["rollout/carried_groups"] == 4 and measure["rollout/dropped_groups"] == 0
        born = [drawn[row["line"]] for row in rows]
        assert born == sorted(born) and (step == 1 or max(ages) > 0)
    assert max(measure["rollout/mixed_version_fraction"] for measure in measured) > 0
    limited = steps_of(folder, "--max-staleness 1")
    ((_, measured, drawn, _, _),) = limited
    assert max(m["rollout/staleness_max"] for m in measured) == 1 and len(drawn) > 4 * STEPS + 4
    assert sum(m["rollout/dropped_groups"] for m in measured) == len(drawn) - 4 * STEPS - 4


def test_logprobs_are_those_of_the_policy_that_generated_the_token(folder):
    ((found, _, _, gap, _),) = steps_of(folder)
    assert gap <= largest_gap_allowed()
    ((same, *_),) = steps_of(folder, moves=False)
    assert found[0] == same[0] and found[1] != same[1]


@pytest.mark.parametrize("size, flags", [
    long((1, "--rollout-max-requests 4 --rollout-prefix-caching")), (2, "--rollout-max-requests 4"),
    long((2, "--tensor-model-parallel-size 2")),
])  # fmt: skip
def test_the_layout_does_not_change_the_responses(size, flags, folder):
    found, expected = merged(steps_of(folder, flags, size)), merged(steps_of(folder))
    if "tensor" in flags:  # sums of another order
        found, expected = ([[row | {"logprobs": []} for row in rows] for rows in steps] for steps in (found, expected))
    assert found == expected


# -- a bound while prompts are read in chunks --------------------------------------------------------------------


def chunked(rank: int):
    """Completions with a bound that falls, of an engine that reads 12 tokens a step."""
    from megarl.mcore.inference.engine import RequestList, RolloutEngine
    from tests.helpers.models.tiny_models import VOCAB, build

    model, _, place = build()
    engine = RolloutEngine(model, place.pg_collection, VOCAB, 48, 0.005, 8, chunked_prefill=True, step_tokens=12)
    bounds, requests = iter([7, *[5] * 100]), make_requests(limit=20)
    found = dict(
        engine.stream(RequestList(enumerate(requests)), NEVER, settings_of(), response_limit=lambda: next(bounds))
    )
    return [len(found[i].tokens) for i in range(len(requests))]


def test_no_response_is_cut_below_the_bound():
    ((*lengths,),) = run_world(chunked, 1)
    assert min(lengths) == 5 and max(lengths) < 20


# -- whole runs --------------------------------------------------------------------------------------------------


@functools.cache
def run_of(folder: Path, flags: str, size: int = 1) -> Path:
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", rl_argv(save, f"{FLAGS} --train-iters 3 {flags}", warm_start=False), size)
    return save


@pytest.mark.long
def test_metrics_tell_fresh_responses_from_continued_ones(folder):
    rows = metrics(run_of(folder, "--save-interval 1 "))
    assert [rows[step]["rollout/staleness_max"] for step in (1, 2, 3)] == [0, 1, 2]
    assert rows[1]["rollout/logprob_gap_max"] <= largest_gap_allowed() < rows[2]["rollout/logprob_gap_max"]
    assert all(row["actor/ppo_kl_first"] == 0 for row in rows.values())
    assert all(row["rollout/logprob_gap_max_fresh"] <= largest_gap_allowed() for row in rows.values())
    assert rows[3]["correction/kl_k3_age_0"] <= largest_gap_allowed() < rows[3]["correction/kl_k3_age_2"]


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LANES = ("", "--expert-model-parallel-size 2 --rollout-max-requests 4")
ROUTES = f"{EXPERTS} --router-replay rollout --lr 0 --samples-per-prompt 3 --max-response-length 24"


@pytest.mark.long
def test_routes_are_those_of_the_last_policy_that_prefilled_the_sequence(folder):
    """The policy does not change, so a wrong route of any token would show as a gap."""
    one, two = (run_of(folder, f"{ROUTES} --train-iters 2 {flags}", size) for size, flags in enumerate(LANES, start=1))
    for step in (1, 2):
        assert samples(one, step) == samples(two, step)
        for row in (metrics(one)[step], metrics(two)[step]):
            assert row["router/replayed_fraction"] == 1 and row["rollout/logprob_gap_max"] <= largest_gap_allowed()
    assert metrics(one)[2]["rollout/staleness_max"] == 1


def test_a_resume_with_too_small_limits_is_rejected(folder):
    start = run_of(folder, "--save-interval 1 ") / "checkpoints" / "step_00000001"
    with pytest.raises(RankFailed, match="--load: the checkpoint holds unfinished groups with prompts of up to 5"):
        run_of(folder, f"--load {start} --max-response-length 9")


def test_groups_that_lost_a_tie_enter_without_a_new_token(folder):
    save = run_of(folder, "--max-response-length 2 --over-sampling 3 --save-interval 1")
    rows = metrics(save)
    assert rows[1]["rollout/carried_groups"] == 8 and rows[1]["rollout/tokens"] >= 12 * 2
    assert rows[2]["rollout/carried_groups"] == 4 and rows[2]["rollout/tokens"] == 0
    assert rows[2]["rollout/staleness"] == rows[2]["rollout/carried_fraction"] == 1
    assert [len(samples(save, step).splitlines()) for step in (1, 2, 3)] == [8] * 3
    assert json.loads(samples(save, 2).splitlines()[0])["length"] > 0
