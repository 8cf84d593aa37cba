"""The structure of the code: who imports whom; how long files, functions and the training loop may be."""

import ast
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import megarl
from megarl.arguments import Settings

PACKAGE = Path(megarl.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OURS = sorted(path for folder in ("megarl", "tests", "tools", "launch") for path in (ROOT / folder).rglob("*.py"))
PROGRAMS = (
    "train_rl",
    "train_sft",
    "train_reward",
    "train_preference",
    "evaluate",
    "serve",
    "replay",
    "plan",
    "generate",
)
# What a training loop leaves to the calls that it makes.
MECHANISMS = {"colocated", "offload", "exchange", "send", "mesh", "device", "rank", "replicas", "dp_assignment"}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax, of which the first is the module."""
    return list(ast.walk(ast.parse(path.read_text())))


def tree_of(path: Path) -> ast.Module:
    """A file's syntax."""
    module = nodes_of(path)[0]
    assert isinstance(module, ast.Module)
    return module


@pytest.fixture(autouse=True, scope="module")
def _forgets_syntax(without_collection):
    """Syntax takes memory, which other tests would fork."""
    yield
    nodes_of.cache_clear()


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """(full name, line) of all that a file imports, at any depth; relative names start with dots."""
    found = []
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__",
        ):  # fmt: skip
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        found += ((name, node.lineno) for name in names)
    return found


def importers(forbidden, files) -> list[str]:
    """Imports of forbidden names: file, line, name."""
    return [f"{p.relative_to(ROOT)}:{line} {name}" for p in files for name, line in imports(p) if forbidden(name)]


def under(*parts) -> list[Path]:
    """The files of a package."""
    return sorted(PACKAGE.joinpath(*parts).rglob("*.py"))


def test_imports_at_any_depth_are_found(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("def f():\n    import megatron.core as m, os\n    from megatron import training\n"
                      "    from . import b\n    importlib.import_module('megatron.x')\n")  # fmt: skip
    found = [("megatron.core", 2), ("os", 2), ("megatron.training", 3), ("..b", 4), ("megatron.x", 5)]
    assert imports(source) == found
    assert len(FILES) > 25


# -- who imports whom --------------------------------------------------------------------------------------------


def test_only_mcore_imports_megatron():
    outside = [path for path in FILES if PACKAGE / "mcore" not in path.parents]
    assert not importers(lambda name: name.split(".")[0] == "megatron", outside)
    assert importers(lambda name: name.split(".")[0] == "megatron", under("mcore"))


def test_algorithms_import_only_torch_and_the_standard_library():
    allowed = {"torch", *sys.stdlib_module_names}
    assert not importers(
        lambda name: (
            name.split(".")[0] not in allowed and not name.startswith(("megarl.algorithms", "megarl.deferred"))
        ),
        under("algorithms"),
    )


@pytest.mark.parametrize("modules", [
    "megarl.environments.worker, megarl.environments.pool, megarl.environments.loading",
    "megarl.tool_formats.chosen_format, megarl.environments.protocol",
    "megarl.train_rl, megarl.train_sft, megarl.train_reward, megarl.train_preference, megarl.evaluate, megarl.serve",
])  # fmt: skip
def test_what_starts_fast_needs_no_torch(modules):
    """Workers with environments, formats of their calls, and programs until their flags are read."""
    libraries = {"torch", "megatron", "numpy", "transformers", *(["jinja2"] if "tool_formats" in modules else [])}
    code = f"import sys, {modules}; print({libraries} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def packages(*names: str):
    """Whether an imported name is in one of these packages or modules of megarl."""
    return lambda name: name.split(".")[:1] == ["megarl"] and name.split(".")[1:2] in [[n] for n in names]


def test_programs_use_trainers_which_use_roles():
    """No package imports a program, only programs import trainers, and roles know neither trainers nor the rollout.

    The rollout does not know the server, which scores sequences with a role's forward pass.
    """
    programs = [PACKAGE / f"{name}.py" for name in PROGRAMS]
    assert set(programs) < set(FILES)
    others = [path for path in FILES if path not in programs]
    assert not importers(packages(*PROGRAMS), others)
    assert not importers(packages("trainers"), [p for p in others if PACKAGE / "trainers" not in p.parents])
    above_roles = {PACKAGE / name for name in ("roles", "rollout", "serving", "trainers")}
    assert not importers(packages("roles"), [path for path in others if not above_roles & set(path.parents)])
    assert not importers(packages("rollout"), under("roles"))
    assert not importers(packages("serving"), [*under("roles"), *under("rollout")])
    for name in PROGRAMS[:4]:
        path = PACKAGE / f"{name}.py"
        assert not importers(lambda n: n.startswith("megarl") and not packages("trainers", "roles")(n), [path])


def import_graph(folder: Path, package: str) -> dict[str, dict[str, str]]:
    """Subpackage or module of a package -> those of the same package that it imports, each with file and line."""
    prefix, graph = package.split("."), {}
    for path in sorted(folder.rglob("*.py")):
        unit = path.relative_to(folder).parts[0].removesuffix(".py")
        found = graph.setdefault(unit, {})
        for name, line in imports(path):
            parts = name.split(".")
            if parts[: len(prefix)] == prefix and len(parts) > len(prefix) and parts[len(prefix)] != unit:
                found.setdefault(parts[len(prefix)], f"{path.relative_to(folder)}:{line}")
    return graph


def shortest_cycle(graph: dict[str, dict[str, str]], start: str, first: str) -> list[str] | None:
    """The shortest path start -> first -> … -> start."""
    paths, seen = [[start, first]], {first}
    while paths and paths[0][-1] != start:
        path = paths.pop(0)
        for target in graph.get(path[-1], {}):
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return paths[0] if paths else None


def cycles(graph: dict[str, dict[str, str]]) -> list[str]:
    """The shortest cycle through every import that is in one."""
    found = set()
    for start, first in ((start, first) for start, targets in graph.items() for first in targets):
        path = shortest_cycle(graph, start, first)
        if path:
            turn = path.index(min(path[:-1]))
            path = path[turn:-1] + path[:turn] + [path[turn]]
            lines = ", ".join(graph[one][two] for one, two in itertools.pairwise(path))
            found.add(f"{' -> '.join(path)} ({lines})")
    return sorted(found)


def test_import_cycles_are_found(tmp_path):
    sources = {"a.py": "from megarl import b, other", "b/__init__.py": "", "d.py": "import torch\nfrom megarl import a",
               "b/deep.py": "def f():\n    from megarl.c import x", "c.py": "import megarl.a.y, megarl.c"}  # fmt: skip
    (tmp_path / "b").mkdir()
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    assert cycles(import_graph(tmp_path, "megarl")) == ["a -> b -> c -> a (a.py:1, b/deep.py:2, c.py:1)"]


@pytest.mark.parametrize("package", ["megarl", "megarl.mcore"])
def test_packages_do_not_import_each_other_in_a_cycle(package):
    """Imports inside functions count. Two packages that need each other are one, or a module is misplaced."""
    graph = import_graph(PACKAGE.joinpath(*package.split(".")[1:]), package)
    assert sum(map(len, graph.values())) > 10
    found = cycles(graph)
    assert not found, "import cycles:\n" + "\n".join(found)


def module_graph() -> dict[str, dict[str, str]]:
    """Module of megarl -> those that it imports, at any depth and for types alone, each with file and line."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph: dict[str, dict[str, str]] = {}
    for module, path in modules.items():
        found = graph.setdefault(module, {})
        for name, line in imports(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                found.setdefault(target, f"{path.relative_to(PACKAGE)}:{line}")
    return graph


def test_modules_do_not_import_each_other():
    """Not even for types: what two modules need belongs into one of them, or into a third one."""
    graph = module_graph()
    assert "megarl.data.conversations" in graph["megarl.data.prompts"]
    found = cycles(graph)
    assert not found, "import cycles:\n" + "\n".join(found)


def test_no_test_module_imports_another():
    """What tests share is in tests/helpers/ and tests/references/."""
    found = importers(lambda n: n.startswith("tests.") and any(p.startswith("test_") for p in n.split(".")), TESTS)
    assert not found
    elsewhere = [path for path in TESTS if path.parent.name in ("helpers", "references")]
    assert importers(lambda name: name.startswith("tests.helpers."), elsewhere)


def test_no_test_module_loads_libraries_that_start_threads():
    """Worlds and the launcher fork the test process: what transformers and PEFT compute belongs into a world."""
    loaded = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip"
        and node.args[0].value in ("transformers", "peft")
    ]  # fmt: skip
    assert not loaded
    top = [node for path in TESTS if path.parent.name != "references" for node in tree_of(path).body]
    modules = [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in top if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if name.split(".")[0] in ("transformers", "peft")] and "torch" in modules


# Who reduces by MAX or MIN without `all_reduce_max`, and why gloo cannot lose a NaN there.
WITHOUT_NAN = {
    "comm/microbatches.py": "counts", "mcore/inference/device_decode.py": "truth values",
    "mcore/inference/generation_session.py": "whole numbers", "mcore/kernel_choice.py": "truth values",
    "mcore/kernels/head_divergence.py": "a sum of e^(logit − top) over the same ranks has the NaN",
    "mcore/kernels/head.py": "a sum of e^(logit − top) over the same ranks has the NaN",
    "mcore/parallel/process_groups.py": "defines it", "mcore/weights/reshard.py": "whole numbers",
    "serving/replica_service.py": "truth values",
}  # fmt: skip


def test_reductions_do_not_lose_nan():
    found = [path for path in FILES if {"MAX", "MIN"} & {getattr(node, "attr", "") for node in nodes_of(path)}]
    assert {str(path.relative_to(PACKAGE)) for path in found} == set(WITHOUT_NAN)


def test_no_global_torch_function_mode():
    """Only a capture of a CUDA graph sees its operators, to hold the memory that they read; and a walk without numbers
    over a module of transformers."""
    captures = PACKAGE / "mcore" / "inference" / "device_decode.py"
    for path in set(FILES) - {captures, PACKAGE / "mcore" / "any_model" / "walk.py"}:
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes_of(path)}
        assert not names & {"TorchFunctionMode", "TorchDispatchMode"}, path


# Rooms that a reader may skip: a run that asks for none of them imports none of them.
OPTIONAL_ROOMS = {
    "extras": "the report of a run, and trackers other than TensorBoard",
    "environments/adapters": "environments of other projects",
    "planning/layouts.py": "the planner's search",
    "replay.py": "the program that repeats one step of a run",
}


def early_imports(path: Path) -> list[str]:
    """Full names of what a file imports when it is itself imported: outside of functions, and not for types alone."""
    found, nodes = [], list(tree_of(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            nodes += ast.iter_child_nodes(node)
    return found


def test_the_core_imports_no_optional_room():
    rooms = {name: PACKAGE / name for name in OPTIONAL_ROOMS}
    assert all(place.exists() for place in rooms.values())
    core = [path for path in FILES if not any(path == room or room in path.parents for room in rooms.values())]
    modules = tuple(f"megarl.{name.removesuffix('.py').replace('/', '.')}" for name in rooms)
    names = {path: early_imports(path) for path in core}
    found = [f"{p.relative_to(ROOT)} {n}" for p, of in names.items() for n in of if f"{n}.".startswith(
        tuple(f"{module}." for module in modules))]  # fmt: skip
    assert not found
    assert "megarl.observe.trackers.TrackedRun" in early_imports(PACKAGE / "extras" / "wandb_run.py")


# -- docstrings, names, lengths ----------------------------------------------------------------------------------


def test_every_file_and_package_has_a_docstring():
    empty = [p for p in OURS if not (ast.get_docstring(tree_of(p)) or "").strip()]
    assert [str(path.relative_to(ROOT)) for path in empty] == []


def test_public_classes_have_different_names():
    names = Counter(
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_files_are_short():
    assert [str(p.relative_to(ROOT)) for p in FILES if len(p.read_text().splitlines()) > 400] == []


def test_functions_are_short():
    long = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 60:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_the_training_loop_is_short_and_names_no_mechanism():
    """The loops of train_rl.py; comments and blank lines count."""
    tree = ast.parse((PACKAGE / "train_rl.py").read_text())
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    assert loops, "train_rl.py has no loop"
    assert max(loop.end_lineno - loop.lineno + 1 for loop in loops) <= 40
    words = {getattr(node, "attr", getattr(node, "id", "")) for loop in loops for node in ast.walk(loop)}
    assert not words & MECHANISMS, "the loop names roles and data, never mechanisms"


# -- settings ----------------------------------------------------------------------------------------------------


def settings_read_in(nodes) -> set[str]:
    """Attributes read from something called `settings` or `role`, or from a name that `settings` were assigned to."""

    def last_name(node):
        return getattr(node, "attr", getattr(node, "id", ""))

    names = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=False)
            names |= {last_name(target) for target, value in pairs if last_name(value).endswith("settings")}
    loads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    return {n.attr for n in loads if last_name(n.value).endswith(("settings", "role")) or last_name(n.value) in names}


def test_settings_that_are_read_are_found():
    source = ("s, x = program.settings, 1\nprint(s.gamma, self.settings.seed, x.save, settings.load)\n"
              "role.offload, settings.top_k = 1, 2")  # fmt: skip
    assert settings_read_in(list(ast.walk(ast.parse(source)))) == {"gamma", "seed", "load"}


def settings_that_nothing_reads(files, names) -> list[str]:
    """The names that no file reads."""
    read = set().union(*(settings_read_in(nodes_of(path)) for path in files))
    return [name for name in names if name not in read]


def test_every_setting_is_read_somewhere(tmp_path):
    """A setting that only a check or a plan reads has no effect on a run."""
    excluded = {PACKAGE / "flags" / "settings.py", *under("planning")}
    assert excluded < set(FILES), "the excluded files have moved"
    names = [field.name for field in dataclasses.fields(Settings)]
    dead = settings_that_nothing_reads(set(FILES) - excluded, names)
    assert not dead, f"flags that nothing reads: {dead}"
    (tmp_path / "checks.py").write_text("def check(case):\n    return case.settings.only_checked > 0\n")
    files = {*FILES, tmp_path / "checks.py"}
    assert settings_that_nothing_reads(files, [*names, "only_checked", "never_read"]) == ["never_read"]
    assert settings_that_nothing_reads(files - {tmp_path / "checks.py"}, ["only_checked"]) == ["only_checked"]
