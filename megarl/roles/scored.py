"""What the reward role says about responses: a record of scores from the verifiers to the batch, and the rows of the
samples file, with what verifiers, judges and people read.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.packed import turn_numbers
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.data.images.names import shown
from megarl.data.messages import conversation_of
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.rewards.base import Sample, Score, only_turn
from megarl.roles.loss_mask import valid_sequences, without_unscored

Decode = Callable[[Sequence[int]], str]  # the text of tokens


class Scored(NamedTuple):
    """The scores of N responses, or of groups of them with one more dimension."""

    reward: Tensor  # [N] float64
    correct: Tensor  # [N] bool
    counts: Tensor  # [N] bool: it has a score
    parts: Tensor  # [N, K] float64 parts of the reward before their weights; K is 0 if there are not several

    @classmethod
    def of_rows(cls, rows: Tensor) -> "Scored":
        """From `rows`: [N, 3 + K] float64."""
        return cls(rows[..., 0], rows[..., 1] > 0, rows[..., 2] > 0, rows[..., 3:])

    @classmethod
    def of_batch(cls, batch: Batch, settings: Settings) -> "Scored":
        """From the fields of a batch that is scored."""
        scores = batch.need("scores")
        parts = scores.new_zeros(len(batch), 0) if batch.reward_parts is None else batch.reward_parts
        return cls(scores.double(), batch.need("correct"), valid_sequences(batch, settings), parts.double())

    def rows(self) -> Tensor:
        """[N, 3 + K] float64, in which ranks exchange them."""
        columns = (column.double() for column in (self.reward, self.correct, self.counts))
        return torch.cat([torch.stack([*columns], dim=-1), self.parts], dim=-1)

    def fill(self, batch: Batch, drops: bool):
        """Sets the fields of a batch. `drops`: a response without a score loses its response tokens."""
        batch.scores, batch.correct = self.reward.float(), self.correct
        if self.parts.shape[-1]:
            batch.reward_parts = self.parts.float()
        if drops:
            batch.response_mask = without_unscored(batch, self.counts)


def no_rows(count: int, settings: Settings, device) -> Tensor:
    """[count, 3 + K] zeros for `Scored.rows`, of responses that another rank scores."""
    return torch.zeros(count, 3 + len(settings.part_weights), dtype=torch.float64, device=device)


def read_responses(
    batch: Batch, prompts: PromptSet, decode: Decode, has_turns: bool
) -> tuple[list[tuple[Prompt, str]], list[Sample], list[dict]]:
    """The responses of a batch as text: prompts and whole texts, for a reward model or a judge; samples, for verifiers;
    and rows of the samples file, without scores. `has_turns`: they are episodes of an environment."""
    sequences = zip(batch.tokens.cpu().split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), strict=True)
    responses = [decode(tokens[start:].tolist()) for tokens, start in sequences]
    # A prompt of its own for each response: a verifier may change its metadata.
    texts = list(zip((prompts[line] for line in batch.prompt_ids.tolist()), responses, strict=True))
    turns = turns_of(batch, decode) if has_turns else [only_turn(response) for response in responses]
    columns = zip(texts, turns, batch.finished.tolist(), batch.response_lengths.tolist(), strict=True)
    images_of = functools.cache(prompts.images_of)
    samples = [
        sample_of(prompt, of_response, ends, tokens, images_of(prompt.index))
        for (prompt, _), of_response, ends, tokens in columns
    ]
    rows = [_row(number, each) for number, each in zip(batch.sequence_ids.tolist(), samples, strict=True)]
    if has_turns:
        for row, sample, response in zip(rows, samples, responses, strict=True):
            row |= {"response": response, "turns": sample.turns}
    return texts, samples, rows


def in_order(rows: list[dict]) -> list[dict]:
    """Rows by the number of their sequence."""
    return sorted(rows, key=lambda row: row["sequence"])


def failed_rows(batch: Batch, valid: Tensor, prompts: PromptSet) -> list[dict]:
    """Rows of the episodes whose environment failed."""
    failed = (~valid).nonzero().flatten()
    columns = zip(batch.sequence_ids[failed].tolist(), batch.prompt_ids[failed].tolist(), strict=True)
    samples = [(number, sample_of(prompts[line], turns=[], finished=False, tokens=0)) for number, line in columns]
    nothing = Score(reward=0.0, correct=False)
    more = {**score_fields(nothing, {}), "turns": [], "failed": True}
    return [_row(number, sample) | more for number, sample in samples]


def sample_of(
    prompt: Prompt, turns: list[dict[str, Any]], finished: bool, tokens: int, images: list[dict] | None = None
) -> Sample:
    """The sample of a response for verifiers. `turns`: of the response; [] if its environment failed. `images`: of the
    prompt, as `PromptSet.images_of` gives them."""
    return Sample(
        prompt=prompt.text, response=turns[-1]["text"] if turns else "", answer=prompt.answer,
        metadata=prompt.metadata, finished=finished, messages=conversation_of(shown(prompt.key)), tokens=tokens,
        turns=turns, columns=prompt.columns, images=images or [],
    )  # fmt: skip


def _row(number: int, sample: Sample) -> dict:
    return {
        "sequence": number,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "reward": None,
        "correct": None,
        "reward_parts": {},
        "reward_values": {},
        "extracted": None,
        "length": sample.tokens,
        "finished": sample.finished,
    }


def score_fields(score: Score, values: dict[str, float | None]) -> dict:
    """The fields of a row that a score sets. `values`: what each term gave, None of one that abstains."""
    return {
        "reward": score.reward,
        "correct": score.correct,
        "reward_parts": score.parts,
        "reward_values": values,
        "extracted": score.extracted,
    }


def turns_of(batch: Batch, decode: Decode) -> list[list[dict[str, Any]]]:
    """For each sequence the records of its turns, as `Sample.turns`; needs `turn_rewards`.

    A turn's text has no special tokens, and so not the token that ended it.
    """
    mask = batch.response_mask if batch.forced is None else batch.response_mask | batch.forced
    numbers = turn_numbers(mask, batch.cu_seqlens)
    lengths = batch.lengths.tolist()
    split = [field.cpu().split(lengths) for field in (batch.tokens, numbers, batch.need("turn_rewards"))]
    return [
        list(_turns(tokens.tolist(), of_sequence.tolist(), rewards.tolist(), decode))
        for tokens, of_sequence, rewards in zip(split[0], split[1], split[2], strict=True)
    ]


def _turns(tokens: list[int], numbers: list[int], rewards: list[float], decode: Decode) -> Iterator[dict[str, Any]]:
    """`numbers`: the turn of each token, −1 outside of turns."""
    begins = [numbers.index(turn) for turn in range(max(numbers, default=-1) + 1)]
    for turn, (begin, following) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
        end = begin + numbers.count(turn)
        yield {
            "text": decode(tokens[begin:end]),
            "observation": decode(tokens[end:following]),
            "reward": sum(rewards[begin:end]),  # it has one, at the last token that the policy has chosen
        }
