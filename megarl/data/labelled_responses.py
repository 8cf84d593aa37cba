"""Single responses with a label, for KTO: desirable or not."""

from collections.abc import Sequence

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples, TokenSequences, arrays_within_limits, sequence_arrays
from megarl.data.preferences import check_pair
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.data.sft import prompt_and_response
from megarl.errors import UsageError


class LabelledResponses(Examples):
    """The responses of all lines: one with `desirable`, or both of a pair. Responses end with EOS, as in a rollout.

    An example has two sequences: the prompt with its own response, and with one to another prompt, which says nothing
    of this one. Responses are masked.
    """

    def __init__(
        self, prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int,
        drops_long: bool = False,
    ):  # fmt: skip
        """Limits: `arrays_within_limits`.

        Raises UsageError as it does, for a line without a response and its label, and if there is only one prompt.
        """
        options = max_prompt_length, max_response_length, drops_long
        prompts, arrays = arrays_within_limits(_arrays, prompts, encoder, "labelled", "lines", *options)
        super().__init__(prompts, arrays)
        self.labels = arrays["labels"]  # [N] bool
        if len(set(arrays["prompt_ids"].tolist())) == 1:
            raise UsageError(
                f"{prompts.flag} {prompts.path}: all responses are to one prompt; kto compares them with responses to "
                "other prompts"
            )
        self._others = next_of_other_prompt(arrays["prompt_ids"])
        self._responses = np.add.reduceat(arrays["mask"], arrays["offsets"][:-1], dtype=np.int64)  # [N] their tokens

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), 2] int64: tokens of both sequences of these examples."""
        rows, own = np.array(lines), super().lengths(lines)[:, 0]
        return np.stack([own, own - self._responses[rows] + self._responses[self._others[rows]]], 1)

    def _example(self, line: int) -> TokenSequences:
        own, mask = self._tokens[line], self._mask[line]
        other = int(self._others[line])
        prompt, response = len(own) - int(self._responses[line]), int(self._responses[other])
        mismatched = own[:prompt] + self._tokens[other][-response:]
        return [(own, mask), (mismatched, [False] * prompt + [True] * response)]


def next_of_other_prompt(prompt_ids: np.ndarray) -> np.ndarray:
    """[N] number of the next example, cyclically, whose prompt differs; there are two prompts or more."""
    count = len(prompt_ids)
    others = np.zeros(count, np.int64)
    for number in [*range(count - 1, -1, -1)] * 2:  # in the second round the first examples are known to the last
        following = (number + 1) % count
        others[number] = following if prompt_ids[following] != prompt_ids[number] else others[following]
    return others


def _arrays(prompts: PromptSet, encoder: Encoder, *options) -> dict[str, np.ndarray]:
    """Those of `Examples`, and the label of each response and the number of its prompt."""
    arrays = sequence_arrays(_examples, prompts, encoder, *options)
    labels, prompt_ids, numbers = [], [], {}
    for index in np.unique(arrays["kept"]).tolist():
        prompt = prompts[index]
        for _, label in _texts(prompt):
            labels.append(label)
            prompt_ids.append(numbers.setdefault(prompt.key, len(numbers)))
    return arrays | {"labels": np.array(labels, np.bool_), "prompt_ids": np.array(prompt_ids, np.int64)}


def _examples(
    prompt: Prompt, encoder: Encoder, max_prompt_length: int, max_response_length: int
) -> list[TokenSequences]:
    options = encoder, max_prompt_length, max_response_length, True
    return [[prompt_and_response(prompt, text, *options)] for text, _ in _texts(prompt)]


def _texts(prompt: Prompt) -> list[tuple[str, bool]]:
    """The responses of a line with their labels. UsageError if it has none."""
    if prompt.chosen is not None or prompt.rejected is not None:
        check_pair(prompt)
        return [(prompt.chosen or "", True), (prompt.rejected or "", False)]
    if prompt.response is None or prompt.desirable is None:
        raise UsageError("kto needs response and desirable on each line, or chosen and rejected")
    return [(prompt.response, prompt.desirable)]
