"""A rollout with its own layout or ranks: exact weight syncs, phases that overlap; the rest is in tests/laws."""

import contextlib
import functools
import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import (
    GRADED,
    in_world,
    inputs,
    metrics,
    program,
    rl_argv,
    train,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, RankFailed, run_world

ONE_RANK_EACH = "--role-map actor=0;critic=1;reward=2;reference=2"


@functools.cache
def run_of(folder: Path, size: int = 1, layout: str = "") -> Path:
    """Run folder of three steps with an evaluation; a rate at which Adam does not blow rounding up."""
    save = folder / f"{size} {layout[:60]}"
    flags = f"--train-iters 3 --lr 1e-4 --critic-lr 1e-3 {GRADED} --eval-prompts {inputs()}/heldout.jsonl"
    train("rl", rl_argv(save, f"{flags} {layout}"), size)
    return save


@pytest.mark.parametrize("size, layout, moved", [
    long((2, "--rollout-tensor-model-parallel-size 2", False)), (3, f"{ONE_RANK_EACH};rollout=2", True),
])  # fmt: skip
def test_weight_sync_bytes_are_counted(size, layout, moved, folder):
    """A rank that holds the trained weights already has its share; any other rank receives every byte."""
    rows = metrics(run_of(folder, size, f"{layout} --verify-weights"))
    parameters = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 32 * 32  # tied embeddings
    largest = parameters * 4 * 1.2  # fp32, and the checkpoint's view of what is stored twice
    for step in (1, 2, 3):
        sent = rows[step]["weights/sync_bytes"]
        assert not moved or rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed()  # sums in one order
        assert parameters * 4 <= sent <= largest if moved else sent == 0


def spoilt(rank: int, parsed):
    """A run whose transfers change one number on the rollout's side."""
    from megarl.mcore.weights.reshard import WeightTransfer

    run = WeightTransfer.run

    def wrong(self):
        sent = run(self)
        shard = next(iter(self.destination.description()[1]), None)
        if shard is not None:
            self.destination.view(shard).view(-1)[0] += 1
        return sent

    WeightTransfer.run = wrong
    return in_world(rank, "rl", parsed)


def test_verification_finds_a_damaged_weight_sync(tmp_path):
    layout = f"--train-iters 1 {ONE_RANK_EACH};rollout=2"
    run_world(spoilt, 3, program("rl", rl_argv(tmp_path, layout), 3))
    assert metrics(tmp_path)[1]["rollout/logprob_gap_max"] > 1e-3
    with pytest.raises(RankFailed, match="weights differ after their transfer"):
        run_world(spoilt, 3, program("rl", rl_argv(tmp_path / "verified", f"{layout} --verify-weights"), 3))


# -- time --------------------------------------------------------------------------------------------------------

STEPS = 3


def on_one_clock(rank: int, parsed, together: bool):
    """Runs with a clock that all ranks share and that each reading moves by a second; returns the rank's trace.

    So times give the order of events on every machine. `together`: updates of actor and critic begin only when both
    have begun, and the actor's ends only when the rollout waits for its weights. If roles ran one after another, the
    run would not end.
    """
    from megarl.observe import timers
    from megarl.roles.trainable_model import TrainableModel

    store, updates, waits = dist.distributed_c10d._get_default_store(), Counter(), itertools.count(1)
    timers.time = SimpleNamespace(time_ns=lambda: 0, perf_counter_ns=lambda: 0)
    mine, update = timers.Timers(), TrainableModel.update
    timers.time.perf_counter_ns = lambda: store.add("seconds", 1) * 10**9
    timers.Timers, phase = lambda: mine, mine.phase

    @contextlib.contextmanager
    def noted(role: str, name: str):
        with phase(role, name):
            if (role, name) == ("rollout", "wait"):
                store.set(f"wait {next(waits)}", b"")
            yield

    def met(self, *args):
        me, step = self.role.name, updates[self.role.name] + 1
        updates[me] = step
        if not together:
            return update(self, *args)
        store.set(f"{me} {step}", b"")
        store.wait([f"{'critic' if me == 'actor' else 'actor'} {step}"], SAFETY)
        result = update(self, *args)
        if me == "actor":
            store.wait([f"wait {step + 1}"], SAFETY)
        return result

    mine.phase, TrainableModel.update = noted, met
    in_world(rank, "rl", parsed)
    return mine.events()


def run_on_one_clock(folder: Path, layout: str, together: bool) -> tuple[list[dict], list[dict]]:
    """Metrics of the clock of each step, and of each rank (begin, end) of its phases and of its steps, by name."""
    flags = f"--train-iters {STEPS} --minibatch-size 12 --ppo-epochs 1 {GRADED} {layout}"
    spans = []
    for events in run_world(on_one_clock, 3, program("rl", rl_argv(folder, flags), 3), together):
        spans.append({})
        for event in events:
            begin = event.start_ns // 10**9
            spans[-1].setdefault(event.name, []).append((begin, begin + event.duration_ns // 10**9))
    rows = [metrics(folder)[step] for step in range(1, STEPS + 1)]
    return [{name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")} for row in rows], spans


def test_disjoint_roles_overlap_and_idle_time_is_the_remainder(tmp_path):
    rows, (actor, critic, rollout) = run_on_one_clock(tmp_path / "disjoint", f"{ONE_RANK_EACH};rollout=2", True)
    assert len(actor["actor/update"]) == len(critic["critic/update"]) == STEPS
    for (begin, end), (its_begin, its_end) in zip(actor["actor/update"], critic["critic/update"], strict=True):
        assert begin < its_end and its_begin < end
    # The generating rank waits for the updates: that time is not part of the transfer.
    # The first weights come before all steps. A rank of the rollout alone is twice in the phase of a transfer.
    waits, transfers = rollout["rollout/wait"][1:], rollout["rollout/sync"][2::2]
    for (_, end), wait, transfer in zip(actor["actor/update"], waits, transfers, strict=True):
        assert wait[0] < end < wait[1] < transfer[0]
    for step, row in enumerate(rows, 1):
        (own,) = critic[f"step {step}"]
        busy, idle = row["critic/values_s"] + row["critic/update_s"], row["critic/idle_fraction"]
        assert 0 < idle < 1 and idle == pytest.approx(1 - busy / (own[1] - own[0]), rel=1e-9)
        (own,) = rollout[f"step {step}"]
        assert row["rollout/wait_s"] / (own[1] - own[0]) <= row["rollout/idle_fraction"]
        assert row["rollout/wait_s"] > 0 and row["rollout/sync_s"] > 0


@pytest.mark.long
def test_colocated_roles_work_one_after_another(tmp_path):
    layout = "--role-map actor=0;critic=0;reward=1;reference=1;rollout=2"
    rows, (trainable_model, *_) = run_on_one_clock(tmp_path, layout, False)
    updates = zip(trainable_model["actor/update"], trainable_model["critic/update"], strict=True)
    assert all(end < its_begin or its_end < begin for (begin, end), (its_begin, its_end) in updates)
    for row in rows:  # one rank, busy with both
        assert row["actor/idle_fraction"] == row["critic/idle_fraction"]


def test_a_kv_cache_too_small_for_one_response_is_rejected(tmp_path):
    flags = "--rollout-buffer-gb 1.6e-5 --max-response-length 58 --max-tokens-per-microbatch 64"
    with pytest.raises(RankFailed, match="--rollout-buffer-gb 1.6e-05: the KV cache holds one sequence of .*is 64"):
        train("rl", rl_argv(tmp_path, flags))
