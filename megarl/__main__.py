"""The command `megarl`, also `python -m megarl`: starts a program on this node's ranks, or runs a tool.

    megarl --nproc-per-node 4 train_rl --config configs/quickstart.yaml
    megarl make_prompts --task chain_sum --train 4000 --heldout 300 --out data/sums
    megarl plan --world-size 64 --config my_run.yaml

The flags before a program's name are those of `megarl.launcher`. Files of megarl's own `configs/` are found from every
folder.
"""

import ast
import difflib
import os
import platform
import runpy
import sys
from pathlib import Path

import megarl
from megarl import bundled, launcher
from megarl.observe.settings_file import installed_version

# Programs of one process, by name.
MODULES = {"plan": "megarl.plan", "build_kernels": "megarl.mcore.kernels.native.build"}
BLANK = "\n\n"  # line


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 2 for an unknown program, else that of the program."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else launcher.WRONG_FLAGS
    if argv == ["--version"]:
        print(_version())
        return 0
    name, rest = argv[0], argv[1:]
    if name in launcher.PROGRAMS or name.startswith("-"):
        return launcher.main(argv)
    if name in MODULES:
        return launcher.run(MODULES[name], rest)
    tools = bundled.tools()
    if name in tools:
        return _run_tool(tools[name], rest)
    known = [*launcher.PROGRAMS, *MODULES, *tools]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; allowed: {', '.join(known)}"
    print(f"megarl: error: {name}: unknown program{hint}", file=sys.stderr)
    return launcher.WRONG_FLAGS


def _run_tool(path: Path, flags: list[str]) -> int:
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(bundled.root()))  # tools import each other as tools.NAME
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _version() -> str:
    others = ", ".join(f"{name} {installed_version(name) or 'not installed'}" for name in ("torch", "megatron-core"))
    return f"megarl {megarl.__version__} (Python {platform.python_version()}, {others})"


def _help() -> str:
    package = Path(megarl.__file__).parent
    programs = {name: package / f"{name}.py" for name in launcher.PROGRAMS}
    others = {name: package.joinpath(*module.split(".")[1:]).with_suffix(".py") for name, module in MODULES.items()}
    lines = [
        "usage: megarl [--nproc-per-node N ...] PROGRAM [flags], megarl TOOL [flags], megarl --version",
        "",
        "programs on ranks (flags before the name are megarl.launcher's: `megarl --nproc-per-node 1 --help`):",
        *_rows(programs),
        "in this process:",
        *_rows(others | bundled.tools()),
        "",
        f"configs: {os.path.relpath(bundled.root() / 'configs')}; `--config configs/...` finds them from every folder",
    ]
    return "\n".join(lines)


def _rows(files: dict[str, Path]) -> list[str]:
    texts = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    return [f"  {name:18} {' '.join((text or '').partition(BLANK)[0].split())}" for name, text in texts.items()]


if __name__ == "__main__":
    sys.exit(main())
