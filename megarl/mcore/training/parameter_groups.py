"""Which parameters of a model are trained, and which of them have learning rates and weight decays of their own."""

from collections.abc import Iterator
from itertools import chain

from megatron.core.optimizer import OptimizerConfig, ParamKey, ParamPredicate, get_standard_config_overrides
from torch import Tensor

from megarl.mcore.config import optimizer_flags
from megarl.mcore.config.optimizer_flags import LEARNING_RATES, MUON, WEIGHT_DECAYS
from megarl.mcore.lora.adapter import give_gradient_to_layers
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.model.initialization import global_name


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
        wrapped: chunks of `optimizer.wrap_for_training`.
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
