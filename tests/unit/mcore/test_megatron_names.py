"""What megarl takes from Megatron: each name is there, and each that is no public function is in `megatron_names.yaml`.

With a new release of Megatron run this file first: in seconds it says which names are gone or have other parameters,
and which files of megarl need them. It reads Megatron's source and imports nothing of it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import megarl
from tests.helpers.pages.megatron_uses import private_names, uses_of
from tests.helpers.pages.python_source import (
    FUNCTIONS,
    Definition,
    Imported,
    find,
    imports,
    members,
    names,
    nodes,
    parameters,
    resolve,
)

ROOT = Path(megarl.__file__).parents[1]
LIST = yaml.safe_load(Path(__file__).with_name("megatron_names.yaml").read_text())
# (class or module of Megatron, name) -> (kind, parameters; None: no function)
NAMES = {
    (owner, name): (kind, given[name] if isinstance(given, dict) else None)
    for owner, kinds in LIST["names"].items()
    for kind, given in kinds.items()
    for name in (given if isinstance(given, dict) else given.split())
}
OWNERS = {owner.rpartition(".")[2]: owner for owner in LIST["names"]}
# The only package that imports Megatron, as tests/unit/test_structure.py checks.
FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "megarl/mcore").rglob("*.py"))]


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_of(owner: str) -> dict:
    """What a class or module of Megatron has; nothing if there is none."""
    definition = find(*owner.rsplit(".", 1))
    if definition is None:
        return {}
    return names(definition.module) if definition.node is None else members(definition)


def find_uses() -> dict[tuple[str, str], dict[str, str]]:
    """(owner, name) -> the files of megarl that need it -> kind; also listed names that Megatron lacks."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for file in FILES:
        held: dict[str, list[str]] = {}
        for place, variables in LIST["variables"].items():
            if f"megarl/{place}" in (file, str(Path(file).parent)):
                held |= {name: [OWNERS[kind] for kind in kinds.split()] for name, kinds in variables.items()}
        for use in uses_of(module_of(file), held, lambda *use: use in NAMES or use[1] in names_of(use[0])):
            known = found[use.owner, use.name]
            known[file] = use.kind if known.get(file, "uses") == "uses" else known[file]
    return found


USES = find_uses()


def sentence(files: dict[str, str]) -> str:
    """Which files of megarl need a name."""
    return ", ".join(f"{file} {kind} it" for file, kind in sorted(files.items()))


def problem_of(owner: str, name: str, expected: str | None) -> str | None:
    """What is wrong with a name of the list; None if nothing is."""
    found = names_of(owner)
    if name not in found:
        return f"{owner}.{name} is missing"
    node = found[name]
    if isinstance(node, Imported):
        definition = find(*node)
        node = definition and definition.node
    given = parameters(node) if isinstance(node, FUNCTIONS) and expected is not None else expected
    return None if given == expected else f"{owner}.{name} has the parameters ({given}), no longer ({expected})"


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=lambda part: part.rpartition(".")[2])
def test_megatron_has_the_name(owner, name):
    problem = problem_of(owner, name, NAMES[owner, name][1])
    assert problem is None, f"{problem}; {sentence(USES[owner, name])}"


def unlisted(listed: dict) -> list[str]:
    """Names that megarl needs and a list lacks."""
    needed = [f"{'.'.join(use)} is not listed; {sentence(files)}" for use, files in USES.items() if use not in listed]
    private = {file: private_names(module_of(file)) for file in FILES}
    known = {name for _, name in USES}.union(LIST["others"].split(), *(defined for defined, _ in private.values()))
    unknown = [(file, name) for file, (_, read) in private.items() for name in sorted(read - known)]
    return needed + [f"{name} is of an object that `variables` does not name; {file} uses it" for file, name in unknown]


def test_the_list_has_all_names():
    problems = unlisted(NAMES)
    assert not problems, "\n".join(problems)


def test_megarl_needs_all_names_of_the_list():
    unneeded = [f"{owner}.{name}" for owner, name in NAMES if not USES.get((owner, name))]
    assert not unneeded, "\n".join(unneeded)


# -- public names: what megarl imports and calls ------------------------------------------------------------------


def named(module: str, expression: ast.expr) -> Definition | None:
    """Megatron's definition of `name` or `module.name` in a module; None: it is not Megatron's, or missing."""
    found = resolve(module, expression.id) if isinstance(expression, ast.Name) else None
    if isinstance(expression, ast.Attribute):
        owner = named(module, expression.value)
        found = find(owner.module, expression.attr) if owner is not None and owner.node is None else None
    return found if found is not None and found.module.startswith("megatron.") else None


def takes(definition: Definition, keyword: str) -> bool:
    """Whether a function, or the constructor of a class, takes a keyword; a dataclass takes its fields."""
    function = definition.node
    if isinstance(function, ast.ClassDef):
        function = members(definition).get("__init__")
        if function is None:
            return keyword in members(definition)
    accepted = parameters(function).split(", ") if isinstance(function, FUNCTIONS) else ["**"]
    return keyword in accepted or any(name.startswith("**") for name in accepted)


def missing_in(module: str) -> Iterator[str]:
    """What a module of megarl imports from Megatron, reads of its modules or passes by keyword, and Megatron lacks."""
    for owner, name in set(imports(module).values()):
        if owner.startswith("megatron") and find(owner, name) is None and name not in names(owner):
            yield f"{owner}.{name or ''} is missing"
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = named(module, node.value)
            if owner is not None and owner.node is None and node.attr not in names(owner.module):
                yield f"{owner.module}.{node.attr} is missing"
        definition = named(module, node.func) if isinstance(node, ast.Call) else None
        for keyword in () if definition is None else node.keywords:
            if keyword.arg is not None and not takes(definition, keyword.arg):
                yield f"{definition.full_name} takes no {keyword.arg}"


IMPORTERS = [f for f in FILES if any(found.module.startswith("megatron") for found in imports(module_of(f)).values())]


@pytest.mark.parametrize("file", IMPORTERS)
def test_megatron_has_what_is_imported_and_passed(file):
    problems = {f"{problem}; {file} needs it" for problem in missing_in(module_of(file))}
    assert not problems, "\n".join(sorted(problems))


# -- the checks themselves ----------------------------------------------------------------------------------------

ENGINE = "megatron.core.inference.engines.dynamic_engine.DynamicInferenceEngine"


def test_missing_and_changed_names_are_found():
    assert problem_of(ENGINE, "step_modern", "") is None
    assert problem_of(ENGINE, "step_ancient", "") == f"{ENGINE}.step_ancient is missing"
    assert problem_of("megatron.core.no_module", "f", None) == "megatron.core.no_module.f is missing"
    assert problem_of(ENGINE, "add_request", "request_id") == (
        f"{ENGINE}.add_request has the parameters (request_id, prompt, sampling_params), no longer (request_id)"
    )


@pytest.mark.parametrize(("owner", "name", "where"), [
    (ENGINE, "step_modern", "megarl/mcore/inference/decode_loop.py overrides it"),
    (ENGINE, "_run_coroutine_sync", "megarl/mcore/inference/decode_loop.py overrides it"),
    (ENGINE, "_prefill_tokens_skipped", "megarl/mcore/inference/engine.py uses it"),
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", "megarl/mcore/device.py replaces it"),
    ("megatron.core.transformer.moe.router_replay.RouterReplay", "global_router_replay_instances",
     "megarl/mcore/moe/router.py replaces it"),
])  # fmt: skip
def test_names_that_the_list_lacks_are_found(owner, name, where):
    (found,) = unlisted({key: value for key, value in NAMES.items() if key != (owner, name)})
    assert found.startswith(f"{owner}.{name} is not listed; ") and where in found
