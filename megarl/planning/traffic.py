"""Traffic of a step in bytes: between roles (the batch), and within a role (sent per rank, mean of its ranks).

An upper bound: every sequence has `--max-prompt-length` + `--max-response-length` tokens. Collectives are rings: in an
all-gather or reduce-scatter of S bytes over r ranks each rank sends (r − 1)/r·S, in an all-reduce twice that. Symbols
as in `activations`; k experts per token, e expert-parallel ranks, p stages of v chunks.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.batch import ACTOR, FIELDS, GENERATED, ON_ROLLOUT, READERS, REWARD, fields_sent
from megarl.comm.exchange import HEADER, PARTS, STATES
from megarl.flags.algorithm import RECOMPUTE
from megarl.flags.settings import expected_responses
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.model.pipeline_layout import (
    attention_layer_pattern,
    indexer_pattern,
    layer_kinds,
    moe_layer_pattern,
    recurrent_layer_pattern,
    stage_layers,
)
from megarl.mcore.model.projections import HeadLayout
from megarl.mcore.model.shared_groups import columns_sent
from megarl.mcore.model.weight_table import Weight, padded_vocab_size, prediction_weights
from megarl.mcore.recurrence import layer_sizes
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.planning.gradient_buffers import buffers, gradient_bytes, gradient_itemsize
from megarl.planning.memory import is_unsharded, plain_bytes, sharded_bytes
from megarl.planning.parameters import (
    CACHED,
    SCALAR_HEAD,
    ModelKey,
    all_factors,
    factors_apart,
    is_half,
    of_stages,
    stage_weights,
    trained_and_frozen,
)

WHOLE = ("_down_proj.", "_latent_proj.")  # matrices that every tensor-parallel rank has


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step."""

    sequences: int
    prompt: int  # tokens of the longest
    response: int
    epochs: int
    updates: int  # of the actor
    greedy: int = 0  # additional greedy responses (ReMax's baseline)
    skips_old_logprobs: bool = False  # old log-probs are the rollout's, or those of a single update's forward
    compares: bool = False  # the policy loss has a pass before updates, unless the policy is the one before the step

    @property
    def tokens(self) -> int:
        """Tokens of all sequences at maximum length."""
        return self.sequences * (self.prompt + self.response)

    def with_greedy(self) -> "StepSizes":
        """These sizes with the greedy responses counted as sequences, for the rollout."""
        return dataclasses.replace(self, sequences=self.sequences + self.greedy)

    def tokens_of_replica(self, replicas: int) -> int:
        """Tokens of one data-parallel replica."""
        return ceil(self.sequences / replicas) * (self.prompt + self.response)

    def microbatches(self, replicas: int, cap: int) -> int:
        """Maximum number of micro-batches of one update on a data-parallel replica; `cap` is in tokens."""
        size = ceil(self.sequences * self.epochs / self.updates)
        return max(1, ceil(ceil(size / replicas) * (self.prompt + self.response) / cap))


def step_sizes(settings) -> StepSizes:
    """The sizes of a step from the settings; with dynamic sampling, of one round."""
    s = settings
    loss, recomputes = POLICY_LOSSES.get(s.policy_loss), s.old_logprobs == RECOMPUTE
    compares = loss is not None and loss.compare is not None and (s.updates_per_step > 1 or not recomputes)
    return StepSizes(
        sequences=expected_responses(s),
        prompt=s.max_prompt_length,
        response=s.max_response_length,
        epochs=s.ppo_epochs,
        updates=s.updates_per_step,
        greedy=s.prompts_per_step if s.greedy_baseline else 0,
        skips_old_logprobs=not recomputes or s.updates_on_policy(s.prompts_per_step),
        compares=compares,
    )


class FieldMove(NamedTuple):
    """Batch fields that one role sends to another."""

    source: str
    destination: str
    fields: list[str]
    sequences: int
    round_robin: bool = False  # sequences are dealt to replicas as they are generated; else balanced by FLOPs


def moves(settings, roles) -> list[FieldMove]:
    """The field moves of a step of a run with these roles, in order."""
    step = step_sizes(settings)
    scored = [step.greedy] * settings.greedy_baseline + [step.sequences] * settings.scores_rounds
    of_round = fields_sent(settings, [GENERATED], REWARD)
    result = [FieldMove("rollout", REWARD, of_round, count, round_robin=True) for count in scored]
    for source in ("rollout", *READERS[1:], ACTOR):
        for reader in READERS:
            fields = fields_sent(settings, ON_ROLLOUT if source == "rollout" else [source], reader)
            result += [FieldMove(source, reader, fields, step.sequences)] if fields else []
    return [move for move in result if move.source in roles and move.destination in roles]


def field_bytes(names: list[str], step: StepSizes, state: int = 0, parts: int = 1) -> int:
    """Bytes of these fields of a step's whole batch, with the header that identifies the sequences. `state`: of one of
    the teachers' hidden states; `parts`: number of a reward's."""
    names = dict.fromkeys(HEADER + names)
    items = {"token": step.tokens, "sequence": step.sequences}
    sizes = {name: FIELDS[name]["dtype"].itemsize for name in names}
    sizes |= {name: size for name, size in ((STATES, state), (PARTS, parts * sizes.get(PARTS, 0))) if name in sizes}
    return sum(size * items[FIELDS[name]["kind"]] for name, size in sizes.items())


def exchanges(role_groups: dict, settings, state: int = 0, own_groups: bool = False) -> list[dict]:
    """Each field move of a step: payload between the replicas' first ranks, and all bytes sent with broadcasts.

    Roles with the same replicas hold the same sequences and need no copy. Sequences of the rollout move after
    generation, because the load is rebalanced, unless it has one replica or they are scored in the rollout's order.

    `state`: as of `field_bytes`; `own_groups`: as of `additions.holds_own_groups`.
    """
    result, served = [], {}
    for move in moves(settings, role_groups):
        source, destination = role_groups[move.source].replicas, role_groups[move.destination].replicas
        is_free = source == destination and (move.source != "rollout" or move.round_robin or len(source) == 1)
        if own_groups and not move.round_robin and "reward" in (move.source, move.destination):
            is_free = False
        elif move.source == "rollout" and not move.round_robin:
            is_free = is_free or destination in served.values()
            served[move.destination] = destination
        step = dataclasses.replace(step_sizes(settings), sequences=move.sequences)
        payload = 0 if is_free else field_bytes(move.fields, step, state, len(settings.part_weights))
        names = {"source": move.source, "destination": move.destination, "fields": move.fields}
        result.append(names | {"payload": payload, "sent": payload * len(destination[0])})
    return result


def routes(roles: dict, role_groups: dict, settings) -> list[dict]:
    """Moves of `--router-replay rollout`, in the form of `exchanges`: two bytes per token, MoE layer and expert.

    A route goes to one of the ranks with its layer, which gather the others from each other: that is not counted.
    Tokens that a rank generates itself also count as moved, unless the rollout has one replica.
    """
    if settings.router_replay != "rollout":
        return []
    result, step, source = [], step_sizes(settings), role_groups["rollout"].replicas
    held = _moe_layers_of_ranks(roles["rollout"].megatron, source) if len(source) == 1 else {}
    for name in ("actor", "reference") if settings.router_replay_reference else ("actor",):
        args, replicas = roles[name].megatron, role_groups[name].replicas
        holders = len(replicas) * args.context_parallel_size * args.tensor_model_parallel_size  # of a layer
        route = FIELDS["routes"]["dtype"].itemsize * args.moe_router_topk  # bytes of one token in one layer
        needed = _moe_layers_of_ranks(args, replicas)
        received = sum(len(layers - held.get(rank, set())) for rank, layers in needed.items())
        sent = route * step.tokens * received // holders
        names = {"source": "rollout", "destination": name, "fields": ["routes"]}
        result.append(names | {"payload": sent, "sent": sent})
    return result


def _moe_layers_of_ranks(args, replicas) -> dict[int, set[int]]:
    """The MoE layers that each rank of these replicas holds."""
    kinds, stages = moe_layer_pattern(args), stage_layers(args)
    of_stage = [{layer for chunk in chunks for layer in chunk if kinds[layer]} for chunks in stages]
    return {rank: of_stage[i * len(stages) // len(ranks)] for ranks in replicas for i, rank in enumerate(ranks)}


def passes(role: str, args, step: StepSizes) -> tuple[int, int]:
    """(forwards, backwards) of a step's batch through a role's model; full recomputation adds forwards."""
    if role not in ("actor", "critic"):
        return 1, 0
    scoring = 0 if role == "actor" and step.skips_old_logprobs else 1
    scoring += step.epochs if role == "actor" and step.compares else 0
    return scoring + step.epochs * (2 if args.recompute_granularity == "full" else 1), step.epochs


def within_role(role, kind: str, vocab_size: int, step: StepSizes) -> dict[str, int]:
    """Bytes that a rank of the role sends in a step, by kind of parallelism."""
    args = role.megatron
    sizes = parallel_sizes(args)
    forwards, backwards = passes(role.name, args, step)
    step = step.with_greedy() if kind == "generate" else step
    n = step.tokens_of_replica(sizes.data(len(role.ranks))) // sizes.context
    sent = {
        "tensor": tensor(args, n, forwards, backwards),
        "context": context(args, n, forwards, backwards),
        "pipeline": pipeline(args, n, forwards, backwards),
        "expert": expert(args, n, forwards, backwards),
        "gradients": 0.0,
    }
    if kind in ("generate", "judge"):  # each new token's logits are gathered over tensor-parallel ranks
        tokens, t = n * (step.response / (step.prompt + step.response)), args.tensor_model_parallel_size
        columns = padded_vocab_size(args, vocab_size) / t
        sent["tensor"] += (t - 1) * tokens * columns * args.params_dtype.itemsize / args.pipeline_model_parallel_size
    if kind in ("train", "value") or args.use_torch_fsdp2:
        sent["gradients"] = gradients(role, kind, vocab_size, step, forwards, backwards)
    return {name: int(value) for name, value in sent.items()}


def tensor(args, n: int, forwards: int, backwards: int) -> float:
    """Attention and each dense or shared MLP: an all-reduce of n·H·b in forward and backward (or gather and scatter).

    Under sequence parallelism the backward gathers once more. Embedding and head together count as one. Experts gather
    and scatter k copies over x ranks. In place of H, what enters the heads of multi-latent attention has as many
    channels as its latents; gates and decays of recurrent states may have latents beside H. Ranks that share a query
    group exchange its heads in forward and backward.
    """
    t, x, wide = args.tensor_model_parallel_size, args.expert_tensor_parallel_size, args.hidden_size
    b, stages = args.params_dtype.itemsize, args.pipeline_model_parallel_size
    layers, experts = args.num_layers / stages, sum(moe_layer_pattern(args)) / stages
    halves = sum(kind.has_mixer + kind.has_mlp for kind in layer_kinds(args)) / stages
    dense = halves - (0 if args.moe_shared_expert_intermediate_size else experts)
    both = forwards + backwards
    rounds = dense * (2 * both + (backwards if args.sequence_parallel else 0)) + 2 * both / stages
    channels = rounds * wide
    if any(recurrent_layer_pattern(args)):
        sizes = layer_sizes(args, args.tensor_model_parallel_size)
        latents = len(sizes.latents) * sizes.gate_rank if isinstance(sizes, HeadSizes) else 0
        rounds = both if args.sequence_parallel else 2 * backwards
        channels += sum(recurrent_layer_pattern(args)) / stages * latents * rounds
    if args.multi_latent_attention:
        layers = sum(attention_layer_pattern(args)) / stages
        if args.attention_output_gate:  # its projection reads hidden states, too
            channels += layers * wide * (both + backwards if args.sequence_parallel else 2 * backwards)
        queries = args.q_lora_rank or wide
        fewer = wide - queries - args.kv_lora_rank - args.qk_pos_emb_head_dim
        channels -= layers * fewer * (both if args.sequence_parallel else 2 * backwards)
        channels -= layers * backwards * (wide - queries) if args.sequence_parallel else 0
        if args.dsa_indexer_topk is not None:  # the heads of an indexer, as if all tokens chose keys
            gathered = args.dsa_indexer_n_heads * args.dsa_indexer_head_dim
            if args.sequence_parallel:
                gathered += args.dsa_indexer_n_heads + args.dsa_indexer_head_dim + queries
            channels += sum(indexer_pattern(args)) / stages * forwards * gathered
    s = n / t if args.sequence_parallel else n
    heads = HeadLayout.of(args)  # columns of `linear_qkv`, or of their gradients; 0 unless ranks share a group
    exchanged = columns_sent(heads, heads.ranks_of_group(t))
    channels = channels * (t - 1) / t + sum(attention_layer_pattern(args)) / stages * both * exchanged
    copies = args.moe_router_topk * s * (args.moe_latent_size or wide)
    return channels * n * b + 2 * both * experts * (x - 1) * copies * b


def context(args, n: int, forwards: int, backwards: int) -> float:
    """Each layer all-gathers keys and values of n tokens, or their latents, from every rank, and reduce-scatters their
    gradients. One with recurrent states sends what its heads read to the ranks of the heads, and results back."""
    width = 2 * HeadLayout.of(args).groups_of_rank(args.tensor_model_parallel_size) * args.kv_channels
    if args.multi_latent_attention:
        width = args.kv_lora_rank + args.qk_pos_emb_head_dim
    ranks, is_recurrent = args.context_parallel_size, recurrent_layer_pattern(args)
    channels = sum(attention_layer_pattern(args)) * (ranks - 1) * width
    if args.dsa_indexer_topk is not None:  # index keys have no gradients
        only_forward = forwards / (forwards + backwards)
        channels += sum(indexer_pattern(args)) * (ranks - 1) * args.dsa_indexer_head_dim * only_forward
    if any(is_recurrent):
        sizes = layer_sizes(args, args.tensor_model_parallel_size)
        sent = sum(sizes.wide.values()) + sizes.heads * sizes.values
        channels += is_recurrent.count(True) * (ranks - 1) / ranks * sent
    return (forwards + backwards) * channels / args.pipeline_model_parallel_size * n * args.params_dtype.itemsize


def pipeline(args, n: int, forwards: int, backwards: int) -> float:
    """Hidden states s·H·b cross p·v − 1 stage boundaries, and gradients cross back; recomputation sends nothing."""
    stages = args.pipeline_model_parallel_size
    boundaries = (stages * (args.virtual_pipeline_model_parallel_size or 1) - 1) / stages
    s = n / args.tensor_model_parallel_size if args.sequence_parallel else n
    again = backwards if args.recompute_granularity == "full" else 0
    return (forwards - again + backwards) * boundaries * s * args.hidden_size * args.params_dtype.itemsize


def expert(args, n: int, forwards: int, backwards: int) -> float:
    """Each MoE layer sends k copies of s tokens to their experts and back, (e − 1)/e of them to other ranks."""
    ranks, stages = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    s = n / args.tensor_model_parallel_size if args.sequence_parallel else n
    width = args.moe_latent_size or args.hidden_size
    copies = 2 * args.moe_router_topk * s * width * args.params_dtype.itemsize * (ranks - 1) / ranks
    return (forwards + backwards) * sum(moe_layer_pattern(args)) / stages * copies


def gradients(role, kind: str, vocab_size: int, step: StepSizes, forwards: int, backwards: int) -> float:
    """Each update all-reduces gradients; the distributed optimizer reduce-scatters them and all-gathers the weights.

    With FSDP, every micro-batch gathers the weights in each pass and scatters the gradients of each backward. The
    gradients of embeddings tied across pipeline stages are all-reduced in addition, and under sequence parallelism
    those of weights that every tensor-parallel rank has whole.
    """
    args = role.megatron
    stages, size = stage_weights(args, vocab_size, kind in SCALAR_HEAD), parallel_sizes(args)
    dense, total = size.data(len(role.ranks)) * size.context, 0.0
    if not args.use_torch_fsdp2:
        for sent in itertools.chain(*_reduced_of_chunks(ModelKey.of(args), vocab_size, kind, role.lora)):
            total += step.updates * sent
        return total / len(stages)
    count = step.microbatches(size.data(len(role.ranks)), role.max_tokens_per_microbatch)
    microbatches = count * step.updates / step.epochs  # of one pass over the batch
    for weights in itertools.chain.from_iterable(stages):
        trained, _ = trained_and_frozen(weights, args, role.lora, kind in SCALAR_HEAD)
        factors, unsharded = all_factors(weights, args, role.lora), [w for w in trained if is_unsharded(w, args)]
        held, _ = sharded_bytes([w for w in weights + factors if not is_unsharded(w, args)], args)
        _, reduced = sharded_bytes([w for w in trained if not is_unsharded(w, args)], args)
        total += step.updates * 2 * (dense - 1) / dense * plain_bytes(unsharded)  # all-reduced once
        total += microbatches * (dense - 1) * ((forwards + backwards) * held + backwards * reduced)
        if factors and not is_half(args):  # they are gathered with the embeddings, to be merged
            outside = [w for w in weights if w.layer is None]
            total += step.updates * (dense - 1) * sharded_bytes(outside + factors, args)[0]
    return total / len(stages)


@functools.lru_cache(maxsize=CACHED)
def _reduced_of_chunks(model: ModelKey, vocab_size: int, kind: str, lora: LoRASettings | None) -> list[list[float]]:
    """`_reduced` of the chunks of each stage."""
    args, value_head = model.args, kind in SCALAR_HEAD
    tensor_ranks = parallel_sizes(args).tensor

    def of_chunks(chunks: list[list[Weight]], stage: int) -> list[float]:
        trained = (trained_and_frozen(weights, args, lora, value_head)[0] for weights in chunks)
        return [_reduced(weights, args, tensor_ranks, stage == 0) for weights in trained]

    return of_stages(stage_weights(args, vocab_size, value_head), of_chunks)


def _reduced(weights: list[Weight], args, tensor_ranks: int, first_stage: bool) -> float:
    """What a rank of a model chunk sends in an update without FSDP."""
    total = 0.0
    for buffer in buffers(weights, args, first_stage):
        gradient = gradient_bytes(buffer, args)
        both = gradient + (buffer.elements * buffer.itemsize if args.use_distributed_optimizer else gradient)
        total += (buffer.ranks - 1) / buffer.ranks * both
    tied = sum(w.elements * gradient_itemsize(args, w.itemsize) for w in weights if w.is_shared)
    of_all = [w for w in weights if any(name in w.name for name in WHOLE)]
    whole = sum(w.elements * gradient_itemsize(args, w.itemsize) for w in of_all)
    return total + tied + (2 * (tensor_ranks - 1) / tensor_ranks * whole if args.sequence_parallel else 0)


def weights_to_rollout(roles: dict, vocab_size: int) -> int:
    """Bytes that all ranks of a rollout with a separate model receive after each update, else 0.

    Weights under low-rank factors of 16 bits travel only once.
    """
    rollout = roles["rollout"]
    if rollout.model_role != "rollout":
        return 0
    if rollout.lora and is_half(rollout.megatron):
        return _of_all_ranks(rollout, vocab_size, lambda w: factors_apart(w, rollout.megatron, rollout.lora))
    predicts = prediction_weights(rollout.megatron, parallel_sizes(rollout.megatron))
    return _of_all_ranks(rollout, vocab_size) + len(rollout.ranks) * plain_bytes(predicts)


def weights_to_reference(roles: dict, settings, vocab_size: int) -> int:
    """Bytes that all ranks of the reference receive in each refresh; 0 without one, or if it has the actor's layout."""
    actor, reference = roles["actor"], roles.get("reference")
    if reference is None or not settings.reference_update_interval:
        return 0
    if reference.ranks == actor.ranks and parallel_sizes(reference.megatron) == parallel_sizes(actor.megatron):
        return 0
    return _of_all_ranks(reference, vocab_size)


def _of_all_ranks(role, vocab_size: int, select=lambda weights: weights) -> int:
    """Bytes of the weights, or of what `select` gives for those of a chunk, on all ranks of a role."""
    stages = stage_weights(role.megatron, vocab_size, False)
    each, chunks = len(role.ranks) // len(stages), [weights for chunks in stages for weights in chunks]
    return each * sum(plain_bytes(select(weights)) for weights in chunks)
