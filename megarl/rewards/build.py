"""From the value of --reward to something that scores, and to a check that the prompts suit it."""

import importlib
from dataclasses import dataclass
from typing import Callable

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import verifiers
from megarl.rewards.base import Reward, Sample, Score


@dataclass(frozen=True)
class _BuiltIn:
    """`check` looks at the prompts alone; `load` also at what the verifier imports."""

    verify: Callable[[Sample], Score]
    check: Callable[[PromptSet], None]
    load: Callable[[PromptSet], None] | None = None


_BUILT_IN = {
    "exact-match": _BuiltIn(verifiers.exact_match, verifiers.check_exact_match),
    "reasoning-gym": _BuiltIn(
        verifiers.reasoning_gym, verifiers.check_reasoning_gym, verifiers.load_reasoning_gym
    ),
}


def build_reward(name: str) -> Reward:
    """The reward called `name`, or the plug-in `package.module:function`, which is imported here.

    A plug-in maps a `Sample` to a `Score` or a number (see `Reward`). Raises UsageError for anything else.
    """
    if name in _BUILT_IN:
        return Reward(name, _BUILT_IN[name].verify)
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(
            f"--reward {name}: unknown; allowed: {', '.join(_BUILT_IN)}, or a plug-in as package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A plug-in may fail at import in any way; whatever it is, this is the user's file to mend.
        raise UsageError(f"--reward {name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "has no" if function is None else "has a non-callable"
        raise UsageError(f"--reward {name}: {module_name} {problem} {function_name}; a function is needed")
    return Reward(name, function)


def check_prompts(name: str, prompts: PromptSet, scores_here: bool = False) -> None:
    """UsageError with file and line if a prompt lacks what the reward needs; a plug-in may need anything.

    `scores_here`: this process is going to score, so also import and build what the prompts call for.
    """
    if name in _BUILT_IN:
        _BUILT_IN[name].check(prompts)
        if scores_here and _BUILT_IN[name].load:
            _BUILT_IN[name].load(prompts)
