"""The fields of requests in the type definitions of clients' packages, with values of their types."""

import collections.abc
import types
import typing
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict  # openai's are of this package

MAX_DEPTH = 4  # of types in types
_PLAIN: dict[Any, list[Any]] = {bool: [True, False], int: [1], float: [0.5], str: ["x"], types.NoneType: [None]}


def fields_of(kind: Any) -> dict[str, list[Any]]:
    """Values of each field of a TypedDict."""
    return {name: samples(annotation) for name, annotation in get_type_hints(kind, include_extras=True).items()}


def samples(kind: Any, depth: int = 0) -> list[Any]:
    """Values of a type: each literal, a value of each part of a union, an empty list and one with an item."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN or depth > MAX_DEPTH:
        return _PLAIN.get(kind, [])
    if origin is Literal:
        return list(arguments)
    if origin in (Union, types.UnionType):
        return [value for each in arguments for value in samples(each, depth + 1)]
    if origin in (typing.Annotated, Required, NotRequired):
        return samples(arguments[0], depth)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return [{}, {"a": "b"}]
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return [[], *([value] for value in samples(arguments[0], depth + 1)[:3])]
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = {name: samples(hints[name], depth + 1)[0] for name in sorted(kind.__required_keys__)}
        others = {name: samples(hint, depth + 1)[:1] for name, hint in hints.items() if name not in needed}
        return [needed, *({**needed, name: value} for name, values in others.items() for value in values)]
    return ["x"]  # of any type
