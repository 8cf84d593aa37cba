"""Checks whether an environment can run megarl: a table of versions, then one line per problem.

    python tools/check_env.py [--extras test,gpu]     table and problems; exit status 1 with problems, otherwise 0
    python tools/check_env.py --requirements [...]    the requirement lines of setup.py; needs no installed package
    python tools/check_env.py --has-cuda              exit status 0 if torch can use a CUDA device, else 1

Versions come from package metadata; only --has-cuda imports torch, and only if the driver reports a device.
"""

import argparse
import ctypes
import importlib.util
import platform
import runpy
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "megatron-core", "sentencepiece", "transformer-engine")
FIX = "run launch/setup_env.sh"
APEX_HELP = "build NVIDIA's from source (git clone https://github.com/NVIDIA/apex; commands in docs/install.md)"


def requirements(extras=(), root=ROOT):
    """Requirement strings of setup.py: the base list, then those of each extra. KeyError names an unknown extra."""
    setup = runpy.run_path(str(Path(root) / "setup.py"), run_name="requirements")
    return setup["INSTALL_REQUIRES"] + [line for extra in extras for line in setup["EXTRAS"][extra]]


def installed_version(name):
    """Version string of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_problems(lines):
    """One line for each requirement of `lines` (PEP 508 strings) that is missing or has a wrong version."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [f"packaging is missing: {FIX}"]
    problems = []
    for requirement in map(Requirement, lines):
        version = installed_version(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing, required {requirement.specifier}: {FIX}")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is installed, allowed {requirement.specifier}: {FIX}")
    return problems


def apex_state():
    """What `import apex` would find: "absent", "nvidia", "nvidia without CUDA extensions" or "other".

    NVIDIA's has apex.optimizers.FusedAdam. It reads files and imports nothing, since importing runs unknown code.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:  # no origin: only a folder of that name
        return "absent"
    folders = [Path(folder) / "optimizers" for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in (folder / "__init__.py", folder / "fused_adam.py")]
    if not any(file.is_file() and "FusedAdam" in file.read_text(errors="replace") for file in files):
        return "other"
    # FusedAdam needs amp_C, an extension that a plain install of apex omits.
    return "nvidia" if importlib.util.find_spec("amp_C") else "nvidia without CUDA extensions"


def apex_problems(state):
    """The problem line of an `apex_state`, in a list; empty if it is no problem."""
    if state == "other":
        return [f"apex is not NVIDIA's but another package of that name: pip uninstall apex, then {APEX_HELP}"]
    if state == "nvidia without CUDA extensions":
        return [
            f"apex has no CUDA extensions (amp_C), so its FusedAdam does not work: pip uninstall apex, then {APEX_HELP}"
        ]
    return []


def driver_devices():
    """Names of the CUDA devices that the driver reports, respecting CUDA_VISIBLE_DEVICES; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), index)
        names.append(name.value.decode(errors="replace"))
    return names


def has_cuda():
    """Whether torch can use a CUDA device."""
    if not driver_devices():
        return False
    import torch

    return torch.cuda.is_available()


def table(apex):
    """Rows (name, value) of the printed table; `apex` is an `apex_state`."""
    rows = [("python", platform.python_version())]
    rows += [(name, installed_version(name) or "not installed") for name in SHOWN]
    rows.append(("apex", "not installed" if apex == "absent" else apex))
    rows.append(("CUDA devices", ", ".join(driver_devices()) or "no CUDA device: gloo on CPU"))
    return rows


def main(argv=None):
    """Runs the program; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check an environment of megarl.")
    parser.add_argument("--extras", default="", help="comma-separated extras of setup.py to check, too")
    parser.add_argument("--requirements", action="store_true", help="print the requirement lines of setup.py and exit")
    parser.add_argument("--has-cuda", action="store_true", help="exit with status 0 if torch can use a CUDA device")
    options = parser.parse_args(argv)
    if options.has_cuda:
        return 0 if has_cuda() else 1
    try:
        lines = requirements([extra for extra in options.extras.split(",") if extra])
    except KeyError as error:
        known = ", ".join(runpy.run_path(str(ROOT / "setup.py"), run_name="requirements")["EXTRAS"])
        print(f"check_env: unknown extra {error.args[0]!r}, allowed: {known}", file=sys.stderr)
        return 2
    if options.requirements:
        print("\n".join(lines))
        return 0
    apex = apex_state()
    for name, value in table(apex):
        print(f"{name:<20}{value}")
    problems = package_problems(lines) + apex_problems(apex)
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
