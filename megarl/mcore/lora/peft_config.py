"""The adapter_config.json of a PEFT adapter: which entries are read, and which ones megarl cannot compute with."""

import re
from collections.abc import Callable
from pathlib import Path

from megarl import plain_files
from megarl.errors import UsageError
from megarl.mcore.lora.peft_modules import PeftModule
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.weights.hf.folder import MAX_BYTES
from megarl.plain_files import read_json, reason_of
from megarl.plain_values import is_plain_number

CONFIG = "adapter_config.json"
PATTERNS = ("alpha_pattern", "rank_pattern")
LINEAR_INIT = (True, False, "gaussian", "orthogonal")  # other initializations change the weights under the factors
SCORES = {"score", "classifier"}  # heads of classifiers
# What to do with an adapter that holds more than factors of layers that megarl adapts.
MERGE = "or merge the adapter into its model (PEFT: merge_and_unload, then save_pretrained) and give that as --hf-model"


def _is_positive(value) -> bool:
    return is_plain_number(value) and value > 0


def _is_rank(value) -> bool:
    return type(value) is int and value > 0


def _are_names(value) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _by_pattern(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


# Entries of the config that are read, and what they must be, if they are there.
ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "r": (_is_rank, "a whole number above 0"),
    "rank_pattern": (_by_pattern(_is_rank), "whole numbers above 0 by pattern"),
    "lora_alpha": (_is_positive, "a number above 0"),
    "alpha_pattern": (_by_pattern(_is_positive), "numbers above 0 by pattern"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "modules_to_save": (_are_names, "a list of names"),
    "target_parameters": (_are_names, "a list of names"),
}
# Entries that say how factors were chosen and trained, not what they compute. Other entries must be off.
UNREAD = {
    *"peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode".split(),
    *"target_modules exclude_modules layers_to_transform layers_pattern lora_dropout bias init_lora_weights".split(),
    *"megatron_core qalora_group_size ensure_weight_tying".split(),
}


def read_config(folder: Path, error: Callable[[str], UsageError]) -> dict:
    """The entries of a folder's config.

    Args:
        error: makes the exception from what is wrong.

    Raises:
        UsageError: no config of LoRA, or one of factors that are not s·B·A beside unchanged weights.
    """
    try:
        config = read_json(folder / CONFIG, MAX_BYTES)
    except FileNotFoundError:
        raise error(f"{CONFIG} is missing; allowed is a folder of PEFT's save_pretrained") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{CONFIG} cannot be read ({reason_of(problem)})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise error(f"{CONFIG} describes no LoRA adapter (peft_type)")
    for name, (holds, allowed) in ALLOWED.items():
        if not (config.get(name) is None or holds(config[name])):
            raise error(f"{CONFIG}: {name} is {config[name]!r}; it must be {allowed}")
    if config.get("init_lora_weights", True) not in LINEAR_INIT:
        raise error(
            f"{CONFIG}: init_lora_weights {config['init_lora_weights']!r} changes the weights under the factors"
        )
    for name in (name for name, value in config.items() if value and name not in ALLOWED and name not in UNREAD):
        raise error(f"{CONFIG}: {name} is not supported: factors may compute something else; train without it, {MERGE}")
    if config.get("bias", "none") != "none":
        raise error(f"{CONFIG}: trains biases (bias {config['bias']!r}); train with bias none, {MERGE}")
    if whole := sorted(set(config.get("modules_to_save") or ()) - SCORES):
        raise error(f"{CONFIG}: trains whole modules (modules_to_save {', '.join(whole)}); train without them, {MERGE}")
    if config.get("r") is None or config.get("lora_alpha") is None:
        raise error(f"{CONFIG}: r and lora_alpha are missing; they must be numbers above 0")
    return config


def check_patterns(config: dict, modules: list[PeftModule], error: Callable[[str], UsageError]):
    """UsageError for a pattern that is no regular expression, or takes too long to match."""
    for entry in PATTERNS:
        patterns = config.get(entry) or {}
        if not plain_files.ends_in_child(
            lambda patterns=patterns: [_matches(p, n) for p in patterns for m in modules for n in m.names()]
        ):
            raise error(f"{CONFIG}: {entry} takes more than {plain_files.child_limits()}, to match")
        for pattern in patterns:
            try:
                _matches(pattern, "")
            except (re.error, RecursionError, OverflowError) as problem:
                raise error(f"{CONFIG}: {entry}: {pattern[:100]!r} is no regular expression ({problem})") from None


def stored_settings(config: dict, name: str | None = None) -> LoRASettings:
    """Rank and scale of a module; without a name those of modules that no pattern matches. Targets are left open."""

    def of_module(entry: str, default):
        """The value of the first pattern that matches the module's name."""
        patterns = (config.get(entry) or {}).items() if name else ()
        return next((value for pattern, value in patterns if _matches(pattern, name)), default)

    rank, alpha = of_module("rank_pattern", config["r"]), of_module("alpha_pattern", config["lora_alpha"])
    return LoRASettings(rank=rank, alpha=alpha, rslora=bool(config.get("use_rslora")), targets=())


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
