"""Preference pairs: the sequences of the chosen and of the rejected response to one prompt, in this order."""

import functools

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import ArraysBuilder, Examples, TokenSequences, arrays_within_limits, sequence_arrays
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.data.sft import prompt_and_response
from megarl.errors import UsageError


def preference_pairs(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool = False) -> Examples:
    """The reward model's inputs of every line, at most `max_length` tokens long (cut by `Encoder.reward_model_inputs`).

    Their last tokens are masked, where the score is read. One rank of a node tokenizes them for all. `drops_long`:
    leave out pairs with a longer text instead. A note in the set of the pairs says how many were cut or left out.
    Raises UsageError with file and line if chosen or rejected is missing, or if both are the same text or the same
    tokens.
    """
    options = max_length, drops_long
    arrays = prompts.on_node(lambda: _scored_arrays(prompts, encoder, *options), "preferences", encoder, *options)
    limits = f"--max-prompt-length and --max-response-length of {max_length} together"
    prompts = prompts.without_long(arrays["kept"], "pairs", limits, str(max_length))
    if count := int(arrays["cut"].sum()):
        pairs = f"{count:,} of {len(prompts):,} pairs"
        prompts = prompts.noted(
            f"cut prompts at their start in {pairs} longer than {max_length} tokens; --filter-long-prompts drops them"
        )
    return Examples(prompts, arrays, 2)


def response_pairs(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool = False
) -> Examples:
    """The sequences of every line for a policy; responses end with EOS, as in a rollout, and are masked.

    Limits: `arrays_within_limits`. Raises UsageError with file and line as it does, and for a line without two
    different responses or with an empty chosen one.
    """
    options = max_prompt_length, max_response_length, drops_long
    compute = functools.partial(sequence_arrays, _pairs)
    return Examples(*arrays_within_limits(compute, prompts, encoder, "pairs", "pairs", *options), 2)


def check_pair(prompt: Prompt):
    """UsageError unless the line has two responses that differ."""
    for name in ("chosen", "rejected"):
        if getattr(prompt, name) is None:
            raise UsageError(f"a preference needs chosen and rejected on each line; {name} is missing")
    if prompt.chosen == prompt.rejected:
        raise UsageError("chosen and rejected are the same text")


def _check_tokens(chosen: list[int], rejected: list[int]):
    if chosen == rejected:
        raise UsageError("chosen and rejected become the same tokens")


def _scored_arrays(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool) -> dict[str, np.ndarray]:
    """Those of `Examples`, and whether a text of each pair is cut."""
    samples = []
    for prompt in prompts:
        with prompts.named_errors(prompt.index):
            check_pair(prompt)
        samples += [(prompt, prompt.chosen), (prompt, prompt.rejected)]
    prompts.encode(encoder)
    inputs = encoder.reward_model_inputs(samples, max_length)
    found, cut = ArraysBuilder(), []
    for (prompt, _), (chosen, of_chosen), (rejected, of_rejected) in zip(
        samples[::2], inputs[::2], inputs[1::2], strict=True
    ):
        is_cut = of_chosen + of_rejected > 0
        if drops_long and is_cut:
            continue
        with prompts.named_errors(prompt.index):
            _check_tokens(chosen, rejected)
        found.add(prompt, [(tokens, [False] * (len(tokens) - 1) + [True]) for tokens in (chosen, rejected)])
        cut.append(is_cut)
    return found.build() | {"cut": np.array(cut, np.bool_)}


def _pairs(prompt: Prompt, encoder: Encoder, max_prompt_length: int, max_response_length: int) -> list[TokenSequences]:
    """One example: the sequences of the chosen and the rejected response; errors begin with the name of one.

    The rejected one may be empty, as a policy's responses are now and then.
    """
    check_pair(prompt)
    limits, found = (max_prompt_length, max_response_length), []
    for name in ("chosen", "rejected"):
        try:
            text, may_be_empty = getattr(prompt, name), name == "rejected"
            found.append(prompt_and_response(prompt, text, encoder, *limits, may_be_empty))
        except UsageError as error:
            raise type(error)(f"{name}: {error}") from None
    _check_tokens(found[0][0], found[1][0])
    return [found]
