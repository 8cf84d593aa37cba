"""Preference pairs: the reward model's inputs for the chosen and the rejected response to one prompt."""

from dataclasses import dataclass

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError


@dataclass(frozen=True)
class Pair:
    """Tokens of prompt + chosen and of prompt + rejected response, and the margin wanted between their scores."""

    chosen: list[int]
    rejected: list[int]
    margin: float


def preference_pairs(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool = False) -> Examples:
    """The pair of every line, each text at most `max_length` tokens long (cut by `Encoder.reward_model_inputs`).

    One rank of a node tokenizes them for all. `drops_long`: leave out pairs with a longer text instead. A note in the
    set of the pairs says how many were cut or left out. Raises UsageError with file and line if chosen or rejected is
    missing, or if both are the same text or the same tokens.
    """
    options = max_length, drops_long
    arrays = prompts.on_node(lambda: _arrays(prompts, encoder, *options), "preferences", encoder, *options)
    limits = f"--max-prompt-length and --max-response-length of {max_length} together"
    prompts = prompts.without_long(arrays["kept"], "pairs", limits, str(max_length))
    if count := int(arrays["cut"].sum()):
        pairs = f"{count:,} of {len(prompts):,} pairs"
        prompts = prompts.noted(
            f"cut prompts at their start in {pairs} longer than {max_length} tokens; --filter-long-prompts drops them"
        )
    tokens, margins = Ragged.of_arrays(arrays), arrays["margins"]
    return Examples(prompts, tokens, lambda line: Pair(tokens[2 * line], tokens[2 * line + 1], float(margins[line])), 2)


def check_pair(prompt: Prompt, where: str):
    """UsageError, which begins with `where`, unless the line has two responses that differ."""
    for name in ("chosen", "rejected"):
        if getattr(prompt, name) is None:
            raise UsageError(f"{where}: a preference needs chosen and rejected on each line; {name} is missing")
    if prompt.chosen == prompt.rejected:
        raise UsageError(f"{where}: chosen and rejected are the same text")


def _arrays(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool) -> dict[str, np.ndarray]:
    """Tokens of chosen and rejected in turn, margins, the numbers of the pairs and whether a text of them is cut."""
    samples = []
    for prompt in prompts:
        check_pair(prompt, prompts.where(prompt.index))
        samples += [(prompt, prompt.chosen), (prompt, prompt.rejected)]
    prompts.encode(encoder)
    inputs = encoder.reward_model_inputs(samples, max_length)
    tokens, margins, kept, cut = [], [], [], []
    for line, ((chosen, of_chosen), (rejected, of_rejected)) in enumerate(zip(inputs[::2], inputs[1::2], strict=True)):
        is_cut = of_chosen + of_rejected > 0
        if drops_long and is_cut:
            continue
        if chosen == rejected:
            raise UsageError(f"{prompts.where(line)}: chosen and rejected become the same tokens")
        tokens += [chosen, rejected]
        margins.append(float(samples[2 * line][0].margin or 0))
        kept.append(line)
        cut.append(is_cut)
    columns = {"margins": np.array(margins), "kept": np.array(kept, np.int64), "cut": np.array(cut, np.bool_)}
    return Ragged.of_rows(tokens).arrays() | columns
