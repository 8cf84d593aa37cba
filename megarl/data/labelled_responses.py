"""Single responses with a label, for KTO: desirable or not."""

from collections.abc import Sequence
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
class LabelledResponse:
    """Two sequences of a prompt, each (tokens, which of them are the response's), and whether the first is desirable.

    `mismatched` has a response to another prompt, which says nothing of this one.
    """

    own: Example
    mismatched: Example
    is_desirable: bool


class LabelledResponses(Examples):
    """The responses of all lines: one with `desirable`, or both of a pair. Responses end with EOS, as in a rollout."""

    def __init__(
        self, prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int,
        drops_long: bool = False,
    ):  # fmt: skip
        """One rank of a node tokenizes the lines for all.

        `drops_long`: leave out lines with a text that is too long, with a note in `prompts`. Raises UsageError with
        file and line for a line without a response and its label, or one that is too long, and if there is only one
        prompt.
        """
        options = max_prompt_length, max_response_length, drops_long
        prompts, arrays = arrays_within_limits(_arrays, prompts, encoder, "labelled", "lines", *options)
        super().__init__(prompts, Ragged.of_arrays(arrays), self._labelled)
        self.labels = arrays["labels"]  # [N] bool
        self.has_margins = bool(arrays["margins"].any())
        self._responses = arrays["responses"]  # [N] tokens of each response
        if len(set(arrays["prompt_ids"].tolist())) == 1:
            raise UsageError(
                f"{prompts.flag} {prompts.path}: all responses are to one prompt; kto compares them with responses to "
                "other prompts"
            )
        self._others = next_of_other_prompt(arrays["prompt_ids"])

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), 2] int64: tokens of both sequences of these examples."""
        rows, own = np.array(lines), super().lengths(lines)[:, 0]
        return np.stack([own, own - self._responses[rows] + self._responses[self._others[rows]]], 1)

    def _labelled(self, row: int) -> LabelledResponse:
        own, other = self._tokens[row], int(self._others[row])
        prompt = own[: len(own) - int(self._responses[row])]
        response = self._tokens[other][-int(self._responses[other]) :]

        def marked(tokens: list[int]) -> Example:
            return tokens, [False] * len(prompt) + [True] * (len(tokens) - len(prompt))

        return LabelledResponse(marked(own), marked(prompt + response), bool(self.labels[row]))


def next_of_other_prompt(prompt_ids: np.ndarray) -> np.ndarray:
    """[N] number of the next example, cyclically, whose prompt differs; there are two prompts or more."""
    count = len(prompt_ids)
    others = np.zeros(count, np.int64)
    for number in [*range(count - 1, -1, -1)] * 2:  # in the second round the first examples are known to the last
        following = (number + 1) % count
        others[number] = following if prompt_ids[following] != prompt_ids[number] else others[following]
    return others


def _arrays(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool
) -> dict[str, np.ndarray]:
    """Tokens of each example, its response's length, label and prompt's number, and the lines' numbers and margins."""
    tokens, rows, kept, margins, numbers = RaggedBuilder(), [], [], [], {}
    for prompt in prompts:
        where = prompts.where(prompt.index)
        try:
            found = [
                (prompt_and_response(prompt, text, encoder, max_prompt_length, max_response_length, True), label)
                for text, label in _texts(prompt, where)
            ]
        except UsageError as error:
            if drops_long and isinstance(error, TooLong):
                continue
            text = str(error)
            raise UsageError(text if text.startswith(where) else f"{where}: {text}") from None
        for (sequence, mask), label in found:
            tokens.add(sequence)
            number = numbers.setdefault(prompt.key, len(numbers))
            rows.append((sum(mask), label, number))
        kept.append(prompt.index)
        margins.append(float(prompt.margin or 0))
    responses, labels, prompt_ids = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {"responses": np.array(responses, np.int64), "labels": np.array(labels, np.bool_)}
    columns |= {"prompt_ids": np.array(prompt_ids, np.int64), "kept": np.array(kept, np.int64)}
    columns["margins"] = np.array(margins)
    return tokens.build().arrays() | columns


def _texts(prompt: Prompt, where: str) -> list[tuple[str, bool]]:
    """The responses of a line with their labels. UsageError, which begins with `where`, if it has none."""
    if prompt.chosen is not None or prompt.rejected is not None:
        check_pair(prompt, where)
        return [(prompt.chosen or "", True), (prompt.rejected or "", False)]
    if prompt.response is None or prompt.desirable is None:
        raise UsageError(f"{where}: kto needs response and desirable on each line, or chosen and rejected")
    return [(prompt.response, prompt.desirable)]
