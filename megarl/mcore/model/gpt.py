"""Models of a role: Megatron's GPTModel with megarl's layers, as a language model or with a scalar head.

A role's model on one rank is its `ModelChunks`: one chunk, or several with virtual pipeline stages. `forward_pass`
runs them.
"""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention.rotary_embeddings import Rotary, Rotation
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.config.model_flags import ROTARY
from megarl.mcore.model.decoder_layer import link_norms
from megarl.mcore.model.initialization import initialize
from megarl.mcore.model.layer_specs import block_spec
from megarl.mcore.model.native_decode import run_decode_layers
from megarl.mcore.model.pipeline_layout import virtual_stage_numbers
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.model.weight_table import padded_vocab_size
from megarl.mcore.parallel.fsdp import shard
from megarl.mcore.vision.store import ImageStore


class ModelChunk(GPTModel):
    """Megatron's model with rotary embeddings by each token's position, so a packed stream may be cut anywhere."""

    images: ImageStore | None = None  # that `vision.store.attach` gave it
    replaces_rows = False  # of images by itself

    def forward(self, input_ids, position_ids, attention_mask, inference_context=None, **kwargs):
        """Same as Megatron's; a step of the rollout engine runs the layers' fast path."""
        if inference_context is None:
            return super().forward(input_ids, position_ids, attention_mask, **kwargs)
        with without_fork_of_random_state():
            embedded, frequencies, *_ = self._preprocess(input_ids, position_ids, inference_context=inference_context)
        hidden = run_decode_layers(self.decoder, embedded.unwrap(), inference_context, frequencies)
        inference_context.keep_hidden(hidden, frequencies)
        kwargs["inference_context"] = inference_context
        return self._postprocess(hidden, input_ids, position_ids, None, frequencies, None, None, **kwargs)

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        outputs = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        embedded, frequencies, *rest = outputs
        if packed_seq_params is None or frequencies is None:
            return outputs
        # [longest, 1, 1, D] by position -> [T, 1, D] by token, which broadcasts to queries [T, H, D].
        positions = packed_seq_params.positions
        if isinstance(self.config, MLATransformerConfig):
            return (embedded, frequencies[positions, 0], *rest)
        # Megatron's attention then rotates nothing: the core attention does, by one kernel for all of a layer.
        by_position = Rotation.by_kind(frequencies.squeeze(1), self.config, self.config.params_dtype)
        axes = None if self.images is None else self.images.axes
        if packed_seq_params.axis_positions is not None:
            positions = packed_seq_params.axis_positions
        rotations = [rotation.at(positions, axes) for rotation in by_position]
        packed_seq_params.rotations = rotations[0], rotations[-1]
        return (embedded, None, *rest)

    def tie_embeddings_and_output_weights_state_dict(self, state, output_key, embedding_key, metadata):
        """Adds the last stage's copy of the embedding to a checkpoint; Megatron's version needs process-wide groups."""
        if self.post_process and not self.pre_process:
            replicas, weight = metadata["dp_cp_group"], self.shared_embedding_or_output_weight()
            groups = {"tp_group": self.tp_group, "dp_cp_group": replicas}
            state[output_key] = make_tp_sharded_tensor_for_checkpoint(
                weight, embedding_key, replica_id=(1, 0, dist.get_rank(replicas)), allow_shape_mismatch=True, **groups
            )


@contextlib.contextmanager
def without_fork_of_random_state():
    """With sequence parallelism Megatron's embedding changes seeds for its dropout, which is off in a rollout: a CUDA
    graph cannot hold a change of seeds."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()
    try:
        yield
    finally:
        del tracker.fork


class ValueHead(torch.nn.Linear):
    """Maps a hidden state to one value, computed in fp32; zero-initialised, replicated over tensor-parallel ranks.

    It replaces the vocabulary's output layer and is saved under that name. Its weights have the model's precision:
    Megatron's 16-bit optimizer, which keeps fp32 copies, cannot save a model of mixed precisions.

    A loss of differences between scores sets `trains_bias` to False. The gradient of its bias is 0 but for rounding,
    which Adam would scale to a step of full size.
    """

    def __init__(self, config, group, bias: bool = True):
        super().__init__(config.hidden_size, 1, bias, dtype=config.params_dtype, device=device.device())
        self.group, self.trains_bias = group, True
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.sequence_parallel = config.sequence_parallel  # ranks see only their tokens: sum grads

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] fp32.

        Not a matrix product with one column: its summation order depends on the number of rows.
        """
        values = (hidden.float() * self.weight.float()).sum(-1)
        if self.bias is None:
            return values
        bias = self.bias.float()
        return values + (bias if self.trains_bias else bias.detach() + 0 * bias)  # a gradient of exactly 0


def value_head_of(chunk) -> ValueHead | None:
    """The scalar head that a model's chunk ends with; None: it has none."""
    head = getattr(chunk, "output_layer", None)
    return head if isinstance(head, ValueHead) else None


# The chunks of a model that this rank holds, in the order in which a micro-batch runs through them.
ModelChunks = torch.nn.ModuleList


def _seed_everything(seed: int, pg_collection):
    """Seeds Megatron's own random states; weights have their own generators (`initialization`)."""
    torch.manual_seed(seed)
    groups = {"tp_rank": pg_collection.tp, "ep_rank": pg_collection.ep, "etp_rank": pg_collection.expt_tp}
    ranks = {name: dist.get_rank(group) for name, group in groups.items()}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **ranks)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # scratch memory of sequence parallelism, process-wide
        parallel_state._set_global_memory_buffer()


def build_model(args, vocab_size: int, pg_collection, value_head: bool = False) -> ModelChunks:
    """Returns this rank's chunks of a model, on its device; weights depend only on `--seed`.

    Args:
        args: the role's Megatron namespace.
        vocab_size: the tokenizer's vocabulary.
        pg_collection: the role's process groups.
        value_head: replace the vocabulary's head by a scalar one.
    """
    config = transformer_config(args)
    config.perform_initialization = False
    config.variable_seq_lengths = True  # packed micro-batches send tensors of unequal length between pipeline stages
    config.batch_p2p_sync = False  # it makes the host wait for each send, to avoid a race of old PyTorch versions
    _seed_everything(args.seed, pg_collection)
    if args.model_folder is not None:
        head = ValueHead(config, pg_collection.tp, bias=False) if value_head else None
        chunk = args.model_folder.chunk(args, config, pg_collection, head)
        return ModelChunks([chunk.to_empty_weights(device.device())])
    chunks = virtual_stage_numbers(args)
    return ModelChunks(_build_chunk(args, config, vocab_size, pg_collection, value_head, chunk) for chunk in chunks)


def build_frozen_model(args, vocab_size: int, pg_collection, value_head: bool = False) -> ModelChunks:
    """Returns a `build_model` that is never trained, and with `--mtp-drafts` the layer of multi-token prediction after
    its chunks; its parameters are sharded if the role's are."""
    stages = build_model(args, vocab_size, pg_collection, value_head)
    if args.predicts:  # a rollout with a model of its own
        stages.append(PredictionLayer(args, pg_collection))
    stages.requires_grad_(False).eval()
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
    is_rotary = args.position_embedding_type in ROTARY
    chunk = ModelChunk(
        config=config,
        transformer_layer_spec=block_spec(args, config, pg_collection, virtual_stage),
        vocab_size=padded_vocab_size(args, vocab_size),
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights and not value_head,
        position_embedding_type="rope" if is_rotary else args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=virtual_stage,
    )
    if first and args.embedding_multiplier is not None:
        factor = torch.tensor(args.embedding_multiplier, dtype=config.params_dtype).item()
        chunk.embedding.register_forward_hook(lambda module, inputs, embedded: embedded * factor)
    if last:
        chunk.output_layer.gives_logits = True  # see `kernels.linear`
    if value_head and last:
        # Sequence classification of Hugging Face has no bias.
        chunk.output_layer = ValueHead(config, pg_collection.tp, bias=args.draws_weights)
    # The first gathers a layer's weights for this layer alone; the other computes layers again, each from its input.
    if not args.use_torch_fsdp2 and args.recompute_granularity != "full":
        link_norms(chunk.decoder)
    if is_rotary:
        chunk.rotary_pos_emb = Rotary(args, config)
    if first and args.position_embedding_type == "learned_absolute":
        chunk.embedding.position_embeddings.to(config.params_dtype)  # Megatron always makes it fp32
    chunk.to(device=device.device())
    if args.draws_weights:  # else they come from a folder: drawing them takes the memory of whole matrices
        initialize(chunk, args.seed, pg_collection)
    return chunk
