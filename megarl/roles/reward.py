"""The reward role: scores responses with a verifier, each lane its own."""

import dataclasses

import torch

from megarl.algorithms.shaping import overlong_penalty
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.observe.timers import Timers
from megarl.rewards.base import Reward as Verifier
from megarl.rewards.base import Sample, Score
from megarl.roles.flow import Flow
from megarl.world import Place


class Reward:
    """Scores text; keeps the rows of the samples file of the last call."""

    name = "reward"

    def __init__(self, settings: Settings, place: Place, tokenizer: Tokenizer, verifier: Verifier, timers: Timers):
        self.settings, self.place, self.timers = settings, place, timers
        self.tokenizer, self.verifier = tokenizer, verifier
        self.rows: list[dict] = []

    def score(self, flow: Flow, prompts: PromptSet):
        """Fills `scores` and `correct` where the sampling has not done it already."""
        if not self.place.is_member or flow[self.name].scores is not None:
            return
        with self.timers.phase(self.name, "score"):
            batch = flow[self.name]
            samples = self._samples(batch, prompts)
            scores = self._shaped([self.verifier(sample) for sample in samples], batch)
            batch.scores = torch.tensor([s.reward for s in scores], dtype=torch.float32, device=batch.tokens.device)
            batch.correct = torch.tensor([s.correct for s in scores], dtype=torch.bool, device=batch.tokens.device)
            self.rows = [self._row(*item) for item in zip(batch.sequence_ids.tolist(), samples, scores,
                                                          batch.response_lengths.tolist(), strict=True)]  # fmt: skip

    def _shaped(self, scores: list[Score], batch: Batch) -> list[Score]:
        """The scores with the penalty of `--overlong-buffer` as a part of their own."""
        s = self.settings
        if not s.overlong_buffer:
            return scores
        penalties = s.overlong_penalty * overlong_penalty(
            batch.response_lengths, s.max_response_length, s.overlong_buffer
        )
        return [_with_part(*item) for item in zip(scores, penalties.tolist(), strict=True)]

    def _samples(self, batch, prompts: PromptSet) -> list[Sample]:
        responses = zip(batch.tokens.cpu().split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), strict=True)
        texts = [self.tokenizer.decode(tokens[start:].tolist()) for tokens, start in responses]
        found = zip(batch.prompt_ids.tolist(), texts, batch.finished.tolist(), strict=True)
        return [
            Sample(prompts[i].prompt, text, prompts[i].answer, prompts[i].metadata, done) for i, text, done in found
        ]

    def _row(self, number: int, sample: Sample, score, length: int) -> dict:
        return {
            "sequence": number,
            "prompt": sample.prompt,
            "response": sample.response,
            "answer": sample.answer,
            "reward": score.reward,
            "correct": score.correct,
            "reward_parts": score.parts,
            "extracted": score.extracted,
            "length": length,
            "finished": sample.finished,
        }


def _with_part(score: Score, penalty: float) -> Score:
    parts = score.parts or {"reward": score.reward}
    return dataclasses.replace(score, reward=score.reward + penalty, parts=parts | {"overlong": penalty})
