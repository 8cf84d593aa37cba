"""Checks of a run's environments before any work starts."""

import numpy as np

from megarl.arguments import Settings
from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.template_checks import check_template
from megarl.environments.check import check_factories
from megarl.tool_formats.by_template import name_of
from megarl.tool_formats.table import load_format


def check_environment_flags(settings: Settings):
    """UsageError for an environment of the flags that cannot be made, or a parser of tool calls that does not exist."""
    if settings.environment:
        load_format(name_of(settings.tool_call_parser, None))
        _have_tools([settings.environment])


def check_environments(settings: Settings, encoder: Encoder, prompt_sets: dict[str, PromptSet]):
    """UsageError for an environment of a line that cannot be made, or a chat template with which a conversation cannot
    continue."""
    if not settings.environment:
        return
    named = {name for prompts in prompt_sets.values() for name in named_in(prompts, encoder)}
    others = sorted(named - {settings.environment})
    have_tools = _have_tools([settings.environment]) + (_have_tools(others) if others else [])
    form = load_format(name_of(settings.tool_call_parser, encoder.template))
    roles = tuple(sorted({"tool" if has_tools else "user" for has_tools in have_tools}))
    check_template(encoder, roles, form.call_id)


def _have_tools(names: list[str]) -> list[bool]:
    """For each environment, whether it has tools; a process of the node makes each of them once."""

    def checked() -> dict[str, np.ndarray]:
        found = check_factories(names)
        return {"have_tools": np.array([found[name] for name in names], dtype=bool)}

    return node_files.arrays(lambda: ("environments", *names), checked)["have_tools"].tolist()


def named_in(prompts: PromptSet, encoder: Encoder) -> list[str]:
    """The environments that lines of a set name, sorted."""

    def names() -> dict[str, np.ndarray]:
        found = sorted({prompt.environment for prompt in prompts if prompt.environment})
        return {"names": np.frombuffer("\n".join(found).encode(), np.uint8)}

    return prompts.on_node(names, "environments", encoder)["names"].tobytes().decode().split()
