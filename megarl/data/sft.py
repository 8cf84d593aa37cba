"""Supervised examples: tokens of conversations, with the mask of the tokens to train on."""

import functools

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples, TokenSequences, arrays_within_limits, sequence_arrays
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong, prompt_tokens
from megarl.errors import UsageError


def sft_examples(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool = False
) -> Examples:
    """One sequence of each line; the mask covers the responses, each with its EOS.

    A line's response is its `response`, else its `answer`; in a line with `messages` every assistant message is one,
    and the conversation may be as long as both limits together. It becomes several examples where the chat template
    shows an earlier turn otherwise once later messages follow (`Encoder.conversation`); a note in the set says how
    many. Limits and errors: `arrays_within_limits`.
    """
    options = max_prompt_length, max_response_length, drops_long
    compute = functools.partial(sequence_arrays, _examples)
    prompts, arrays = arrays_within_limits(compute, prompts, encoder, "sft", "examples", *options)
    examples = np.unique(arrays["kept"], return_counts=True)[1]  # of each line
    if len(divided := examples[examples > 1]):
        prompts = prompts.noted(
            f"{len(divided):,} of {len(examples):,} conversations become {divided.sum():,} examples, since the chat "
            "template shows earlier turns otherwise once later messages follow"
        )
    return Examples(prompts, arrays)


def _examples(
    prompt: Prompt, encoder: Encoder, max_prompt_length: int, max_response_length: int
) -> list[TokenSequences]:
    if prompt.messages is None:
        text = prompt.response if prompt.response is not None else prompt.answer
        return [[prompt_and_response(prompt, text, encoder, max_prompt_length, max_response_length)]]
    found = encoder.conversation(prompt.messages, prompt.tools)
    longest, max_length = max(len(tokens) for tokens, _ in found), max_prompt_length + max_response_length
    if longest > max_length:
        raise TooLong(
            f"the conversation has {longest} tokens; --max-prompt-length and --max-response-length allow "
            f"{max_length} together{TooLong.CURE}"
        )
    return [[sequence] for sequence in found]


def prompt_and_response(
    prompt: Prompt, text: str | None, encoder: Encoder, max_prompt_length: int, max_response_length: int,
    may_be_empty: bool = False,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """The sequence of a prompt and the text of its response. UsageError without a text, or if one is too long.

    `may_be_empty`: the response may be EOS alone.
    """
    if text is None:
        raise UsageError("supervised training needs a response (or an answer), or messages, on each line")
    prompt_ids = prompt_tokens(prompt, encoder, max_prompt_length)
    response_ids = encoder.trained_response(prompt, text)
    if len(response_ids) < 2 and not may_be_empty:
        raise UsageError("the response is empty")
    if len(response_ids) > max_response_length:
        raise TooLong(
            f"the response has {len(response_ids)} tokens with EOS; --max-response-length allows {max_response_length}"
            f"{TooLong.CURE}"
        )
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)
