"""Rows of responses for the samples of a run: token by token for the report, and what there is of a step that fails.

The tokens of a step's first responses, with log-probs, advantages and values, are files of their own beside the
samples: the numbers of a token differ by rounding between layouts of a run, while its samples are the same to the byte.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megarl.batch import Batch
from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.data.detokenizer import Vocabulary
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.observe.samples import QUANTITIES
from megarl.roles.reward import Reward
from megarl.rollout.episodes.results import episodes_to_batch
from megarl.rollout.episodes.runner import EpisodeRunner

_WRITTEN = "response_mask"
MAX_TOKENS = 1024  # tokens of a response; the rest of a longer one is left out, which bounds a step's file


class TokenSamples:
    """Makes the rows of `tokens/step_%08d.jsonl`."""

    def __init__(self, count: int, tokenizer: Tokenizer, has_forced: bool = False):
        """`count`: responses of a step; 0: none. `has_forced`: responses may have tokens of a thinking budget."""
        self._count, self._tokenizer, self._has_forced = count, tokenizer, has_forced
        self._vocabulary = Vocabulary(tokenizer)

    def rows(self, step_batch: StepBatch) -> list[dict]:
        """Rows of the responses that this rank's replica of the actor holds; its leader calls this after the update.

        A row has `sequence` (number in the batch), `prompt` and `response` (text), `reward`, `finished`, `length` (all
        response tokens), and lists with an item for each of the first `MAX_TOKENS` response tokens: `tokens` (their
        texts), `token_ids`, and the fields of `QUANTITIES` (nats, except advantages, values and returns). Numbers are
        the shortest decimals that read back as the same float32. With an environment or a thinking budget, `observed`
        says which tokens are theirs, and not the policy's: `response`, `length` and the lists have both.
        """
        batch: Batch = step_batch[ACTOR]
        chosen = (batch.sequence_ids < self._count).nonzero().flatten()
        if not len(chosen):
            return []
        part = batch.select(chosen)
        names = [name for name in QUANTITIES if getattr(part, name) is not None]
        columns = [getattr(part, name).float() for name in names]
        if part.turn_rewards is not None or self._has_forced:
            names, columns = [*names, _WRITTEN], [*columns, part.response_mask.float()]
        fields = torch.stack(columns).cpu().numpy()
        return [
            self._row(columns, ids, values, names, step_batch.prompts)
            for columns, ids, values in _sequences(part, fields)
        ]

    def _row(self, columns: dict, ids: list[int], values: np.ndarray, names: list[str], prompts: PromptSet) -> dict:
        """`values`: [F, T] of the response tokens `ids` [T]."""
        shown, fields = ids[:MAX_TOKENS], dict(zip(names, values[:, :MAX_TOKENS], strict=True))
        written = fields.pop(_WRITTEN, None)
        observed = {} if written is None else {"observed": (written == 0).tolist()}
        return {
            "sequence": columns["sequence_ids"],
            "prompt": prompts[columns["prompt_ids"]].text,
            "response": self._tokenizer.decode(ids),
            "reward": columns["scores"],
            "finished": columns["finished"],
            "length": len(ids),
            "tokens": [self._vocabulary.token(number)[0] for number in shown],
            "token_ids": shown,
            **observed,
            # The shortest decimals that name the 32-bit numbers.
            **{name: [float(str(value)) for value in of_field] for name, of_field in fields.items()},
        }


def _sequences(batch: Batch, fields: np.ndarray):
    """For each sequence of a batch (its per-sequence fields, ids of its response tokens, their `fields` [F, T])."""
    names = ("sequence_ids", "prompt_ids", "scores", "finished")
    columns = zip(*(getattr(batch, name).tolist() for name in names), strict=True)
    tokens, starts = batch.tokens.cpu().numpy(), batch.cu_seqlens.tolist()
    prompt_lengths = batch.prompt_lengths.tolist()
    for number, of_sequence in enumerate(columns):
        response = slice(starts[number] + prompt_lengths[number], starts[number + 1])
        yield dict(zip(names, of_sequence, strict=True)), tokens[response].tolist(), fields[:, response]


def rows_so_far(
    reward: Reward, step_batch: StepBatch | None, episodes: EpisodeRunner | None, scored: Sequence[dict] = ()
) -> Sequence[dict]:
    """Rows of the responses that this rank holds, with what is known of them; for `samples.keep_for_failure`.

    Args:
        step_batch: None until all are generated; then the `episodes` that have ended are what there is.
        scored: rows of those that were scored before.
    """
    if rows := (reward.running.rows if reward.running is not None else []) or scored:
        return rows
    if step_batch is not None and (batch := step_batch[ACTOR] or step_batch[reward.name]):
        rows = reward.unscored_rows(batch, step_batch.prompts)
        if batch.scores is None:
            return rows
        scores = dict(zip(batch.sequence_ids.tolist(), batch.scores.tolist(), strict=True))
        return [row | {"reward": scores[row["sequence"]]} for row in rows]
    if episodes is not None and episodes.ended is not None:
        ended, prompts = episodes.ended
        return reward.unscored_rows(episodes_to_batch(ended), prompts)
    return []
