"""Checks of flags with patterns of parameter names (`mcore.config.optimizer_flags`) against the roles' models."""

import difflib
import re

from megarl.arguments import RunConfig
from megarl.errors import UsageError, flag_of
from megarl.mcore.config import optimizer_flags
from megarl.planning.parameters import layout_free_names, stage_weights, trained_and_frozen

_SHOWN = 3  # nearest names in a message


def check(config: RunConfig):
    """UsageError for a pattern of a trained role without effect, and for a frozen role or pipeline stage."""
    for role in map(config.roles.__getitem__, config.trained):
        _check(role.name, role.megatron, role.lora is not None, role.has_scalar_head)


def _check(role: str, args, has_lora: bool, value_head: bool):
    if has_lora and args.optimizer == optimizer_flags.MUON:
        raise UsageError(
            f"{role}: --optimizer {optimizer_flags.MUON}: not allowed with low-rank factors; allowed is adam or sgd"
        )
    given = [name for name in sorted(optimizer_flags.ATTRIBUTES) if getattr(args, name)]
    for flag in map(flag_of, given if has_lora else ()):
        raise UsageError(f"{role}: {flag}: not allowed with low-rank factors, beside which all weights are frozen")
    if not given:
        return
    names = layout_free_names(args, value_head)
    trained = [name for name in names if not optimizer_flags.is_frozen(args, name)]
    for attribute in given:
        texts = getattr(args, attribute)
        for number, pattern in enumerate(found := optimizer_flags.patterns_of(args, attribute)):
            flag = f"{role}: {flag_of(attribute)} {texts[number]}"
            named = [name for name in names if optimizer_flags.matches(name, [pattern])]
            if not named:
                raise UsageError(f"{flag}: names no parameter of the {role}; nearest: {_nearest(pattern, names)}")
            if attribute == optimizer_flags.FREEZE:
                continue
            if not {*named} & {*trained}:
                raise UsageError(f"{flag}: names only parameters that are not trained")
            if all(optimizer_flags.matches(name, found[number + 1 :]) for name in named):
                raise UsageError(f"{flag}: has no effect: later patterns name all of its parameters")
    if args.freeze:
        _check_stages(role, args, value_head, trained)


def _nearest(pattern: str, names: list[str]) -> str:
    """The names most like a pattern, those of layers once, with a * for the number."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    text = re.sub(r"\.\d+\.", ".*.", pattern)
    return ", ".join(difflib.get_close_matches(text, kinds, _SHOWN, cutoff=0.0))


def _check_stages(role: str, args, value_head: bool, trained: list[str]):
    """UsageError for a chunk of the model without a trained parameter; `trained`: names of the whole model's."""
    flag = f"{role}: --freeze {' '.join(args.freeze)}"
    if not trained:
        raise UsageError(f"{flag}: leaves nothing to train")
    if args.model_folder is not None:  # one chunk
        return
    for stage, chunks in enumerate(stage_weights(args, 1, value_head)):
        if not all(trained_and_frozen(weights, args, None, value_head)[0] for weights in chunks):
            raise UsageError(f"{flag}: leaves nothing to train on pipeline stage {stage}; use fewer stages")
