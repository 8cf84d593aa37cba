"""Bytes that a step moves: between roles (the batch), and within a role (mean of its ranks, bytes that a rank sends).

An upper bound: every sequence has `--max-prompt-length` + `--max-response-length` tokens, and rings are assumed, in
which an all-gather or a reduce-scatter of S bytes over r ranks makes each send (r − 1)/r·S and an all-reduce twice
that. Symbols as in `activations`; k experts a token, e expert-parallel ranks, p stages of v chunks.
"""

import dataclasses
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megarl.batch import ACTOR_FIELDS, FIELDS, RESPONSE_FIELDS
from megarl.comm.exchange import HEADER
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.model.gpt import padded_vocab_size
from megarl.mcore.model.pipeline_layout import moe_layer_pattern, stage_layers
from megarl.planning.memory import buffers, plain_bytes, sharded_bytes
from megarl.planning.parameters import SCALAR_HEAD, stage_weights


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step: sequences, the longest prompt and response in tokens, PPO epochs, and the actor's updates.

    `greedy` responses (ReMax's baseline) are generated and scored in addition. `on_policy`: there is one update, whose
    forward gives the old log-probs, too.
    """

    sequences: int
    prompt: int
    response: int
    epochs: int
    updates: int
    greedy: int = 0
    on_policy: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, each at its longest."""
        return self.sequences * (self.prompt + self.response)

    def with_greedy(self) -> "StepSizes":
        """These sizes with the greedy responses among the sequences: what the rollout generates."""
        return dataclasses.replace(self, sequences=self.sequences + self.greedy)

    def tokens_of_replica(self, replicas: int) -> int:
        """Tokens of one of so many data-parallel replicas."""
        return ceil(self.sequences / replicas) * (self.prompt + self.response)

    def microbatches(self, replicas: int, cap: int) -> int:
        """Micro-batches of one update on a data-parallel replica, at most; `cap` is in tokens."""
        size = ceil(self.sequences * self.epochs / self.updates)
        return max(1, ceil(ceil(size / replicas) * (self.prompt + self.response) / cap))


def step_sizes(settings) -> StepSizes:
    """The sizes of a step from megarl's own settings; of dynamic sampling, one round."""
    s = settings
    lengths = s.max_prompt_length, s.max_response_length
    greedy, on_policy = s.prompts_per_step if s.greedy_baseline else 0, s.updates_on_policy(s.sequences_per_step)
    return StepSizes(s.sequences_per_step, *lengths, s.ppo_epochs, s.updates_per_step, greedy, on_policy)


class FieldMove(NamedTuple):
    """Batch fields that one role sends to another.

    `round_robin`: sequences go to replicas in turn, as they are generated; else they are balanced by work.
    """

    source: str
    destination: str
    fields: list[str]
    sequences: int
    round_robin: bool = False


def moves(settings, roles) -> list[FieldMove]:
    """What a step of a run with these roles sends from role to role, in this order."""
    step, known, found = step_sizes(settings), settings.sampled_fields, []
    if "baseline_scores" in known:
        found.append(FieldMove("rollout", "reward", RESPONSE_FIELDS, step.greedy, round_robin=True))
    if "scores" in known:
        found.append(FieldMove("rollout", "reward", RESPONSE_FIELDS, step.sequences, round_robin=True))
    batch = [
        ("rollout", "actor", [*ACTOR_FIELDS, *known]),
        *(("rollout", role, [*RESPONSE_FIELDS, *known]) for role in ("reward", "reference", "critic")),
        ("reward", "actor", ["scores", "correct"]),
        ("reference", "actor", ["reference_logprobs"]),
        ("critic", "actor", ["values"]),
        ("actor", "critic", ["returns"]),
    ]
    found += [FieldMove(*move, step.sequences) for move in batch]
    return [move for move in found if move.source in roles and move.destination in roles]


def field_bytes(names: list[str], step: StepSizes) -> int:
    """Bytes of these fields of a step's whole batch, with the header that says which sequences they belong to."""
    names = dict.fromkeys(HEADER + names)
    items = {"token": step.tokens, "sequence": step.sequences}
    return sum(FIELDS[name].dtype.itemsize * items[FIELDS[name].kind] for name in names)


def exchanges(places: dict, settings) -> list[dict]:
    """Each move of a step: payload between the first ranks of replicas, and all bytes sent, broadcasts included.

    Roles with the same replicas hold the same sequences and need no copy. The rollout's replicas hold others: unless
    there is one replica, sequences move after generation, except where they are scored in the rollout's own order.
    """
    found, served = [], {}
    for move in moves(settings, places):
        here, there = places[move.source].replicas, places[move.destination].replicas
        is_free = here == there and (move.source != "rollout" or move.round_robin or len(here) == 1)
        if move.source == "rollout" and not move.round_robin:
            is_free = is_free or there in served.values()
            served[move.destination] = there
        step = dataclasses.replace(step_sizes(settings), sequences=move.sequences)
        payload = 0 if is_free else field_bytes(move.fields, step)
        names = {"source": move.source, "destination": move.destination, "fields": move.fields}
        found.append(names | {"payload": payload, "sent": payload * len(there[0])})
    return found


def routes(roles: dict, places: dict, settings) -> list[dict]:
    """What `--router-replay rollout` moves, as `exchanges` tells it: two bytes a token, MoE layer and expert.

    A route goes to each rank whose router sees the token: with sequence parallelism one of the tensor-parallel ranks,
    without it all. Tokens that a rank generates itself are counted as moved, too, unless the rollout has one replica.
    """
    if settings.router_replay != "rollout":
        return []
    found, step, source = [], step_sizes(settings), places["rollout"].replicas
    held = _moe_layers_of_ranks(roles["rollout"].megatron, source) if len(source) == 1 else {}
    for name in ("actor", "reference") if settings.router_replay_reference else ("actor",):
        args, replicas = roles[name].megatron, places[name].replicas
        share = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        one = FIELDS["routes"].dtype.itemsize * args.moe_router_topk  # a token's in a layer
        wanted = _moe_layers_of_ranks(args, replicas)
        taken = sum(len(layers - held.get(rank, set())) for rank, layers in wanted.items())
        sent = one * step.tokens_of_replica(len(replicas)) * taken // share
        payload = min(sent, one * step.tokens * sum(moe_layer_pattern(args)))
        names = {"source": "rollout", "destination": name, "fields": ["routes"]}
        found.append(names | {"payload": payload, "sent": sent})
    return found


def _moe_layers_of_ranks(args, replicas) -> dict[int, set[int]]:
    """The MoE layers that each rank of these replicas holds."""
    kinds, stages = moe_layer_pattern(args), stage_layers(args)
    of_stage = [{layer for chunk in chunks for layer in chunk if kinds[layer]} for chunks in stages]
    return {rank: of_stage[i * len(stages) // len(ranks)] for ranks in replicas for i, rank in enumerate(ranks)}


def passes(role: str, args, step: StepSizes) -> tuple[int, int]:
    """(forwards, backwards) of a step's batch through a role's model; full recomputation repeats forwards."""
    if role not in ("actor", "critic"):
        return 1, 0
    again = args.recompute_granularity == "full"
    scoring = 0 if role == "actor" and step.on_policy else 1
    return scoring + step.epochs * (2 if again else 1), step.epochs


def within_role(role, kind: str, vocab_size: int, step: StepSizes) -> dict[str, int]:
    """Bytes that a rank of the role sends in a step, by kind of parallelism."""
    args = role.megatron
    sizes, forwards, backwards = parallel_sizes(args), *passes(role.name, args, step)
    step = step.with_greedy() if kind == "generate" else step
    n = step.tokens_of_replica(sizes.data(len(role.ranks))) // sizes.context
    found = {
        "tensor": tensor(args, n, forwards, backwards),
        "context": context(args, n, forwards, backwards),
        "pipeline": pipeline(args, n, forwards, backwards),
        "expert": expert(args, n, forwards, backwards),
        "gradients": 0.0,
    }
    if kind == "generate":
        share = step.response / (step.prompt + step.response)
        found["tensor"] += _gathered_logits(args, vocab_size, n * share)
    if kind in ("train", "value") or args.use_torch_fsdp2:
        found["gradients"] = gradients(role, kind, vocab_size, step, forwards, backwards)
    return {name: int(value) for name, value in found.items()}


def tensor(args, n: int, forwards: int, backwards: int) -> float:
    """Attention and each dense or shared MLP: an all-reduce of n·H·b forward and backward (or gather and scatter).

    Under sequence parallelism backward gathers once more. Embedding and head have one of each together. Experts: k
    copies gathered and scattered over x ranks.
    """
    t, x, wide = args.tensor_model_parallel_size, args.expert_tensor_parallel_size, args.hidden_size
    b, stages = args.params_dtype.itemsize, args.pipeline_model_parallel_size
    layers, experts = args.num_layers / stages, sum(moe_layer_pattern(args)) / stages
    dense = 2 * layers - (0 if args.moe_shared_expert_intermediate_size else experts)
    both = forwards + backwards
    rounds = dense * (2 * both + (backwards if args.sequence_parallel else 0)) + 2 * both / stages
    s = n / t if args.sequence_parallel else n
    return rounds * (t - 1) / t * n * wide * b + 2 * both * experts * (x - 1) * args.moe_router_topk * s * wide * b


def _gathered_logits(args, vocab_size: int, tokens: float) -> float:
    """The rollout gathers each new token's logits over tensor-parallel ranks, on the last stage."""
    t = args.tensor_model_parallel_size
    columns = padded_vocab_size(args, vocab_size) / t
    return (t - 1) * tokens * columns * args.params_dtype.itemsize / args.pipeline_model_parallel_size


def context(args, n: int, forwards: int, backwards: int) -> float:
    """Each layer gathers keys and values of n tokens from every rank, and reduce-scatters their gradients."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    width = 2 * groups * args.kv_channels / args.tensor_model_parallel_size
    layers = args.num_layers / args.pipeline_model_parallel_size
    return (forwards + backwards) * layers * (args.context_parallel_size - 1) * n * width * args.params_dtype.itemsize


def pipeline(args, n: int, forwards: int, backwards: int) -> float:
    """Hidden states s·H·b are sent over p·v − 1 stage boundaries, gradients back; recomputation sends nothing."""
    stages = args.pipeline_model_parallel_size
    boundaries = (stages * (args.virtual_pipeline_model_parallel_size or 1) - 1) / stages
    s = n / args.tensor_model_parallel_size if args.sequence_parallel else n
    again = backwards if args.recompute_granularity == "full" else 0
    return (forwards - again + backwards) * boundaries * s * args.hidden_size * args.params_dtype.itemsize


def expert(args, n: int, forwards: int, backwards: int) -> float:
    """Each MoE layer sends k copies of s tokens to their experts and back; (e − 1)/e of them to other ranks."""
    ranks, stages = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    s = n / args.tensor_model_parallel_size if args.sequence_parallel else n
    copies = 2 * args.moe_router_topk * s * args.hidden_size * args.params_dtype.itemsize * (ranks - 1) / ranks
    return (forwards + backwards) * sum(moe_layer_pattern(args)) / stages * copies


def gradients(role, kind: str, vocab_size: int, step: StepSizes, forwards: int, backwards: int) -> float:
    """Each update all-reduces gradients; the distributed optimizer scatters them and gathers weights instead.

    Fully sharded, every micro-batch gathers the weights for each pass and scatters the gradients of each backward.
    Tied embeddings of a pipeline's first and last stage are summed besides.
    """
    args = role.megatron
    stages, size = stage_weights(args, vocab_size, kind in SCALAR_HEAD), parallel_sizes(args)
    dense = size.data(len(role.ranks)) * size.context
    total, in_fp32 = 0.0, args.accumulate_allreduce_grads_in_fp32
    for number, chunks in enumerate(stages):
        for weights in chunks:
            if args.use_torch_fsdp2:
                held, reduced = sharded_bytes(weights, args)
                count = step.microbatches(size.data(len(role.ranks)), role.max_tokens_per_microbatch)
                again = count * step.updates / step.epochs  # micro-batches of one pass over the batch
                total += again * (dense - 1) * ((forwards + backwards) * held + backwards * reduced)
                continue
            for buffer in buffers(weights, args, number == 0):
                gradient = buffer.elements * (4 if in_fp32 else buffer.itemsize)
                both = gradient + buffer.elements * buffer.itemsize if args.use_distributed_optimizer else 2 * gradient
                total += step.updates * (buffer.ranks - 1) / buffer.ranks * both
            total += step.updates * sum(w.elements * (4 if in_fp32 else w.itemsize) for w in weights if w.is_shared)
    return total / len(stages)


def weights_to_rollout(roles: dict, vocab_size: int) -> int:
    """Bytes that all ranks of a rollout with a model of its own receive after each update; 0 without one."""
    rollout = roles["rollout"]
    if rollout.model_role != "rollout":
        return 0
    stages = stage_weights(rollout.megatron, vocab_size, False)
    each = len(rollout.ranks) // len(stages)
    return each * sum(plain_bytes(weights) for chunks in stages for weights in chunks)
