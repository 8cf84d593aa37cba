"""Preference pairs: the reward model's inputs for the chosen and the rejected response to one prompt."""

from dataclasses import dataclass

from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError


@dataclass(frozen=True)
class Pair:
    """Tokens of prompt + chosen and of prompt + rejected response, and the margin wanted between their scores."""

    chosen: list[int]
    rejected: list[int]
    margin: float


def preference_pairs(prompts: PromptSet, encoder: Encoder, longest: int) -> list[Pair]:
    """The pair of every line, each text at most `longest` tokens long (cut by `Encoder.scored`).

    Raises UsageError with file and line if chosen or rejected is missing, or if both are the same text or the same
    tokens.
    """
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
    tokens = [ids for ids, _ in encoder.reward_model_inputs(samples, longest)]
    pairs = []
    for prompt, chosen, rejected in zip(prompts, tokens[::2], tokens[1::2], strict=True):
        if chosen == rejected:
            raise UsageError(f"{prompts.where(prompt.index)}: chosen and rejected become the same tokens")
        pairs.append(Pair(chosen, rejected, float(prompt.margin or 0)))
    return pairs
