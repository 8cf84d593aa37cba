"""The examples of a file: the token sequences that are made of its lines, read when they are used."""

from collections.abc import Callable, Sequence

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong
from megarl.data.ragged import Ragged, RaggedBuilder

TokenSequences = list[tuple[list[int], list[bool]]]  # (tokens, which of them are trained on or scored) of each
# The examples of a line, each with its sequences; with the limits of prompt and response.
LineReader = Callable[[Prompt, Encoder, int, int], list[TokenSequences]]


class Examples(Sequence):
    """Examples of k token sequences each, made when they are read; a slice is a plain list."""

    def __init__(self, prompts: PromptSet, arrays: dict[str, np.ndarray], sequences: int = 1):
        """
        Args:
            prompts: a set with the line of each example, which is there once for each of its examples.
            arrays: of `sequence_arrays`; the sequences of example i are the rows i·k … i·k + k − 1.
            sequences: k.
        """
        self.prompts, self.margins = prompts, arrays["margins"]  # [lines] float64
        self._tokens, self._mask = Ragged.of_arrays(arrays), Ragged(arrays["mask"], arrays["offsets"])
        self._sequences = sequences
        assert len(self) == len(prompts), "a run draws examples by the set's order"

    def __len__(self) -> int:
        return len(self._tokens) // self._sequences

    def __getitem__(self, index):
        lines = range(len(self))[index]
        return [self._example(line) for line in lines] if isinstance(index, slice) else self._example(lines)

    def _example(self, line: int) -> TokenSequences:
        rows = range(line * self._sequences, (line + 1) * self._sequences)
        return [(self._tokens[row], self._mask[row]) for row in rows]

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), k] int64: tokens of each sequence of these examples, which are not read."""
        return self._tokens.lengths(np.array(lines)[:, None] * self._sequences + np.arange(self._sequences))


class ArraysBuilder:
    """Collects the sequences of lines for `Examples`."""

    def __init__(self):
        self._tokens, self._mask = RaggedBuilder(), RaggedBuilder(np.bool_)
        self._margins: list[float] = []
        self._kept: list[int] = []

    def add(self, prompt: Prompt, sequences: TokenSequences):
        """Adds an example of a line."""
        for tokens, mask in sequences:
            self._tokens.add(tokens)
            self._mask.add(mask)
        self._margins.append(float(prompt.margin or 0))
        self._kept.append(prompt.index)

    def build(self) -> dict[str, np.ndarray]:
        """Tokens and mask of all sequences; margins and lines of the examples."""
        found = self._tokens.build().arrays() | {"mask": self._mask.build().values}
        return found | {"margins": np.array(self._margins), "kept": np.array(self._kept, np.int64)}


def sequence_arrays(
    read: LineReader, prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int,
    drops_long: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """What `read` makes of each line. UsageError with file and line for a wrong one."""
    found, before = ArraysBuilder(), encoder.unshown_thoughts
    for prompt in prompts:
        with prompts.named_errors(prompt.index):
            try:
                for example in read(prompt, encoder, max_prompt_length, max_response_length):
                    found.add(prompt, example)
            except TooLong:
                if not drops_long:
                    raise
    return found.build() | {"unshown": np.array([encoder.unshown_thoughts - before])}


def arrays_within_limits(
    compute: Callable[..., dict[str, np.ndarray]], prompts: PromptSet, encoder: Encoder, name: str, unit: str,
    max_prompt_length: int, max_response_length: int, drops_long: bool,
) -> tuple[PromptSet, dict[str, np.ndarray]]:  # fmt: skip
    """(the set of the lines that are kept, the arrays of `Examples`, which one rank of a node computes for all).

    Args:
        compute: makes the arrays of prompts, encoder, both limits and `drops_long`, as `sequence_arrays` does.
        name: of what is computed; `unit`: what a line is, for messages.
        max_prompt_length, max_response_length: in tokens; the latter counts the EOS, as in a rollout.
        drops_long: leave out lines that are too long, with a note in the set.

    Raises:
        UsageError: with file and line, for a wrong line or one that is too long; if all are.
    """
    options = max_prompt_length, max_response_length, drops_long
    arrays = prompts.on_node(lambda: compute(prompts, encoder, *options), name, encoder, *options)
    flags = f"--max-prompt-length {max_prompt_length} --max-response-length {max_response_length}"
    limits = f"{max_prompt_length} + {max_response_length}"
    prompts = prompts.without_long(arrays["kept"], unit, flags, limits)
    if turns := int(arrays["unshown"][0]):
        prompts = prompts.noted(
            f"the chat template leaves out the thoughts of {turns:,} turns, which are not trained on; some templates "
            "show them with --chat-template-kwargs"
        )
    return prompts, arrays
