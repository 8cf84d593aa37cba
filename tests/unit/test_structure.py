"""The shape of the code: who may import what, how long files, functions and the training loop may be."""

import ast
import dataclasses
import sys
from pathlib import Path

import megarl
from megarl.arguments import Settings

PACKAGE = Path(megarl.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = sorted(path for folder in ("megarl", "tests", "tools", "launch") for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path):
    """Full names of the modules that a file imports, at any depth; relative ones start with dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__",
        ):  # fmt: skip
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def importers(forbidden, files):
    return [f"{path.relative_to(ROOT)}: {name}" for path in files for name in imports(path) if forbidden(name)]


def under(*parts) -> list[Path]:
    return sorted(PACKAGE.joinpath(*parts).rglob("*.py"))


def test_the_walk_sees_imports(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("def f():\n    import megatron.core as m, os\n    from megatron import training\n"
                      "    from . import b\n    importlib.import_module('megatron.x')\n")  # fmt: skip
    assert list(imports(source)) == ["megatron.core", "os", "megatron", ".", "megatron.x"]
    assert len(FILES) > 25


def test_megatron_is_imported_in_mcore_alone():
    outside = [path for path in FILES if PACKAGE / "mcore" not in path.parents]
    assert not importers(lambda name: name.split(".")[0] == "megatron", outside)
    assert importers(lambda name: name.split(".")[0] == "megatron", under("mcore"))


def test_algorithms_import_torch_and_the_standard_library_alone():
    allowed = {"torch", *sys.stdlib_module_names}
    assert not importers(
        lambda name: name.split(".")[0] not in allowed and not name.startswith("megarl.algorithms"),
        under("algorithms"),
    )


def test_roles_and_programs_stand_above_the_rest():
    programs = tuple(f"megarl.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem.startswith("train_"))
    below = [path for path in FILES if path.parent != PACKAGE]
    assert not importers(lambda name: name.startswith(programs) and programs, below)
    lower = [path for path in below if not {PACKAGE / "roles", PACKAGE / "runtime"} & set(path.parents)]
    assert not importers(lambda name: name.startswith("megarl.roles"), lower)


def test_no_global_torch_function_mode():
    for path in FILES:
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))}
        assert not names & {"TorchFunctionMode", "TorchDispatchMode"}, path


def test_every_file_says_what_it_holds():
    assert [str(p.relative_to(ROOT)) for p in OURS if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_files_are_short():
    assert [str(p.relative_to(ROOT)) for p in OURS if len(p.read_text().splitlines()) > 300] == []


def test_functions_are_short():
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 50:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_the_training_loop_fits_on_a_screen():
    """The longest outermost loop of train_rl.py, comments and blank lines counted."""
    tree = ast.parse((PACKAGE / "train_rl.py").read_text())
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    assert loops, "train_rl.py has no loop"
    lengths = [loop.end_lineno - loop.lineno + 1 for loop in loops]
    assert max(lengths) <= 40
    words = {getattr(node, "attr", getattr(node, "id", "")) for loop in loops for node in ast.walk(loop)}
    assert not words & {"colocated", "offload"}, "the loop names roles and data, never mechanisms"


def settings_read_in(tree) -> set[str]:
    """Attributes read from something called `settings` or `role`, or from a name that `settings` were assigned to."""

    def last_name(node):
        return getattr(node, "attr", getattr(node, "id", ""))

    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=False)
            names |= {last_name(target) for target, value in pairs if last_name(value).endswith("settings")}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    return {n.attr for n in loads if last_name(n.value).endswith(("settings", "role")) or last_name(n.value) in names}


def test_the_walk_sees_what_is_read():
    source = ("s, x = program.settings, 1\nprint(s.gamma, self.settings.seed, x.save, settings.load)\n"
              "role.offload, settings.top_k = 1, 2")  # fmt: skip
    assert settings_read_in(ast.parse(source)) == {"gamma", "seed", "load"}


def settings_that_nothing_reads(files, names) -> list[str]:
    read = set().union(*(settings_read_in(ast.parse(path.read_text())) for path in files))
    return [name for name in names if name not in read]


def test_every_setting_is_read_somewhere(tmp_path):
    """What only a check or a plan reads has no effect on a run."""
    aside = {PACKAGE / "flags" / "combinations.py", *under("planning")}
    assert aside < set(FILES), "what is left aside has moved"
    names = [field.name for field in dataclasses.fields(Settings)]
    dead = settings_that_nothing_reads(set(FILES) - aside, names)
    assert not dead, f"flags that nothing reads: {dead}"
    (tmp_path / "checks.py").write_text("def check(case):\n    return case.settings.only_checked > 0\n")
    files = {*FILES, tmp_path / "checks.py"}
    assert settings_that_nothing_reads(files, [*names, "only_checked", "never_read"]) == ["never_read"]
    assert settings_that_nothing_reads(files - {tmp_path / "checks.py"}, ["only_checked"]) == ["only_checked"]
