"""Values of Arrow columns as plain JSON types, as `datasets` gives them back. A type without such a form is refused.

JSON is text in storage, as an extension type or by the features that `datasets` writes into a schema. A reader without
an extension type sees its storage and its name in the field's metadata, at every depth.
"""

import datetime
import decimal
import json
import re
from collections.abc import Callable
from typing import Any

from megarl.data.sources import printable
from megarl.errors import UsageError

Converter = Callable[[Any], Any]
_JSON = "arrow.json"
_AS_STORED = ("arrow.bool8", "datasets.features.features.Array")  # beginnings of names; the latter are lists of lists
_EXTENSION, _FEATURES = b"ARROW:extension:name", b"huggingface"
# Texts that `datasets` stores without quotes in JSON, since its parser reads them; no writer spells a number so.
_TEXT_OF_NUMBER = re.compile(r"-?(0\d+(\.\d+)?|\d+\.\d+0)")


class Struct(dict):
    """An object of a column of objects: it has the names of all rows' objects, null where its own row has none."""


class TimeText(str):
    """A point in time as ISO 8601. How the text was written that a reader of JSON took for a time is lost."""


def features_of(schema: Any) -> dict[str, Any]:
    """The features that `datasets` has written into a schema, by column; none if they cannot be read."""
    try:
        found = json.loads((schema.metadata or {})[_FEATURES])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Converters:
    """Makes the converters of a file's columns."""

    def __init__(self, arrow: Any, where: str):
        self._arrow, self._where = arrow, where

    def of(self, field: Any, feature: Any, path: str) -> Converter:
        """The function that makes plain JSON types of a field's values: structs become `Struct`, maps objects.

        It raises ValueError for a text that should be JSON and is not.

        `feature`: of the field, as `datasets` describes it; None if it does not. `path`: names the field in errors.
        UsageError: a type that has no form in JSON, or an unknown extension type.
        """
        kind, name = field.type, _extension_of(self._arrow, field)
        storage = kind.storage_type if isinstance(kind, self._arrow.BaseExtensionType) else kind
        if is_json(self._arrow, field, feature):
            return _present(str if isinstance(feature, dict) and feature.get("decode") is False else self._json(path))
        if name == "arrow.uuid":
            return _present(str)
        if name is not None and not name.startswith(_AS_STORED):
            raise UsageError(
                f"{self._where}: the column {printable(path)} has the extension type {printable(name)}, which is not "
                "read; save it as a plain type, or leave it out"
            )
        return self._of_type(storage, feature, path)

    def _of_type(self, kind: Any, feature: Any, path: str) -> Converter:
        types = self._arrow.types
        if types.is_dictionary(kind):
            return self.of(self._arrow.field("", kind.value_type), feature, path)
        if types.is_struct(kind):
            fields = [kind.field(i) for i in range(kind.num_fields)]
            of_struct = feature if isinstance(feature, dict) else {}
            inner = {each.name: self.of(each, of_struct.get(each.name), f"{path}.{each.name}") for each in fields}
            return _present(lambda value: Struct({name: inner[name](each) for name, each in value.items()}))
        if types.is_map(kind):
            key = kind.key_type
            if not (_is_text(types, key) or types.is_integer(key)):
                raise self._refusal(path, kind)
            item = self.of(kind.item_field, None, path)
            return _present(lambda value: {str(key): item(each) for key, each in value})
        if types.is_nested(kind) and not types.is_union(kind):  # lists of all kinds
            if isinstance(feature, list):
                inner = feature[0] if feature else None
            else:
                inner = feature.get("feature") if isinstance(feature, dict) else None
            item = self.of(kind.value_field, inner, f"{path}[]")
            return _present(lambda value: [item(each) for each in value])
        if holds_bytes(self._arrow, kind):  # of images: no other column of bytes is asked for
            return _present(bytes)
        if types.is_float32(kind) or types.is_float16(kind):
            return _present(_short_float("float32" if types.is_float32(kind) else "float16"))
        for test, convert in (
            (types.is_decimal, _number),
            (types.is_timestamp, lambda value: TimeText(value.isoformat())),
            (lambda kind: types.is_date(kind) or types.is_time(kind), lambda value: value.isoformat()),
            (types.is_duration, datetime.timedelta.total_seconds),
        ):
            if test(kind):
                return _present(convert)
        plain = types.is_null, types.is_boolean, types.is_integer, types.is_float64
        if _is_text(types, kind) or any(test(kind) for test in plain):
            return lambda value: value
        raise self._refusal(path, kind)

    def _json(self, path: str) -> Converter:
        def value_of(text: str) -> Any:
            if _TEXT_OF_NUMBER.fullmatch(text):
                return text
            try:
                # As `datasets`: what is no number is no value.
                return json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))
            except (ValueError, RecursionError):
                raise ValueError(f"{path} says that it is JSON, but a text in it is none: {text[:60]!r}") from None

        return value_of

    def _refusal(self, path: str, kind: Any) -> UsageError:
        return UsageError(
            f"{self._where}: the column {printable(path)} has the type {printable(str(kind))}, which is not read; save "
            "it as another type, or leave it out"
        )


def is_json(arrow: Any, field: Any, feature: Any) -> bool:
    """Whether a field's texts are JSON, by its type or by its feature."""
    name, is_feature = _extension_of(arrow, field), isinstance(feature, dict) and feature.get("_type") == "Json"
    return name == _JSON or name is None and is_feature and _is_text(arrow.types, field.type)


def holds_bytes(arrow: Any, kind: Any) -> bool:
    """Whether a type has values that are bytes at some depth."""
    types = arrow.types
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    is_nested = types.is_nested(kind) and not types.is_dictionary(kind)
    inner = [kind.field(i).type for i in range(kind.num_fields)] if is_nested else []
    return any(test(kind) for test in tests) or any(holds_bytes(arrow, each) for each in inner)


def _extension_of(arrow: Any, field: Any) -> str | None:
    if isinstance(field.type, arrow.BaseExtensionType):
        return field.type.extension_name
    name = (field.metadata or {}).get(_EXTENSION)
    return None if name is None else name.decode("utf-8", "replace")


def _present(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)


def _is_text(types: Any, kind: Any) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _short_float(kind: str) -> Converter:
    """Numbers of few bits as the shortest text that reads back gives them, not as fp64 continues their bits."""
    import numpy  # flags import this module, and need no numbers

    return lambda value: float(str(getattr(numpy, kind)(value)))


def _number(value: decimal.Decimal) -> int | float | str:
    """A decimal as the number that is equal to it, or its text if there is none."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)
