"""Over-sampling: keeps the groups whose longest response is shortest, and stops generation early."""

import dataclasses
import functools
from pathlib import Path

from tests.helpers.programs import metrics, program, rl_argv, rows_of, train
from tests.helpers.rollout.engines import NEVER, make_engine, make_requests, settings_of
from tests.helpers.worlds import SAFETY, run_world, wait_until

LONG = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --temperature 1 --max-response-length 60 --rollout-max-requests 6"
    " --max-tokens-per-microbatch 200"
)
TWICE = f"{LONG} --over-sampling 2 --prompts-per-step 4 --minibatch-size 4 --train-iters 2 --save-interval 1"


@functools.cache
def run_of(folder: Path, flags: str, size: int = 1) -> Path:
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", rl_argv(save, flags, warm_start=False), size)  # random weights end after 16 tokens on average
    return save


def groups_of(save: Path, step: int) -> list[list[dict]]:
    rows = rows_of(save, step)
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


def essence(groups: list) -> list:
    return [[(row["prompt"], row["response"], row["length"]) for row in group] for group in groups]


def test_the_groups_that_end_first_are_kept(folder):
    everything = groups_of(run_of(folder, f"{LONG} --prompts-per-step 8 --minibatch-size 8 --train-iters 1"), 1)
    longest = [max(row["length"] for row in group) for group in everything]
    assert len(set(longest)) > 3 and max(longest) > 16
    first = sorted(sorted(range(8), key=lambda i: (longest[i], i))[:4])
    kept = groups_of(run_of(folder, TWICE), 1)
    assert essence(kept) == essence([everything[i] for i in first])
    assert metrics(run_of(folder, TWICE))[1]["rollout/tokens"] == sum(row["length"] for group in kept for row in group)


# -- the race ----------------------------------------------------------------------------------------------------


def at_one_pace(rank: int, rollout) -> list[int]:
    """Makes the engines of two replicas take each step together, so that no clock decides; returns a list of 0s, one
    per step of this rank."""
    import torch.distributed as dist

    store, steps = dist.distributed_c10d._get_default_store(), []
    step, run, other = rollout.engine.engine.step_modern, rollout._run_engine, f"steps/{1 - rank}"

    def together():
        steps.append(0)
        store.set(f"steps/{rank}", str(len(steps)))
        assert wait_until(lambda: store.check([other]) and int(store.get(other)) >= len(steps) - 1)
        return step()

    def until_its_end(*args):
        done = run(*args)
        store.set(f"steps/{rank}", str(1 << 30))
        return done

    rollout.engine.engine.step_modern, rollout._run_engine = together, until_its_end
    return steps


def raced(rank: int, parsed, wanted: int | None):
    """(steps of this rank's engine, generated lengths by sequence, groups that finish first)."""
    from megarl.comm import role_mesh
    from megarl.data.tokenizers import build_tokenizer
    from megarl.mcore.model.gpt import build_model
    from megarl.observe.timers import Timers
    from megarl.rollout.requests import PromptRequest
    from megarl.rollout.rollout import Rollout

    here = role_mesh.create_mesh(parsed.roles, SAFETY)
    tokenizer = build_tokenizer("SentencePieceTokenizer", parsed.settings.tokenizer_model)
    stages = build_model(parsed.roles["actor"].megatron, tokenizer.vocab_size, here["actor"].pg_collection)
    rollout = Rollout(parsed.settings, parsed.roles["rollout"], here, stages, tokenizer, Timers())
    steps = at_one_pace(rank, rollout)
    prompts = [PromptRequest(i, [1 + i, 2, 3], 2, parsed.settings.max_response_length, 0) for i in range(10)]
    batch = rollout.generate(prompts, 0, wanted=wanted)
    first, _ = rollout.earliest_groups(batch, prompts, wanted or 3)
    return len(steps), dict(zip(batch.sequence_ids.tolist(), batch.response_lengths.tolist())), first.tolist()


def test_generation_stops_when_enough_groups_are_finished(tmp_path):
    parsed = program(
        "rl",
        rl_argv(tmp_path / "run", f"{LONG} --max-response-length 120 --rollout-max-requests 20 --keep-responses false"),
        2,
    )
    whole, short = run_world(raced, 2, parsed, None), run_world(raced, 2, parsed, 3)
    lengths = {i: n for _, mine, _ in whole for i, n in mine.items()}
    longest = [max(lengths[2 * g], lengths[2 * g + 1]) for g in range(10)]
    expected = sorted(sorted(range(10), key=lambda g: (longest[g], g))[:3])
    needed = max(longest[g] for g in expected)
    assert all(first == expected for _, _, first in whole + short) and max(longest) > 2 * needed
    generated = {i: n for _, mine, _ in short for i, n in mine.items()}
    bound = needed + 2 * 16 + 1  # each replica checks at every 16th step
    assert max(steps for steps, _, _ in short) <= bound < max(steps for steps, _, _ in whole)
    assert all(n <= lengths[i] for i, n in generated.items()) and sum(generated.values()) < sum(lengths.values())


def cut(rank: int):
    """Completions with a step bound that falls during generation, and complete ones; the last four requests count three
    tokens of an earlier one."""
    from megarl.mcore.inference.engine import RequestList

    engine, _, _ = make_engine(max_requests=8)
    bounds = iter([None, *[9] * 100])
    requests, s = make_requests(limit=20), settings_of()
    requests[-4:] = [dataclasses.replace(request, counted_tokens=3) for request in requests[-4:]]
    found = dict(engine.stream(RequestList(enumerate(requests)), NEVER, s, response_limit=lambda: next(bounds)))
    return [found[i] for i in range(len(requests))], engine.generate(requests, NEVER, s)


def test_a_step_bound_truncates_responses_and_changes_nothing_else():
    ((found, whole),) = run_world(cut, 1)
    for cut_off, full in zip(found, whole, strict=True):
        count = len(cut_off.tokens)
        assert cut_off.tokens == full.tokens[:count] and cut_off.logprobs == full.logprobs[:count]
    lengths = [len(c.tokens) for c in found]
    # The bound comes before step 32: the first eight have ended, the next have 11 tokens and end with one more.
    assert lengths == [20] * 8 + [12] * 8 + [6] * 4
