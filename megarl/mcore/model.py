"""Models of a role: Megatron's GPTModel with megarl's layer spec, as a language model or with a scalar head."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention import PackedAttention, PagedSelfAttention, token_grid
from megarl.mcore.flags import transformer_config
from megarl.mcore.norm import Norm
from megarl.mcore.tensor_parallel import head_logprob_entropy


class TokenScores(NamedTuple):
    """What a language model says of packed tokens; both [T] fp32, 0 at each sequence's first token."""

    logprobs: Tensor
    entropy: Tensor


class ValueHead(torch.nn.Linear):
    """Hidden state -> one value, in fp32, 0 at the start; the same weights on every tensor-parallel rank.

    It stands in the place of the vocabulary's output layer and is saved under that name.
    """

    def __init__(self, config, group):
        super().__init__(config.hidden_size, 1, dtype=torch.float32, device=device.device())
        self.group = group
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T]."""
        return super().forward(hidden.float()).squeeze(-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """Replicated over tensor-parallel ranks."""
        state, lanes = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.group, dp_cp_group=lanes
        )


def layer_spec(args):
    """Megatron's local layer with norms that carry sequence parallelism and attention for packed and paged tokens."""
    spec = get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm)
    layer, attention = spec.submodules, spec.submodules.self_attention
    attention.module = PagedSelfAttention
    attention.submodules.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if args.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    return spec


def padded_vocab_size(args, vocab_size: int) -> int:
    """Vocabulary padded to `--make-vocab-size-divisible-by`: the same for every tensor-parallel size."""
    divisor = args.make_vocab_size_divisible_by
    return -(-vocab_size // divisor) * divisor


def seed_everything(seed: int, collection):
    """Seeds weights: with CPU initialization every rank draws the same full matrices and keeps its slice."""
    torch.manual_seed(seed)
    ranks = {"tp_rank": dist.get_rank(collection.tp), "ep_rank": 0, "etp_rank": dist.get_rank(collection.tp)}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **ranks)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # sequence parallelism's scratch memory, process-wide by design
        parallel_state._set_global_memory_buffer()


def build_model(args, vocab_size: int, collection, value_head: bool = False) -> GPTModel:
    """A GPTModel on the role's groups, its weights drawn from `--seed` alone; on this rank's device.

    Args:
        args: the role's Megatron namespace.
        vocab_size: the tokenizer's vocabulary.
        collection: the role's process groups.
        value_head: put a scalar head in the place of the vocabulary's.
    """
    config = transformer_config(args)
    config.perform_initialization = True
    seed_everything(args.seed, collection)
    spec = layer_spec(args)
    block = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=Norm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab_size(args, vocab_size),
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights and not value_head,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=collection,
    )
    if value_head:
        model.output_layer = ValueHead(config, collection.tp)
    return model.to(device=device.device())


def weight_shapes(role: str, args, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Global shapes by which a checkpoint's policy is told from another: what the role's flags describe."""
    hidden, layers = args.hidden_size, args.num_layers
    return {
        f"{role}.embedding.word_embeddings.weight": (padded_vocab_size(args, vocab_size), hidden),
        f"{role}.decoder.layers.self_attention.linear_proj.weight": (
            layers, hidden, args.num_attention_heads * args.kv_channels,
        ),
        f"{role}.decoder.layers.mlp.linear_fc2.weight": (layers, hidden, args.ffn_hidden_size),
    }  # fmt: skip


def packed_params(lengths: Tensor) -> PackedSeqParams:
    """Megatron's description of packed sequences of these lengths [N]."""
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def align_to_tokens(next_token_values: Tensor, lengths: Tensor) -> Tensor:
    """[T] values that speak about the following token -> aligned to that token, 0 at each sequence's first token."""
    starts = lengths.cumsum(0) - lengths
    shifted = torch.cat([next_token_values.new_zeros(1), next_token_values[:-1]])
    first = torch.zeros_like(shifted, dtype=torch.bool)
    first[starts] = True
    return shifted.masked_fill(first, 0.0)


def _run(model, tokens: Tensor, lengths: Tensor, processor):
    if InferenceMode.is_active():
        raise RuntimeError("a training forward while the rollout engine is active: suspend the engine first")
    _, positions = token_grid(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), len(tokens))
    return model(
        tokens.unsqueeze(0),
        positions.unsqueeze(0),
        None,
        packed_seq_params=packed_params(lengths),
        output_processor=processor,
    )


def token_scores(model, tokens: Tensor, lengths: Tensor, temperature: float, vocab_size: int) -> TokenScores:
    """Log-probabilities and entropies of packed tokens under a language model (or a DDP wrapper of one).

    Args:
        tokens: [T] int64, sequences behind each other.
        lengths: [N] int64, each at least 1.
        temperature: of the softmax, as in the rollout.
        vocab_size: the tokenizer's vocabulary.
    """
    targets = torch.cat([tokens[1:], tokens[:1]])

    def processor(hidden_states, output_layer, output_weight, scale_logits, **_):
        def head(hidden):
            logits, _ = output_layer(hidden.unsqueeze(1), weight=output_weight)
            return scale_logits(logits).squeeze(1)

        group = output_layer.tp_group
        return head_logprob_entropy(hidden_states.squeeze(1), head, targets, temperature, vocab_size, group)

    logprobs, entropy = _run(model, tokens, lengths, processor)
    return TokenScores(align_to_tokens(logprobs, lengths), align_to_tokens(entropy, lengths))


def token_values(model, tokens: Tensor, lengths: Tensor) -> Tensor:
    """[T] values of the states before each token, from a model with a scalar head; 0 at first tokens."""

    def processor(hidden_states, output_layer, **_):
        return output_layer(hidden_states.squeeze(1))

    return align_to_tokens(_run(model, tokens, lengths, processor), lengths)


@contextlib.contextmanager
def evaluating(model):
    """The model in eval mode without gradients, back in training mode behind it."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(was_training)
