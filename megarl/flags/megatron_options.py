"""Megatron's options by name, so that a wrong flag is answered without Megatron's parser, which loads torch.

`tools/make_reference.py` writes the table. It is of one version of megatron-core; with another one the parser is asked.
"""

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".json")
PACKAGE = "megatron-core"


class MegatronOptions(NamedTuple):
    """What is known of Megatron's options before any is parsed."""

    destinations: dict[str, str]  # option -> the attribute that it sets
    accepted: tuple[str, ...]  # options that megarl accepts with more than one value
    training: frozenset[str]  # attributes that only a role that learns has a use for


@functools.cache
def options() -> MegatronOptions:
    """Of the installed version of Megatron, with megarl's additions."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if table[PACKAGE] != importlib.metadata.version(PACKAGE):
        return of_parser()
    rows = table["options"]
    return MegatronOptions(
        {option: dest for option, (dest, _, _) in rows.items()},
        tuple(option for option, (_, is_accepted, _) in rows.items() if is_accepted),
        frozenset(dest for dest, _, trains in rows.values() if trains),
    )


def of_parser() -> MegatronOptions:
    """From Megatron's own parser."""
    from megarl.mcore.config import megatron_flags, supported_flags

    destinations = megatron_flags.destinations()
    training = supported_flags.training().intersection(destinations.values())
    return MegatronOptions(destinations, tuple(megatron_flags.accepted_options()), training)


def table_text() -> str:
    """The table of the installed version, an option a line."""
    found = of_parser()
    rows = [
        f" {json.dumps(option)}: {json.dumps([dest, int(option in found.accepted), int(dest in found.training)])}"
        for option, dest in found.destinations.items()
    ]
    head = json.dumps({PACKAGE: importlib.metadata.version(PACKAGE)})[:-1]
    return head + ', "options": {\n' + ",\n".join(rows) + "\n}}\n"
