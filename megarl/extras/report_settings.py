"""The settings of a report: settings.yaml as a table, compared with another run's."""

import json
import shlex

from megarl.observe.settings_file import COMMAND_LINE, USER_SETTINGS, whole

SECTIONS = ("run", "environment", "megarl", "roles", "megatron")  # in the order of the table


def table(settings: dict, other: dict | None) -> list[list]:
    """Rows [section, name, value, other value, whether they differ, whether the user set it in one of the runs].

    Those that the user set come first. A value is its text, or null if there is none. A Megatron flag that is the same
    for all roles has one row, else one for each role: `lr · critic`. `other`: of the run to compare with.
    """
    flat = [_flatten(whole(settings)), _flatten(whole(other or {}))]
    split = set().union(*map(_differ_by_role, flat))

    def row_of(key: tuple[str, ...]) -> tuple[str, ...]:  # without the role, if it makes no difference
        return key[:2] if key[0] == "megatron" and key[1] not in split else key

    own, others = ({row_of(key): value for key, value in of_run.items()} for of_run in flat)
    by_user = {key for of_run in (settings, other or {}) for key in _set_by_user(of_run, {*own, *others})}
    rows, order = [], {section: number for number, section in enumerate(SECTIONS)}
    for key in sorted({*own, *others}, key=lambda key: (key not in by_user, order.get(key[0], len(order)), key)):
        values = [own.get(key), others.get(key)]
        differs = other is not None and values[0] != values[1]
        rows.append([key[0], " · ".join(key[1:]), *values, differs, key in by_user])
    return rows


def command_line(settings: dict) -> str | None:
    """The command line of a run as text for a shell; None if its settings do not have it."""
    words = settings.get(COMMAND_LINE)
    return shlex.join(map(str, words)) if isinstance(words, list) and words else None


def _set_by_user(settings: dict, keys: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The keys of rows that a run's user set; none if the file does not say so (earlier versions)."""
    said, roles = settings.get(USER_SETTINGS), settings.get("roles")
    if not isinstance(said, dict):
        return set()
    lists = [name for name in ("megarl", "megatron") if isinstance(said.get(name), list)]
    names = {section: set(map(str, said[section])) for section in lists}
    prefixes = [f"{role}_" for role in roles] if isinstance(roles, dict) else []

    def is_set(key: tuple[str, ...]) -> bool:
        section, name, *role = key
        if section == "roles":  # the row is named by the role, then the setting
            return any({each, f"{name}_{each}"} & names.get("megarl", set()) for each in role)
        own = [f"{role[0]}_"] if role else prefixes
        given = names.get(section, set())
        return name in given or section == "megatron" and any(prefix + name in given for prefix in own)

    return set(filter(is_set, keys))


def _flatten(settings: dict) -> dict[tuple[str, ...], str]:
    """Settings by (section, name …); Megatron's flags by ("megatron", name, role)."""
    found: dict[tuple[str, ...], str] = {}
    for key, value in settings.items():
        if key == "roles" and isinstance(value, dict):
            for role, of_role in value.items():
                found |= _flatten_role(str(role), of_role)
        elif key in (COMMAND_LINE, USER_SETTINGS):
            continue
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
