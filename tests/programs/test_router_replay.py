"""Router replay in whole runs: training uses the recorded routes in any layout, even with perturbed routers."""

import pytest

from tests.helpers.models.router_watch import run_watched
from tests.helpers.programs import assert_close, metrics, program, rl_argv, timeless
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --train-iters 2"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
DENSE_FIRST = "--num-layers 4 --moe-layer-freq [0,1,1,1]"
LAYOUTS = {
    "one": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2-sp": (2, TP2),
    "cp2": (2, "--context-parallel-size 2"),
    "dense-first-pp2": (2, f"{DENSE_FIRST} {PP2}"),
    "dense-first-pp2-vp2": (2, f"{DENSE_FIRST} {PP2} --num-layers-per-virtual-pipeline-stage 1"),
}
NEVER = 100
R3 = "--router-replay rollout"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"


def run(folder, size: int, flags: str, noisy_from: int = NEVER) -> tuple[dict, dict]:
    """({kind: experts by token}, metrics by step) of a run without a warm start."""
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    parsed = program("rl", rl_argv(folder, f"{MOE} {flags}", warm_start=False), size)
    seen = {kind: {} for kind in ("generated", "passed", "updated", "reference")}
    for part in run_world(run_watched, size, parsed, noisy_from):
        for (kind, *where), experts in part.items():
            assert seen[kind].setdefault(tuple(where), experts) == experts  # ranks that saw the same saw the same
    return seen, {step: timeless(row) for step, row in metrics(folder).items()}


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("dense-first-pp2-vp2",)))
def test_the_rollouts_routes_close_the_gap(layout, tmp_path):
    """Step 1 without noise: no gap, no disagreement. Step 2 with noise on the routers of training alone."""
    size, flags = LAYOUTS[layout]
    seen, rows = run(tmp_path, size, f"{flags} {R3} --router-probe-interval 1", noisy_from=2)
    before, noisy = rows[1], rows[2]
    assert seen["generated"] and seen["generated"] == seen["passed"] == seen["updated"]
    assert before["rollout/logprob_gap_max"] == before["router/gap_live"] == 0.0
    assert before["router/disagreement"] == 0.0 and noisy["router/disagreement"] > 0.0
    assert before["router/replayed_fraction"] == noisy["router/replayed_fraction"] == 1.0
    assert noisy["router/gap_live"] >= 10 * noisy["router/gap_replayed"] > 0.0


def numbers(row: dict) -> dict:
    """A row without router metrics."""
    return {name: value for name, value in row.items() if "router/" not in name}


@pytest.mark.parametrize(
    "size, flags, recompute", [long((1, "", FULL)), long((2, PP2, SELECTIVE))], ids=["full", "selective"]
)
def test_backward_recomputes_with_the_same_routes(size, flags, recompute, tmp_path):
    """Live routes would differ from the first pass's, and so would the gradient."""
    _, expected = run(tmp_path / "kept", size, f"{flags} {R3}", noisy_from=1)
    seen, rows = run(tmp_path / "again", size, f"{flags} {R3} {recompute}", noisy_from=1)
    assert rows == expected and seen["generated"] == seen["updated"]


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--kl-coefficient 0"], ids=["pass", "on policy"])
def test_replaying_the_first_pass_changes_no_bit_of_the_only_update(flags, tmp_path):
    """With --kl-coefficient 0 no pass comes before the update: nothing is replayed and nothing changes."""
    one = f"--ppo-epochs 1 --minibatch-size 12 {flags}"
    _, live = run(tmp_path / "live", 2, one)
    seen, replayed = run(tmp_path / "replayed", 2, f"{one} --router-replay old-logprob")
    for step in live:
        assert numbers(live[step]) == numbers(replayed[step])
        assert replayed[step]["router/replayed_fraction"] == (0.0 if flags else 1.0)
        assert replayed[step].get("router/disagreement", 0.0) == 0.0
    assert flags or seen["passed"] == seen["updated"]


@pytest.mark.parametrize("layout", ["cp2", long("dense-first-pp2-vp2")])
def test_updates_replay_the_first_pass_for_any_minibatch_split(layout, tmp_path):
    """Two epochs of three mini-batches: ranks route other tokens in each. After the first update routers disagree."""
    size, flags = LAYOUTS[layout]
    seen, rows = run(tmp_path, size, f"{flags} --router-replay old-logprob --lr 2e-2")
    assert seen["passed"] and seen["passed"] == seen["updated"] and not seen["generated"]
    assert rows[1]["router/replayed_fraction"] == 1.0 and rows[1]["router/disagreement"] > 0.0


@pytest.mark.long
def test_routes_come_from_a_rollout_on_separate_ranks(tmp_path):
    """A rollout of one stage and two replicas, an actor of two stages, a reference that replays the routes too."""
    roles = "--role-map actor=0-1;critic=2;reward=2;reference=2;rollout=1-2"
    pipelined = "--actor-pipeline-model-parallel-size 2 --rollout-pipeline-model-parallel-size 1"
    _, expected = run(tmp_path / "one", 1, f"{DENSE_FIRST} {R3} --router-replay-reference", noisy_from=1)
    seen, rows = run(
        tmp_path / "three", 3, f"{roles} {pipelined} {DENSE_FIRST} {R3} --router-replay-reference", noisy_from=1
    )
    assert seen["generated"] == seen["passed"] == seen["updated"] == seen["reference"]
    assert_close(rows[1], expected[1], ["actor/loss", "router/disagreement", "router/load_imbalance"], 1e-5)
