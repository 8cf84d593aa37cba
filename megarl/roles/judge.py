"""The judge: a frozen language model that reads responses and writes judgements, from which numbers are read."""

import functools
from statistics import fmean
from typing import NamedTuple

import torch

from megarl.algorithms.counter_rng import stream_keys
from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.arguments import RoleSettings, Settings
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm.role_mesh import RoleGroups
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.rewards import guard
from megarl.rewards.judge.config import JudgeConfig
from megarl.rewards.judge.prompts import JudgePrompts
from megarl.rewards.judge.questions import JudgeQuestion, order_agreement, questions_of
from megarl.roles.frozen_model import FrozenModel

STREAMS = 0x6A75646765  # added to the seed, so that no judgement has the random numbers of a response
ALONE = 0.5  # share of wins of the only response to a prompt
_SHOWN = 80  # characters of a judgement in a reason


class Judgement(NamedTuple):
    """One text of the judge, with the numbers of the responses that it is about; None: it has none."""

    text: str
    numbers: list[float] | None


class JudgedResponse(NamedTuple):
    """What the judge says about a response: its mean number, and a row for each judgement about it.

    `number` is None if no judgement has one; `problem` then says why.
    """

    rows: list[dict]
    number: float | None
    problem: str | None = None


class Judge:
    """The judge's model and engine on the ranks of the reward role; each replica judges its own responses.

    Random numbers depend on (seed, step, prompt line, sequences, sample, try), so a judgement is the same on every
    layout and after a resume.
    """

    def __init__(
        self, settings: Settings, config: JudgeConfig, role: RoleSettings, role_groups: RoleGroups,
        prompts: JudgePrompts, end_ids: tuple[int, ...], weights: PretrainedWeights, vocab_size: int, timers: Timers,
    ):  # fmt: skip
        """Builds the model, loads its weights and reserves its KV cache. A collective of the role.

        Args:
            end_ids: tokens that end a judgement.
            vocab_size: the model's.

        Raises:
            UsageError: the KV cache does not hold a prompt and a judgement.
        """
        self.settings, self.config, self.role = settings, config, role
        self.role_groups, self.timers = role_groups, timers
        self.prompts, self._end_ids = prompts, end_ids
        self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers)
        self.frozen_model.load_pretrained(weights)
        with self.frozen_model.offload.present("weights"):
            self.engine = RolloutEngine(
                self.frozen_model.model[0], role_groups.pg_collection, vocab_size, settings.judge_max_length,
                settings.judge_buffer_gb, settings.judge_max_requests, prefix_caching=not has_states(role.megatron),
                decode_graphs=settings.decode_graphs == "auto",
            )  # fmt: skip
        if self.engine.capacity < settings.judge_max_length:
            raise UsageError(
                f"--judge-buffer-gb {settings.judge_buffer_gb}: the KV cache holds {self.engine.capacity} tokens; "
                f"--judge-max-length is {settings.judge_max_length}",
                role_groups.ranks.start,
            )
        self._sampling = SamplingSettings(temperature=config.temperature or 1.0, greedy=config.temperature == 0)
        self.begin_step()

    def begin_step(self):
        """Resets the step's statistics."""
        # Judgements, those with numbers, tokens written, prompt tokens read, and those found in the cache; pairs whose
        # orders agree, pairs with numbers in both orders.
        self._counts = torch.zeros(7, dtype=torch.float64)

    def judge(
        self, texts: list[tuple[Prompt, str]] | None, sequence_ids: list[int], groups: list[list[int]], step: int,
        for_training: bool = True,
    ) -> list[JudgedResponse]:  # fmt: skip
        """Judges the replica's responses; [] except on its leader. A collective of the replica, and of replicas that
        share experts.

        Args:
            texts: prompts and responses, on the leader; None elsewhere.
            sequence_ids: their numbers in the step.
            groups: their positions by prompt, in order.
            for_training: False leaves the statistics unchanged.
        """
        texts = texts or []
        questions = questions_of(self.config, sequence_ids, groups) if texts else []
        judgements: list[list[Judgement]] = [[] for _ in questions]
        with self.timers.phase("reward", "judge"), self.frozen_model.offload.present("weights"):
            prompts, problems = self._read(questions, texts)
            unanswered = [i for i in range(len(questions)) if i not in problems]
            for attempt in range(1 + self.config.retries):
                requests = [self._request(questions[i], prompts[i], texts, step, attempt) for i in unanswered]
                requests = self.role_groups.broadcast_object(requests)
                if not requests and not self.engine.is_coupled:
                    break
                written = self._generate(requests, for_training)
                for i, text in zip(unanswered, written, strict=False):  # on other ranks than the leader there are none
                    judgements[i].append(self._judgement(text, len(questions[i].members)))
                unanswered = [i for i in unanswered if judgements[i][-1].numbers is None]
        if for_training:
            self._count(questions, judgements)
        return self._judged(questions, judgements, problems, sequence_ids) if texts else []

    def _read(
        self, questions: list[JudgeQuestion], texts: list[tuple[Prompt, str]]
    ) -> tuple[list[list[int]], dict[int, str]]:
        """Tokens of the prompt of each question, and by its position why there are none."""
        prompts: list[list[int]] = []
        problems: dict[int, str] = {}
        for i, question in enumerate(questions):
            prompt = texts[question.members[0]][0]
            try:
                prompts.append(self.prompts.tokens(prompt, [texts[member][1] for member in question.members]))
            except UsageError as error:
                prompts.append([])
                problems[i] = str(error)
        return prompts, problems

    def _request(
        self, question: JudgeQuestion, tokens: list[int], texts: list[tuple[Prompt, str]], step: int, attempt: int
    ) -> GenerationRequest:
        line = torch.tensor([texts[question.members[0]][0].index])
        stream = torch.tensor([question.stream << 20 | question.sample << 10 | attempt])
        key = int(stream_keys(self.settings.seed + STREAMS, step, line, stream))
        return GenerationRequest(prompt=tokens, key=key, max_new_tokens=self.config.max_tokens)

    def _generate(self, requests: list[GenerationRequest], for_training: bool) -> list[str]:
        """The texts of the judgements; on all ranks of the replica."""
        done = self.engine.generate(requests, self._end_ids, self._sampling)
        prefilled = self.engine.take_prefill_counts()
        if for_training:
            tokens = sum(len(completion.tokens) for completion in done)
            self._counts[2:5] += torch.tensor([tokens, *prefilled], dtype=torch.float64)
        return [self.prompts.text(completion.tokens) for completion in done]

    def _judgement(self, text: str, count: int) -> Judgement:
        try:
            with activity.limited():
                read = functools.partial(self.config.numbers, count=count)
                return Judgement(text, guard.call(read, text, self.settings.reward_timeout))
        except TimeoutError:  # a regular expression that backtracks without end
            return Judgement(text, None)

    def _count(self, questions: list[JudgeQuestion], judgements: list[list[Judgement]]):
        every = [judgement for of_question in judgements for judgement in of_question]
        self._counts[0] += len(every)
        self._counts[1] += sum(judgement.numbers is not None for judgement in every)
        if self.config.mode == "pair":
            last = [of_question[-1].numbers if of_question else None for of_question in judgements]
            self._counts[5:] += torch.tensor(order_agreement(questions, last), dtype=torch.float64)

    def _judged(
        self, questions: list[JudgeQuestion], judgements: list[list[Judgement]], problems: dict[int, str],
        sequence_ids: list[int],
    ) -> list[JudgedResponse]:  # fmt: skip
        """The judgements of each question -> those of each response, first tries before second ones."""
        rows: list[list[dict]] = [[] for _ in sequence_ids]
        of_response: list[list[str]] = [[] for _ in sequence_ids]  # problems
        for attempt in range(1 + self.config.retries):
            for i, question in enumerate(questions):
                for place, member in enumerate(question.members):
                    if i in problems:
                        of_response[member].append(problems[i])
                    elif attempt < len(judgements[i]):
                        text, numbers = judgements[i][attempt]
                        row: dict = {"text": text, "number": numbers and numbers[place]}
                        if self.config.compares:
                            row["responses"] = [sequence_ids[each] for each in question.members]
                        rows[member].append(row)
        return [self._mean(*item) for item in zip(rows, of_response, strict=True)]

    def _mean(self, rows: list[dict], problems: list[str]) -> JudgedResponse:
        numbers = [row["number"] for row in rows if row["number"] is not None]
        if numbers:
            return JudgedResponse(rows, fmean(numbers))
        if not rows and not problems:  # the only response to its prompt
            return JudgedResponse([], ALONE)
        if problems:
            return JudgedResponse(rows, None, problems[0])
        last = rows[-1]["text"]
        shown = repr(last if len(last) <= _SHOWN else last[: _SHOWN - 3] + "...")
        return JudgedResponse(
            rows, None, f"no number from {self.config.low:g} to {self.config.high:g} in the judgement {shown}"
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the step's training responses, on replica leaders, and of memory. A collective of the leaders."""
        of_memory = self.frozen_model.offload.metrics(self.role.name)
        if not self.role_groups.is_leader:
            return of_memory
        counts = self.role_groups.dp_all_reduce(self._counts.clone().to(device.device()))
        judgements, readable, tokens, read, reused, agreed, pairs = counts.tolist()
        found = {"judge/tokens": int(tokens), "judge/prompt_tokens": int(read), "judge/reused_tokens": int(reused)}
        if judgements:
            found |= {"judge/readable_fraction": readable / judgements, "judge/length_mean": tokens / judgements}
        if pairs:
            found["judge/order_agreement"] = agreed / pairs
        return found | of_memory
