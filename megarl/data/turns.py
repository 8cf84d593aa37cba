"""Turns of a conversation as tokens: the first prompt, and what lies between a written turn and the next one.

What the policy wrote is never encoded again: the next prompt is the last one, the written tokens, and a bridge, the
template's text from the end of the turn to the opening of the next. The turn ends with a special token, which no token
spans. `template_checks.py` refuses templates with which the bridge would depend on more than the new messages.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megarl.data.conversations import RESULT, USER, Encoder, end_of_next, end_of_turn
from megarl.data.detokenizer import Vocabulary
from megarl.data.images.names import MARK, PATTERN
from megarl.data.messages import content_of, message_error, template_message, tool_call
from megarl.errors import UsageError
from megarl.plain_values import whole_unicode

Messages = Sequence[Mapping[str, Any]]
_SAMPLE = 1 << 16  # characters, at least, by which a text that is far too long is known
_SAMPLE_PER_TOKEN = 64


class TurnTokens:
    """Encodes the messages around turns, and decodes turns."""

    def __init__(self, encoder: Encoder, max_observation_length: int):
        """`max_observation_length`: tokens of a message that follows a turn; a longer one is cut in the middle."""
        self._encoder, self._max_length = encoder, max_observation_length
        self._tokenizer, self._template = encoder.tokenizer, encoder.template
        self._vocabulary = Vocabulary(encoder.tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a turn, without the token that ended it and without special tokens."""
        return self._tokenizer.decode(self._without_end(tokens))

    def shown(self, tokens: Sequence[int]) -> str:
        """Text of any tokens for people to read, with special tokens and the names of images."""

        def decode(ids: Sequence[int]) -> str:
            return self._vocabulary.text(ids, tuple(self._tokenizer.special))

        images = self._encoder.images
        return decode(tokens) if images is None else images.text(tokens, decode)

    def marked_text(self, tokens: Sequence[int], marks: Collection[str]) -> str | None:
        """`text` with the strings of those special tokens that are among `marks`; None: the turn has none of them."""
        ids = self._without_end(tokens)
        return None if self._vocabulary.special_ids(marks).isdisjoint(ids) else self._vocabulary.text(ids, marks)

    def _without_end(self, tokens: Sequence[int]) -> Sequence[int]:
        has_end = len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.end_ids
        return tokens[:-1] if has_end else tokens

    def first_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Tokens of the prompt with the opening of the assistant's turn; without a template, of the contents by line.
        UsageError: there are tools and no template, or the template fails.
        """
        if self._template is not None:
            return self._encoder.chat_prompt(messages, tools)
        if tools:
            raise UsageError(f"tools need {self._encoder.flag}, which shows them to the policy")
        return self._encoder.text("\n".join(map(content_of, messages)))

    def closing_token(self) -> int:
        """The token that ends an assistant's turn in a conversation that continues. UsageError: no end token does, or
        it depends on what follows.
        """
        tokenizer = self._tokenizer
        if self._template is None:
            return tokenizer.eos_id
        found = {self._end_before([USER])}
        with contextlib.suppress(UsageError):  # of a template without tools
            found.add(self._end_before([RESULT]))
        if len(found) > 1:
            raise UsageError(f"{self._template.flag}: which token ends an assistant's turn depends on what follows")
        return tokenizer.special[found.pop()]

    def following(
        self, messages: Messages, count: int, last: int, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int] | None:
        """Tokens between an assistant's turn and the next one: the last `count` messages, and the next opening. None if
        the template shows the turn otherwise once they follow it, or ends it without an end token, or with one that
        says who speaks next and is not the policy's.

        `messages`: the conversation, in which an assistant's turn is before the last `count` messages. `last`: the last
        token that the policy wrote of the turn. UsageError: the template fails on the messages. ValueError: the
        messages become no token.
        """
        plain = [template_message(message) for message in messages[:-count]]
        fresh = [self.shortened(message) for message in messages[-count:]]
        whole, end = "", None
        if self._template is not None:
            whole = self._template.render([*plain, *fresh], add_generation_prompt=True, tools=tools)
            if (end := self._end_in(whole, plain, last, tools)) is None:
                return None
        return self._encoded(fresh, whole, end, "the messages")

    def _encoded(self, messages: Messages, rendered: str, end: int | None, what: str) -> list[int]:
        """Tokens of messages: by line without a template, else of what is `rendered` from `end` on."""
        if self._template is None:
            tokens = self._tokenizer.encode("\n".join(message["content"] for message in messages))
        else:
            tokens = self._template.encode_following([(rendered[:end], rendered[end:])])[0]
        if not tokens:
            raise ValueError(f"{what} become no token")
        return tokens

    def _end_in(self, whole: str, messages: Messages, last: int, tools: Messages | None) -> int | None:
        """Where the last message, a turn, ends in the rendered text `whole`; None if that shows it in another way."""
        assert self._template is not None
        alone, before = (self._template.render(part, tools=tools) for part in (messages, messages[:-1]))
        if not alone.startswith(before):
            return None
        end, kept = end_of_last_turn(self._encoder, whole, alone, len(before))
        if end is None:
            return None
        if whole.startswith(kept):
            says_who_is_next = end > len(alone)
            return end if not says_who_is_next or self._tokenizer.special[self._last_of(whole[:end])] == last else None
        opened = self._template.render(messages[:-1], add_generation_prompt=True, tools=tools)
        has_thoughts = "reasoning_content" in messages[-1] or "<think>" in messages[-1]["content"]
        return end_after_empty_thoughts(self._encoder, whole, opened, has_thoughts)

    def bridge(self, messages: Messages) -> list[int]:
        """Tokens after a turn that ended with one of the end tokens: the messages, and the opening of the next turn.
        ValueError: there is no message, one is malformed or the assistant's, or they become no token. UsageError: the
        template fails on the messages.
        """
        if not messages:
            raise ValueError("the environment answered a turn without a message and did not end the episode")
        if problem := message_error(list(messages)):
            raise ValueError(f"messages of the environment: {problem}")
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError("messages of the environment: one has the role assistant, for which the policy writes")
        shortened = [self.shortened(message) for message in messages]
        rendered, end = ("", None) if self._template is None else self._rendered_after_turn(shortened)
        return self._encoded(shortened, rendered, end, "the environment's messages")

    def shortened(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with a content of valid Unicode and at most `max_observation_length` tokens. A longer one loses
        its middle, for which `[... 123 characters cut ...]` stands, and each image of that as a whole.
        """
        whole = {name: whole_unicode(value) for name, value in template_message(message).items()}
        return whole | {"content": self._cut(whole["content"])}

    def _end_before(self, messages: Messages) -> str:
        rendered, end = self._rendered_after_turn(messages)
        return self._last_of(rendered[:end])

    def _last_of(self, text: str) -> str:
        return max((token for token in self._tokenizer.end_tokens if text.endswith(token)), key=len)

    def _rendered_after_turn(self, messages: Messages) -> tuple[str, int]:
        """(a conversation with a turn and these messages after it, as text, where the turn ends)."""
        problem = UsageError(f"{self._template.flag}: an assistant's turn does not end before what follows")
        opened = self._template.render([USER], add_generation_prompt=True)
        for turn in _dummy_turns(messages):
            try:
                rendered = self._template.render([USER, turn, *messages], add_generation_prompt=True)
            except UsageError as error:
                problem = error
                continue
            if not rendered.startswith(opened):  # the opening of a last turn may hold more, such as <think>
                opened = self._template.render([USER])
            end = end_of_turn(self._tokenizer, rendered, len(opened)) if rendered.startswith(opened) else None
            if end is not None:
                return rendered, end
        raise problem

    def _cut(self, content: str) -> str:
        sample = content[: max(_SAMPLE, _SAMPLE_PER_TOKEN * self._max_length)]
        is_long = len(sample) < len(content) and self._count(sample) > 2 * self._max_length
        if not is_long and self._count(content) <= self._max_length:
            return content
        has_place = 2 * self._count(_mark(content)) <= self._max_length
        mark = _mark if has_place else lambda _: "..."
        budget = self._max_length - self._count(mark(content))
        while budget > 0:
            head = self._fitting(content, budget - budget // 2)
            tail = self._fitting(content, budget // 2, from_end=True)
            cut = content[:head] + mark(content[head : len(content) - tail]) + content[len(content) - tail :]
            excess = self._count(cut) - self._max_length
            if excess <= 0:
                return cut
            budget -= excess
        return content[: self._fitting(content, self._max_length)]

    def _fitting(self, text: str, max_tokens: int, from_end: bool = False) -> int:
        """How many characters from the start of a text, or from its end, have at most `max_tokens` tokens. None of them
        is in the middle of an image's mark."""
        marks = [match.span() for match in PATTERN.finditer(text)]

        def whole(size: int) -> int:
            at = len(text) - size if from_end else size
            start, end = next(((start, end) for start, end in marks if start < at < end), (at, at))
            return len(text) - end if from_end else start

        def fits(size: int) -> bool:
            size = whole(size)
            return self._count(text[len(text) - size :] if from_end else text[:size]) <= max_tokens

        fitting, too_many = 0, max_tokens + 1
        while too_many <= len(text) and fits(too_many):
            fitting, too_many = too_many, 2 * too_many
        too_many = min(too_many, len(text) + 1)
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
        return whole(fitting)

    def _count(self, text: str) -> int:
        images = self._encoder.images
        if images is None or MARK not in text:
            return len(self._tokenizer.encode(text))
        return sum(map(images.tokens, images.found(text))) + len(self._tokenizer.encode(PATTERN.sub("", text)))


def end_of_last_turn(encoder: Encoder, whole: str, alone: str, start: int) -> tuple[int | None, str]:
    """(where a turn ends in the rendered conversation `whole`, what that must begin with if it keeps the turn).

    The end is None if no end token ends the turn.

    `alone`: the conversation up to the turn, rendered; `start`: where the turn begins in it.
    """
    end = end_of_turn(encoder.tokenizer, alone, start)
    if end is not None:
        return end, alone[:end]
    if whole.startswith(alone):
        return end_of_next(encoder.tokenizer, whole, alone), alone
    return end_of_turn(encoder.tokenizer, whole, start), alone


def end_after_empty_thoughts(encoder: Encoder, whole: str, opened: str, has_thoughts: bool) -> int | None:
    """Where a turn ends that `whole` shows otherwise than a conversation that ends with it; None: it is another turn.

    A last turn without thoughts may be shown with empty ones, which the policy did not write.

    `opened`: the conversation before the turn, rendered with its opening.
    """
    return None if has_thoughts or not whole.startswith(opened) else end_of_turn(encoder.tokenizer, whole, len(opened))


def _dummy_turns(messages: Messages) -> Iterator[dict[str, Any]]:
    """Turns of the assistant that the messages may follow: with the calls that tools answer. For templates that have no
    such turn, others: Llama 3 has one call in a turn, and gpt-oss ends a turn without a call in another way than the
    policy.
    """
    results = [(number, message) for number, message in enumerate(messages) if message["role"] == "tool"]
    if not results:
        yield {"role": "assistant", "content": "a"}
        yield _dummy_calls([(0, {"name": "f"})])
        return
    yield _dummy_calls(results)
    if len(results) > 1:
        yield _dummy_calls(results[-1:])


def _dummy_calls(results: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    calls = [
        tool_call(message.get("tool_call_id", f"call{number:05}"), message.get("name", ""), {})
        for number, message in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _mark(cut: str) -> str:
    """What stands for the text that was cut."""
    images = len(PATTERN.findall(cut))
    of_images = f" and {images} image{'s' * (images > 1)}" if images else ""
    return f"\n[... {len(PATTERN.sub('', cut))} characters{of_images} cut ...]\n"
