"""Environments by the name of `--environment`: built-in ones, or a user's factory."""

from collections.abc import Callable

from megarl import plugins
from megarl.environments.protocol import Environment

# Name -> its factory, imported when it is asked for: some need packages that others do not.
BUILT_IN: dict[str, str] = {
    "guess-number": "megarl.environments.games:GuessNumber",
    "guess-number-blind": "megarl.environments.games:guess_number_blind",
    "calculator": "megarl.environments.calculator:calculator",
    "calculator-agent": "megarl.environments.agents.calculator:calculator_agent",
    "calculator-offset": "megarl.environments.calculator:calculator_offset",
    "python-tool": "megarl.environments.python_tool:python_tool",
    "frozen-lake": "megarl.environments.adapters.gymnasium_env:FrozenLake",
    "reasoning-gym": "megarl.environments.adapters.reasoning_gym_env:ReasoningGymEnvironment",
}


def load_factory(name: str) -> Callable[[], Environment]:
    """The function that makes an environment for each episode.

    Raises:
        UsageError: the name is neither built in nor package.module:factory, or the module cannot be imported.
    """
    found = BUILT_IN.get(name, name)
    if ":" not in found:
        return plugins.load("--environment", name, dict.fromkeys(BUILT_IN))  # says what is allowed
    return plugins.load("--environment", found, {}, awaits=True)
