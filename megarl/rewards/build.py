"""From the value of --reward to something that scores, and to a check that the prompts suit it."""

from dataclasses import dataclass
from typing import Callable

from megarl import plugins
from megarl.data.prompts import PromptSet
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
    return Reward(name, plugins.load("--reward", name, {key: each.verify for key, each in _BUILT_IN.items()}))


def check_prompts(name: str, prompts: PromptSet, scores_here: bool = False) -> None:
    """UsageError with file and line if a prompt lacks what the reward needs; a plug-in may need anything.

    `scores_here`: this process is going to score, so also import and build what the prompts call for.
    """
    if name in _BUILT_IN:
        _BUILT_IN[name].check(prompts)
        if scores_here and _BUILT_IN[name].load:
            _BUILT_IN[name].load(prompts)
