"""The reward role: scores responses with verifiers and a reward model, each replica its own."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.normalization import RunningMoments, clip
from megarl.algorithms.shaping import overlong_penalty
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.data.prompts import Prompt, PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.observe.timers import Timers
from megarl.rewards.base import Sample, Score
from megarl.rewards.composition import compose
from megarl.rewards.expression import ENVIRONMENT, MODEL, Term
from megarl.rewards.verifiers import VerifierSet
from megarl.roles.reward_metrics import FailureWindow, RewardStatistics
from megarl.roles.reward_model import RewardModel


class Reward:
    """Scores responses; `rows` holds the samples-file rows of the last call.

    The leader of each replica decodes its responses and runs the verifiers; a reward model runs on all ranks.
    """

    name = "reward"
    outputs = ("scores", "correct")

    def __init__(
        self, settings: Settings, terms: tuple[Term, ...], role_groups: RoleGroups, tokenizer: Tokenizer,
        verifiers: VerifierSet, reward_model: RewardModel | None, timers: Timers,
    ):  # fmt: skip
        """`tokenizer`: the policy's. `reward_model`: on the role's ranks, if `terms` contain the model."""
        self.settings, self.terms, self.role_groups, self.timers = settings, terms, role_groups, timers
        self.tokenizer, self.verifiers, self.reward_model = tokenizer, verifiers, reward_model
        self.moments = RunningMoments()  # of the reward model's scores of training responses
        self._failure_window = FailureWindow(settings.reward_max_failures)
        self.rows: list[dict]
        self.begin_step()

    def begin_step(self):
        """Resets the step's statistics and rows."""
        self._statistics, self.rows = RewardStatistics(self.role_groups, self.terms), []

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step's training responses by reward term. A collective of the replica leaders."""
        return self._statistics.metrics() | (self.reward_model.metrics() if self.reward_model else {})

    def prepare(self, prompts: PromptSet, lines: list[int]):
        """Encodes prompts for the reward model in advance; dedicated reward ranks do this during generation."""
        if self.reward_model:
            with self.timers.phase(self.name, "read"):
                self.reward_model.prepare([prompts[line] for line in lines])

    def score(self, step_batch: StepBatch, for_training: bool = True):
        """Fills `scores` and `correct`, unless the batcher has already done so for a group filter.

        `for_training`: False for evaluation and greedy baselines, which get raw reward-model scores and leave the
        running moments and the statistics unchanged.

        Raises:
            RuntimeError: a verifier failed on more of the latest samples than `--reward-max-failures` allows.
        """
        batch = step_batch[self.name]
        if batch is None or batch.scores is not None:
            return
        with self.timers.phase(self.name, "score"):
            texts = self._texts(batch, step_batch.prompts) if self.role_groups.is_leader else None
            model_scores = self._model_scores(texts, batch, step_batch.count, for_training)
            columns = torch.zeros(len(batch), 2, dtype=torch.float64, device=batch.tokens.device)
            if self.role_groups.is_leader:
                scores = self._scores(texts, model_scores, batch, step_batch.count, for_training)
                rows = [(score.reward, score.correct) for score in scores]
                columns[:] = torch.tensor(rows, dtype=columns.dtype).reshape(len(batch), 2)
            if len(self.role_groups.replica) > 1:
                dist.broadcast(columns, self.role_groups.replica[0], group=self.role_groups.replica_group)
            batch.scores, batch.correct = columns[:, 0].float(), columns[:, 1] > 0

    def _texts(self, batch: Batch, prompts: PromptSet) -> list[tuple[Prompt, str]]:
        sequences = zip(batch.tokens.cpu().split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), strict=True)
        responses = [self.tokenizer.decode(tokens[start:].tolist()) for tokens, start in sequences]
        return list(zip((prompts[line] for line in batch.prompt_ids.tolist()), responses, strict=True))

    def _model_scores(self, texts, batch: Batch, count: int, for_training: bool) -> Tensor | None:
        """[2, N] reward-model scores of the replica's responses: raw, and normalized and clipped. Collective."""
        if not self.reward_model:
            return None
        members = self.reward_model.scores(texts)
        raw = self.reward_model.combined(members)
        if for_training:
            self._statistics.add_ensemble(members, self.reward_model.cut)
        normalized = raw
        if for_training and self.settings.reward_normalize:
            self.moments.update(self._of_step(raw, batch, count))
            normalized = self.moments.normalize(raw)
        return torch.stack([raw, clip(normalized, self.settings.reward_clip) if for_training else normalized])

    def _of_step(self, values: Tensor, batch: Batch, count: int) -> Tensor:
        """[N] of this replica -> [count] of all replicas by sequence id, exactly: each is summed with zeros."""
        of_step = torch.zeros(count, dtype=torch.float64, device=values.device)
        of_step[batch.sequence_ids] = values
        return self.role_groups.dp_all_reduce(of_step)

    def _scores(self, texts, model_scores: Tensor | None, batch: Batch, count: int, for_training: bool) -> list[Score]:
        """Scores of the replica's responses; sets `rows`. A collective of the replica leaders."""
        samples = self._samples(texts, batch)
        columns = self.verifiers.score(samples)
        self._statistics.check_failures(self.verifiers.failures, self.verifiers.timeouts, count, self._failure_window)
        values = {name: [score.reward for score in column] for name, column in columns.items()}
        if model_scores is not None:
            values[MODEL], normalized = model_scores.tolist()
            columns[MODEL] = [Score(x, raw > 0) for x, raw in zip(normalized, values[MODEL], strict=True)]
        if batch.turn_rewards is not None and any(term.name == ENVIRONMENT for term in self.terms):
            sums = [float(row.double().sum()) for row in batch.turn_rewards.split(batch.lengths.tolist())]
            values[ENVIRONMENT] = sums
            columns[ENVIRONMENT] = [Score(x, bool(ok)) for x, ok in zip(sums, batch.solved.tolist(), strict=True)]
        if for_training:
            self._statistics.add(values)
        positions = range(len(batch))
        scores = [compose(self.terms, {name: column[i] for name, column in columns.items()}) for i in positions]
        scores = self._with_overlong_penalty(scores, batch)
        values = [{name: column[i] for name, column in values.items()} for i in positions]
        self.rows = [_row(*item) for item in zip(batch.sequence_ids.tolist(), samples, scores, values, strict=True)]
        return scores

    def _with_overlong_penalty(self, scores: list[Score], batch: Batch) -> list[Score]:
        """The scores with the penalty of `--overlong-buffer` as one more component."""
        s = self.settings
        if not s.overlong_buffer:
            return scores
        penalties = s.overlong_penalty * overlong_penalty(
            batch.response_lengths, s.max_response_length, s.overlong_buffer
        )
        return [_with_component(*item) for item in zip(scores, penalties.tolist(), strict=True)]

    def _samples(self, texts: list[tuple[Prompt, str]], batch: Batch) -> list[Sample]:
        responses = zip(texts, batch.finished.tolist(), batch.response_lengths.tolist(), strict=True)
        return [
            Sample(prompt.text, response, prompt.answer, prompt.metadata, finished, prompt.conversation, tokens)
            for (prompt, response), finished, tokens in responses
        ]


def _row(number: int, sample: Sample, score: Score, values: dict[str, float]) -> dict:
    return {
        "sequence": number,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "reward": score.reward,
        "correct": score.correct,
        "reward_parts": score.parts,
        "reward_values": values,
        "extracted": score.extracted,
        "length": sample.tokens,
        "finished": sample.finished,
    }


def _with_component(score: Score, penalty: float) -> Score:
    components = score.parts or {"reward": score.reward}
    return dataclasses.replace(score, reward=score.reward + penalty, parts=components | {"overlong": penalty})
