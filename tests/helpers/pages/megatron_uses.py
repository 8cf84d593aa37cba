"""What megarl takes from Megatron's classes and modules besides what it imports and calls, found in its syntax."""

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.helpers.pages.python_source import FUNCTIONS, Definition, bases, nodes, own_members, resolve


class Use(NamedTuple):
    """A name of Megatron that a file of megarl needs."""

    owner: str  # full name of the class or module
    name: str
    kind: str  # "overrides", "replaces" or "uses"


def _bases_in_megatron(definition: Definition) -> list[Definition]:
    """Megatron's classes that a class of megarl extends, itself or through others of megarl."""
    found = []
    for base in bases(definition):
        found += [base] if base.module.startswith("megatron.") else _bases_in_megatron(base)
    return found


def _members_of_megarl(definition: Definition) -> set[str]:
    inherited = [_members_of_megarl(base) for base in bases(definition) if base.module.startswith("megarl.")]
    return set(own_members(definition)).union(*inherited)


def _is_own(value: ast.expr) -> bool:
    """Whether an expression is `self` or `super()`."""
    return getattr(value, "id", None) == "self" or getattr(getattr(value, "func", None), "id", None) == "super"


def _uses_of_class(definition: Definition, has: Callable[[str, str], bool]) -> Iterator[Use]:
    """What a subclass of Megatron's classes overrides, sets, and reads of itself."""
    own = _members_of_megarl(definition)
    read = {node.attr for node in ast.walk(definition.node) if isinstance(node, ast.Attribute) and _is_own(node.value)}
    for base in _bases_in_megatron(definition):
        for name, node in own_members(definition).items():
            if has(base.full_name, name) and not name.startswith("__"):
                yield Use(base.full_name, name, "overrides" if isinstance(node, FUNCTIONS) else "uses")
        for name in read - own:
            if has(base.full_name, name):
                yield Use(base.full_name, name, "uses")


def uses_of(module: str, variables: dict[str, list[str]], has: Callable[[str, str], bool]) -> Iterator[Use]:
    """What a module of megarl takes from Megatron.

    Args:
        variables: what holds objects of Megatron -> full names of their possible classes: a variable, or an attribute.
        has: whether a class or module, by its full name, has a name.
    """
    for node in nodes(module):
        if isinstance(node, ast.ClassDef):
            yield from _uses_of_class(Definition(module, node), has)
        if not isinstance(node, ast.Attribute):
            continue
        held = getattr(node.value, "attr", getattr(node.value, "id", None)) or ast.unparse(node.value)
        yield from (Use(owner, node.attr, "uses") for owner in variables.get(held, ()) if has(owner, node.attr))
        definition = resolve(module, node.value.id) if isinstance(node.value, ast.Name) else None
        if definition is not None and definition.module.startswith("megatron."):
            if isinstance(node.ctx, ast.Store):
                yield Use(definition.full_name, node.attr, "replaces")
            elif node.attr.startswith("_"):
                yield Use(definition.full_name, node.attr, "uses")


def private_names(module: str) -> tuple[set[str], set[str]]:
    """Names with a leading underscore that a module defines or imports, and those of attributes that it reads."""
    defined, read = set(), set()
    for node in nodes(module):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            defined.add(getattr(node, "id", getattr(node, "attr", "")))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            read.add(node.attr)
    return defined, read
