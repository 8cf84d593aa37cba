"""Tokenizes prompts, responses and whole conversations, with or without a chat template."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.chat import ChatTemplate, load_template
from megarl.data.messages import Message, MessageKey, conversation_of, template_message
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError

# Encoded prompts to cache: about those of a step, because all samples of a prompt are scored together.
_CACHED_PROMPTS = 4096


class Encoder:
    """A tokenizer and its chat template; without one, texts are encoded unchanged and a response ends with EOS.

    Prompt and response are encoded separately and joined, exactly as in a rollout. Raises UsageError (naming the
    template's flag) for a template whose conversation does not begin with its prompt, that ends an assistant's turn
    without EOS, or that writes BOS twice; and (naming `flag`) for messages without a template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None, flag: str = "--chat-template"):
        self.tokenizer, self.template, self.flag = tokenizer, template, flag
        self._encoded = functools.lru_cache(_CACHED_PROMPTS)(self._encode_prompt)
        if template is not None:
            # Fail now, not in the middle of a run: some templates drop a message with empty content.
            self.responses([(Prompt(0, "a"), "b"), (Prompt(0, "a"), "")])

    @property
    def fingerprint(self) -> tuple:
        """Tokenizer, template and flag, as values that differ where the tokens or the errors differ."""
        return self.tokenizer.fingerprint, self.template and self.template.source, self.flag

    def prompt(self, prompt: Prompt) -> list[int]:
        """The tokens that the policy continues; with a template they end with the opening of the assistant's turn."""
        return list(self._encoded(prompt.key)[1])

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens that the policy continues after messages that may have tool calls, and with tools.

        Without those it equals `prompt`. UsageError without a template, or if the template fails on the messages.
        """
        if self.template is None:
            raise UsageError(f"a prompt in messages needs {self.flag}")
        plain = [template_message(message) for message in messages]
        rendered = self.template.render(plain, add_generation_prompt=True, tools=tools)
        return self._one_bos(self.template.encode(rendered))

    def response(self, prompt: Prompt, text: str) -> list[int]:
        """The tokens of the response after `prompt`, up to and including EOS."""
        return self.responses([(prompt, text)])[0]

    def responses(self, samples: Sequence[tuple[Prompt, str]]) -> list[list[int]]:
        """`response` of each (prompt, text)."""
        if self.template is None:
            return [[*ids, self.tokenizer.eos_id] for ids in self.tokenizer.encode_batch([text for _, text in samples])]
        return self.template.encode_following([self._turn(prompt, text) for prompt, text in samples])

    def reward_model_inputs(
        self, samples: Sequence[tuple[Prompt, str]], max_length: int
    ) -> list[tuple[list[int], int]]:
        """The reward model's input for each (prompt, text), at most `max_length` >= 1 tokens, and how many were cut.

        Tokens are cut from the start of the prompt (a leading BOS stays), then from the start of the response; never
        from the end, because the score is read at EOS. Never empty.
        """
        if max_length < 1:
            raise ValueError(f"max_length {max_length}: must be at least 1")
        responses = self.responses(samples)
        return [
            self._cut([*self._encoded(prompt.key)[1], *response], max_length)
            for (prompt, _), response in zip(samples, responses, strict=True)
        ]

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """`(ids, mask)` of a whole conversation, equally long; the mask covers each assistant's turn with its EOS.

        The calls of a turn are part of it. The opening of the turn and the template's text after that EOS are context,
        outside the mask, as are the results of tools.
        """
        if self.template is None:
            raise UsageError(f"a conversation in messages needs {self.flag}")
        messages = [template_message(message) for message in messages]
        whole = self.template.render(messages)
        boundaries = [0]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                opened, turn = self._rendered_turn(messages[:number], message)
                if not whole.startswith(opened + turn) or len(opened) < boundaries[-1]:
                    raise UsageError(f"{self.template.flag}: a later message changes how an earlier one is rendered")
                boundaries += [len(opened), len(opened) + len(turn)]
        boundaries.append(len(whole))
        ranges = list(itertools.pairwise(boundaries))
        segments = self.template.encode_following([(whole[:start], whole[start:end]) for start, end in ranges])
        ids = self._one_bos([i for segment in segments for i in segment])
        # Segments alternate: context, assistant's turn, context, ...
        return ids, [bool(number % 2) for number, segment in enumerate(segments) for _ in segment]

    def _encode_prompt(self, key: str | tuple[MessageKey, ...]) -> tuple[str, tuple[int, ...]]:
        """A prompt's rendered text, with marks, and its tokens."""
        if self.template is None:
            if not isinstance(key, str):
                raise UsageError(f"a prompt in messages needs {self.flag}")
            return key, tuple(self.tokenizer.encode(key))
        rendered = self.template.render(conversation_of(key), add_generation_prompt=True)
        return rendered, tuple(self._one_bos(self.template.encode(rendered)))

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.tokenizer.bos_id is not None and ids[:2] == [self.tokenizer.bos_id] * 2:
            raise UsageError(f"{self.template.flag}: the template writes BOS {self.tokenizer.bos_token!r} twice")
        return ids

    def _turn(self, prompt: Prompt, text: str) -> tuple[str, str]:
        answer = {"role": "assistant", "content": text}
        return self._rendered_turn(conversation_of(prompt.key), answer, self._encoded(prompt.key)[0])

    def _rendered_turn(self, before: Sequence[Message], turn: Message, opened: str | None = None) -> tuple[str, str]:
        """The text before the assistant's `turn`, and the turn up to and including EOS."""
        template, end_tokens = self.template, self.tokenizer.end_tokens
        if opened is None:
            opened = template.render(before, add_generation_prompt=True)
        whole = template.render([*before, turn])
        if not whole.startswith(opened):
            raise UsageError(f"{template.flag}: the rendered conversation does not begin with its rendered prompt")
        # Special tokens in contents are marked, so this end is the template's.
        found = re.compile("|".join(map(re.escape, end_tokens))).search(whole, len(opened))
        if found is None:
            raise UsageError(
                f"{template.flag}: an assistant's turn ends without the tokenizer's EOS {end_tokens[0]!r}; "
                "write eos_token there, make the token that ends a turn the tokenizer's eos_token, or name it in "
                "eos_token_id of generation_config.json"
            )
        return opened, whole[len(opened) : found.end()]

    def _cut(self, ids: list[int], max_length: int) -> tuple[list[int], int]:
        cut = max(0, len(ids) - max_length)
        if not cut:
            return ids, 0
        kept = 1 if max_length > 1 and ids[0] == self.tokenizer.bos_id else 0
        return ids[:kept] + ids[cut + kept :], cut


def build_encoder(
    tokenizer: Tokenizer, chat_template: str | None, flag_prefix: str = "", folder: str | None = None
) -> Encoder:
    """The encoder of a role: `chat_template` is the value of `--chat-template` (see `load_template`), or "none".

    `folder`: flag and path of the model's Hugging Face folder, whose tokenizer gives the default template.
    """
    if chat_template is None and folder is not None and tokenizer.template:
        where = f"{folder}: chat template"
        return Encoder(tokenizer, ChatTemplate(tokenizer.template, tokenizer, where), where)
    chat_template = None if chat_template == "none" else chat_template
    flag = f"--{flag_prefix}chat-template"
    return Encoder(tokenizer, load_template(chat_template, tokenizer, flag), flag)
