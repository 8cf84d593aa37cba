"""Names of modules and classes of megarl and Megatron, read from their source.

Megatron is not imported for it: megarl replaces some names at import, which would hide that they are missing, and a
release without a name may fail to import.
"""

import ast
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Imported(NamedTuple):
    """What an import binds to a name."""

    module: str
    name: str | None  # None: the module itself


class Definition(NamedTuple):
    """A statement that defines a name, and its module."""

    module: str
    node: ast.stmt | None  # None: the module itself

    @property
    def full_name(self) -> str:
        return self.module if self.node is None else f"{self.module}.{self.node.name}"


@functools.cache
def _path(module: str) -> Path | None:
    package, *rest = module.split(".")
    if package not in ("megarl", "megatron"):
        return None
    paths = [Path(folder, *rest) for folder in importlib.util.find_spec(package).submodule_search_locations]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next(filter(Path.exists, files), None)


@functools.cache
def tree(module: str) -> ast.Module:
    """The syntax of a module; empty if there is no such module."""
    path = _path(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse("" if path is None else path.read_text())


@functools.cache
def nodes(module: str) -> list[ast.AST]:
    """All nodes of a module's syntax."""
    return list(ast.walk(tree(module)))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those in branches, without those in functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What an assignment assigns to; nothing for other statements."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _imports_of(module: str, node: ast.stmt) -> dict[str, Imported]:
    if isinstance(node, ast.Import):
        bound = [(alias.asname or alias.name.split(".")[0], alias) for alias in node.names]
        return {name: Imported(alias.name if alias.asname else name, None) for name, alias in bound}
    if not isinstance(node, ast.ImportFrom):
        return {}
    is_package = (_path(module) or Path()).name == "__init__.py"
    package = module.split(".")[: module.count(".") + 1 - node.level + is_package] if node.level else []
    source = ".".join([*package, *filter(None, [node.module])])
    return {alias.asname or alias.name: Imported(source, alias.name) for alias in node.names}


@functools.cache
def names(module: str) -> dict[str, ast.stmt | Imported]:
    """The names of a module."""
    found: dict[str, ast.stmt | Imported] = {}
    for node in _statements(tree(module).body):
        found |= _imports_of(module, node)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found[node.name] = node
        found |= {target.id: node for target in _targets(node) if isinstance(target, ast.Name)}
    return found


@functools.cache
def imports(module: str) -> dict[str, Imported]:
    """What a module imports, also in its functions, by name."""
    found: dict[str, Imported] = {}
    for node in nodes(module):
        found |= _imports_of(module, node)
    return found


def find(module: str, name: str | None) -> Definition | None:
    """Where a name of a module is defined, followed through imports; None: missing, or in another package."""
    if name is None:
        return Definition(module, None) if _path(module) else None
    found = names(module).get(name)
    if isinstance(found, Imported) and found != (module, name):  # a package may import its own modules
        return find(*found)
    if found is None or isinstance(found, Imported):
        return find(f"{module}.{name}", None)
    return Definition(module, found)


@functools.cache
def resolve(module: str, name: str) -> Definition | None:
    """As `find`, for a name in any function of the module."""
    return find(*imports(module).get(name, (module, name)))


def bases(definition: Definition) -> list[Definition]:
    """The direct base classes that megarl or Megatron defines."""
    known = [find(definition.module, base.id) for base in definition.node.bases if isinstance(base, ast.Name)]
    return [base for base in known if base is not None and isinstance(base.node, ast.ClassDef)]


@functools.cache
def own_members(definition: Definition) -> dict[str, ast.AST]:
    """What a class itself defines: methods, fields, and attributes that its methods set or register."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(definition.node):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self":
                found[target.attr] = node
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("register_buffer", "register_parameter"):
            found[getattr(node.args[0], "value", "")] = node
    for node in _statements(definition.node.body):
        if isinstance(node, FUNCTIONS):
            found[node.name] = node
        found |= {target.id: node for target in _targets(node) if isinstance(target, ast.Name)}
    return found


@functools.cache
def members(definition: Definition) -> dict[str, ast.AST]:
    """What a class and its bases define."""
    found: dict[str, ast.AST] = {}
    for base in reversed(bases(definition)):
        found |= members(base)
    return found | own_members(definition)


def parameters(function: ast.AST) -> str:
    """Names of a function's parameters without `self`, in order."""
    a = function.args
    found = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    found += [f"*{a.vararg.arg}"] if a.vararg else []
    found += [arg.arg for arg in a.kwonlyargs]
    found += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return ", ".join(found[1:] if found[:1] == ["self"] else found)
