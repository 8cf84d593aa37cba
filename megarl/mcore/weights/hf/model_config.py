"""A folder's config.json: checked reading of its entries, with the defaults of its class."""

from collections.abc import Callable
from typing import Any

from megarl.errors import UsageError


class ModelConfig:
    """The entries of a config.json. An entry that the file omits has the default of transformers' class.

    `error` makes a UsageError of a text; `longest`: maximum length of prompt and response together, in tokens.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], longest: int, error: Callable):
        self._values, self._error, self.longest = defaults | values, error, longest
        self.names, self.defaults = frozenset(self._values), defaults

    def error(self, key: str, allowed: str) -> UsageError:
        """The error that an entry is not allowed."""
        return self._error(f"config.json: {key} {self._values.get(key)!r}: allowed is {allowed}")

    def get(self, key: str) -> Any:
        """An entry of any type; None if it is missing."""
        return self._values.get(key)

    def whole(self, *keys: str, minimum: int = 1) -> int:
        """The first of these entries that is there: a whole number, `minimum` or more."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = self.get(key)
        if type(value) is not int or value < minimum:
            raise self.error(key, "a whole number above 0" if minimum == 1 else f"a whole number of {minimum} or more")
        return value

    def number(self, key: str) -> float:
        """An entry: a number of 0 or more."""
        value = self.get(key)
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise self.error(key, "a number of 0 or more")
        return value

    def switch(self, key: str) -> bool:
        """An entry: true or false; false if it is missing."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false")
        return bool(value)

    def items(self, key: str, kind: type, what: str) -> list:
        """An entry: a list of values of one type, `what` in messages; empty if it is missing."""
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise self.error(key, f"a list of {what}")
        return value or []

    def require(self, key: str, *allowed):
        """UsageError unless an entry has one of these values, the only ones that megarl's layers compute."""
        if self.get(key) not in allowed:
            raise self.error(key, " or ".join("absent" if value is None else repr(value) for value in allowed))
