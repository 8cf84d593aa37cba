"""A folder's config.json: read by transformers' configuration class, then entry by entry with checks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHOWN = 300  # characters of an error of transformers
MAX_LAYERS = 4096  # transformers makes lists of so many entries


class ModelConfig:
    """The entries of a config.json as transformers' class has them: with its defaults and in its present form.

    `values`: of the file; `model_type`: of the class that reads them; `error` makes a UsageError of a text; `longest`:
    maximum length of prompt and response together, in tokens. UsageError if the class refuses the file.
    """

    def __init__(self, values: dict[str, Any], model_type: str, longest: int, error: Callable[[str], UsageError]):
        layers = values.get("num_hidden_layers")
        if type(layers) is int and layers > MAX_LAYERS:
            raise error(f"config.json: num_hidden_layers {layers}: allowed are at most {MAX_LAYERS}")
        self._error, self.longest = error, longest
        self._config, self._default = _read(values, model_type, error), _class(model_type)()

    def error(self, key: str, allowed: str) -> UsageError:
        """The error that an entry is not allowed."""
        return self._error(f"config.json: {key} {self.get(key)!r}: allowed is {allowed}")

    def get(self, key: str) -> Any:
        """An entry of any type; None if it is missing."""
        return getattr(self._config, key, None)

    def is_known(self, key: str) -> bool:
        """Whether transformers' class has such an entry; others have no effect there."""
        return hasattr(self._default, key)

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

    def require(self, **allowed):
        """UsageError unless entries have the only values that megarl's layers compute: one, or one of a tuple."""
        for key, value in allowed.items():
            values = value if isinstance(value, tuple) else (value,)
            if self.get(key) not in values:
                raise self.error(key, " or ".join("absent" if each is None else repr(each) for each in values))

    def check_length(self, key: str, limit: Any, why: str):
        """UsageError for an entry that limits prompt and response together to fewer tokens than the run's."""
        if type(limit) not in (int, float) or not self.longest <= limit < float("inf"):
            raise self.error(key, f"a prompt and response of {limit} tokens together at most{why}")

    def rotates_part(self) -> bool:
        """Whether models of the class may rotate a part of the channels."""
        return "partial_rotary_factor" in (self._default.rope_parameters or {})


def _class(model_type: str) -> "type[PreTrainedConfig]":
    from transformers import CONFIG_MAPPING, logging  # takes a second of start-up

    logging.set_verbosity_error()  # of entries that it reads otherwise than they are written
    return CONFIG_MAPPING[model_type]


def _with_floats(value: Any) -> Any:
    """The same with floats that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        is_float = value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN")
        return float(value["__float__"]) if is_float else {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _read(values: dict[str, Any], model_type: str, error: Callable[[str], UsageError]) -> "PreTrainedConfig":
    try:
        return _class(model_type).from_dict(_with_floats(values) | {"model_type": model_type})
    except Exception as problem:  # whatever a wrong file raises in there
        text = " ".join(str(problem).split())[:SHOWN] or type(problem).__name__
        raise error(f"config.json: transformers cannot read it: {text}") from None
