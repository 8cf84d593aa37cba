"""The software and the machine of a run, for settings.yaml."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "numpy")
ROOT = Path(__file__).parents[2]  # of megarl's files: the checkout, if it is one
GIT_SECONDS = 10  # a network file system may be slow


def environment(device_name: str) -> dict[str, str | None]:
    """Versions, git commit and device of rank 0; None for what cannot be known.

    `device_name`: the device that computes. `git_commit`: of the checkout that megarl was imported from, with `-dirty`
    if tracked files had changed.
    """
    return {
        "device": device_name,
        "git_commit": _git_commit(),
        "megarl": _version("megarl"),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
    }


def processor() -> str:
    """Name of the processor, from /proc/cpuinfo if there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    if not (ROOT / ".git").exists():  # a folder of site-packages may be in a repository of others
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
