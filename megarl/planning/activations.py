"""Activation memory of a micro-batch of T tokens between forward and backward, and memory of its logits.

Symbols as in `parameters`; n = T/c tokens of a rank under context parallelism, s = n/t of them under sequence
parallelism (else n), b bytes per element, F the ffn channels of this rank. Sequences are packed (THD): only attention
segments are padded, for which `SEGMENT_PADDING` is a typical factor. Experts are assumed evenly loaded.
"""

import torch

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.config.model_flags import ROTARY, is_gated
from megarl.mcore.kernels.head import MAX_KEPT, row_chunks
from megarl.mcore.kernels.head_scores import MAX_TOGETHER
from megarl.mcore.model.pipeline_layout import LayerKind, layer_kinds, stage_layers
from megarl.mcore.model.projections import HeadLayout
from megarl.mcore.model.weight_table import padded_vocab_size
from megarl.mcore.recurrence import layer_sizes
from megarl.mcore.recurrence.delta_rule import DECAY_BLOCK, HeadSizes
from megarl.mcore.recurrence.runs import CHUNK
from megarl.planning.parameters import SCALAR_HEAD

SEGMENT_PADDING = 1.2


def _tokens(args, tokens: int) -> tuple[int, int]:
    """(n, s): a rank's tokens outside and inside the sequence-parallel regions."""
    n = -(-tokens // args.context_parallel_size)
    return n, -(-n // args.tensor_model_parallel_size) if args.sequence_parallel else n


def _norm(args, width: int, fused: bool) -> int:
    """Bytes per token that a norm keeps: its input; torch's 16-bit RMSNorm keeps input and result in fp32."""
    keeps_fp32 = args.normalization == "RMSNorm" and not fused and args.params_dtype != torch.float32
    return width * (8 if keeps_fp32 else args.params_dtype.itemsize)


def of_layer(args, kind: LayerKind, tokens: int, fused: bool = True) -> float:
    """Bytes that one layer keeps for a micro-batch.

    Norms 2·norm(H)·s, twice that if before and after; inputs of the linear layers (2H·s + A·D/t·n)·b; attention; MLP.
    """
    n, s = _tokens(args, tokens)
    t, b, hidden = args.tensor_model_parallel_size, args.params_dtype.itemsize, args.hidden_size
    norms = 4 if args.layernorm_position == "sandwich" else 2
    total = (norms * _norm(args, hidden, fused) * s + 2 * hidden * s * b) * (kind.has_mixer + kind.has_mlp) / 2
    if kind.is_recurrent:
        total += _delta_net(args, n, fused) if args.hybrid_layer_pattern is None else _mamba(args, n)
    elif kind.has_mixer:
        total += args.num_attention_heads * args.kv_channels / t * n * b
        total += _latent_attention(args, n, s, fused) if args.multi_latent_attention else _attention(args, n, fused)
        total += n * args.seq_length / 16 if kind.has_indexer else 0  # a bit for each key that a token sees
    if not kind.has_mlp:
        return total
    return total + (_moe(args, s) if kind.is_moe else _mlp(args, args.ffn_hidden_size / t) * n)


def _delta_net(args, n: int, fused: bool) -> float:
    """Bytes of a gated delta net: its inputs in fp32, the normed results, the gates, and their product; latents of
    gates and decays."""
    heads = HeadSizes.of(args, args.tensor_model_parallel_size)
    values, b = heads.parts["value"], args.params_dtype.itemsize
    wide = sum(heads.wide.values())
    inputs = 4 * wide + (0 if b == 4 else b * wide) + len(heads.latents) * heads.gate_rank * b
    return n * (inputs + heads.heads * _norm(args, heads.values, fused) + values * (4 + 4 + 2 * b))


def _mamba(args, n: int) -> float:
    """Bytes of Mamba-2: its inputs in fp32, what it reads, the gates and their product, and the normed results."""
    sizes, b = layer_sizes(args, args.tensor_model_parallel_size), args.params_dtype.itemsize
    wide, values = sum(sizes.parts.values()), sizes.heads * sizes.values
    return n * (4 * wide + (0 if b == 4 else b * wide) + values * (4 + 4 + 4 + 4 + 2 * b))


def _working(args, kind: LayerKind, tokens: int) -> float:
    """Bytes that the backward of a layer computes again beside what was kept: chunks of a recurrence."""
    if not kind.is_recurrent:
        return 0
    n, heads = _tokens(args, tokens)[0], layer_sizes(args, args.tensor_model_parallel_size)
    # Vectors of each head; products and ratios of decays between tokens of a chunk, with channels between tokens of a
    # block alone; the memory before a chunk.
    channels, keys, values, products = (0, 8, 3, 6) if args.hybrid_layer_pattern is None else (1, 4, 2, 4)
    ratios = products * CHUNK if heads.decays == 1 else 3 * CHUNK + (4 * DECAY_BLOCK + 10) * heads.keys
    of_head = keys * heads.keys + values * heads.values + ratios + heads.keys * heads.values / CHUNK
    return 4 * n * (channels * heads.channels + heads.heads * of_head)


def _attention(args, n: int, fused: bool) -> float:
    """Bytes of attention ((A/t + 2g)·D·b + 4A/t)·n·SEGMENT_PADDING with g = G/t groups of a rank, at least one; keys
    and values of all c·n tokens under context parallelism. Its outputs are the next linear layer's inputs.

    Selective recomputation of the core attention keeps (A/t + 2g)·D·b·n of the attention's share.
    """
    t, b, heads = args.tensor_model_parallel_size, args.params_dtype.itemsize, args.num_attention_heads
    channels, groups, total = args.kv_channels, HeadLayout.of(args).groups_of_rank(t), 0.0
    if args.attention_output_gate:
        total += heads * channels / t * n * (4 + 3 * b)
    if args.qk_layernorm or args.qk_layernorm_all_heads:
        total += (heads / t + groups) * _norm(args, channels, fused) * n
    inputs = heads * channels / t * n * b + 2 * groups * channels * n * args.context_parallel_size * b
    if args.recompute_granularity == "selective":
        return total + inputs
    return total + SEGMENT_PADDING * (inputs + 4 * heads / t * n)


def _latent_attention(args, n: int, s: int, fused: bool) -> float:
    """Bytes of rotary tables 4·r·n·b; of latents, their norms and inputs of the layers that expand them; of attention
    with A key and value heads, all of the widest head's W channels.

    Selective recomputation of the core attention keeps A·W/t·b·n and the latents of all c·n tokens. Queries that choose
    keys, and what they attend to, have 2L + r channels of each head instead, in fp32, as latents then; few keys' heads
    are not counted.
    """
    t, b, heads = args.tensor_model_parallel_size, args.params_dtype.itemsize, args.num_attention_heads
    rotary, latent, all_tokens = args.qk_pos_emb_head_dim, args.kv_lora_rank, n * args.context_parallel_size
    width = max(args.qk_head_dim + rotary, args.v_head_dim)
    total = 4 * rotary * n * b
    for size in (latent, args.q_lora_rank or 0):
        total += (_norm(args, size, fused) if args.qk_layernorm else 0) * s
    total += (args.q_lora_rank or 0) * s * b
    query = heads * width / t * n * b
    if args.recompute_granularity == "selective":
        return total + query + (latent + rotary) * all_tokens * b
    keys = 2 * heads * width / t * all_tokens * b
    if args.dsa_indexer_topk is not None:  # queries are multiplied by what expands latents, which are not
        wide = 4 if b == 4 else 4 + b
        total += (latent + rotary) * all_tokens * wide + query / b * wide
        return total + heads / t * n * 4 * (2 * latent + rotary + 1)
    return total + latent * all_tokens * b + SEGMENT_PADDING * (2 * query + keys + 4 * heads / t * n)


def _mlp(args, ffn: float) -> float:
    """Bytes per token between the linear layers: 5F·b gated (input, gate, two factors, product), else 2F·b."""
    return (5 if is_gated(args) else 2) * ffn * args.params_dtype.itemsize


def _moe(args, s: int) -> float:
    """Bytes of router outputs, k copies of each token, (6 or 3)·k·F/x channels; the shared expert for all n tokens. Of
    experts with latents the copies are theirs; they and the experts' sum are inputs, too.

    This is Megatron's path, which a GPU takes; the direct one of a CPU (`mcore.moe.layer`) keeps 2·k·F channels.
    """
    k, x, b = args.moe_router_topk, args.expert_tensor_parallel_size, args.params_dtype.itemsize
    inner = (6 if is_gated(args) else 3) * args.moe_ffn_hidden_size * b
    latent = args.moe_latent_size or 0
    total = s * (28 * k + k * x * (latent or args.hidden_size) * b + k * inner + 2 * latent * b)
    shared, t = args.moe_shared_expert_intermediate_size, args.tensor_model_parallel_size
    if shared:
        total += _mlp(args, shared / t) * s * (t if args.sequence_parallel else 1)
    return total


def of_chunk(args, layers: range, tokens: int, last: bool, value_head: bool = False, fused: bool = True):
    """Bytes (kept, working): kept by a model chunk per micro-batch until its backward, and used during the backward.

    Its layers share the cosines and sines of rotary embeddings, 2·D·n·b; those of latent attention keep their own.
    Full recomputation keeps H·s·b per group of `--recompute-num-layers` layers and recomputes one group at a time
    (method uniform); or it recomputes each of the first so many layers alone (method block), whose backward runs
    after that of the others.
    """
    n, s = _tokens(args, tokens)
    kinds, b = layer_kinds(args), args.params_dtype.itemsize
    sizes = [of_layer(args, kinds[layer], tokens, fused) for layer in layers]
    kept = sum(sizes)
    working = again = max((_working(args, kinds[layer], tokens) for layer in layers), default=0.0)
    if args.recompute_granularity == "full" and sizes:
        size, layer_input = args.recompute_num_layers, args.hidden_size * s * b
        if args.recompute_method == "uniform":
            groups = [sum(sizes[i : i + size]) for i in range(0, len(sizes), size)]
            kept, working = len(groups) * layer_input, max(groups) + again
        else:
            others = sum(sizes[size:])
            kept = min(size, len(sizes)) * layer_input + others
            working = max(0, max(sizes[:size]) - others) + again
    if args.position_embedding_type in ROTARY and not args.multi_latent_attention:
        kept += 2 * args.kv_channels * n * b
    if last:
        kept += _norm(args, args.hidden_size, fused) * s + (4 if value_head else b) * args.hidden_size * n + 28 * n
    return kept, working


def in_flight(args, stage: int, microbatches: int) -> int:
    """Micro-batches (per model chunk) in flight on a stage: p − i in 1F1B, the warm-up plus one if interleaved.

    The warm-up of stage i of p with v chunks is 2·(p − i − 1) + (v − 1)·p forwards (2104.04473 §2.2).
    """
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    ahead = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(ahead, microbatches * virtual)


def of_stage(args, stage: int, kind: str, tokens: int, microbatches: int, fused: bool = True) -> int:
    """Activation bytes of a rank: of all micro-batches in flight when training, else of the largest layer.

    If interleaved, each chunk holds an equal share of the micro-batches in flight.
    """
    chunks, kinds = stage_layers(args)[stage], layer_kinds(args)
    last = stage == args.pipeline_model_parallel_size - 1
    if kind not in ("train", "value"):
        return int(max((of_layer(args, kinds[i], tokens, fused) for chunk in chunks for i in chunk), default=0))
    sizes = [of_chunk(args, c, tokens, last and c == chunks[-1], kind in SCALAR_HEAD, fused) for c in chunks]
    kept = in_flight(args, stage, microbatches) * sum(kept for kept, _ in sizes) / len(sizes)
    return int(kept + max(working for _, working in sizes))


def of_logits(args, vocab_size: int, kind: str, tokens: int) -> int:
    """Bytes of the logits chunk of C rows: two fp32 buffers of C·V/t, one of b bytes, and, when training, the fp32
    gradient of the head, V/t·H, and all logits of the micro-batch if these are small enough to be kept; in 16 bits, if
    that is more, one fp32 buffer and the gradients of several chunks, as on CUDA.
    """
    if kind in SCALAR_HEAD:
        return 0
    columns = padded_vocab_size(args, vocab_size) // parallel_sizes(args).tensor
    scored = max(tokens // args.context_parallel_size, 4)
    rows, size = row_chunks(scored, columns)[0], args.params_dtype.itemsize
    chunk = rows.stop - rows.start
    logits = chunk * columns * (8 if args.params_dtype == torch.float32 else 8 + size)
    if kind != "train":
        return logits
    kept = scored * columns if scored * columns <= MAX_KEPT else 0
    if size < 4:
        together = min(max(MAX_TOGETHER // columns, chunk), scored)
        logits = max(logits, (4 * chunk + size * together) * columns)
    return logits + 4 * (columns * args.hidden_size + kept)
