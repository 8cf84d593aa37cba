"""The reward role: scores responses with verifiers and a reward model or a judge, each replica its own."""

import dataclasses
import math
from itertools import compress

import torch
from torch import Tensor

from megarl.algorithms.score_shaping import RunningMoments, clip, combine, overlong_penalty
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.announcements import response_queue
from megarl.comm.load_balance import positions_by_group
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.errors import warn
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from megarl.rewards.base import Sample, Score, failure
from megarl.rewards.composition import SHAPING, Shaped, compose, fail_unscored, parse_cosine, shaping_scores
from megarl.rewards.expression import ADAPTIVE, ENVIRONMENT, INFALLIBLE, JUDGE, MODEL, Term, expressions_of
from megarl.rewards.verifiers import VerifierSet
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.judge import Judge, JudgedResponse
from megarl.roles.judge_requests import ArrivingResponses
from megarl.roles.loss_mask import valid_sequences
from megarl.roles.reward_metrics import FailureWindow, RewardStatistics
from megarl.roles.reward_model import RewardModel
from megarl.roles.scored import Decode, Scored, failed_rows, in_order, no_rows, read_responses, score_fields


class Reward:
    """Scores responses: fills their batches, and the rows of the step batch.

    The leader of each replica decodes its responses and runs the verifiers; a reward model or a judge runs on all
    ranks. With an environment verifiers see the turns of an episode, a reward model and a judge read its whole text. An
    episode whose environment failed is not scored: its reward is 0, its row says `failed`, and it is in no statistics.
    A response whose verifier failed, or whose judgements have no number, loses its response tokens, unless it gets
    `--reward-fallback`; its row has the reason as `failure`.
    """

    name = "reward"

    def __init__(
        self, settings: Settings, terms: tuple[Term, ...], role_groups: RoleGroups, decode: Decode,
        verifiers: VerifierSet, model: RewardModel | Judge | None, timers: Timers, compares: bool = False,
    ):  # fmt: skip
        """`decode`: gives the text of the policy's tokens. `model`: on the role's ranks, if `terms` have one.
        `compares`: the judge reads several responses to a prompt together."""
        self.settings, self.terms = settings, terms
        # The terms of --reward and of the files of a mixture by their text, in the same order on all ranks.
        self._expressions = expressions_of(settings)
        is_adaptive = any(_has(terms, ADAPTIVE) for terms in self._expressions.values())
        self.needs_whole_groups = verifiers.needs_whole_groups or compares or is_adaptive
        self.drops = settings.reward_failure == "drop" and any(term.name not in INFALLIBLE for term in terms)
        self.role_groups, self.timers = role_groups, timers
        self._decode, self.verifiers = decode, verifiers
        self.model = model
        self.reward_model = model if isinstance(model, RewardModel) else None
        self.judge = model if isinstance(model, Judge) else None
        self.moments = RunningMoments()  # of the reward model's scores of training responses
        self._failure_windows = {term.name: FailureWindow(settings.reward_max_failures) for term in terms}
        self._warned: set[str] = set()  # verifiers of whose failures the user was told
        self.running: StepBatch | None = None  # whose responses are being scored
        self.begin_step()

    @property
    def frozen_models(self) -> list[FrozenModel]:
        """The reward models or the judge on this rank."""
        return [] if self.model is None else self.model.members

    def begin_step(self):
        """Resets the step's statistics."""
        self._statistics = RewardStatistics(self.role_groups, self.terms)
        if self.judge:
            self.judge.begin_step()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step's training responses by reward term. A collective of the replica leaders."""
        model = self.reward_model or self.judge
        return self._statistics.metrics() | (model.metrics() if model else {})

    def prepare(self, prompts: PromptSet, lines: list[int]):
        """Encodes prompts for the reward model in advance; dedicated reward ranks do this during generation."""
        if self.reward_model:
            with self.timers.phase(self.name, "read"):
                of_lines = [line for line in lines if _has(self._terms_of(prompts, line), MODEL)]
                self.reward_model.prepare([prompts[line] for line in of_lines])

    def judge_early(self, prompts: PromptSet, lines: list[int], step: int, number: int):
        """Judges the responses to a round's prompts while the rollout generates them (`comm.announcements`).

        `lines`: of the prompts; `number`: of the round in the step. A collective of the role; other ranks return at
        once.
        """
        if self.judge is None:
            return
        groups, arrivals = self.role_groups, None
        if groups.is_leader:
            of_round = PromptGroups(prompts.group_sizes(lines, self.settings.samples_per_prompt))
            is_own = of_round.round_robin(len(groups.replicas)) == groups.dp_rank
            of_lines = [prompts[line] if _has(self._terms_of(prompts, line), JUDGE) else None for line in lines]
            decode, compares = self._decode, self.judge.config.compares
            queue, count = response_queue(step, number, groups.dp_rank), int(is_own.sum())
            arrivals = ArrivingResponses(queue, count, of_lines, of_round, decode, compares)
        self.judge.judge_early(arrivals, step)

    def score(self, step_batch: StepBatch, for_training: bool = True):
        """Fills `scores` and `correct`, and on leaders the step batch's `rows`, unless the batcher has already done so
        for a group filter. Empties `response_mask` of responses that have no score.

        `for_training`: False for evaluation and greedy baselines, which get raw reward-model scores and leave the
        running moments and the statistics unchanged.

        Raises:
            TooManyFailures: a verifier or the judge failed on more of the latest samples than `--reward-max-failures`
                allows.
        """
        batch = step_batch[self.name]
        if batch is None or batch.scores is not None:
            return
        with self.timers.phase(self.name, "score"):
            valid, scored = torch.ones_like(batch.lengths, dtype=torch.bool), batch
            if self.settings.environment is not None:
                valid = valid_sequences(batch, self.settings)
                scored = batch.select(valid.nonzero().flatten())
            found = no_rows(len(batch), self.settings, batch.tokens.device)
            places, self.running, step_batch.rows = valid.nonzero().flatten(), step_batch, []
            for terms, positions, total in self._parts(scored, step_batch.prompts, step_batch.count):
                own = scored if len(positions) == len(scored) else scored.select(positions)
                found[places[positions]] = self._score_part(terms, total, own, step_batch, for_training)
            if self.judge and for_training:
                self.judge.forget_early()
            if self.role_groups.is_leader:
                step_batch.rows = in_order(step_batch.rows + failed_rows(batch, valid, step_batch.prompts))
            Scored.of_rows(self.role_groups.broadcast(found)).fill(batch, self.drops)
            self.running = None

    def _text_of(self, prompts: PromptSet, line: int) -> str:
        """The reward of the responses to a prompt, a key of `_expressions`."""
        return prompts.entry_of(line).reward or self.settings.reward

    def _terms_of(self, prompts: PromptSet, line: int) -> tuple[Term, ...]:
        return self._expressions[self._text_of(prompts, line)]

    def _parts(self, batch: Batch, prompts: PromptSet, count: int) -> list[tuple[tuple[Term, ...], Tensor, int]]:
        """[(terms of a reward, positions [n] int64 in this replica's batch of the responses that it scores, their
        number on all replicas)], without rewards that score no response. A collective of the role.

        `count`: sequences on all replicas, of which some may have failed.
        """
        whole, device = torch.arange(len(batch), device=batch.tokens.device), batch.tokens.device
        texts = list(self._expressions) if prompts.entries else [self.settings.reward]
        if len(texts) == 1 and self.settings.environment is None:
            return [(self._expressions[texts[0]], whole, count)]
        own = [texts.index(self._text_of(prompts, line)) for line in batch.prompt_ids.tolist()]
        numbers = torch.tensor(own, dtype=torch.int64, device=device)
        counts = self.role_groups.dp_all_reduce(torch.bincount(numbers, minlength=len(texts))).tolist()
        found = [
            (self._expressions[text], (numbers == number).nonzero().flatten(), n)
            for number, (text, n) in enumerate(zip(texts, counts, strict=True))
            if n
        ]
        return found or [(self._expressions[texts[0]], whole, 0)]

    def _score_part(
        self, terms: tuple[Term, ...], total: int, batch: Batch, step_batch: StepBatch, for_training: bool
    ) -> Tensor:
        """`Scored.rows` of the responses to a part of the prompts, on the leader; zeros on other ranks. Adds to the
        step batch's `rows`. A collective of the role. `total`: responses of the part on all replicas."""
        model_scores = judged = texts = samples = rows = None
        if self.role_groups.is_leader:
            texts, samples, rows = self._read(batch, step_batch.prompts)
        if self.reward_model and _has(terms, MODEL):
            with self.timers.phase(self.name, MODEL):
                model_scores = self._model_scores(texts, batch, step_batch.count, for_training)
        if self.judge and _has(terms, JUDGE):
            numbers = batch.sequence_ids.tolist()
            groups = positions_by_group(numbers, step_batch.groups)
            judged = self.judge.judge(texts, numbers, groups, step_batch.step, for_training)
        if not self.role_groups.is_leader:
            return no_rows(len(batch), self.settings, batch.tokens.device)
        before = step_batch.rows
        step_batch.rows = before + rows  # a verifier that ends the run leaves them
        of_models = model_scores, judged
        scored, rows = self._scores(terms, total, samples, rows, of_models, batch, step_batch, for_training)
        step_batch.rows = before + rows
        return scored.rows().to(batch.tokens.device)

    def _read(self, batch: Batch, prompts: PromptSet) -> tuple[list[tuple[Prompt, str]], list[Sample], list[dict]]:
        return read_responses(batch, prompts, self._decode, has_turns=self.settings.environment is not None)

    def _model_scores(self, texts, batch: Batch, count: int, for_training: bool) -> Tensor:
        """[2, N] reward-model scores of the replica's responses: raw, and normalized and clipped. Collective."""
        members = self.reward_model.scores(texts)
        raw = combine(members, self.settings.reward_ensemble)
        if for_training:
            self._statistics.add_ensemble(members, self.reward_model.cut)
        normalized = raw
        if for_training and self.settings.reward_normalize:
            self.moments.update(self._of_step(raw, batch, count))
            normalized = self.moments.normalize(raw)
        return torch.stack([raw, clip(normalized, self.settings.reward_clip) if for_training else normalized])

    def _of_step(self, values: Tensor, batch: Batch, count: int) -> Tensor:
        """[N] of this replica -> those of all replicas by sequence id, exactly: each is summed with zeros."""
        of_step = torch.zeros(2, count, dtype=torch.float64, device=values.device)
        of_step[0, batch.sequence_ids], of_step[1, batch.sequence_ids] = values, 1.0
        scores, is_scored = self.role_groups.dp_all_reduce(of_step)
        return scores[is_scored > 0]

    def _scores(
        self, terms: tuple[Term, ...], total: int, samples: list[Sample], rows: list[dict],
        of_models: tuple[Tensor | None, list[JudgedResponse] | None], batch: Batch, step_batch: StepBatch,
        for_training: bool,
    ) -> tuple[Scored, list[dict]]:  # fmt: skip
        """(scores of the responses, on the host; their rows of the samples file). A collective of the replica leaders.

        `samples`, `rows`: of the responses; `of_models`: of `_model_scores` and `Judge.judge`.
        """
        (model_scores, judged), names = of_models, frozenset(term.name for term in terms)
        groups = positions_by_group(batch.sequence_ids.tolist(), step_batch.groups)
        columns, failures = self.verifiers.score(samples, groups, names), self.verifiers.failures
        reasons = self.verifiers.reasons
        if for_training:
            self._statistics.add_seconds(self.verifiers.seconds_of_calls)
        if judged is not None:
            columns[JUDGE], of_judge = self._judged(samples, judged, rows)
            failures = failures | {JUDGE: [reason for reason in of_judge if reason is not None]}
            reasons = [reason or other for reason, other in zip(reasons, of_judge, strict=True)]
        failures, reasons = fail_unscored(terms, samples, columns, failures, reasons, self.settings.reward_fallback)
        for row, reason in zip(rows, reasons, strict=True):
            if reason is not None:
                row["failure"] = reason
        if ENVIRONMENT in names:
            columns[ENVIRONMENT] = _environment_scores(batch)
        self._warn(failures, len(samples), drops=self.drops and for_training)
        self._statistics.check_failures(failures, self.verifiers.timeouts, total, self._failure_windows)
        values = {name: list(map(_value, column)) for name, column in columns.items()}
        if model_scores is not None:
            values[MODEL], normalized = model_scores.tolist()
            pairs = zip(normalized, values[MODEL], strict=True)
            columns[MODEL] = [Score(reward=reward, correct=raw > 0) for reward, raw in pairs]
        counted = [not self.drops or reason is None for reason in reasons]
        if not names.isdisjoint(SHAPING):
            members = [[i for i in group if counted[i]] for group in groups]
            cosine, ngram = parse_cosine(self.settings.reward_cosine), self.settings.reward_ngram
            shaped = shaping_scores(terms, cosine, ngram, self._shaped(batch, step_batch.prompts), columns, members)
            columns |= shaped
            values |= {name: list(map(_value, column)) for name, column in shaped.items()}
        if for_training:
            known = {name: list(compress(column, counted)) for name, column in values.items()}
            self._statistics.add({name: [v for v in column if v is not None] for name, column in known.items()})
        positions = range(len(batch))
        scores = [compose(terms, {name: column[i] for name, column in columns.items()}) for i in positions]
        penalties = self._overlong_penalties(batch, step_batch.prompts)
        parts = self._parts_of(terms, columns, penalties, len(batch))
        if penalties is not None:
            weighted = (self.settings.overlong_penalty * penalties).tolist()
            scores = [_with_penalty(score, lost) for score, lost in zip(scores, weighted, strict=True)]
        given = [{name: column[i] for name, column in values.items()} for i in positions]
        rows = [row | score_fields(score, of_terms) for row, score, of_terms in zip(rows, scores, given, strict=True)]
        rewards = torch.tensor([score.reward for score in scores], dtype=torch.float64)
        verdicts = torch.tensor([score.correct for score in scores], dtype=torch.bool)
        of_parts = torch.tensor(parts, dtype=torch.float64).reshape(len(parts), len(self.settings.part_weights))
        return Scored(rewards, verdicts, torch.tensor(counted, dtype=torch.bool), of_parts), rows

    def _judged(
        self, samples: list[Sample], judged: list[JudgedResponse], rows: list[dict]
    ) -> tuple[list[Score], list[str | None]]:
        """The judge's scores, and why it has none; its judgements are added to `rows`."""
        scores, reasons = [], []
        for row, sample, (judgements, number, problem) in zip(rows, samples, judged, strict=True):
            row["judgements"] = judgements
            reasons.append(None if number is not None else failure(JUDGE, sample, problem))
            if number is None:
                scores.append(Score(self.settings.reward_fallback, False))
            else:
                scores.append(Score(number, number >= self.judge.config.correct_from, {JUDGE: number}))
        return scores, reasons

    def unscored_rows(self, batch: Batch, prompts: PromptSet) -> list[dict]:
        """Rows of responses that this rank holds, without scores; for the samples of a step that failed."""
        valid = valid_sequences(batch, self.settings)
        *_, rows = self._read(batch.select(valid.nonzero().flatten()), prompts)
        return in_order(rows + failed_rows(batch, valid, prompts))

    def _warn(self, failures: dict[str, list[str]], count: int, drops: bool):
        """Says once for each verifier and the judge that it failed, where, and what becomes of such responses."""
        what = "such responses are dropped" if drops else f"they get {self.settings.reward_fallback:g}"
        for name, reasons in failures.items():
            if reasons and name not in self._warned:
                self._warned.add(name)
                warn([f"{reasons[0]}; it failed on {len(reasons)} of {count} responses; {what} (--reward-failure)"])

    def _limits(self, batch: Batch, prompts: PromptSet) -> Tensor:
        """[N] int64 tokens that each response may have: those of the flag, or of its file in a mixture."""
        limits = torch.full_like(batch.lengths, self.settings.max_response_length)
        if prompts.entries:
            own = [prompts.response_limit(line) for line in batch.prompt_ids.tolist()]
            limits = torch.tensor([n or limit for n, limit in zip(own, limits.tolist(), strict=True)]).to(limits)
        return limits

    def _overlong_penalties(self, batch: Batch, prompts: PromptSet) -> Tensor | None:
        """[N] the penalty of `--overlong-buffer` before its weight; None without one. All turns of an episode and its
        observations count, as they do for `--max-response-length`."""
        s = self.settings
        if not s.overlong_buffer:
            return None
        lengths, limits = batch.lengths - batch.prompt_lengths, self._limits(batch, prompts)
        return overlong_penalty(lengths, limits, s.overlong_buffer)

    def _parts_of(
        self, terms: tuple[Term, ...], columns: dict[str, list[Score]], penalties: Tensor | None, count: int
    ) -> list[list[float]]:
        """Parts of each response's reward, in the order of `Settings.part_weights`, NaN of a term that abstains; [] if
        there are not several."""
        if not self.settings.part_weights:
            return [[] for _ in range(count)]
        parts = [[math.nan if s.abstains else s.reward for s in columns[term.name]] for term in terms if term.weight]
        parts += [] if penalties is None else [penalties.tolist()]
        if len(parts) != len(self.settings.part_weights):  # another reward of a mixture; then no estimator reads parts
            return [[0.0] * len(self.settings.part_weights) for _ in range(count)]
        return [[column[i] for column in parts] for i in range(count)]

    def _shaped(self, batch: Batch, prompts: PromptSet) -> list[Shaped]:
        """What the shaping terms read. As for `--max-response-length`, all turns and observations of an episode count
        as its length; its tokens are the policy's."""
        shares = ((batch.lengths - batch.prompt_lengths).double() / self._limits(batch, prompts)).tolist()
        written = batch.tokens[batch.response_mask].cpu().split(batch.response_lengths.tolist())
        columns = zip(shares, batch.finished.tolist(), (tokens.tolist() for tokens in written), strict=True)
        return [Shaped(share, finished, tokens) for share, finished, tokens in columns]


def _with_penalty(score: Score, lost: float) -> Score:
    parts = (score.parts or {"reward": score.reward}) | {"overlong": lost}
    return dataclasses.replace(score, reward=score.reward + lost, parts=parts)


def _has(terms: tuple[Term, ...], name: str) -> bool:
    return any(term.name == name for term in terms)


def _value(score: Score) -> float | None:
    return None if score.abstains else score.reward


def _environment_scores(batch: Batch) -> list[Score]:
    rewards = [float(row.double().sum()) for row in batch.turn_rewards.split(batch.lengths.tolist())]
    return [Score(reward, correct) for reward, correct in zip(rewards, batch.solved.tolist(), strict=True)]
