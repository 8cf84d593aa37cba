"""Models of a role: Megatron's GPTModel with megarl's layers, as a language model or with a scalar head.

A role's model on one rank is its `ModelChunks`: one chunk, or several with virtual pipeline stages. `passes` runs them.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megarl.mcore import device
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.model.decoder_layer import run_decode_layers
from megarl.mcore.model.initialization import initialize
from megarl.mcore.model.layer_specs import block_spec
from megarl.mcore.model.pipeline_layout import moe_layer_pattern, virtual_stage_numbers
from megarl.mcore.model.value_head import ValueHead
from megarl.mcore.moe.balancing import balancing_state
from megarl.mcore.parallel.fsdp import shard

HEAD = "output_layer.weight"  # name of what stands behind the last layer: the vocabulary's head, or a scalar one


class ModelChunk(GPTModel):
    """Megatron's model whose rotary embeddings come by each token's position: a packed stream may be cut anywhere."""

    def forward(self, input_ids, position_ids, attention_mask, inference_context=None, **kwargs):
        """As Megatron's; a step of the rollout engine goes from layer to layer without what only others need."""
        if inference_context is None:
            return super().forward(input_ids, position_ids, attention_mask, **kwargs)
        embedded, frequencies, *_ = self._preprocess(input_ids, position_ids, inference_context=inference_context)
        hidden = run_decode_layers(self.decoder, embedded.unwrap(), inference_context, frequencies)
        where = {"inference_context": inference_context, **kwargs}
        return self._postprocess(hidden, input_ids, position_ids, None, frequencies, None, None, **where)

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        found = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params is None or found[1] is None:
            return found
        # [longest, 1, 1, D] by position -> [T, 1, D] by token, the shape that queries [T, H, D] are multiplied with.
        return (found[0], found[1][packed_seq_params.positions, 0], *found[2:])

    def tie_embeddings_and_output_weights_state_dict(self, state, output_key, embedding_key, metadata):
        """A later stage's copy of the embedding in a checkpoint; Megatron's asks its process-wide groups for a rank."""
        if self.post_process and not self.pre_process:
            replicas, weight = metadata["dp_cp_group"], self.shared_embedding_or_output_weight()
            state[output_key] = make_tp_sharded_tensor_for_checkpoint(
                weight, embedding_key, replica_id=(1, 0, dist.get_rank(replicas)), allow_shape_mismatch=True,
                tp_group=self.tp_group, dp_cp_group=replicas,
            )  # fmt: skip


class ModelChunks(torch.nn.ModuleList):
    """The chunks of a model that this rank holds, in the order in which a micro-batch passes them."""


def padded_vocab_size(args, vocab_size: int) -> int:
    """Vocabulary padded to `--make-vocab-size-divisible-by`: the same for every tensor-parallel size."""
    divisor = args.make_vocab_size_divisible_by
    return -(-vocab_size // divisor) * divisor


def _seed_everything(seed: int, pg_collection):
    """Seeds what Megatron draws by itself; weights have their own generators (`initialization`)."""
    torch.manual_seed(seed)
    ranks = {
        "tp_rank": dist.get_rank(pg_collection.tp),
        "ep_rank": dist.get_rank(pg_collection.ep),
        "etp_rank": dist.get_rank(pg_collection.expt_tp),
    }
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **ranks)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # sequence parallelism's scratch memory, process-wide by design
        parallel_state._set_global_memory_buffer()


def build_model(args, vocab_size: int, pg_collection, value_head: bool = False) -> ModelChunks:
    """This rank's part of a model, its weights drawn from `--seed` alone; on this rank's device.

    Args:
        args: the role's Megatron namespace.
        vocab_size: the tokenizer's vocabulary.
        pg_collection: the role's process groups.
        value_head: put a scalar head in the place of the vocabulary's.
    """
    config = transformer_config(args)
    config.perform_initialization = False
    config.variable_seq_lengths = True  # of the tensors between pipeline stages: micro-batches are packed
    config.batch_p2p_sync = False  # the host would wait for each of them, against a race of a PyTorch that is long gone
    _seed_everything(args.seed, pg_collection)
    chunks = virtual_stage_numbers(args)
    return ModelChunks(_build_chunk(args, config, vocab_size, pg_collection, value_head, chunk) for chunk in chunks)


def build_frozen_model(args, vocab_size: int, pg_collection, value_head: bool = False) -> ModelChunks:
    """A model as `build_model` gives it that never learns; its parameters sharded where the role's are."""
    stages = build_model(args, vocab_size, pg_collection, value_head).requires_grad_(False).eval()
    if args.use_torch_fsdp2:
        for chunk in stages:
            shard(chunk, pg_collection)
    return stages


def _build_chunk(
    args, config, vocab_size: int, pg_collection, value_head: bool, virtual_stage: int | None
) -> ModelChunk:
    first = dist.get_rank(pg_collection.pp) == 0 and not virtual_stage
    last = dist.get_rank(pg_collection.pp) == dist.get_world_size(pg_collection.pp) - 1
    last = last and virtual_stage == virtual_stage_numbers(args)[-1]
    chunk = ModelChunk(
        config=config,
        transformer_layer_spec=block_spec(args, config, pg_collection, virtual_stage),
        vocab_size=padded_vocab_size(args, vocab_size),
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights and not value_head,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=virtual_stage,
    )
    if value_head and last:
        chunk.output_layer = ValueHead(config, pg_collection.tp)
    if hasattr(chunk, "rotary_pos_emb"):
        chunk.rotary_pos_emb.cp_group = None  # else it hands out the slice of a sequence cut by Megatron's rule
    if first and args.position_embedding_type == "learned_absolute":
        chunk.embedding.position_embeddings.to(config.params_dtype)  # Megatron makes it fp32, whatever the model is
    chunk.to(device=device.device())
    initialize(chunk, args.seed, pg_collection)
    return chunk


def weight_shapes(
    role: str, args, vocab_size: int, resumes: bool = False, value_head: bool = False
) -> dict[str, tuple[int, ...] | None]:
    """Global shapes by which a checkpoint's model is told from another: what the role's flags describe.

    None: it must not be there. What balances experts starts anew where a policy has none, but not in a run that
    `resumes`. `value_head`: the scalar head must be there, too.
    """
    hidden, layers, attended = args.hidden_size, args.num_layers, args.num_attention_heads * args.kv_channels
    shapes = {f"{role}.embedding.word_embeddings.weight": (padded_vocab_size(args, vocab_size), hidden)}
    if value_head:
        shapes[f"{role}.{HEAD}"] = (1, hidden)
    kinds, stacked = moe_layer_pattern(args), (layers,)
    prefix = moe_prefix = f"{role}.decoder.layers"
    if len(set(kinds)) > 1:  # layers that differ are saved one by one, others stacked
        prefix, moe_prefix, stacked = f"{prefix}.{layers - 1}", f"{prefix}.{kinds.index(True)}", ()
    shapes[f"{prefix}.self_attention.linear_proj.weight"] = (*stacked, hidden, attended)
    if not args.num_experts:
        shapes[f"{prefix}.mlp.linear_fc2.weight"] = (*stacked, hidden, args.ffn_hidden_size)
        return shapes
    shapes[f"{moe_prefix}.mlp.router.weight"] = (*stacked, args.num_experts, hidden)
    for name, is_on in balancing_state(args).items():
        key = f"{moe_prefix}.mlp.router.{name}"
        if is_on and resumes:
            shapes[key] = (*stacked, args.num_experts)
        elif not is_on and name == "expert_bias":  # without it the policy would be another one
            shapes[key] = None
    return shapes
