"""The turns of episodes as text, for verifiers and for the samples file."""

from collections.abc import Iterator
from typing import Any

from megarl.algorithms.packed import turn_numbers
from megarl.batch import Batch
from megarl.data.tokenizers import Tokenizer


def turns_of(batch: Batch, tokenizer: Tokenizer) -> list[list[dict[str, Any]]]:
    """For each sequence the records of its turns, as `Sample.turns`; needs `turn_rewards`.

    A turn's text has no special tokens, and so not the token that ended it.
    """
    mask = batch.response_mask if batch.forced is None else batch.response_mask | batch.forced
    numbers = turn_numbers(mask, batch.cu_seqlens)
    lengths = batch.lengths.tolist()
    columns = (field.cpu().split(lengths) for field in (batch.tokens, numbers, batch.turn_rewards))
    return [
        list(_turns(tokens.tolist(), of_sequence.tolist(), rewards.tolist(), tokenizer))
        for tokens, of_sequence, rewards in zip(*columns, strict=True)
    ]


def _turns(
    tokens: list[int], numbers: list[int], rewards: list[float], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """`numbers`: the turn of each token, −1 outside of turns."""
    begins = [numbers.index(turn) for turn in range(max(numbers, default=-1) + 1)]
    for turn, (begin, following) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
        end = begin + numbers.count(turn)
        yield {
            "text": tokenizer.decode(tokens[begin:end]),
            "observation": tokenizer.decode(tokens[end:following]),
            "reward": sum(rewards[begin:end]),  # it has one, at the last token that the policy has chosen
        }
