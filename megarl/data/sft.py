"""Supervised examples: prompt, reference response and EOS as tokens, with the mask of what is to be learnt."""

from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError


def sft_examples(
    prompts: PromptSet, tokenizer: Tokenizer, max_prompt_length: int, max_response_length: int
) -> list[tuple[list[int], list[bool]]]:
    """`(tokens, response_mask)` per prompt, equally long; the mask covers the response and its EOS.

    The response is the line's `response`, or else its `answer`. Lengths are in tokens; `max_response_length` counts
    the EOS, as it does in a rollout. Raises UsageError with file and line for a line without either, or too long.
    """
    examples = []
    for prompt, prompt_ids in zip(prompts, prompts.encode(tokenizer, max_prompt_length), strict=True):
        where = prompts.where(prompt.index)
        text = prompt.response if prompt.response is not None else prompt.answer
        if text is None:
            raise UsageError(f"{where}: supervised training needs a response (or an answer) on each line")
        response_ids = tokenizer.encode(text)
        if not response_ids:
            raise UsageError(f"{where}: the response is empty")
        response_ids.append(tokenizer.eos_id)
        if len(response_ids) > max_response_length:
            raise UsageError(
                f"{where}: the response has {len(response_ids)} tokens with EOS; "
                f"--max-response-length allows {max_response_length}"
            )
        mask = [False] * len(prompt_ids) + [True] * len(response_ids)
        examples.append((prompt_ids + response_ids, mask))
    return examples
