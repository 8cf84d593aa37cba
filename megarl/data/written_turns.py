"""What a policy writes of an assistant's turn, from the turn's message: text after the opening, up to an end token.

Published templates differ: a turn may end with the token with which the next message begins (GLM), and an opening may
begin thoughts that the template does not show of a turn (DeepSeek R1).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.chat import ChatTemplate
from megarl.data.message_forms import CLOSE, OPEN
from megarl.data.messages import tool_call
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError

USER = {"role": "user", "content": "a"}
RESULT = {"role": "tool", "content": "a", "tool_call_id": "call00000", "name": "f"}
_ANSWER = {"role": "assistant", "content": "a"}
_CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call("call00000", "f", {})]}


def end_of_turn(tokenizer: Tokenizer, rendered: str, start: int) -> int | None:
    """Where the first end token after `start` ends; None if there is none. Only special tokens count: their strings are
    marked in contents, so the one that is found is the template's.
    """
    special = [token for token in tokenizer.end_tokens if token in tokenizer.special]
    found = re.compile("|".join(map(re.escape, special)) or "(?!)").search(rendered, start)
    return None if found is None else found.end()


def end_of_next(tokenizer: Tokenizer, longer: str, alone: str) -> int | None:
    """Where the token with which the next message begins ends in `longer`, which begins with `alone`, the conversation
    up to a turn; None if that is no end token. It may end the turn (GLM)."""
    end = end_of_turn(tokenizer, longer, len(alone))
    return end if longer[len(alone) : end].strip() in tokenizer.end_tokens else None


def written_turn(
    template: ChatTemplate,
    opened: str,
    before: Sequence[Mapping[str, Any]],
    turn: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """The text that the policy writes of `turn` after the rendered messages `before` with their opening, `opened`. It
    ends with an end token. UsageError for a template that begins the turn otherwise than it opens it, or that ends it
    without such a token.
    """
    shown = _after_opening(template, opened, template.render([*before, turn], tools=tools), turn)
    end_tokens = template.tokenizer.end_tokens
    # Special tokens in contents are marked, so this end is the template's.
    found = re.compile("|".join(map(re.escape, end_tokens))).search(shown)
    return shown + _closing(template, "tool_calls" in turn) if found is None else shown[: found.end()]


def thoughts_of(turn: Mapping[str, Any]) -> str:
    """The thoughts of a turn, of a field of their own or at the beginning of its content; "" if it has none."""
    thoughts = turn.get("reasoning_content") or ""
    if not thoughts and CLOSE in turn["content"]:
        thoughts = turn["content"].split(CLOSE)[0].split(OPEN)[-1]
    return thoughts.strip()


def _after_opening(template: ChatTemplate, opened: str, whole: str, turn: Mapping[str, Any]) -> str:
    """What follows the opening in `whole`, the rendered conversation with the turn, as the policy would write it."""
    if whole.startswith(opened):
        return whole[len(opened) :]
    at = opened.rfind(OPEN)
    if opened.rstrip().endswith(OPEN) and whole.startswith(opened[:at]):
        rest = whole[at:]
        if rest.startswith(OPEN):  # with other white space after it
            return rest.removeprefix(OPEN)
        return f"{template.marked(thoughts_of(turn))}\n{CLOSE}\n\n{rest.lstrip()}"
    said = "the rendered conversation does not begin with its rendered prompt"
    if opened.rstrip().endswith(CLOSE) and thoughts_of(turn):
        said = "a turn with thoughts follows an opening that ends them; --chat-template-kwargs may switch them on"
    raise UsageError(f"{template.flag}: {said}")


@functools.lru_cache(maxsize=16)
def _closing(template: ChatTemplate, has_calls: bool) -> str:
    """The text up to the token that ends a turn, if that is the beginning of the next message: a result, or a user's.
    UsageError if no end token does.
    """
    turn, following = (_CALL, RESULT) if has_calls else (_ANSWER, USER)
    alone, longer = template.render([USER, turn]), template.render([USER, turn, following])
    end = end_of_next(template.tokenizer, longer, alone) if longer.startswith(alone) else None
    if end is None:
        raise UsageError(
            f"{template.flag}: an assistant's turn ends without the tokenizer's EOS "
            f"{template.tokenizer.end_tokens[0]!r}; write eos_token there, make the token that ends a turn the "
            "tokenizer's eos_token, or name it in eos_token_id of generation_config.json"
        )
    return longer[len(alone) : end]
