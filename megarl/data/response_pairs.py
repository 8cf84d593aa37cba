"""Preference pairs for a policy: the sequences of the chosen and the rejected response to one prompt."""

from dataclasses import dataclass

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.preferences import check_pair
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong
from megarl.data.ragged import Ragged, RaggedBuilder
from megarl.data.sft import Example, arrays_within_limits, prompt_and_response
from megarl.errors import UsageError


@dataclass(frozen=True)
class ResponsePair:
    """The sequences of both responses, each (tokens, which of them are the response's), and the pair's margin."""

    chosen: Example
    rejected: Example
    margin: float


class ResponsePairs(Examples):
    """The pair of every line; responses end with EOS, as in a rollout."""

    def __init__(
        self, prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int,
        drops_long: bool = False,
    ):  # fmt: skip
        """One rank of a node tokenizes the lines for all.

        `drops_long`: leave out lines with a text that is too long, with a note in `prompts`. Raises UsageError with
        file and line for a line without two different responses, an empty chosen one, or one that is too long, and if
        all are too long.
        """
        options = max_prompt_length, max_response_length, drops_long
        prompts, arrays = arrays_within_limits(_arrays, prompts, encoder, "pairs", "pairs", *options)
        super().__init__(prompts, Ragged.of_arrays(arrays), self._pair, sequences=2)
        self._responses, self._margins = arrays["responses"], arrays["margins"]
        self.has_margins = bool(self._margins.any())

    def _pair(self, line: int) -> ResponsePair:
        return ResponsePair(self._sequence(2 * line), self._sequence(2 * line + 1), float(self._margins[line]))

    def _sequence(self, row: int) -> Example:
        tokens, response = self._tokens[row], int(self._responses[row])
        return tokens, [False] * (len(tokens) - response) + [True] * response


def _arrays(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool
) -> dict[str, np.ndarray]:
    """Tokens of both sequences of each line in turn, their responses' lengths, margins, and the lines' numbers."""
    tokens, responses, margins, kept = RaggedBuilder(), [], [], []
    for prompt in prompts:
        where = prompts.where(prompt.index)
        check_pair(prompt, where)
        try:
            examples = _examples(prompt, encoder, max_prompt_length, max_response_length)
        except UsageError as error:
            if drops_long and isinstance(error, TooLong):
                continue
            raise UsageError(f"{where}: {error}") from None
        if examples[0][0] == examples[1][0]:
            raise UsageError(f"{where}: chosen and rejected become the same tokens")
        for sequence, mask in examples:
            tokens.add(sequence)
            responses.append(sum(mask))
        margins.append(float(prompt.margin or 0))
        kept.append(prompt.index)
    columns = {"responses": np.array(responses, np.int64), "margins": np.array(margins)}
    return tokens.build().arrays() | columns | {"kept": np.array(kept, np.int64)}


def _examples(prompt: Prompt, encoder: Encoder, max_prompt_length: int, max_response_length: int) -> list[Example]:
    """The sequences of the chosen and the rejected response; errors begin with the name of one.

    The rejected one may be empty, as a policy's responses are now and then.
    """
    found = []
    for name in ("chosen", "rejected"):
        try:
            text, may_be_empty = getattr(prompt, name), name == "rejected"
            found.append(
                prompt_and_response(prompt, text, encoder, max_prompt_length, max_response_length, may_be_empty)
            )
        except UsageError as error:
            raise type(error)(f"{name}: {error}") from None
    return found
