"""Prompt files: JSON lines, checked whole before any work starts.

One object per line: `prompt` (non-empty string) and, where wanted, `answer` (string, the reference answer),
`task` (string), `metadata` (object, what a verifier needs) and `response` (string, what supervised training imitates).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError

_FIELD_TYPES: dict[str, tuple[type, str]] = {
    "prompt": (str, "a string"),
    "answer": (str, "a string"),
    "task": (str, "a string"),
    "metadata": (dict, "an object"),
    "response": (str, "a string"),
}


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file; `index` counts the prompts from 0."""

    index: int
    prompt: str
    answer: str | None = None
    task: str | None = None
    metadata: dict[str, Any] | None = None
    response: str | None = None


class PromptSet:
    """The prompts of one file, in file order."""

    def __init__(self, prompts: list[Prompt], path: str, flag: str):
        self._prompts = prompts
        self.path = path
        self.flag = flag

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def where(self, index: int) -> str:
        """`--prompts data/train.jsonl:17`, to open an error message about prompt `index`."""
        return f"{self.flag} {self.path}:{index + 1}"

    def encode(self, tokenizer: Tokenizer, max_prompt_length: int) -> list[list[int]]:
        """Token ids of every prompt (no BOS, no EOS), each of 1 to `max_prompt_length` tokens, or UsageError."""
        encoded = []
        for prompt in self._prompts:
            ids = tokenizer.encode(prompt.prompt)
            if not ids:
                raise UsageError(f"{self.where(prompt.index)}: the prompt becomes no token at all")
            if len(ids) > max_prompt_length:
                raise UsageError(
                    f"{self.where(prompt.index)}: the prompt has {len(ids)} tokens; "
                    f"--max-prompt-length allows {max_prompt_length}"
                )
            encoded.append(ids)
        return encoded


def load_prompts(path: str, flag: str = "--prompts") -> PromptSet:
    """Read and check every line of a prompt file; `flag` is the option that named it, for the messages.

    Blank lines may follow the last prompt. Raises UsageError with the line number for the first bad line, and for a
    file that is missing, not UTF-8, or without prompts.
    """
    lines = _read_text(path, flag).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UsageError(f"{flag} {path}: the file holds no prompt")
    # One line, one prompt: line number = index + 1, which `PromptSet.where` relies on.
    prompts = [Prompt(index=i, **_parse_line(line, f"{flag} {path}:{i + 1}")) for i, line in enumerate(lines)]
    return PromptSet(prompts, path, flag)


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from None


def _parse_line(line: str, where: str) -> dict[str, Any]:
    if not line.strip():
        raise UsageError(f"{where}: blank line between prompts; expected one JSON object per line")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: malformed JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected a JSON object, not {type(entry).__name__}")
    unknown = sorted(set(entry) - set(_FIELD_TYPES))
    if unknown:
        raise UsageError(
            f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(_FIELD_TYPES)} "
            "(anything else belongs inside metadata)"
        )
    # A null is the same as leaving the field out.
    fields = {name: value for name, value in entry.items() if value is not None}
    for name, value in fields.items():
        _check_field(name, value, where)
    if not fields.get("prompt", "").strip():
        raise UsageError(f"{where}: prompt is {'empty' if 'prompt' in fields else 'missing'}")
    return fields


def _check_field(name: str, value: Any, where: str) -> None:
    kind, kind_name = _FIELD_TYPES[name]
    if not isinstance(value, kind):
        raise UsageError(f"{where}: {name} must be {kind_name}, not {type(value).__name__}")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{where}: {name} holds half of a surrogate pair (\\ud800-\\udfff)") from None
