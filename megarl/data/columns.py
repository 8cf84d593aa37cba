"""Which columns of a file are which fields of a prompt: names that verl, TRL, OpenRLHF and slime use, or the user's.

A column may be one inside another: `reward_model.ground_truth`. In reinforcement learning and evaluation the columns
that are not a field become entries of `metadata`, so that rewards can read them; other programs do not read them.
"""

import dataclasses
import json
import math
import os.path
from typing import Any

from megarl.data.fields import FIELD_TYPES, check_fields, present_fields
from megarl.data.messages import THOUGHTS, content_of, message_error
from megarl.data.sources import printable
from megarl.data.tables import Table
from megarl.errors import UsageError

_VERL_ANSWER = "reward_model.ground_truth"
# What prompts are read for; evaluation reads them as reinforcement learning. LABELLED: single responses, or pairs.
RL, SFT, REWARD, LABELLED = "rl", "sft", "reward", "labelled"
# Field -> names of its column, the first that a file has counts.
_NAMES = {
    RL: {
        "prompt": ("prompt", "question", "problem", "input", "query"),
        "answer": (_VERL_ANSWER, "answer", "solution", "ground_truth", "label"),
        "task": ("task", "data_source"),
        "teacher_prompt": ("teacher_prompt",),
        "teacher": ("teacher",),
    },
    SFT: {
        "messages": ("messages", "conversations"),
        "prompt": ("prompt", "question", "problem", "input", "query"),
        "response": ("response", "completion", "output", "answer", "solution"),
        "tools": ("tools",),
        "teacher": ("teacher",),
    },
    REWARD: {
        "prompt": ("prompt", "question", "problem", "input", "query"),
        "chosen": ("chosen",),
        "rejected": ("rejected",),
        "margin": ("margin",),
        "tools": ("tools",),
    },
}  # fmt: skip
_NAMES[LABELLED] = {
    **_NAMES[REWARD], "response": ("response", "completion", "output"), "desirable": ("desirable", "label")
}  # fmt: skip
_NEEDED = {
    RL: ("prompt",), SFT: ("prompt", "response"), REWARD: ("chosen", "rejected"),
    LABELLED: ("prompt", "response", "desirable"),
}  # fmt: skip
# A JSON line with one of these is not in megarl's own fields, whatever else it has.
_FOREIGN = {name.split(".")[0] for fields in _NAMES.values() for names in fields.values() for name in names}
_FOREIGN |= {"extra_info", "ability"}
_FOREIGN -= set(FIELD_TYPES)
_SHOWN = 20  # names of columns in an error
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Columns:
    """What prompts are read for (RL, SFT, REWARD or LABELLED), and the columns that the user names, by field."""

    purpose: str = RL
    prompt: str | None = None
    answer: str | None = None
    response: str | None = None
    messages: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    desirable: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """The columns that the user names, by field."""
        values = {field: value for field, value in vars(self).items() if field != "purpose"}
        return {field: value for field, value in values.items() if value is not None}

    def are_own(self, line: bytes) -> bool:
        """Whether the first line of a JSON file is in megarl's own fields, or is meant to be, or is not an object."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return True
        if not isinstance(entry, dict):
            return True
        texts = all(not isinstance(entry.get(name), list) for name in ("response", "chosen", "rejected"))
        has_prompt = "prompt" in entry or "messages" in entry
        return not self.named and has_prompt and texts and not _FOREIGN & set(entry)


class ColumnMap:
    """Which columns of a table are fields, which become metadata, and its rows as fields."""

    def __init__(self, table: Table, columns: Columns, where: str):
        """Raises UsageError if a column that the user names does not exist, or no column is a needed field."""
        self.purpose, self._table = columns.purpose, table
        self.columns: dict[str, str] = {}  # field -> name of its column
        for field, names in _NAMES[columns.purpose].items():
            if wanted := columns.named.get(field):
                if not self._has(wanted):
                    raise UsageError(f"--{field}-column {wanted}: {where}: has no such column; {_found(table)}")
                names = (wanted,)
            # An object called task is not the name of a task, nor is one called teacher.
            is_name = field in ("task", "teacher")
            fitting = [name for name in names if self._has(name) and not (is_name and table.columns[name])]
            if fitting:
                self.columns[field] = fitting[0]
        self._choose_conversation_or_parts(columns)
        for field in () if "messages" in self.columns else _NEEDED[self._shape]:
            if field not in self.columns:
                raise UsageError(f"{where}: {_missing(field, columns.purpose)}; {_found(table)}")
        # A reward that was written for verl reads the source, too, and one may read who the teacher is.
        used = set(self.columns.values()) - {"data_source", "teacher"}
        self.extras = [name for name in table.columns if name not in used] if columns.purpose == RL else []

    @property
    def _shape(self) -> str:
        """The purpose whose fields the table has: labelled responses may be those of pairs."""
        return REWARD if self.purpose == LABELLED and "chosen" in self.columns else self.purpose

    def _has(self, name: str) -> bool:
        outer, dot, inner = name.partition(".")
        return name in self._table.columns or bool(dot) and inner.split(".")[0] in self._table.columns.get(outer, ())

    def _choose_conversation_or_parts(self, columns: Columns):
        """A conversation is whole: beside `messages` only its tools are read, unless the user names parts of it."""
        if "messages" in self.columns and not {"prompt", "response"} & set(columns.named):
            kept = ("messages", "tools", "teacher")
            self.columns = {name: self.columns[name] for name in kept if name in self.columns}
        else:
            self.columns.pop("messages", None)

    @property
    def needed(self) -> list[str]:
        """Names of the columns to read."""
        names = [name if name in self._table.columns else name.split(".")[0] for name in self.columns.values()]
        return list(dict.fromkeys([*names, *self.extras]))

    def describe(self) -> str:
        """What was recognised: `prompt from question, answer from label, metadata from level, type`."""
        parts = [f"{field} from {printable(name)}" for field, name in self.columns.items()]
        if self.extras:
            parts.append(f"metadata from {_listed(self.extras)}")
        left_out = _listed(self._table.left_out) if self.purpose == RL else ""
        return ", ".join(parts) + (f"; left out, as they hold bytes: {left_out}" if left_out else "")

    def fields(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields of a row, checked; UsageError, which begins with `where`, for a wrong one."""
        found = present_fields({field: self._value(row, name) for field, name in self.columns.items()})
        if self._table.fills_nulls:
            for field in {"prompt", "messages", "chosen", "rejected", "tools"} & set(found):
                found[field] = _without_nulls(found[field])
        try:
            for field in {"prompt", "messages"} & set(found):
                found[field] = _messages(found[field])
            if "tools" in found:
                found["tools"] = _tools(found["tools"], self.columns["tools"])
            if self.purpose == RL:
                found |= self._answer_and_metadata(found, row)
            elif "response" in found:
                found["response"] = _reply(found["response"], self.columns["response"])
            elif self._shape == REWARD:
                found |= _pair(found, has_prompt="prompt" in self.columns)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        found = present_fields(found)
        check_fields(found, where, {field: printable(name) for field, name in self.columns.items()})
        return found

    def _value(self, row: dict[str, Any], name: str) -> Any:
        if name in self._table.columns:
            return row.get(name)
        for part in name.split("."):
            row = row.get(part) if isinstance(row, dict) else None
        return row

    def _answer_and_metadata(self, found: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        answer, own = found.get("answer"), row.get("metadata")
        if isinstance(answer, float) and math.isnan(answer):
            answer = None  # what pandas and Arrow write for a number that is missing
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = _number_text(answer, self.columns["answer"])
        if isinstance(answer, list | dict) and self.columns["answer"] == _VERL_ANSWER:
            answer = None  # of a reward function that reads it in metadata["reward_model"]
        others = {name: row[name] for name in self.extras if row.get(name) is not None}
        if isinstance(own, dict):
            others = {name: value for name, value in others.items() if name != "metadata"} | own
        return {"answer": answer, "metadata": others or None}


def _without_nulls(value: Any) -> Any:
    """A value of nested columns without the names that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _tools(value: Any, column: str) -> Any:
    """Tools as objects: the list of them, or each, may be the text of JSON. None of an empty list."""
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value
        value = [json.loads(tool) if isinstance(tool, str) else tool for tool in value] if value else None
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{printable(column)} is no list of tools, nor the text of one in JSON") from None
    return value


def _messages(value: Any) -> Any:
    """Messages without the names that other rows have and they lack, and in role and content if in from and value."""
    return [_message(message) for message in value] if isinstance(value, list) else value


def _message(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    value = present_fields(value)
    if set(value) != {"from", "value"}:
        return value
    return {"role": _SPEAKERS.get(str(value["from"]), value["from"]), "content": value["value"]}


def _number_text(number: int | float, column: str) -> str:
    """`72` of 72 and of 72.0."""
    if isinstance(number, float) and not math.isfinite(number):
        raise UsageError(f"{printable(column)} is {number}; it must be a finite number")
    return str(int(number)) if isinstance(number, float) and number.is_integer() else str(number)


def _reply(value: Any, column: str) -> Any:
    """A response as text: it may be one message of the assistant."""
    value = _messages(value)
    if not isinstance(value, list):
        return value
    _check_messages(value, column)
    if [message["role"] for message in value] != ["assistant"]:
        raise UsageError(f"{printable(column)} must be text or one message of the assistant; a longer conversation "
                         "belongs in messages")  # fmt: skip
    return _answer(value[0], column)


def _check_messages(value: Any, column: str):
    if problem := message_error(value):
        raise UsageError(f"{printable(column)}: {problem}")


def _pair(found: dict[str, Any], has_prompt: bool) -> dict[str, Any]:
    """Prompt, chosen and rejected as text, of texts or conversations with or without the prompt."""
    chosen, rejected = (_messages(found.get(name)) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if has_prompt:
            return {}
        end = _shared_text(chosen, rejected)
        if not chosen[:end].strip() and chosen != rejected:
            raise UsageError("there is no prompt: chosen and rejected have no common beginning")
        return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return {}  # one is missing or of another type, which the check of the fields says
    _check_messages(chosen, "chosen")
    _check_messages(rejected, "rejected")
    if {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
        raise UsageError("the last message of chosen and of rejected must be the assistant's")
    before, prompt = chosen[:-1], found.get("prompt")
    if before != rejected[:-1]:
        raise UsageError("chosen and rejected differ before their last message")
    if before and prompt is not None and not (before == prompt or content_of(before[-1]) == prompt):
        raise UsageError("chosen and rejected do not continue the prompt")
    better, worse = _answer(chosen[-1], "chosen"), _answer(rejected[-1], "rejected")
    return {"prompt": before or prompt, "chosen": better, "rejected": worse}


def _answer(message: dict[str, Any], column: str) -> str:
    """The text of a response in a message."""
    if message.get("tool_calls") or any(map(message.get, THOUGHTS)):
        raise UsageError(f"{printable(column)}: a response cannot hold tool_calls or reasoning_content; a conversation "
                         "with them belongs in messages")  # fmt: skip
    return content_of(message)


def _shared_text(one: str, other: str) -> int:
    """Characters of the common beginning of two texts, without a space at its end, which belongs to the responses."""
    end = len(os.path.commonprefix([one, other]))  # noqa: RUF071  # of texts
    return end - 1 if end and one[end - 1] == " " else end


def _missing(field: str, purpose: str) -> str:
    names = ", ".join(_NAMES[purpose][field])
    whole = f" (or {' or '.join(_NAMES[SFT]['messages'])})" if purpose == SFT else ""
    return f"{field} is missing: known names of its column are {names}{whole}; --{field}-column names another"


def _found(table: Table) -> str:
    bytes_columns = f", and with bytes {_listed(table.left_out)}" if table.left_out else ""
    return f"the file has {_listed(list(table.columns)) or 'none'}{bytes_columns}"


def _listed(names) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + rest
