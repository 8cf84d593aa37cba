"""Checks a documented command without running it: files, variables, flags and values."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed.run

from megarl import bundled, launcher, plan
from megarl.__main__ import MODULES
from setup import EXTRAS
from tests.helpers.pages.command_flags import (
    ELLIPSIS,
    PROGRAMS,
    check_flags,
    check_tool,
    megarl_flags,
    megatron,
    require,
    with_values,
    without_ellipsis,
)
from tests.helpers.pages.documents import Command
from tests.helpers.programs import ROOT
from tests.helpers.tools import load_tool

# Commands that are not ours, each with what it does in the documentation.
OTHERS = {
    "cd": "changes the folder", "export": "sets variables", "echo": "prints", "mkdir": "makes a folder",
    "cat": "prints a file", "ls": "lists files", "git": "fetches the source of a library", "exit": "ends a script",
    "source": "activates an environment", "lm_eval": "a client of the server", "set": "options of the shell",
    "kill": "sends a signal", "apt-get": "installs packages of the system", "ssh": "opens a tunnel",
    "scancel": "ends a Slurm job", "squeue": "lists Slurm jobs", "tensorboard": "shows a run", "module": "of clusters",
    "tail": "prints the end of a file",
    "tar": "packs files", "scp": "copies files", "rsync": "copies files", "docker": "runs a container",
}  # fmt: skip
OTHER_MODULES = {"venv": "makes an environment", "build": "makes a wheel", "twine": "checks and uploads it"}
# Variables that tools read without a script.
OWN_VARIABLES = {"VLLM_PYTHON": "tools/bench", "MEGARL_VENV": "launch/setup_env.sh"}
# Variables that libraries read, with what they do.
LIBRARIES = {
    "PYTHONPATH": "Python's import path", "OMP_NUM_THREADS": "threads of PyTorch", "APEX_CPP_EXT": "build of apex",
    "APEX_CUDA_EXT": "build of apex", "CUDA_VISIBLE_DEVICES": "CUDA", "OMP_WAIT_POLICY": "threads of PyTorch",
    "RANK": "torch.distributed", "LOCAL_RANK": "torch.distributed", "WORLD_SIZE": "torch.distributed",
    "MASTER_ADDR": "torch.distributed", "MASTER_PORT": "torch.distributed",
}  # fmt: skip


def _modules(words: list[str], is_inline: bool, ranks: int = 1):
    """`-m NAME FLAGS…`; in prose `-m` alone."""
    if not words:
        require(is_inline, "-m needs a module")
        return
    name, flags = words[0], words[1:]
    if name == "pip":
        _pip(flags)
    elif name in ("pytest", *OTHER_MODULES) or ELLIPSIS.fullmatch(name):
        return
    elif name == "megarl.plan":
        gap = ["…"] * (len(without_ellipsis(flags)) < len(flags))
        flags = with_values(without_ellipsis(flags), {}, ("--world-size", "--vocab-size"))
        default = ["--world-size", "1"] if is_inline else []  # prose may name the program alone
        chosen, rest = plan.build_parser().parse_known_args([*default, *flags])
        check_flags("rl", [*rest, *gap], is_inline, chosen.world_size)
    elif name == "megarl.launcher":
        known = {option for action in launcher._parser()._actions for option in action.option_strings}
        at = next((i for i, word in enumerate(flags) if word in PROGRAMS), len(flags))
        require({w for w in flags[:at] if w.startswith("--")} <= known, f"megarl.launcher has not all of {flags[:at]}")
        if at < len(flags):
            check_flags(PROGRAMS[flags[at]], flags[at + 1 :], is_inline, ranks)
    elif name.removeprefix("megarl.") in PROGRAMS and name.startswith("megarl."):
        check_flags(PROGRAMS[name.removeprefix("megarl.")], flags, is_inline, ranks)
    else:
        path = ROOT / (name.replace(".", "/") + ".py")
        path = path if path.is_file() else path.with_suffix("") / "__main__.py"
        require(path.is_file(), f"there is no module {name}")
        check_tool(path, flags, is_inline)


def _python(words: list[str], is_inline: bool):
    if words[:1] == ["-m"]:
        _modules(words[1:], is_inline)
    elif words and words[0] != "-c":
        path = ROOT / words[0]
        require(path.is_file() or not words[0].startswith(("tools/", "tests/", "megarl/")), f"no file {words[0]}")
        if path.is_file():
            check_tool(path, words[1:], is_inline)


def _megarl(words: list[str], is_inline: bool):
    """The command `megarl`: a program on ranks, one of this process, or a tool."""
    at = next((i for i, word in enumerate(words) if word in PROGRAMS), None)
    if at is not None or not words:
        _modules(["megarl.launcher", *words], is_inline)
    elif words[0] in MODULES:
        _modules([MODULES[words[0]], *words[1:]], is_inline)
    elif words[0] in bundled.tools():
        check_tool(bundled.tools()[words[0]], words[1:], is_inline)
    else:
        require(is_inline or words[0] in ("--help", "--version"), f"megarl has no program {words[0]}")


def _torchrun(words: list[str], is_inline: bool):
    known = {o for action in torch.distributed.run.get_args_parser()._actions for o in action.option_strings}
    words = without_ellipsis(words)
    at = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    unknown = [word for word in words[:at] if word.startswith("-") and word.split("=")[0] not in known]
    require(not unknown, f"torchrun has no flag {unknown}")
    numbers = [words[i + 1] for i in range(at - 1) if words[i] == "--nproc-per-node"]
    ranks = int(numbers[0]) if numbers and numbers[0].isdigit() else 1
    if at < len(words) and words[at] == "-m":
        _modules(words[at + 1 :], is_inline, ranks)
    elif at < len(words):
        _python(words[at:], is_inline)


def _srun(words: list[str], is_inline: bool):
    """The program that srun starts."""
    at = next((i for i, word in enumerate(words) if re.search("python|bash", word)), len(words))
    if at < len(words) and "python" in words[at]:
        _python(list(words[at + 1 :]), is_inline)


def _pip(words: list[str]):
    for word in words:
        for extras in re.findall(r"(?:^\.|^megarl|\.whl)\[([\w,-]+)\]", word):
            unknown = set(extras.split(",")) - set(EXTRAS)
            require(not unknown, f"setup.py has no extra {', '.join(unknown)}")


def _curl(words: list[str]):
    urls = [match for word in words if (match := re.match(r"(?:http://)?(?:localhost|127\.0\.0\.1):\d+(/[^?]*)", word))]
    require(urls, "no address of a server on this machine")
    routes = (ROOT / "megarl" / "serving" / "app.py").read_text()
    require(f'"{urls[0][1]}"' in routes, f"the server has no {urls[0][1]}")


@functools.cache
def script_text(path: Path) -> str:
    """The text of a script and of all that it starts or sources, directly or not."""
    texts, waiting = {}, [path]
    while waiting:
        each = waiting.pop()
        if each in texts or not each.is_file():
            continue
        text = texts[each] = each.read_text()
        if each.suffix == ".sh":
            names = re.findall(r"\blaunch/[\w/.]+\.sh|\btools/\w+\.py", text)
            names += [f"launch/{name}" for name in re.findall(r'[")]/(\w+\.sh)', text)]
            names += ["megarl/launcher.py"] if "-m megarl.launcher" in text else []
            waiting += [ROOT / name for name in names]
    return "\n".join(texts.values())


def _script(words: list[str], variables: dict[str, str], is_inline: bool):
    path = ROOT / words[0]
    require(path.is_file(), f"there is no script {words[0]}")
    started = [ROOT / word for word in words[1:2] if word.endswith(".sh")]
    text = "\n".join(map(script_text, (path, *started)))
    for name in variables:
        is_read = re.search(
            rf"\$\{{?[!]?{name}\b|environ[^\n]*\"{name}\"|^for name in [^;\n]*\b{name}\b", text, re.MULTILINE
        )
        require(is_read, f"{words[0]} does not read the variable {name}")
    ranks = int(variables["NPROC"]) if variables.get("NPROC", "").isdigit() else 1
    flags = words[1:]
    if words[0] == "launch/slurm.sh" and flags[:1] and flags[0].endswith(".sh"):
        _script(flags, {}, is_inline)
    elif words[0] == "tests/run.sh":
        for word in flags:
            require(not word.startswith("tests/") or (ROOT / word).exists(), f"no file {word}")
    elif words[0] == "launch/setup_env.sh":
        unknown = {name for word in flags if not word.startswith("-") for name in word.split(",")} - set(EXTRAS) - {"…"}
        require(not unknown, f"setup.py has no extra {', '.join(unknown)}")
        require({w for w in flags if w.startswith("-")} <= {"--which-python"}, f"{words[0]} has not all of {flags}")
    elif without_ellipsis(flags) and words[0] in (
        "launch/run.sh",
        "launch/slurm.sh",
    ):  # the first argument is a program
        require(flags[0] in PROGRAMS, f"{flags[0]}: allowed: {', '.join(PROGRAMS)}")
        check_flags(PROGRAMS[flags[0]], flags[1:], is_inline, ranks)
    elif words[0] == "tools/gpu_check.sh":
        check = load_tool("gpu_check")
        known = {*check.STAGES, *check.GROUPS, "prepare", "--small"}
        require({*flags} <= known, f"{words[0]} has not all of the stages {flags}")
    elif without_ellipsis(flags):
        programs = re.findall(r"flags of megarl\.(\w+)", path.read_text())
        require(programs, f"{words[0]} takes no flags")
        known = {f"--{name}" for program in {*programs, *(["serve"] if "serve" in words[0] else [])}
                 for name in megarl_flags(PROGRAMS[program])} | megatron()[1] | {"--config"}  # fmt: skip
        unknown = [w for w in flags if w.startswith("--") and w.split("=")[0] not in known]
        require(not unknown, f"{words[0]}: unknown flags {unknown}")


def check(command: Command):
    """WrongCommand or UsageError for a command that would not work."""
    words, is_inline = list(command.words), command.is_inline
    head = words[0].rsplit("/", 1)[-1]
    if words[0].endswith("="):  # an array of a launch script
        if any(word.startswith("--") for word in words[1:]):
            check_flags("rl", words[1:], is_inline)
        return
    if ELLIPSIS.fullmatch(words[0]) or words[0].startswith("--"):  # flags to be added to a command
        check_flags("rl", words, is_inline)
        return
    if head in ("bash", "sbatch"):
        scripts = [number for number, word in enumerate(words) if word.endswith(".sh")]
        require(scripts or is_inline, f"{head} needs a script")
        if scripts:
            _script(words[scripts[0] :], command.variables, is_inline)
        return
    rules: dict[str, Callable] = {"torchrun": _torchrun, "srun": _srun, "megarl": _megarl}
    for name in command.variables:
        require(name in LIBRARIES or name in OWN_VARIABLES, f"{name}: nothing reads this variable")
    if re.fullmatch(r"python3?(\.\d+)?|\$\{?PYTHON(_BIN)?\}?", head):
        _python(words[1:], is_inline)
    elif head in rules:
        rules[head](words[1:], is_inline)
    elif head == "pip":
        _pip(words[1:])
    elif head == "curl":
        _curl(words[1:])
    else:
        require(head in OTHERS, f"{head}: unknown; a command that is not ours belongs to OTHERS in {__name__}")
