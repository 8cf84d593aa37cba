"""Checks of a run's environments before any work starts."""

import numpy as np

from megarl.arguments import Settings
from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.template_checks import check_template
from megarl.environments.check import check_factories
from megarl.environments.turn_parsing import load_parser


def check_environments(settings: Settings, encoder: Encoder, prompt_sets: dict[str, PromptSet]):
    """UsageError for an environment that cannot be made, a parser of tool calls that does not exist, or a chat template
    with which a conversation cannot continue."""
    if not settings.environment:
        return
    load_parser(settings.tool_call_parser)
    named = {name for prompts in prompt_sets.values() for name in named_in(prompts, encoder)}
    names = sorted({settings.environment} | named)

    def checked() -> dict[str, np.ndarray]:
        return {"has_tools": np.array([check_factories(names)[name] for name in names], dtype=bool)}

    has_tools = node_files.arrays(lambda: ("environments", *names), checked)["has_tools"]
    roles = {"tool" if of_environment else "user" for of_environment in has_tools.tolist()}
    check_template(encoder, tuple(sorted(roles)))


def named_in(prompts: PromptSet, encoder: Encoder) -> list[str]:
    """The environments that lines of a set name, sorted."""

    def names() -> dict[str, np.ndarray]:
        found = sorted({prompt.environment for prompt in prompts if prompt.environment})
        return {"names": np.frombuffer("\n".join(found).encode(), np.uint8)}

    return prompts.on_node(names, "environments", encoder)["names"].tobytes().decode().split()
