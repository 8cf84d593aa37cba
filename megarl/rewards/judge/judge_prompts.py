"""The tokens that a judge reads: its messages with the places filled by a prompt's fields and by a response.

Texts are filled in once and never evaluated, so a place's name inside a response stays text. No text becomes a special
token of the judge's template. A response stands between two lines with a code that no text contains.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.images.names import readable
from megarl.data.places import filled
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.data.turns import TurnTokens
from megarl.errors import UsageError
from megarl.plain_values import whole_unicode
from megarl.rewards.judge.config import PLACES, JudgeConfig

JOINING = 16  # tokens that a response may have beside its own, where it meets the text around it


class JudgePrompts:
    """Fills and encodes the messages of a `--judge-config`."""

    def __init__(self, config: JudgeConfig, encoder: Encoder, seed: int, max_length: int, max_response_length: int):
        """`encoder`: the judge's tokenizer and chat template. `seed`: of the run, from which the codes are drawn.
        `max_length`: of the judge's prompt and judgement together, in tokens. `max_response_length`: the policy's, in
        tokens.
        """
        self.config, self.seed, self.max_length = config, seed, max_length
        self.response_tokens = config.response_tokens or max_response_length
        self._turns = TurnTokens(encoder, self.response_tokens)
        self.encoder = encoder

    def tokens(self, prompt: Prompt, responses: Sequence[str]) -> list[int]:
        """What the judge reads of a prompt and the responses that it judges together, in their order. A response that
        is too long loses its middle. UsageError: the template fails on the messages, or they leave no room for a
        judgement.
        """
        tokens = self._turns.first_prompt(self.messages(prompt, responses))
        if len(tokens) + self.config.max_tokens > self.max_length:
            raise UsageError(f"the judge's prompt has {len(tokens)} tokens, too many for --judge-max-length")
        return tokens

    def example(self, prompt: Prompt) -> list[int]:
        """What the judge reads of a prompt and responses of three dots, for people to read."""
        return self.tokens(prompt, ["..."] * (2 if self.config.compares else 1))

    def messages(self, prompt: Prompt, responses: Sequence[str]) -> list[dict[str, str]]:
        """The messages with their places filled. UsageError if the prompt lacks a field."""
        plain = map(readable, responses)  # a policy's mark is no image
        texts = [self._turns.shortened({"role": "user", "content": text})["content"] for text in plain]
        values, places = self._values(prompt), PLACES[self.config.mode]
        code = self._code([*texts, *values.values()])
        labels = [f" {number}" if self.config.compares else "" for number in range(1, len(texts) + 1)]
        blocks = [
            f"<response{label} {code}>\n{text}\n</response{label} {code}>"
            for label, text in zip(labels, texts, strict=True)
        ]
        blocks = ["\n\n".join(blocks)] if self.config.mode == "group" else blocks
        values |= dict(zip(places, blocks, strict=True))
        return [message | {"content": filled(message["content"], values)} for message in self.config.messages]

    def text(self, tokens: list[int]) -> str:
        """The text of a judgement."""
        return self._turns.text(tokens)

    def check(self, prompts: PromptSet, group_size: int = 1):
        """UsageError with file and line for a prompt without a field that a place names, or that is too long. One rank
        of a node checks them for all. `group_size`: the most responses to a prompt.
        """
        count = {"single": 1, "pair": 2, "group": group_size}[self.config.mode]
        room = self.max_length - count * (self.response_tokens + JOINING) - self.config.max_tokens

        def lengths() -> dict[str, np.ndarray]:
            found = np.array([self._checked_length(prompts, prompt, count, room) for prompt in prompts], np.int64)
            return {"lengths": found}

        prompts.on_node(lengths, "judge", self.encoder, repr(self.config[:4]), count, room)

    def _checked_length(self, prompts: PromptSet, prompt: Prompt, count: int, room: int) -> int:
        with prompts.named_errors(prompt.index):
            length = len(self._turns.first_prompt(self.messages(prompt, [""] * count)))
            if length > room:
                raise UsageError(
                    f"without the {f'{count} responses' if count > 1 else 'response'} the judge's prompt has {length} "
                    f"tokens; --judge-max-length {self.max_length} leaves {max(room, 0)} beside {self.response_tokens} "
                    f"and {JOINING} around them of each response, and {self.config.max_tokens} of the judgement"
                )
        return length

    def _values(self, prompt: Prompt) -> dict[str, str]:
        """Texts by place, without the response. UsageError if the prompt lacks one."""
        metadata = prompt.metadata or {}
        own = {"question": prompt.marked_text, "answer": prompt.answer}
        values = {}
        for name in (place for place in self.config.places if place not in PLACES[self.config.mode]):
            value = own[name] if name in own else metadata.get(name)
            if value is None:
                kind = "no answer" if name in own else f"no metadata field {name!r}"
                raise UsageError(f"the line has {kind}, for the place {{{name}}} of {self.config.where}")
            values[name] = whole_unicode(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return values

    def _code(self, texts: Sequence[str]) -> str:
        """The first of the seed's codes that none of the texts contains."""
        number = 0
        while True:
            code = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).hexdigest()
            if not any(code in text for text in texts):
                return code
            number += 1
