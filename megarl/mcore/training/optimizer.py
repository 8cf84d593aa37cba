"""Optimizer, gradient buffers and learning-rate schedule of a role: Megatron's, with an Adam for plain PyTorch."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from itertools import chain

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.config.optimizer_rules import SGD
from megarl.mcore.moe.balancing import balanced_routers, finish_update
from megarl.mcore.moe.buffer_layout import stacked_experts
from megarl.mcore.parallel.fsdp import FullyShardedDataParallel
from megarl.mcore.training import layer_wise  # noqa: F401  it replaces a class of Megatron
from megarl.mcore.training.adam import Adam, SmallMomentsAdam
from megarl.mcore.training.parameter_groups import group_overrides

# To exempt these methods from compilation, torch would import its compiler, which takes half a second of each start.
# Nothing that calls them is compiled.
for _exempt in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _method = getattr(torch.optim.Optimizer, _exempt).__wrapped__
    _method.__dynamo_disable = _method


def create_momentum(sgd: torch.optim.SGD, config: OptimizerConfig):
    """Creates the momentum of parameters that have none. Zeros, to which torch adds the first gradient."""
    for parameter in (p for group in sgd.param_groups for p in group["params"] if config.sgd_momentum):
        sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class ShardedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer, also for SGD: Megatron knows the states of Adam and Lion alone."""

    def __init__(self, optimizer, config, grad_scaler, init_state_fn, *args, **kwargs):
        super().__init__(optimizer, config, grad_scaler, init_state_fn or create_momentum, *args, **kwargs)

    @property
    def optimizer_state_keys(self):
        """Names of the states of a parameter."""
        if self.config.optimizer != SGD:
            return super().optimizer_state_keys
        return ("momentum_buffer",) if self.config.sgd_momentum else ()

    def _copy_main_params_to_model_params(self):
        """As Megatron's, in one call."""
        if not self.is_stub_optimizer:
            models = chain(*self.model_float16_groups, *self.model_fp32_groups)
            shards = chain(*self.shard_fp32_from_float16_groups, *self.shard_fp32_groups)
            copy_together([*shards], [self._place_of(parameter) for parameter in models])

    def _place_of(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that this rank updates, in the buffer of its bucket."""
        number, _, bucket = self.model_param_gbuf_map[parameter]
        place = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        return self.buffers[number].buckets[bucket].param_data.view(-1)[place.start : place.end]


megatron_optimizer.DistributedOptimizer = ShardedOptimizer
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


def copy_together(this: list[Tensor], that: list[Tensor], overflow_buf=None):
    """Copies tensors `this` to those of `that`, which may have other types, for Megatron's function of this kind."""
    if that:
        torch._foreach_copy_(that, this)


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
    moments = {"exp_avg": args.exp_avg_dtype, "exp_avg_sq": args.exp_avg_sq_dtype}
    # Megatron's own way would keep fp32 weights and gradients elsewhere, too, and wants Transformer Engine.
    fields = _fields(OptimizerConfig, args) | {"use_precision_aware_optimizer": False}
    config = OptimizerConfig(**fields | {f"{name}_dtype": torch.float32 for name in moments})
    with _default_group(pg_collection.intra_dist_opt), _adam_with(moments):
        overrides = group_overrides(wrapped, config, args, pg_collection)
        optimizer = get_megatron_optimizer(
            config, wrapped, overrides, use_gloo_process_groups=False, pg_collection=pg_collection
        )
    for chained in optimizer.chained_optimizers:
        if isinstance(chained.optimizer, SmallMomentsAdam):  # Megatron's function would create them in fp32
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


@contextlib.contextmanager
def _adam_with(moments: dict[str, torch.dtype]):
    """Context in which Megatron builds optimizers with moments of these types."""
    adam = megatron_optimizer.Adam
    if any(dtype != torch.float32 for dtype in moments.values()):
        megatron_optimizer.Adam = functools.partial(SmallMomentsAdam, moments=moments)
    try:
        yield
    finally:
        megatron_optimizer.Adam = adam


def _number_as_grouped(part):
    """Corrects which parameter of its groups a distributed optimizer takes for which one of the model.

    Megatron counts them in the model's order, but its groups have the fp32 parameters before those of 16 bits.
    """
    if not hasattr(part, "model_param_group_index_map"):
        return
    for number, of_group in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for place, parameter in enumerate(chain(*of_group)):
            part.model_param_group_index_map[parameter] = number, place


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
    start = args.lr_warmup_init
    if start is None:
        start = min(args.lr, args.decoupled_lr or args.lr) / (warmup + 1)
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
