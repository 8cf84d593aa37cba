"""Which columns of a file are which fields of a prompt: names that verl, TRL, OpenRLHF and slime use, or the user's.

A column may be one inside another: `reward_model.ground_truth`. In reinforcement learning and evaluation the columns
that are not a field become entries of `metadata`, so that rewards can read them; other programs do not read them. The
names are also those of ms-swift, LLaMA-Factory, axolotl and NeMo-RL.
"""

import dataclasses
import json
import math
import os.path
from collections import Counter
from typing import Any

from megarl.data.arrow_values import Struct, TimeText
from megarl.data.images import forms
from megarl.data.messages import THOUGHTS, content_of, message_error
from megarl.data.prompt import FIELD_TYPES, LABELLED, REWARD, RL, SFT, check_fields, present_fields
from megarl.data.sources import printable
from megarl.data.tables import Table
from megarl.errors import UsageError

_SHOWN = 20  # names of columns in an error
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


# -- names of columns in published files -------------------------------------------------------------------------------


VERL_ANSWER = "reward_model.ground_truth"
# Columns that have a part in any prompt: all programs read them. The text of `system` becomes the first message.
_PROMPT = {
    "prompt": ("prompt", "question", "problem", "instruction", "input", "query"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
}
# Field -> names of its column, the first that a file has counts.
NAMES = {
    RL: {
        **_PROMPT,
        "answer": (VERL_ANSWER, "answer", "solution", "ground_truth", "label"),
        "task": ("task", "data_source"),
        "environment": ("environment",),
        "teacher_prompt": ("teacher_prompt",),
        "teacher": ("teacher",),
    },
    SFT: {
        **_PROMPT,
        "messages": ("messages", "conversations"),
        "response": ("response", "completion", "output", "answer", "solution"),
        "teacher": ("teacher",),
    },
    REWARD: {**_PROMPT, "chosen": ("chosen",), "rejected": ("rejected",), "margin": ("margin",)},
}
_LABELLED = {"response": ("response", "completion", "output"), "desirable": ("desirable", "label")}
NAMES[LABELLED] = NAMES[REWARD] | _LABELLED
NEEDED = {
    RL: ("prompt",),
    SFT: ("prompt", "response"),
    REWARD: ("chosen", "rejected"),
    LABELLED: ("prompt", "response", "desirable"),
}
# Fields that are the name of something: an object or a list in such a column is another thing.
NAME_FIELDS = frozenset(("task", "teacher", "environment"))
# Columns of fields that are metadata, too: rewards written for verl or TRL read the first two, and one may read who the
# teacher is, or where a line is played.
ALSO_METADATA = frozenset(("data_source", "tools", "teacher", "environment"))

_OF_ALL_LINES = "--chat-template-kwargs holds for all lines"
# Columns with which another framework shows the policy a different text -> what to do about it.
UNREAD = {
    "chat_template_kwargs": _OF_ALL_LINES,
    "enable_thinking": _OF_ALL_LINES,
    "history": "write the earlier turns as messages",
    "context": "write it into the prompt",
    **dict.fromkeys(forms.NAMES, "the model has no vision tower, or no chat template"),
    **dict.fromkeys(("videos", "video", "audios", "audio", "objects"), "megarl reads text and images"),
}
# The same, of responses in a column of their own: thoughts that stand beside them.
UNREAD_THOUGHTS = dict.fromkeys(THOUGHTS, "write the thoughts into the response, or as messages")
# Two columns that some programs join to one prompt -> what to do about the one that is not read.
JOINED = ("instruction", "input")
UNREAD_PART = "write both into one column"
OWN_SYSTEM = "the messages begin with one of the system"

# A JSON line with one of these is not in megarl's own fields, whatever else it has.
FOREIGN = {name.split(".")[0] for fields in NAMES.values() for names in fields.values() for name in names}
FOREIGN |= {"extra_info", "ability", *UNREAD}
FOREIGN -= set(FIELD_TYPES)


# -- columns of a file -------------------------------------------------------------------------------------------------


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
    images: str | None = None

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
        return not self.named and has_prompt and texts and not FOREIGN & set(entry)


class ColumnMap:
    """Which columns of a table are fields, which become metadata, and its rows as fields."""

    def __init__(self, table: Table, columns: Columns, where: str, images: forms.ImageTable | None = None):
        """Raises UsageError if a column that the user names does not exist, or no column is a needed field. `images`:
        of the files; None: images are not read."""
        self.purpose, self._table, self._images = columns.purpose, table, images
        self.columns: dict[str, str] = {}  # field -> name of its column
        for field, names in (NAMES[columns.purpose] | ({} if images is None else {"images": forms.NAMES})).items():
            if wanted := columns.named.get(field):
                if not self._has(wanted):
                    raise UsageError(f"--{field}-column {wanted}: {where}: has no such column; {_found(table)}")
                names = (wanted,)
            fitting = [name for name in names if self._has(name)]
            if field in NAME_FIELDS:  # an object called task is not a task's name
                fitting = [name for name in fitting if not table.names_in(name)]
            if fitting:
                self.columns[field] = fitting[0]
        self._choose_conversation_or_parts(columns)
        for field in () if "messages" in self.columns else NEEDED[self._shape]:
            if field not in self.columns:
                raise UsageError(f"{where}: {_missing(field, columns.purpose)}; {_found(table)}")
        self._images_of = forms.columns_of(self.columns.get("images"), columns.images is not None, self._has)
        used = {*self.columns.values(), *self._images_of}
        is_metadata = columns.purpose == RL
        self.extras = [name for name in table.columns if is_metadata and name not in used - ALSO_METADATA]
        self._unread = self._find_unread()
        self.unread: Counter[str] = Counter()  # rows in which a column that changes the prompt is not read, by name
        self.rows = 0

    @property
    def _shape(self) -> str:
        """The purpose whose fields the table has: labelled responses may be those of pairs."""
        return REWARD if self.purpose == LABELLED and "chosen" in self.columns else self.purpose

    def _has(self, name: str) -> bool:
        outer, dot, inner = name.partition(".")
        if self._images is not None and name in self._table.left_out:
            return True  # images, or messages with images inside
        return name in self._table.columns or bool(dot) and inner.split(".")[0] in self._table.names_in(outer)

    def _find_unread(self) -> dict[str, str]:
        has_response = self.purpose != RL and "messages" not in self.columns
        found = UNREAD | (UNREAD_THOUGHTS if has_response else {})
        used, known = set(self.columns.values()), {*self._table.columns, *self._table.left_out}
        if len(used & set(JOINED)) == 1:
            found = found | dict.fromkeys(JOINED, UNREAD_PART)
        found = {name: cure for name, cure in found.items() if name in known - used}
        return found | {self.columns["system"]: OWN_SYSTEM} if "system" in self.columns else found

    def _choose_conversation_or_parts(self, columns: Columns):
        """A conversation is whole: beside `messages` only what no message says, unless the user names parts of it."""
        if "messages" in self.columns and not {"prompt", "response"} & set(columns.named):
            kept = ("messages", "system", "tools", "teacher", "images")
            self.columns = {name: self.columns[name] for name in kept if name in self.columns}
        else:
            self.columns.pop("messages", None)

    @property
    def needed(self) -> list[str]:
        """Names of the columns to read."""
        whole = {*self._table.columns, *self._table.left_out}
        names = [*self.columns.values(), *self._images_of]
        names = [name if name in whole else name.split(".")[0] for name in names]
        unread = [name for name in self._unread if name in self._table.columns]  # a nested column is read above
        return list(dict.fromkeys([*names, *self.extras, *unread]))

    def describe(self) -> str:
        """What was recognised: `prompt from question, answer from label, metadata from level, type`."""
        used = {field: (name,) for field, name in self.columns.items()} | {"images": self._images_of}
        parts = [f"{field} from {_listed(names)}" for field, names in used.items() if names]
        if self.extras:
            parts.append(f"metadata from {_listed(self.extras)}")
        read = {*self.columns.values(), *self._images_of}
        unread = [name for name in self._table.left_out if name not in read]
        left_out = _listed(unread) if self.purpose == RL else ""
        return ", ".join(parts) + (f"; left out, as they hold bytes: {left_out}" if left_out else "")

    def warnings(self) -> list[str]:
        """A line about each column that changes the prompt and is not read, after the rows were."""
        found = [(name, self.rows if name in self._table.left_out else self.unread[name]) for name in self._unread]
        return [
            f"{name} changes the prompt and is not read, in {count:,} of {self.rows:,} rows; {self._unread[name]}"
            for name, count in found
            if count
        ]

    def fields(self, row: dict[str, Any], where: str, path: str = "") -> dict[str, Any]:
        """The fields of a row, checked; UsageError, which begins with `where`, for a wrong one. `path`: of its file."""
        self.rows += 1
        unread = self._unread.keys() - self.columns.values()
        self.unread.update(name for name in unread if _without_nulls(row.get(name)) not in (None, "", [], {}))
        found = present_fields({field: self._value(row, name) for field, name in self.columns.items()})
        for field in {"prompt", "messages", "chosen", "rejected", "tools"} & set(found):
            found[field] = _without_nulls(found[field])
        try:
            for field, value in found.items():
                if isinstance(value, TimeText):
                    raise UsageError(
                        f"{printable(self.columns[field])} is a time; what its text was is not known: save it as text"
                    )
            given = found.pop("images", None)
            if len(self._images_of) > 1:
                given = forms.numbered({name: self._value(row, name) for name in self._images_of})
            for field in {"prompt", "messages"} & set(found):
                found[field] = _messages(found[field])
            if self._images is not None:
                found |= self._images.line(found, _without_nulls(given), path)
            numbers = found.pop("images", None)
            if "tools" in found:
                found["tools"] = _tools(found["tools"], self.columns["tools"])
            if self.purpose == RL:
                found |= self._answer_and_metadata(found, row)
            elif "response" in found:
                found["response"] = _reply(found["response"], self.columns["response"])
            elif self._shape == REWARD:
                found |= _pair(found, has_prompt="prompt" in self.columns)
            found |= self._with_system(found, found.pop("system", None))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        found = present_fields(found)
        check_fields(found, where, {field: printable(name) for field, name in self.columns.items()})
        return found | ({} if numbers is None else {"images": numbers})

    def _value(self, row: dict[str, Any], name: str) -> Any:
        if name in self._table.columns or name in self._table.left_out:
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
        if isinstance(answer, list | dict) and self.columns["answer"] == VERL_ANSWER:
            answer = None  # of a reward function that reads it in metadata["reward_model"]
        others = {name: row[name] for name in self.extras if row.get(name) is not None}
        if isinstance(own, dict):
            others = {name: value for name, value in others.items() if name != "metadata"} | own
        return {"answer": answer, "metadata": others or None}

    def _with_system(self, found: dict[str, Any], system: Any) -> dict[str, Any]:
        """The prompt or the messages after the text of the system's column; their own message of the system wins, as
        in ms-swift and LLaMA-Factory."""
        column = self.columns.get("system", "")
        if not isinstance(system, str | None):
            raise UsageError(f"{printable(column)} must be a string, not {type(system).__name__}")
        field = "messages" if "messages" in found else "prompt"
        messages = found.get(field)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not system or not isinstance(messages, list) or message_error(messages):
            return {}
        if messages[0]["role"] in ("system", "developer"):
            self.unread[column] += content_of(messages[0]) != system
            return {}
        return {field: [{"role": "system", "content": system}, *messages]}


def _without_nulls(value: Any) -> Any:
    """A value without the names that only other rows' objects have; a null inside JSON stays."""
    if isinstance(value, dict):
        is_filled = isinstance(value, Struct)
        return {name: _without_nulls(inner) for name, inner in value.items() if not (is_filled and inner is None)}
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
    if isinstance(number, float) and not math.isfinite(number):
        raise UsageError(f"{printable(column)} is {number}; it must be a finite number")
    return str(int(number)) if isinstance(number, float) and number.is_integer() else str(number)


def _reply(value: Any, column: str) -> Any:
    """A response as text: it may be one message of the assistant."""
    value = _messages(value)
    if not isinstance(value, list):
        return value
    if problem := message_error(value):
        raise UsageError(f"{printable(column)}: {problem}")
    if [message["role"] for message in value] != ["assistant"]:
        what = "text or one message of the assistant; a longer conversation belongs in messages"
        raise UsageError(f"{printable(column)} must be {what}")
    return _answer(value[0], column)


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
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if problem := message_error(value):
            raise UsageError(f"{name}: {problem}")
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
    if message.get("tool_calls") or any(map(message.get, THOUGHTS)):
        what = "tool_calls or reasoning_content; a conversation with them belongs in messages"
        raise UsageError(f"{printable(column)}: a response cannot hold {what}")
    return content_of(message)


def _shared_text(one: str, other: str) -> int:
    """Characters of the common beginning of two texts, without a space at its end, which belongs to the responses."""
    end = len(os.path.commonprefix([one, other]))  # noqa: RUF071  # of texts
    return end - 1 if end and one[end - 1] == " " else end


def _missing(field: str, purpose: str) -> str:
    names = ", ".join(NAMES[purpose][field])
    whole = f" (or {' or '.join(NAMES[SFT]['messages'])})" if purpose == SFT else ""
    return f"{field} is missing: known names of its column are {names}{whole}; --{field}-column names another"


def _found(table: Table) -> str:
    bytes_columns = f", and with bytes {_listed(table.left_out)}" if table.left_out else ""
    return f"the file has {_listed(list(table.columns)) or 'none'}{bytes_columns}"


def _listed(names) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + rest
