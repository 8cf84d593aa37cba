"""Optimizer, gradient buffers and learning-rate schedule of a role: Megatron's, with an Adam for plain PyTorch; which
parameters are trained, and which have learning rates and weight decays of their own."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from itertools import chain

import megatron.core.optimizer as megatron_optimizer
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.config import optimizer_flags
from megarl.mcore.config.optimizer_flags import LEARNING_RATES, MUON, WEIGHT_DECAYS, on_host
from megarl.mcore.lora.adapter import give_gradient_to_layers
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.model.initialization import global_name
from megarl.mcore.moe.layer import stacked_experts
from megarl.mcore.moe.router import balanced_routers, finish_update
from megarl.mcore.parallel.fsdp import FullyShardedDataParallel
from megarl.mcore.training.adam import Adam, HostAdam
from megarl.mcore.training.sharded_optimizer import copy_together, create_momentum

# To exempt these methods from compilation, torch would import its compiler, which takes half a second of each start.
# Nothing that calls them is compiled.
for _exempt in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _method = getattr(torch.optim.Optimizer, _exempt).__wrapped__
    _method.__dynamo_disable = _method


megatron_optimizer.SGD = torch.optim.SGD  # of Transformer Engine, whose states nothing here has tried
if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
    megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = Adam, False
    # The distributed optimizer checks separately which Adam it has; ours keeps its step where FusedAdam does.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def norm_without_host(chunk_size, noop_flag, tensor_lists: list[list[Tensor]], per_tensor, *_) -> tuple[Tensor, None]:
    """Returns the norm [1] of all tensors together, for Megatron's `local_multi_tensor_l2_norm`, which reads
    the norm of each tensor on the host."""
    norms = torch.stack(torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors]))
    return torch.linalg.vector_norm(norms.float()).view(1), None


# One call for all tensors: of thousands of experts, one for each would take longer than the update.
def scale_together(chunk_size, noop_flag, tensor_lists: list[list[Tensor]], scale: float):
    """Scales tensors in place, for Megatron's `local_multi_tensor_scale`, which also copies each of them."""
    if targets := tensor_lists[1]:
        torch._foreach_mul_(targets, scale)


mixed_precision._multi_tensor_copy_this_to_that = copy_together
if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:  # without Transformer Engine and Apex
    clip_grads.multi_tensor_scale_impl = scale_together
if device.has_cuda() and clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # without Transformer Engine and Apex
    clip_grads.l2_norm_impl = norm_without_host


def _fields(config_class, args) -> dict:
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config_class) if hasattr(args, f.name)}


def wrap_for_training(stages, args, pg_collection) -> list[DistributedDataParallel | FullyShardedDataParallel]:
    """Wraps each chunk with gradient buffers or FSDP shards, summed over data- and context-parallel ranks."""
    settings = _fields(DistributedDataParallelConfig, args)
    settings |= {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "check_for_nan_in_grad": False,  # a step with a non-finite gradient is skipped and counted, not fatal
        "bucket_size": args.ddp_bucket_size,
        "average_in_collective": False,
    }
    config = DistributedDataParallelConfig(**settings)
    wrapper = FullyShardedDataParallel if args.use_torch_fsdp2 else DistributedDataParallel
    with stacked_experts(stages, config, pg_collection):
        wrapped = [wrapper(chunk.config, config, chunk, pg_collection=pg_collection) for chunk in stages]

    def finalize(models, num_tokens=None, **_):
        finish_gradients(models, pg_collection)

    model_config = wrapped[0].config  # shared by all chunks
    model_config.finalize_model_grads_func = finalize
    model_config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def finish_gradients(wrapped, pg_collection):
    """Sums the gradients of all micro-batches over the ranks that have parts of them. A collective of the role.

    Losses are local sums divided by global counts, so the sums need no division by tokens.
    """
    finalize_model_grads(wrapped, None, pg_collection=pg_collection)


def build_optimizer(wrapped: list[DistributedDataParallel | FullyShardedDataParallel], args, pg_collection):
    """Returns Megatron's optimizer of the wrapped chunks' parameters."""
    # Megatron's own ways would keep fp32 weights and gradients elsewhere, too, and want Transformer Engine.
    own = {"use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
    fields = _fields(OptimizerConfig, args) | own | {f"{name}_dtype": torch.float32 for name in _moments(args)}
    config = OptimizerConfig(**fields)
    with _default_group(pg_collection.intra_dist_opt), _adam_of(args):
        overrides = group_overrides(wrapped, config, args, pg_collection)
        optimizer = get_megatron_optimizer(
            config, wrapped, overrides, use_gloo_process_groups=False, pg_collection=pg_collection
        )
    # Of Megatron's optimizers for experts and for the rest, one has nothing if all of its parameters are frozen.
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    if args.optimizer_cpu_offload:
        _move_to_host(optimizer.chained_optimizers, args)
    for chained in optimizer.chained_optimizers:
        if isinstance(chained.optimizer, Adam) and chained.optimizer.moments:  # Megatron would create them in fp32
            chained.optimizer.create_all_moments()
        chained.init_state_fn = chained.init_state_fn or create_momentum
        _number_as_grouped(chained)
        chained.init_state_fn(chained.optimizer, chained.config)  # a checkpoint may be saved before the first update
    wrapped[0].config.grad_scale_func = optimizer.scale_loss
    optimizer.routers = balanced_routers(wrapped)
    return optimizer


@contextlib.contextmanager
def _default_group(group):
    """Makes `group` the default of object gathers, world size and rank inside: some Megatron calls take no group.

    `get_megatron_optimizer` gathers its parameter groups over the world, but ranks outside the role never call it.
    """
    gather, size, rank = dist.all_gather_object, dist.get_world_size, dist.get_rank
    dist.all_gather_object = lambda objects, item, group=group: gather(objects, item, group=group)  # type: ignore[assignment]
    dist.get_world_size = lambda group=group: size(group)
    dist.get_rank = lambda group=group: rank(group)
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size, dist.get_rank = gather, size, rank


def _moments(args) -> dict[str, torch.dtype]:
    return {"exp_avg": args.exp_avg_dtype, "exp_avg_sq": args.exp_avg_sq_dtype}


@contextlib.contextmanager
def _adam_of(args):
    adam, moments = megatron_optimizer.Adam, _moments(args)
    if args.optimizer_cpu_offload:
        copies = {"overlaps": args.overlap_cpu_optimizer_d2h_h2d, "pins": args.pin_cpu_grads}
        megatron_optimizer.Adam = functools.partial(HostAdam, moments=moments, **copies)
    elif any(dtype != torch.float32 for dtype in moments.values()):
        megatron_optimizer.Adam = functools.partial(Adam, moments=moments)
    try:
        yield
    finally:
        megatron_optimizer.Adam = adam


def _move_to_host(parts, args):
    """Moves the states of a fraction of this rank's parameters to the host, before there are moments. `parts`: the
    distributed optimizers of a role."""
    weights = [part.model_weights() for part in parts]
    moments = sum(dtype.itemsize for dtype in _moments(args).values())
    pairs = chain.from_iterable(each.items() for each in weights)
    sizes = [len(parameter) * (moments + 4 * (parameter is not of_model)) for parameter, of_model in pairs]
    chosen = iter(on_host(np.array([sizes], dtype=np.int64), args.optimizer_offload_fraction)[0])
    for part, own in zip(parts, weights, strict=True):
        part.optimizer.move_to_host({parameter: weight for parameter, weight in own.items() if next(chosen)})


def _number_as_grouped(part):
    """Corrects which parameter of its groups a distributed optimizer takes for which one of the model.

    Megatron counts them in the model's order, but its groups have the fp32 parameters before those of 16 bits.
    """
    if not hasattr(part, "model_param_group_index_map"):
        return
    for number, of_group in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for place, parameter in enumerate(chain.from_iterable(of_group)):
            part.model_param_group_index_map[parameter] = number, place


# -- parameters that are trained, and those with rates and decays of their own ------------------------------------


def named(chunk, pg_collection) -> Iterator[tuple[str, Tensor]]:
    """(the name that patterns are matched with, parameter) of each parameter of a bare chunk."""
    for name, parameter in chunk.named_parameters():
        yield optimizer_flags.layout_free(global_name(name, chunk, pg_collection)), parameter


def freeze(stages, args, pg_collection):
    """Excludes the parameters that `--freeze` names, and indexers, from training: they get neither gradients nor
    optimizer states.

    Args:
        stages: the model's bare chunks, before they get gradient buffers.
        args: the role's Megatron namespace.
    """
    if not optimizer_flags.frozen_patterns(args):
        return
    for chunk in stages:
        for name, parameter in named(chunk, pg_collection):
            if optimizer_flags.is_frozen(args, name):
                parameter.requires_grad_(False)
        if chunk.pre_process and args.model_folder is None:
            give_gradient_to_layers(chunk)


def _keep_from_muon(wrapped):
    """Marks matrices that Adam trains beside Muon, but Megatron does not mark: of scalar heads and positions."""
    for chunk in (each.module for each in wrapped):
        heads = chunk.output_layer.parameters() if value_head_of(chunk) else ()
        positions = getattr(getattr(chunk, "embedding", None), "position_embeddings", None)
        for parameter in chain(heads, positions.parameters() if positions is not None else ()):
            parameter.is_embedding_or_output_parameter = True


def group_overrides(wrapped, config: OptimizerConfig, args, pg_collection) -> dict[ParamKey, dict]:
    """What groups of parameters have instead of the optimizer's values: Megatron's rules, and the role's multipliers.

    A multiplier of a weight decay multiplies Megatron's own, so that vectors stay without decay.

    Args:
        wrapped: chunks of `wrap_for_training`.
    """
    standard = get_standard_config_overrides(config)
    if args.optimizer == MUON:
        _keep_from_muon(wrapped)
    if not args.lr_multipliers and not args.weight_decay_multipliers:
        return standard
    members: dict[tuple, set[int]] = {}
    for chunk in wrapped:
        for name, parameter in named(chunk.module, pg_collection):
            own = {
                k: v for key, override in standard.items() if key.matches(parameter, name) for k, v in override.items()
            }
            own["lr_mult"] = optimizer_flags.multiplier(args, LEARNING_RATES, name)
            own["wd_mult"] = own.get("wd_mult", 1.0) * optimizer_flags.multiplier(args, WEIGHT_DECAYS, name)
            own = {k: v for k, v in own.items() if v != 1.0 or not k.endswith("_mult")}
            members.setdefault(tuple(sorted(own.items())), set()).add(id(parameter))
    return {
        ParamKey(predicate=ParamPredicate(name=repr(own), fn=lambda p, ids=ids: id(p) in ids)): dict(own)
        for own, ids in members.items()
        if own
    }


# -- updates -----------------------------------------------------------------------------------------------------


def loss_scale(optimizer) -> float | None:
    """The factor of losses and gradients in fp16; None in other types."""
    return float(optimizer.get_loss_scale()) if optimizer.config.fp16 else None


def can_lower_loss_scale(optimizer) -> bool:
    """Whether a gradient that is not finite lowers the loss scale: it may only mean that the scale is too high."""
    scalers = [getattr(chained, "grad_scaler", None) for chained in optimizer.chained_optimizers]
    return any(isinstance(s, DynamicGradScaler) and float(s.scale) > float(s.min_scale) for s in scalers)


def update(optimizer, accepts: Callable[[float], bool] = lambda norm: True) -> tuple[bool, float]:
    """Applies the clipped gradients and updates expert-balancing state; returns (applied, norm before clipping).

    The norm is the same on every rank of the role, so all ranks skip a non-finite gradient together.

    Args:
        accepts: whether to apply gradients of this norm; the same answer on every rank of the role.
    """
    applied, norm = _step(optimizer, accepts)
    finish_update(optimizer.routers, applied)
    return applied, norm


def _step(optimizer, accepts: Callable[[float], bool]) -> tuple[bool, float]:
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    config = optimizer.config
    is_accepted = accepts(norm)  # a collective
    if overflow or not is_accepted or not math.isfinite(norm) or norm > config.grad_norm_skip_threshold:
        return False, norm
    if config.clip_grad > 0:
        for chained in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(chained.get_parameters(), max_norm=config.clip_grad, total_norm=norm)
    return optimizer.step_with_ready_grads(), norm


class RateSchedule(OptimizerParamScheduler):
    """Megatron's schedule, in which a group of parameters may have a multiple of the learning rate."""

    def get_lr(self, param_group: dict) -> float:
        """The rate of a group; of {} that of parameters without one of their own."""
        return super().get_lr(param_group) * param_group.get("lr_mult", 1.0)


def build_scheduler(optimizer, args, updates_per_iteration: int) -> RateSchedule:
    """Returns Megatron's schedule in updates of full batches; flags such as `--lr-warmup-iters` count iterations.

    Megatron's warm-up begins at a rate of 0: its first update changes nothing, which would waste a rollout. This one
    begins where the first of equal rises from 0 ends, unless `--lr-warmup-init` says where.
    """
    decay = (args.lr_decay_iters or args.train_iters) * updates_per_iteration
    warmup = (args.lr_warmup_iters or 0) * updates_per_iteration
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    start = min(args.lr, args.decoupled_lr or args.lr) / (warmup + 1)
    start = start if args.lr_warmup_init is None else args.lr_warmup_init
    return RateSchedule(
        optimizer,
        init_lr=start,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=args.weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=decay,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=args.lr_wsd_decay_iters and args.lr_wsd_decay_iters * updates_per_iteration,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
