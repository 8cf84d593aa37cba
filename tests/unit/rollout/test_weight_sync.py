"""The version that each token carries names the weights that drew it; what goes wrong on the way is seen."""

import pytest
import torch.distributed as dist

from tests.helpers.programs import in_world, program, rl_argv
from tests.helpers.rollout import seeded_clock
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

STEPS = 5
GRPO = "--advantage grpo --kl-coefficient 0"
FLAGS = (
    f"{GRPO} --lr 1e-4 --reward tests.helpers.programs:coarse_reward --train-iters {STEPS} --save-interval 3"
    " --rollout-correction tis --generation-lag 2 --temperature 1"
    " --max-response-length 30 --rollout-prefix-caching --role-map actor=0;reward=1;rollout=1"
)
PARTIAL = "--over-sampling 1.5 --partial-rollouts"
# Before a checkpoint, where all ranks meet, the rollout takes no newer weights.
RECORDED = "--generation-schedule recorded --save-interval 0"


def lose_weights():
    """The rollout keeps its weights instead of those of step 2."""
    from megarl.rollout.rollout import Rollout

    loads, load = [0], Rollout.load_weights

    def lost(rollout):
        loads[0] += 1
        before = [] if rollout.model is None else [parameter.clone() for parameter in rollout.model[0].parameters()]
        load(rollout)
        if loads[0] == 3:
            for parameter, value in zip(rollout.model[0].parameters() if before else [], before, strict=True):
                parameter.data.copy_(value)

    Rollout.load_weights = lost


def misnumber():
    """Tokens and training get a version too many from step 5 on."""
    from megarl.rollout.policy_versions import PolicyVersions

    of_step = PolicyVersions.of_step
    PolicyVersions.of_step = lambda versions, step: tuple(version + (step > 4) for version in of_step(versions, step))


def swap_copies():
    """The copies of the weights of steps 1 and 2 are sent in the other order."""
    from megarl.mcore.weights.reshard import WeightTransfer

    count, held, send, send_copy = [0], [], dist.batch_isend_irecv, WeightTransfer.send_copy

    def swapped(transfer):
        count[0] += 1
        if count[0] == 1:
            dist.batch_isend_irecv = lambda operations: held.extend(operations) or []
        sent = send_copy(transfer)
        dist.batch_isend_irecv = send
        return [*sent, *((work, None) for work in send(held))] if count[0] == 2 else sent

    WeightTransfer.send_copy = swapped


def keep_blocks():
    """Blocks of the prefix cache outlive the weights with which they were computed."""
    from megarl.mcore.inference.reusable_blocks import ReusableBlocks

    reset = ReusableBlocks.reset

    def kept(blocks):
        hashes, known = blocks.block_hashes.clone(), dict(blocks.kv_hash_to_block_id)
        reset(blocks)
        free = (hashes[: blocks.dummy_block_idx] == -1).nonzero().flatten()
        blocks.block_hashes.copy_(hashes)
        blocks.kv_hash_to_block_id.update(known)
        blocks.block_bag[: len(free)], blocks.total_avail = free.int(), len(free)

    ReusableBlocks.reset = kept


def misnumber_within_rounds():
    """Tokens that the weights of step 2 drew get a version too many, where weights change within a round."""
    from megarl.rollout.policy_versions import PolicyVersions

    PolicyVersions.of_weights = lambda versions, step: step + (step == 2)


FAULTS = {
    "none": lambda: None, "weights of a step are lost": lose_weights, "a wrong version": misnumber,
    "swapped copies": swap_copies, "stale blocks": keep_blocks,
    "a wrong version within a round": misnumber_within_rounds,
}  # fmt: skip
FACTORS = "--lora-rank 4"
FACTOR_FAULTS = ("none", "weights of a step are lost")  # checked with low-rank factors, too
TURNS = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 3 --max-turn-length 16 --max-response-length 60"
    " --max-tokens-per-microbatch 100 --rollout-max-requests 64 --environment-timeout 60"
)


def stamped(rank: int, parsed, fault: str) -> tuple[list[dict], list[dict], float]:
    """(the actor's weights after each step, rows of the batches that this rank generated, tokens whose blocks were
    found in the cache); `fault`: what goes wrong."""
    from megarl.rollout.group_collector import GroupCollector
    from megarl.trainers.rl_trainer import RLTrainer
    from tests.helpers.rollout.policy_versions import rows_of

    weights, rows, reused = [], [], [0]
    evaluate, collect = RLTrainer.evaluate, GroupCollector.collect

    def noted(run, step):
        if run.actor.trainable_model:
            model = run.actor.trainable_model.model[0]
            weights.append({name: value.clone() for name, value in model.state_dict().items() if value is not None})
        evaluate(run, step)

    def collected(collector, step):
        found = collect(collector, step)
        reused[0] += collector.metrics["rollout/reused_tokens"]
        if found is not None:
            rows.extend(rows_of(found[0]))
        return found

    seeded_clock.install(rank, 3)
    RLTrainer.evaluate, GroupCollector.collect = noted, collected
    FAULTS[fault]()
    in_world(rank, "rl", parsed)
    return weights, rows, reused[0]


WITHIN = "a wrong version within a round"
CHECKED = [(fault, "") for fault in FAULTS if fault != WITHIN] + [(fault, FACTORS) for fault in FACTOR_FAULTS]
CHECKED += [("none", TURNS), ("none", RECORDED), (WITHIN, RECORDED)]
BY_DEFAULT = [("none", TURNS)]


@pytest.mark.parametrize("fault, kind", by_default(CHECKED, BY_DEFAULT))
def test_each_token_has_the_log_prob_of_the_weights_that_its_version_names(fault, kind, tmp_path):
    from tests.helpers.rollout.policy_versions import largest_gaps

    flags = f"{FLAGS} {kind}" if kind == RECORDED else f"{FLAGS} {PARTIAL} {kind}"
    parsed = program("rl", rl_argv(tmp_path, flags, warm_start=kind == TURNS), 2)
    (weights, *_), (_, rows, reused) = run_world(stamped, 2, parsed, fault)
    assert len(weights) == STEPS and len({version for row in rows for version in row["versions"]}) >= 3
    assert any(len({*row["versions"]}) > 1 for row in rows)  # of several rounds, or of one whose weights changed
    # Within a round no continued response begins like another, but turns do.
    assert kind in (TURNS, RECORDED) or (reused > 0) == (fault == "stale blocks")
    model = FACTORS if kind == FACTORS else ""
    parsed = program("rl", rl_argv(tmp_path / "alone", f"{GRPO} {model}", warm_start=kind == TURNS), 1)
    (gaps,) = run_world(largest_gaps, 1, parsed, weights, rows)
    if fault == "none":
        assert max(gaps["own"]) == 0 < 1e-4 < min(gaps["other"])
    else:
        assert max(gaps["own"]) > 1e-4
