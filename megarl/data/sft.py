"""Supervised examples: tokens of conversations, with the mask of the tokens to train on."""

from collections.abc import Callable

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong, prompt_tokens
from megarl.data.ragged import Ragged, RaggedBuilder
from megarl.errors import UsageError

Example = tuple[list[int], list[bool]]


def sft_examples(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool = False
) -> Examples:
    """`(tokens, response_mask)` per line, equally long; the mask covers the responses, each with its EOS.

    A line's response is its `response`, else its `answer`; in a line with `messages` every assistant message is one.
    Lengths are in tokens; `max_response_length` counts the EOS, as in a rollout, and a conversation in messages may be
    as long as both limits together. One rank of a node tokenizes them for all. `drops_long`: leave out lines that are
    too long, with a note in the set of the examples. Raises UsageError with file and line for a line without a
    response, or too long, and if all are.
    """
    options = max_prompt_length, max_response_length, drops_long
    prompts, arrays = arrays_within_limits(_arrays, prompts, encoder, "sft", "examples", *options)
    tokens, mask = (Ragged(arrays[name], arrays["offsets"]) for name in ("values", "mask"))
    return Examples(prompts, tokens, lambda line: (tokens[line], mask[line]))


def arrays_within_limits(
    compute: Callable[..., dict[str, np.ndarray]], prompts: PromptSet, encoder: Encoder, name: str, unit: str,
    max_prompt_length: int, max_response_length: int, drops_long: bool,
) -> tuple[PromptSet, dict[str, np.ndarray]]:  # fmt: skip
    """(the set of the lines that are kept, arrays of tokens that one rank of a node computes for all).

    Args:
        compute: makes the arrays of prompts, encoder, both limits and `drops_long`; "kept" has the numbers of the
            lines. UsageError for a wrong line.
        name: of what is computed; `unit`: what a line is, for messages.

    Raises:
        UsageError: also if all lines are too long.
    """
    options = max_prompt_length, max_response_length, drops_long
    arrays = prompts.on_node(lambda: compute(prompts, encoder, *options), name, encoder, *options)
    flags = f"--max-prompt-length {max_prompt_length} --max-response-length {max_response_length}"
    limits = f"{max_prompt_length} + {max_response_length}"
    return prompts.without_long(arrays["kept"], unit, flags, limits), arrays


def _arrays(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool
) -> dict[str, np.ndarray]:
    tokens, masks, kept = RaggedBuilder(), RaggedBuilder(np.bool_), []
    for prompt in prompts:
        try:
            if prompt.messages is not None:
                example = _conversation(prompt, encoder, max_prompt_length + max_response_length)
            else:
                text = prompt.response if prompt.response is not None else prompt.answer
                example = prompt_and_response(prompt, text, encoder, max_prompt_length, max_response_length)
        except UsageError as error:
            if drops_long and isinstance(error, TooLong):
                continue
            raise UsageError(f"{prompts.where(prompt.index)}: {error}") from None
        tokens.add(example[0])
        masks.add(example[1])
        kept.append(prompt.index)
    return tokens.build().arrays() | {"mask": masks.build().values, "kept": np.array(kept, np.int64)}


def prompt_and_response(
    prompt: Prompt, text: str | None, encoder: Encoder, max_prompt_length: int, max_response_length: int,
    may_be_empty: bool = False,
) -> Example:  # fmt: skip
    """The example of a prompt and the text of its response. UsageError without a text, or if one is too long.

    `may_be_empty`: the response may be EOS alone.
    """
    if text is None:
        raise UsageError("supervised training needs a response (or an answer), or messages, on each line")
    prompt_ids = prompt_tokens(prompt, encoder, max_prompt_length)
    response_ids = encoder.response(prompt, text)
    if len(response_ids) < 2 and not may_be_empty:
        raise UsageError("the response is empty")
    if len(response_ids) > max_response_length:
        raise TooLong(
            f"the response has {len(response_ids)} tokens with EOS; --max-response-length allows {max_response_length}"
            f"{TooLong.CURE}"
        )
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def _conversation(prompt: Prompt, encoder: Encoder, max_length: int) -> Example:
    tokens, mask = encoder.conversation(prompt.messages, prompt.tools)
    if len(tokens) > max_length:
        raise TooLong(
            f"the conversation has {len(tokens)} tokens; --max-prompt-length and --max-response-length allow "
            f"{max_length} together{TooLong.CURE}"
        )
    return tokens, mask
