"""The resolved settings of a run, with its software and machine: settings.yaml.

The file has all Megatron flags of one role, the first by name (actor), and of the others those that differ from them.
"""

import argparse
import dataclasses
import enum
import functools
import numbers
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from megarl import yaml_files
from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from megarl.plain_files import MAX_BYTES, is_absent, read_text, reading

FILE_NAME = "settings.yaml"
# Entries about the settings: the module and the arguments as typed; the names of those that the user set, by section.
COMMAND_LINE, USER_SETTINGS = "command_line", "user_settings"
PACKAGES = ("torch", "megatron-core", "numpy", "fla-core")
ROOT = Path(__file__).parents[2]  # of megarl's files: the checkout, if it is one
CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.IGNORECASE)  # the user and password of a URL
GIT_SECONDS = 10  # a network file system may be slow


def write_settings(directory: Path, settings: dict) -> Path:
    """Write the resolved settings to `directory/settings.yaml`, keys sorted, atomically; returns its path.

    Values may nest: mappings, namespaces, dataclasses, sequences (lists in the file), sets (sorted lists), paths
    (text; the user and password of a URL become ***), enumeration members, torch types and devices, functions and
    classes (names).
    Raises TypeError with the key of a value that has no stable text form.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    # PyYAML's C dumper if available: in Python 2,000 keys take 0.3 s, which would delay the first rollout.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    form: dict[str, Any] = {"sort_keys": True, "allow_unicode": True, "default_flow_style": False, "width": 100}
    text = yaml.dump(plain_settings(settings), Dumper=dumper, **form)
    write_atomically(path, text)
    return path


def plain_settings(settings: dict) -> dict:
    """The settings as text, numbers, booleans, null, lists and dictionaries. Errors as of `write_settings`."""
    plain: Any = _plain(settings, "")
    return plain


def _plain(value: object, key: str) -> object:
    """`value` as types of safe YAML; the same settings always give the same text."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(inner, f"{key}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, (str, Path)):
        # YAML has no half of a surrogate pair, which stands for a byte of a path that is not UTF-8.
        return CREDENTIALS.sub(r"\1***@", str(value).encode(errors="backslashreplace").decode())
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if type(value).__module__ == "torch":  # torch.dtype, torch.device: their text is their name
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"setting {key} is a {type(value).__name__}, which has no text form in settings.yaml")


def read_settings(directory: Path) -> dict:
    """The content of a run's settings.yaml; empty without the file. Raises UsageError for a damaged one."""
    path = Path(directory, FILE_NAME)
    if is_absent(path):
        return {}
    with reading(str(path)):
        found = yaml_files.parse(read_text(path, MAX_BYTES))
    if not isinstance(found, dict):
        raise UsageError(f"{path}: is not the YAML of a run's settings")
    return found


def without_repeats(flags: dict[str, dict]) -> dict[str, dict]:
    """What settings.yaml has of the roles' Megatron flags: all of the first role, of others those that differ."""
    first = flags[min(flags)]
    return {
        role: {name: x for name, x in own.items() if role == min(flags) or name not in first or x != first[name]}
        for role, own in flags.items()
    }


def whole(settings: dict) -> dict:
    """Settings of a file with all Megatron flags of every role: undoes `without_repeats`; as they are if they have no
    such roles."""
    roles = settings.get("roles")
    if not isinstance(roles, dict) or not roles:
        return settings
    first, *others = (roles[name] for name in sorted(roles, key=str))
    if not all(isinstance(role, dict) and isinstance(role.get("megatron"), dict) for role in (first, *others)):
        return settings
    found = {name: {**role, "megatron": first["megatron"] | role["megatron"]} for name, role in roles.items()}
    return settings | {"roles": found}


# -- the block `environment` ---------------------------------------------------------------------------------------


def environment(device_name: str) -> dict[str, str | None]:
    """Versions, git commit and device of rank 0, for settings.yaml; None for what cannot be known.

    `device_name`: the device that computes. `git_commit`: of the checkout that megarl was imported from, with `-dirty`
    if tracked files had changed.
    """
    return {
        "device": device_name,
        "git_commit": _git_commit(),
        "megarl": installed_version("megarl"),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        **{name.replace("-", "_"): installed_version(name) for name in PACKAGES},
    }


def processor() -> str:
    """Name of the processor, from /proc/cpuinfo if there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of a package; None if it is not installed, as megarl that runs from its source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_commit() -> str | None:
    if not (ROOT / ".git").exists():  # a folder of site-packages may be in a repository of others
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
