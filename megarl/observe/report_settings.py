"""The settings of a report: settings.yaml as a table, compared with another run's."""

import json
from pathlib import Path

import yaml

from megarl.errors import UsageError

FILE_NAME = "settings.yaml"
SECTIONS = ("run", "environment", "megarl", "roles", "megatron")  # in the order of the table


def read_settings(directory: Path) -> dict:
    """The content of a run's settings.yaml; empty without the file. Raises UsageError for a damaged one."""
    path = Path(directory, FILE_NAME)
    if not path.is_file():
        return {}
    try:
        # The C loader needs a tenth of the time for the thousands of lines of four roles.
        found = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not the YAML of a run's settings")
    return found


def table(settings: dict, other: dict | None) -> list[list]:
    """Rows [section, name, value, other value, whether they differ]; a value is its text, or null if there is none.

    A Megatron flag that is the same for all roles has one row, else one for each role: `lr · critic`.
    other: settings of the run to compare with; None: none.
    """
    flat = [_flatten(settings), _flatten(other or {})]
    split = set().union(*map(_differ_by_role, flat))
    own, others = ({_joined(key, split): value for key, value in of_run.items()} for of_run in flat)
    rows = []
    for key in sorted({*own, *others}, key=_order):
        values = [own.get(key), others.get(key)]
        rows.append([key[0], " · ".join(key[1:]), *values, other is not None and values[0] != values[1]])
    return rows


def _flatten(settings: dict) -> dict[tuple[str, ...], str]:
    """Settings by (section, name …); Megatron's flags by ("megatron", name, role)."""
    found: dict[tuple[str, ...], str] = {}
    for key, value in settings.items():
        if key == "roles" and isinstance(value, dict):
            for role, of_role in value.items():
                found |= _flatten_role(str(role), of_role)
        elif isinstance(value, dict):
            found |= {(str(key), str(name)): _text(inner) for name, inner in value.items()}
        else:
            found["run", str(key)] = _text(value)
    return found


def _flatten_role(role: str, settings: object) -> dict[tuple[str, ...], str]:
    if not isinstance(settings, dict):
        return {("roles", role): _text(settings)}
    flags = settings.get("megatron")
    found: dict[tuple[str, ...], str] = {}
    found |= {("megatron", str(flag), role): _text(v) for flag, v in flags.items()} if isinstance(flags, dict) else {}
    return found | {("roles", role, str(name)): _text(v) for name, v in settings.items() if name != "megatron"}


def _differ_by_role(flat: dict[tuple[str, ...], str]) -> set[str]:
    """Names of Megatron's flags that some roles lack, or that have several values."""
    roles, values = {key[2] for key in flat if key[0] == "megatron"}, {}
    for key, value in flat.items():
        if key[0] == "megatron":
            values.setdefault(key[1], []).append(value)
    return {name for name, found in values.items() if len(found) < len(roles) or len(set(found)) > 1}


def _joined(key: tuple[str, ...], split: set[str]) -> tuple[str, ...]:
    """The key of a row: without the role, if it makes no difference."""
    return key[:2] if key[0] == "megatron" and key[1] not in split else key


def _order(key: tuple[str, ...]) -> tuple:
    return SECTIONS.index(key[0]) if key[0] in SECTIONS else len(SECTIONS), key


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
