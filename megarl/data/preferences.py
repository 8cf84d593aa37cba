"""Preference pairs: the reward model's inputs for the chosen and the rejected response to one prompt."""

from dataclasses import dataclass

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError


@dataclass(frozen=True)
class Pair:
    """Tokens of prompt + chosen and of prompt + rejected response, and the margin wanted between their scores."""

    chosen: list[int]
    rejected: list[int]
    margin: float


def preference_pairs(prompts: PromptSet, encoder: Encoder, max_length: int) -> Examples:
    """The pair of every line, each text at most `max_length` tokens long (cut by `Encoder.reward_model_inputs`).

    One rank of a node tokenizes them for all. Raises UsageError with file and line if chosen or rejected is missing, or
    if both are the same text or the same tokens.
    """
    arrays = prompts.on_node(lambda: _arrays(prompts, encoder, max_length), "preferences", encoder, max_length)
    tokens, margins = Ragged.of_arrays(arrays), arrays["margins"]
    return Examples(tokens, lambda line: Pair(tokens[2 * line], tokens[2 * line + 1], float(margins[line])), 2)


def _arrays(prompts: PromptSet, encoder: Encoder, max_length: int) -> dict[str, np.ndarray]:
    """Tokens of chosen and rejected in turn, and margins."""
    samples = []
    for prompt in prompts:
        where = prompts.where(prompt.index)
        for name in ("chosen", "rejected"):
            if getattr(prompt, name) is None:
                raise UsageError(f"{where}: a preference needs chosen and rejected on each line; {name} is missing")
        if prompt.chosen == prompt.rejected:
            raise UsageError(f"{where}: chosen and rejected are the same text")
        samples += [(prompt, prompt.chosen), (prompt, prompt.rejected)]
    prompts.encode(encoder)
    tokens = [ids for ids, _ in encoder.reward_model_inputs(samples, max_length)]
    for line, (chosen, rejected) in enumerate(zip(tokens[::2], tokens[1::2], strict=True)):
        if chosen == rejected:
            raise UsageError(f"{prompts.where(line)}: chosen and rejected become the same tokens")
    margins = [float(prompt.margin or 0) for prompt, _ in samples[::2]]
    return Ragged.of_rows(tokens).arrays() | {"margins": np.array(margins)}
