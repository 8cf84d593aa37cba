"""A language model of transformers as a chunk that engine, roles, optimizer and checkpoints take like Megatron's.

Its parameters have transformers' names after `hf.`; a scalar head is `output_layer`. One chunk is the whole model.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from megarl.mcore import device
from megarl.mcore.any_model import attention, fused, recurrence, routing, rows, source, tensor_parallel
from megarl.mcore.any_model.attention import CachePass, PackedPass, Pass, SlotContext, StateSlotContext, Unsupported
from megarl.mcore.any_model.walk import walk
from megarl.mcore.attention import backends
from megarl.mcore.config.optimizer_flags import MODULE as PREFIX
from megarl.mcore.kernels.batch_invariance import is_exact
from megarl.mcore.kernels.linear import at_least_rows, exact_product, logits_with, matmul
from megarl.mcore.lora.adapted_linear import AdaptedLinear
from megarl.mcore.lora.targets import LoRASettings, Projection
from megarl.mcore.parallel.fsdp import whole
from megarl.mcore.vision.store import ImageStore

ADAPTER = "adapter."  # of the names of low-rank factors
SOFTCAP = "final_logit_softcapping"


def positions_seen(positions: Tensor) -> types.SimpleNamespace:
    """Stands for transformers' cache in modules that ask one how many tokens it has seen, [T] int64: what makes a row's
    number its position. Keys and values pass through: attention caches them."""
    seen = positions[0] - torch.arange(positions.shape[1], device=positions.device)
    return types.SimpleNamespace(
        is_compileable=False, get_seq_length=lambda *_: seen, update=lambda key, value, *_, **__: (key, value)
    )


class HeadInputs:
    """What a model's head reads: of logits, or the last hidden states.

    In the place of the vocabulary's projection stands the identity while the module runs. What the module does to its
    logits is then done to the projection's inputs: scales of logits are linear. A softcap is not, and is left out.
    """

    def __init__(self, module: PreTrainedModel):
        """`module`: with its slots."""
        text = module.config.get_text_config()
        self._module, self.softcap = module, getattr(text, SOFTCAP, None)
        # Tables of RoBERTa and its kin begin with rows up to padding's.
        tables = (each for name, each in module.named_modules() if name.endswith("position_embeddings"))
        paddings = (getattr(each, "padding_idx", None) for each in tables)
        self._first = next((padding + 1 for padding in paddings if padding is not None), 0)
        # Whether positions are those after the tokens of a cache, whatever a module is given as positions.
        models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
        reads_given = any("position_ids" in inspect.signature(each.forward).parameters for each in models)
        has_slots = any(hasattr(each, "attention_slots") for each in module.modules())
        self._counts_cached = getattr(text, "attn_temperature_tuning", False) or has_slots and not reads_given
        if self.softcap is not None:
            vars(text)[SOFTCAP] = None  # which the checks of some classes refuse

    def __call__(self, tokens: Tensor, positions: Tensor, of_logits: bool = True) -> Tensor:
        """Tokens and positions [1, T] -> [T, H]."""
        module = self._module
        kwargs: dict[str, Any] = {"input_ids": tokens, "position_ids": positions + self._first}
        if self._counts_cached:  # a mask of ones keeps classes from making one for as many tokens as are cached
            kwargs |= {"cache": positions_seen(positions), "attention_mask": torch.ones_like(tokens)}
        if not of_logits:
            return module.base_model(**kwargs, use_cache=False)[0].squeeze(0)
        head = module.get_output_embeddings()
        head.forward = lambda hidden: hidden
        try:
            return module(**kwargs, use_cache=False).logits.squeeze(0)
        finally:
            del head.forward


def head_inputs(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [T, H'] of a vocabulary's projection, and its weight [V, H']: a bias is one more column, times 1."""
    if head.bias is None:
        return hidden, head.weight
    return nn.functional.pad(hidden, (0, 1), value=1.0), torch.cat([head.weight, head.bias.unsqueeze(1)], dim=1)


class AnyChunk(MegatronModule):
    """A `PreTrainedModel` with a language model's head or with megarl's scalar one."""

    pre_process = post_process = True
    model_type = vp_stage = None
    mtp_process = False
    images: ImageStore | None = None
    output_layer: Any
    replaces_rows = True  # of images, by itself

    def __init__(self, config, args, pg_collection, value_head: nn.Module | None = None):
        """Builds the module without values: import or a weight transfer fills it.

        Args:
            config: Megatron's.
            args: the role's Megatron namespace; `model_folder` is the folder.
            value_head: takes the place of the vocabulary's projection.
        """
        super().__init__(config=config)
        self.pg_collection, self.max_sequence_length = pg_collection, args.max_position_embeddings
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        found = args.model_folder.source()
        self.hf = found.module(config.params_dtype)
        self.vocab_size = found.text.vocab_size
        self._waits = walk(self.hf).waits if device.has_cuda() else None
        fused.fuse(self.hf)
        self.splits = {}
        if dist.get_world_size(pg_collection.tp) > 1:
            ranks = tensor_parallel.Ranks(pg_collection.tp)
            self.splits = tensor_parallel.splits_of(self.hf, ranks.size)
            tensor_parallel.split(self.hf, self.splits, ranks, args.model_folder.partial_weights(ranks.size))
        for each in self.hf.modules():
            each._buffers |= {name: x.to(device.device()) for name, x in each._buffers.items() if x is not None}
        config.attention_slots = source.find_slots(self.hf, place=device.device())
        config.state_shapes, self._functions = self.hf.state_shapes, recurrence.functions_of(self.hf)
        config.linear_conv_kernel_dim = recurrence.taps_of(config.state_shapes)
        self.routers: list[routing.ModuleRouter] = []
        with contextlib.suppress(Unsupported):  # a run that replays routes was refused before
            self.routers = routing.install(self.hf, device.device())
        if self.routers:
            config.moe_router_topk = self.routers[0].topk  # the engine's tables of routes
        self.hf.get_input_embeddings().register_forward_hook(attention.with_images)
        self._head_inputs = HeadInputs(self.hf)
        config.final_logit_softcapping = None if value_head else self._head_inputs.softcap
        head = self.hf.get_output_embeddings()
        is_tied = head.weight is self.hf.get_input_embeddings().weight
        self.share_embeddings_and_output_weights = is_tied and value_head is None
        if value_head is not None:
            names = {name for name, each in self.hf.named_modules() if each is head}
            self.splits = {name: each for name, each in self.splits.items() if name.rpartition(".")[0] not in names}
            self.hf.set_output_embeddings(nn.Identity())
            self.output_layer = value_head
        else:
            head.tp_group = pg_collection.tp
            self.__dict__["output_layer"] = head  # not a second name of its weights
        self._has_value_head = value_head is not None
        self._backend, self._product = backends.load(config), rows.product
        if is_exact(config):
            self._product = functools.partial(rows.product, multiply=exact_product())
            rows.use_row_norms(self.hf)
        if config.recompute_granularity == "full":
            is_block = config.recompute_method == "block"  # of Megatron: the first layers alone
            for layer in self.decoder.layers[: config.recompute_num_layers if is_block else None]:
                layer.forward = functools.partial(_recomputed, layer.forward)

    def to_empty_weights(self, place: torch.device):
        """Gives the parameters memory on a device, without values, and moves the buffers there; returns itself."""
        self._apply(lambda x: torch.empty_like(x, device=place) if x.is_meta else x.to(place))
        self.hf.tie_weights()
        tensor_parallel.mark(self.hf, self.splits)
        ends: Any = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        for parameter in (each for part in ends for each in part.parameters()):
            parameter.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights:
            self.shared_embedding_or_output_weight().zero_out_wgrad = True  # autograd adds the embedding's gradient
        return self

    @property
    def reads_host(self) -> bool:
        """Whether the host reads numbers of the device within a pass."""
        experts = (each for each in self.hf.modules() if hasattr(each, "is_transposed"))
        return self._waits is not None or bool(self.config.state_shapes) or not all(map(rows.is_grouped, experts))

    def train(self, mode: bool = True):
        """Modules of transformers stay in evaluation mode: dropout and the noise of routers are off."""
        super().train(mode)
        self.hf.eval()
        return self

    @property
    def decoder(self):
        """What FSDP shards one by one: the layers."""
        return types.SimpleNamespace(layers=source.layers_of(self.hf))

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The embedding [V, H] that is the head, too."""
        return self.output_layer.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """Parameters and persistent buffers by the module's own names; a tied one once, low-rank factors not."""
        state = {name: x for name, x in source.own_tensors(self).items() if not name.startswith(ADAPTER)}
        splits = {PREFIX + name: split for name, split in self.splits.items()}
        return tensor_parallel.described(state, splits, prefix, self.tp_group, metadata["dp_cp_group"])

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As of other modules; a tied weight is in the state by its first name alone."""
        first = {id(x): name for name, x in source.own_tensors(self).items()}
        names = ((name, first.get(id(x))) for name, x in self.state_dict(keep_vars=True).items())
        tied = {name: state_dict[of] for name, of in names if name not in state_dict and of in state_dict}
        return super().load_state_dict(state_dict | tied, strict, assign)

    def whole_weight(self, name: str) -> Tensor:
        """A weight of the module, gathered from all ranks that have a part of it; a collective of these."""
        share = whole(self.state_dict(keep_vars=True)[PREFIX + name])
        return tensor_parallel.gathered_whole(share, self.splits.get(name), self.tp_group)

    def products(self) -> tuple:
        """As of `fused.products`: what a rollout's prepacked weights are copies of."""
        return fused.products(self.hf)

    def context(self, config, memory, snapshots: int | None) -> SlotContext:
        """The engine's context. Arguments as of `StateSlotContext`."""
        if self.config.state_shapes:
            return StateSlotContext(self.config, config, memory, snapshots)
        return SlotContext(self.config, config, memory)

    def adapted(self, names: Collection[str], lora: LoRASettings, seed: int) -> "list[AdaptedModule]":
        """Draws factors of linear layers."""
        found = []
        for name in names:
            layer, split = self.hf.get_submodule(name), self.splits.get(f"{name}.weight")
            if split is not None and split.parts > 1:
                raise ValueError(f"{name} packs {split.parts} parts, each over several ranks: it can have no factors")
            vars(layer).update(split_axis=split and split.axis, tp_group=self.tp_group, config=self.config)
            owner, _, last = (PREFIX + name).rpartition(".")
            found.append(AdaptedModule(owner, layer, [Projection(last, slice(0, len(layer.weight)))], lora, seed))
        return found

    def set_input_tensor(self, tensor):
        """Does nothing: there are no pipeline stages before it."""

    def forward(
        self, input_ids, position_ids, *_, inference_context=None, packed_seq_params=None, output_processor=None, **__
    ):
        """As Megatron's: a packed micro-batch [1, T] with an `output_processor`, or a step of the engine."""
        if inference_context is not None:
            return self._step(input_ids, position_ids, inference_context)
        hidden = self._run(input_ids, position_ids, PackedPass(layout=packed_seq_params, backend=self._backend))
        if self._has_value_head:
            return output_processor(hidden.unsqueeze(1), self.output_layer, None)
        hidden, weight = head_inputs(self.output_layer, hidden)
        return output_processor(hidden.unsqueeze(1), self.output_layer, weight)

    def _run(self, tokens: Tensor, positions: Tensor, each: Pass) -> Tensor:
        """Tokens and positions [1, T] -> [T, H], what a head reads."""
        each.tokens, each.functions, each.product = tokens.shape[1], self._functions, self._product
        if self.images is not None:  # rows of images stand on token 0, whose gradient then has nothing of them
            each.images, tokens = self.images.rows(tokens[0]), tokens.clamp(min=0)
        if missing := rows.missing_rows(each.tokens):
            tokens, positions = (nn.functional.pad(x, (0, missing)) for x in (tokens, positions))
        with attention.running(each):
            return self._head_inputs(tokens, positions, not self._has_value_head)[: each.tokens]

    def _step(self, tokens: Tensor, positions: Tensor, context) -> Tensor:
        """Logits [1, N, V] of a step's last tokens."""
        plan = context.plan(None)
        if plan.dedup is not None:
            tokens, positions = (x.index_select(1, plan.dedup.kept_tokens) for x in (tokens, positions))
        hidden = self._run(tokens, positions, CachePass(plan=plan))
        hidden = hidden if plan.dedup is None else hidden.index_select(0, plan.dedup.inverse)
        context.keep_hidden(hidden.unsqueeze(1), None)
        last = context.last_token_logits(hidden.unsqueeze(0))
        last, weight = head_inputs(self.output_layer, last)
        is_other = last.is_cuda or is_exact(self.config)
        logits = logits_with(weight, is_exact(self.config))(last) if is_other else matmul(last, weight)
        return gather_from_tensor_model_parallel_region(logits, group=self.tp_group).unsqueeze(0)


def _recomputed(forward, *args, **kwargs):
    """A layer's forward pass, repeated in the backward pass instead of keeping what it made."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    each = attention.current()

    def contexts():
        return contextlib.nullcontext(), attention.running(each)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class AdaptedModule(AdaptedLinear):
    """The factors of a linear layer of transformers."""

    def attach(self, is_used: bool = True):
        """As of `AdaptedLinear`, by the layer's own forward function."""
        layer = self.layer
        layer.adds_product = is_used and not self.product.is_merged
        vars(layer).pop("forward", None)
        if is_used:
            layer.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        """[…, K] -> […, N], with the bias."""
        weight, bias = self.layer.weight, self.layer.bias
        if x.numel() == 0:  # of an expert without tokens
            return x.new_zeros(*x.shape[:-1], len(weight))
        out = at_least_rows(self._forward_impl, x.reshape(-1, x.shape[-1]), weight, bias, False, False)
        return out.view(*x.shape[:-1], len(weight))
