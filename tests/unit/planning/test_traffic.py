"""Traffic of the plan: against the bytes of real collectives, and against the fields that a step moves."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl import arguments, batch
from megarl.arguments import Settings
from megarl.batch import FIELDS, Batch
from megarl.comm import exchange, role_mesh, step_batch
from megarl.mcore.model.pipeline_layout import stage_layers
from megarl.planning import summary, traffic
from megarl.roles.actor import Actor
from megarl.roles.critic import Critic
from megarl.roles.reference import Reference
from megarl.roles.reward import Reward
from megarl.roles.teacher import Teachers
from megarl.router_replay.route_exchange import RouteExchange
from megarl.trainers.rl_trainer import RLTrainer
from tests.helpers.models.tiny_models import LENGTHS as WRITTEN
from tests.helpers.models.tiny_models import SHAPES, VOCAB, join_actor, parse_roles, ragged_tokens
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

LENGTHS = [40, 40, 32, 48, 1, 47, 48]  # 256 tokens
MOE = "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2"
TP2, PP2, EP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
SHARED = "--moe-shared-expert-intermediate-size 48"
LAYOUTS = [
    "", "--bf16", "--use-distributed-optimizer", TP2, f"{TP2} --sequence-parallel", "--context-parallel-size 2",
    f"{MOE} {EP2}", f"{MOE} {EP2} {TP2} --sequence-parallel {SHARED}", f"{PP2} --num-layers 4",
    f"{PP2} --num-layers 4 --untie-embeddings-and-output-weights --num-layers-per-virtual-pipeline-stage 1",
    f"{TP2} --num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    f"{TP2} --num-query-groups 1",
]  # fmt: skip
LATENT = [TP2, f"{TP2} --sequence-parallel", "--context-parallel-size 2"]  # with multi-latent attention
# Bytes that a call sends over a ring of r ranks: from its first arguments.
RINGS = {
    "all_reduce": lambda r, tensor: 2 * (r - 1) / r * tensor.nbytes,
    "all_gather_into_tensor": lambda r, output: (r - 1) / r * output.nbytes,
    "reduce_scatter_tensor": lambda r, _, tensor: (r - 1) / r * tensor.nbytes,
    "all_to_all_single": lambda r, _, tensor, received=None, sent=None: tensor.nbytes * _to_others(r, sent),
}


def _to_others(ranks: int, sent: list[int] | None) -> float:
    """The fraction of a message that goes to other ranks of the world, which are the group's."""
    return 1 - sent[dist.get_rank()] / sum(sent) if sent else (ranks - 1) / ranks


def program(flags: str):
    """The training program parsed from flags."""
    return arguments.parse(f"{SHAPES['llama']} {flags}".split(), 4)


def count_sent(sent: list[float]):
    """From here on every collective of this process adds what it sends to `sent`."""
    for name, rule in RINGS.items():
        original = getattr(dist, name)

        def counted(*args, group=None, rule=rule, original=original, **kwargs):
            sent[0] += rule(dist.get_world_size(group), *args[: rule.__code__.co_argcount - 1])
            return original(*args, group=group, **kwargs)

        setattr(dist, name, counted)
        for module in [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("megatron.core")]:
            for bound in ("dist_all_gather_func", "dist_reduce_scatter_func"):  # Megatron's own names for two of them
                if getattr(module, bound, None) is original:
                    setattr(module, bound, counted)
    send = dist.ProcessGroup.send

    def counted_send(group, tensors, *args):
        sent[0] += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, *args)

    dist.ProcessGroup.send = counted_send


def sent_by_rank(rank: int, layouts: list[str], shape: str) -> list[tuple[float, dict]]:
    """(bytes that this rank sends in one update, bytes of the plan) for each layout."""
    from megarl.mcore.model import forward_pass, gpt
    from megarl.mcore.parallel import pipeline
    from megarl.mcore.training import optimizer

    found, sent = [], [0.0]
    count_sent(sent)
    for flags in layouts:
        role = parse_roles(flags, dist.get_world_size(), shape)["actor"]
        args, place = join_actor(flags, shape)
        stages = gpt.build_model(args, VOCAB, place.pg_collection)
        wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
        built = optimizer.build_optimizer(wrapped, args, place.pg_collection)
        parts = [ragged_tokens(LENGTHS, seed) for seed in range(2)]
        sent[0] = 0.0
        pipeline.run_microbatches(
            wrapped, parts, lambda chunk, part: forward_pass.token_scores(chunk, *part, 1.0, VOCAB),
            lambda out, part: (out.logprobs.sum(), torch.zeros(1)), place.pg_collection, train=True,
        )  # fmt: skip
        optimizer.update(built)
        n = 2 * sum(LENGTHS) // args.context_parallel_size
        forwards = 2 if args.recompute_granularity else 1
        planned = {kind: getattr(traffic, kind)(args, n, forwards, 1) for kind in ("tensor", "context", "expert")}
        planned["pipeline"] = traffic.pipeline(args, n, forwards, 1)
        planned["gradients"] = traffic.gradients(role, "train", VOCAB, traffic.StepSizes(14, 36, 0, 1, 1), forwards, 1)
        found.append((sent[0], planned))
    return found


@pytest.mark.parametrize("shape, layouts", [("llama", LAYOUTS), long(("latent", LATENT)), long(("recurrent", LATENT)),
                                             long(("kimi", LATENT)), long(("ling", LATENT))],
                         ids=["llama", "latent", "recurrent", "kimi", "ling"])  # fmt: skip
def test_a_real_update_sends_the_planned_bytes(shape, layouts):
    """Within 5 %: statistics of the head, shapes between stages and gradient norms are not in the plan."""
    ranks = run_world(sent_by_rank, 2, layouts, shape)
    for layout, results in zip(layouts, zip(*ranks, strict=True), strict=True):
        real = sum(sent for sent, _ in results) / len(results)
        planned = sum(results[0][1].values())
        assert abs(planned / real - 1) < 0.05, (layout, real, results[0][1])


ALL = ("actor", "critic", "reward", "reference", "rollout")
MOVES = [
    ("", ALL), ("--advantage grpo", ("actor", "reward", "reference", "rollout")),
    ("--advantage rloo --kl-coefficient 0", ("actor", "reward", "rollout")),
    ("--kl-coefficient 0", ("actor", "critic", "reward", "rollout")),
    ("--advantage remax --greedy-baseline", ("actor", "reward", "reference", "rollout")),
    ("--advantage grpo --group-filter correct --dynamic-sampling --kl-coefficient 0", ("actor", "reward", "rollout")),
    ("--advantage remax --greedy-baseline --group-filter reward", ("actor", "reward", "reference", "rollout")),
    ("--advantage grpo --partial-rollouts --over-sampling 2 --rollout-correction tis --kl-coefficient 0",
     ("actor", "reward", "rollout")),
    ("--distill loss", ("actor", "reward", "teacher", "rollout")),
    ("--distill reward --reward format --advantage grpo --kl-coefficient 0", ("actor", "reward", "teacher", "rollout")),
]  # fmt: skip


class Recorder(step_batch.StepBatch):
    """The step batch of a run with these roles: sends nothing and records what it would send."""

    def __init__(self, roles, settings):
        super().__init__(SimpleNamespace(roles=roles), None, {}, None, 1, None, 1, settings, batch.ON_ROLLOUT)
        self.moves = []

    def _closest_copy(self, role):
        return "rollout"

    def _send(self, source, destination, names, pending=None):
        self.moves.append((source, destination, list(names)))


class Anything:
    """Has every attribute; each can be called."""

    def __getattr__(self, name):
        return lambda *_, **__: None


class Role(Anything):
    """Computes nothing, and exchanges the fields that the role exchanges."""

    def __init__(self, role: type):
        self.name = role.name


@pytest.mark.parametrize("flags, roles", MOVES)
def test_the_moves_are_those_of_the_training_program(flags, roles, monkeypatch):
    from megarl import train_rl
    from megarl.trainers import rl_trainer

    settings = program(flags).settings
    recorder = Recorder(roles, settings)

    class Run(Anything):
        _sent = []
        actor, critic, reward, reference, teacher = (
            Role(role) for role in (Actor, Critic, Reward, Reference, Teachers)
        )
        rollout = batcher = advantages = Anything()

        def steps(self):
            return [1]

        def flush(self, wait):
            pass

        images = None
        dispatch = RLTrainer.dispatch

    Run.batcher.generate = lambda step: recorder
    Run.routing_replay = Anything()
    monkeypatch.setattr(rl_trainer, "RLTrainer", lambda *_: Run())
    train_rl.train(None, None)
    planned = [move for move in traffic.moves(settings, roles) if not move.round_robin]
    assert sorted(recorder.moves) == sorted((move.source, move.destination, move.fields) for move in planned)
    assert {move.sequences for move in planned} == {64}


@pytest.mark.parametrize("flags, sequences", [
    ("", []), ("--advantage remax --greedy-baseline", [16]), ("--group-filter reward", [64]),
    ("--advantage remax --greedy-baseline --group-filter reward --dynamic-sampling", [16, 64]),
])  # fmt: skip
def test_responses_scored_during_dynamic_sampling_move_to_the_reward_role(flags, sequences):
    in_turn = [move for move in traffic.moves(program(flags).settings, ALL) if move.round_robin]
    assert [move.sequences for move in in_turn] == sequences
    fields = ["prompt_ids", "prompt_lengths", "finished", "tokens", "response_mask"]
    assert all(move[:3] == ("rollout", "reward", fields) for move in in_turn)


PACKED = [*(move.fields for move in traffic.moves(Settings(), ALL)), ["scores", "baseline_scores"]]


@pytest.mark.parametrize("names", PACKED)
def test_the_planned_payload_equals_the_exchanged_one(names):
    lengths = torch.full((6,), 48)
    step = traffic.StepSizes(sequences=6, prompt=20, response=28, epochs=1, updates=1)
    size = {"token": 6 * 48, "sequence": 6}
    fields = {n: torch.zeros(size[FIELDS[n]["kind"]], dtype=FIELDS[n]["dtype"]) for n in {*names, "sequence_ids"}}
    packed = exchange.to_bytes(Batch(**{**fields, "lengths": lengths}), list(names))
    assert 8 <= len(packed) - traffic.field_bytes(names, step) < 16  # the count in front, padding after


REPLAYED = f"{MOE} --num-layers 4 --moe-layer-freq [0,1,1,1] --router-replay rollout {WRITTEN}"
APART = "--role-map actor=0-1;critic=0;reward=0;reference=0;rollout=2"
ALONE = "--rollout-tensor-model-parallel-size 1 --rollout-pipeline-model-parallel-size 1"
REFERENCE = "--role-map actor=2;critic=2;reward=2;reference=0-1;rollout=2 --router-replay-reference"
EACH = 64 * 48 * 2 * 2  # bytes of a MoE layer: sequences, tokens, experts of a token
SPLIT = "--actor-tensor-model-parallel-size 2 --actor-sequence-parallel"


def planned_routes(flags: str, size: int) -> dict[str, int]:
    """Bytes of routes that all ranks of each role receive in a run that replays."""
    found = arguments.parse(f"{SHAPES['llama']} {REPLAYED} {flags}".split(), size)
    moved = traffic.routes(found.roles, summary.create_role_groups(found.roles, size), found.settings)
    assert all(move["source"] == "rollout" and 0 <= move["payload"] <= move["sent"] for move in moved)
    return {move["destination"]: move["sent"] for move in moved}


def routes_received(rank: int, flags: str) -> int:
    """Bytes of routes that this rank receives when it asks for all tokens but the last of each sequence."""
    roles, layers = arguments.parse(f"{SHAPES['llama']} {REPLAYED} {flags}".split(), 3).roles, {}
    here = role_mesh.create_mesh(roles, timedelta(seconds=60))
    for role in ("actor", "rollout"):
        place, stages = here[role], stage_layers(roles[role].megatron)
        if place.is_member:
            mine = stages[dist.get_rank(place.pg_collection.pp)]
            layers[role] = tuple(layer + 1 for chunk in mine for layer in chunk if layer)
    lengths = torch.full((64,), 48)
    whole = Batch(sequence_ids=torch.arange(64), lengths=lengths, tokens=torch.zeros(64 * 48))
    whole.routes = torch.tensor([1, 3], dtype=torch.int16).repeat(64 * 48, len(layers.get("rollout", ())), 1)
    wanted = torch.ones(64 * 48, dtype=torch.bool)
    everywhere_0 = dict.fromkeys(("rollout", "actor"), torch.zeros(64, dtype=torch.int64))
    table = RouteExchange(here, layers, 2, 4).send(whole, "actor", whole, wanted, everywhere_0)
    return 0 if table is None else table.rows.nbytes


def test_routes_move_as_planned():
    flags = f"{APART} --actor-pipeline-model-parallel-size 2 {ALONE}"
    received = run_world(routes_received, 3, flags)
    assert received[1] == 2 * received[0] > received[2] == 0  # a stage has two MoE layers, the other one
    assert sum(received) * 48 == planned_routes(flags, 3)["actor"] * 47


@pytest.mark.parametrize("flags, size, copies", [
    ("", 1, {"actor": 0}), ("", 2, {"actor": 1}), (f"{SPLIT} {ALONE}", 2, {"actor": 1}),
    (f"{SPLIT} --rollout-tensor-model-parallel-size 2", 2, {"actor": 0}), (f"{APART} {SPLIT} {ALONE}", 3, {"actor": 1}),
    (f"{APART} --router-replay-reference", 3, {"actor": 1, "reference": 1}),
    (f"{REFERENCE} --reference-tensor-model-parallel-size 2", 3, {"actor": 0, "reference": 1}),
    (f"--actor-pipeline-model-parallel-size 2 {ALONE} --router-replay old-logprob", 2, {}),
])  # fmt: skip
def test_routes_recorded_on_the_same_rank_do_not_move(flags, size, copies):
    assert planned_routes(flags, size) == {role: 3 * EACH * number for role, number in copies.items()}


def test_sizes_of_a_step():
    step = traffic.StepSizes(sequences=12, prompt=6, response=4, epochs=2, updates=6)  # mini-batches of 4 sequences
    assert (step.tokens, step.tokens_of_replica(4), step.tokens_of_replica(5)) == (120, 30, 30)
    assert [step.microbatches(replicas, 10) for replicas in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [step.microbatches(1, cap) for cap in (10, 20, 39, 40)] == [4, 2, 2, 1]


@pytest.mark.parametrize("flags, updates, greedy, on_policy", [
    ("", 1, 0, False),  # the KL in the reward needs log-probs before the update
    ("--kl-in loss", 1, 0, True), ("--kl-coefficient 0", 1, 0, True), ("--kl-in loss --minibatch-size 32", 2, 0, False),
    ("--kl-in loss --ppo-epochs 3 --minibatch-size 32", 6, 0, False),
    ("--advantage remax --greedy-baseline --kl-coefficient 0", 1, 16, True),
    ("--policy-loss real --kl-coefficient 0", 1, 0, True),
    ("--policy-loss real --kl-coefficient 0 --ppo-epochs 2 --minibatch-size 32", 4, 0, False),
])  # fmt: skip
def test_flags_give_the_planned_step_sizes(flags, updates, greedy, on_policy):
    found = program(flags)
    step = traffic.step_sizes(found.settings)
    assert (step.sequences, step.updates, step.greedy, step.skips_old_logprobs) == (64, updates, greedy, on_policy)
    assert step.with_greedy().sequences == 64 + greedy
    of_actor = Actor._updates_on_policy(
        SimpleNamespace(settings=found.settings), SimpleNamespace(groups=range(16), step=1)
    )
    assert of_actor == on_policy
    forwards, backwards = traffic.passes("actor", found.roles["actor"].megatron, step)
    compares = "real" in flags and updates > 1
    assert (forwards, backwards) == (step.epochs * (1 + compares) + (0 if on_policy else 1), step.epochs)
    assert traffic.passes("critic", found.roles["actor"].megatron, step)[0] == step.epochs + 1
    assert traffic.passes("rollout", found.roles["actor"].megatron, step) == (1, 0)
