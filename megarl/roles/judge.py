"""The judge: a frozen language model that reads responses and writes judgements, from which numbers are read."""

import functools
from statistics import fmean

import torch

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RoleSettings, Settings
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm.role_mesh import RoleGroups
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config.recurrent_rules import keeps_states
from megarl.mcore.inference.engine import RolloutEngine
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.rewards import guard
from megarl.rewards.judge.config import JudgeConfig, order_agreement
from megarl.rewards.judge.judge_prompts import JudgePrompts
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.judge_requests import (
    ArrivingResponses,
    JudgeAnswer,
    JudgedText,
    Judgement,
    JudgeRequests,
    QuestionKey,
)

WAIT_SECONDS = 0.05  # for a response, before replicas that share experts look again
ALONE = 0.5  # share of wins of the only response to a prompt
_SHOWN = 80  # characters of a judgement in a reason


# What the judge says about a response: a row for each judgement about it, and its mean number; None if no judgement has
# one, and why.
JudgedResponse = tuple[list[dict], float | None, str]


class Judge:
    """The judge's model and engine on the ranks of the reward role; each replica judges its own responses.

    Random numbers depend on (seed, step, prompt line, sequences, sample, try), so a judgement is the same on every
    layout and after a resume.
    """

    def __init__(
        self, settings: Settings, config: JudgeConfig, role: RoleSettings, role_groups: RoleGroups,
        prompts: JudgePrompts, weights: PretrainedWeights, timers: Timers,
    ):  # fmt: skip
        """Builds the model, loads its weights and reserves its KV cache. A collective of the role.

        Raises:
            UsageError: the KV cache does not hold a prompt and a judgement.
        """
        self.settings, self.config, self.role = settings, config, role
        self.role_groups, self.timers = role_groups, timers
        self.prompts, tokenizer = prompts, prompts.encoder.tokenizer
        self._end_ids = tokenizer.end_ids  # of a judgement
        vocab_size = role.model_vocab_size(tokenizer.vocab_size)
        self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers)
        self.frozen_model.load_pretrained(weights)
        with self.frozen_model.offload.present("weights"):
            self.engine = RolloutEngine(
                self.frozen_model.model[0],
                role_groups.pg_collection,
                vocab_size,
                settings.judge_max_length,
                settings.judge_buffer_gb,
                settings.judge_max_requests,
                prefix_caching=not keeps_states(role.megatron),
                decode_graphs=settings.decode_graphs == "auto",
            )
        if self.engine.capacity < settings.judge_max_length:
            raise UsageError(
                f"--judge-buffer-gb {settings.judge_buffer_gb}: the KV cache holds {self.engine.capacity} tokens; "
                f"--judge-max-length is {settings.judge_max_length}",
                role_groups.ranks.start,
            )
        self._early: dict[QuestionKey, JudgeAnswer] = {}  # of responses that arrived during the rollout
        self._sampling = SamplingSettings(temperature=config.temperature or 1.0, greedy=config.temperature == 0)
        self.begin_step()

    @property
    def members(self) -> list[FrozenModel]:
        """Its one model, as an ensemble of reward models has several."""
        return [self.frozen_model]

    def begin_step(self):
        # Judgements, those with numbers, tokens written, prompt tokens read, and those found in the cache; pairs whose
        # orders agree, pairs with numbers in both orders.
        self._counts = torch.zeros(7, dtype=torch.float64)

    def judge_early(self, arrivals: ArrivingResponses | None, step: int):
        """Judges the replica's responses to a round's prompts while they arrive, for `judge` for training, until
        `forget_early`.

        `arrivals`: on the leader; None elsewhere. A collective as `judge`.
        """
        requests = self._requests(step, arrivals)
        self._answer(requests, for_training=True)
        self._early = requests.answers

    def forget_early(self):
        """Ends a round: equal responses of later ones are judged anew, with random numbers of their own."""
        self._early = {}

    def judge(
        self,
        texts: list[tuple[Prompt, str]] | None,
        sequence_ids: list[int],
        groups: list[list[int]],
        step: int,
        for_training: bool = True,
    ) -> list[JudgedResponse]:
        """Judges the replica's responses; [] except on its leader. A collective of the replica, and of replicas that
        share experts.

        Args:
            texts: prompts and responses, on the leader; None elsewhere.
            sequence_ids: their numbers in the step.
            groups: their positions by prompt, in order.
            for_training: False leaves the statistics unchanged.
        """
        requests = self._requests(step)
        if texts:
            numbered = zip(sequence_ids, texts, strict=True)
            read = [JudgedText(number, prompt, text) for number, (prompt, text) in numbered]
            requests.ask(read, groups, self._early if for_training else {})
        if self.engine.is_coupled or requests.has_ready:
            self._answer(requests, for_training)
        answers = list(requests.answers.values())
        if for_training:
            self._count(answers)
        return self._judged(answers, sequence_ids) if texts else []

    def _requests(self, step: int, arrivals: ArrivingResponses | None = None) -> JudgeRequests:
        """Requests without questions. `arrivals`: as of `judge_early`."""
        if arrivals is not None and self.engine.is_coupled:
            # Replicas that share experts run their engines together, so none of them may wait for long.
            arrivals.patience = WAIT_SECONDS
        groups, read, seed = self.role_groups, self._judgement, self.settings.seed
        return JudgeRequests(self.config, self.prompts, groups, read, seed, step, self.timers, arrivals)

    def _answer(self, requests: JudgeRequests, for_training: bool):
        """Has the engine answer all questions. A collective as `judge`."""
        with self.timers.phase("reward", "judge"), self.frozen_model.offload.present("weights"):
            for number, completion in self.engine.stream(requests, self._end_ids, self._sampling):
                requests.ended(number, completion)
        counts = self.engine.take_counts()
        if for_training:
            self._counts[2:5] += torch.tensor([requests.tokens, counts.read, counts.reused], dtype=torch.float64)

    def _judgement(self, text: str, count: int) -> Judgement:
        try:
            with activity.limited():
                read = functools.partial(self.config.numbers, count=count)
                return text, guard.call(read, text, self.settings.reward_timeout)
        except TimeoutError:  # a regular expression that backtracks without end
            return text, None

    def _count(self, answers: list[JudgeAnswer]):
        every = [judgement for answer in answers for judgement in answer.judgements]
        self._counts[0] += len(every)
        self._counts[1] += sum(numbers is not None for _, numbers in every)
        if self.config.mode == "pair":
            last = [answer.judgements[-1][1] if answer.judgements else None for answer in answers]
            questions = [answer.question for answer in answers]
            self._counts[5:] += torch.tensor(order_agreement(questions, last), dtype=torch.float64)

    def _judged(self, answers: list[JudgeAnswer], sequence_ids: list[int]) -> list[JudgedResponse]:
        """The judgements of each question -> those of each response, first tries before second ones."""
        rows: list[list[dict]] = [[] for _ in sequence_ids]
        problems: list[list[str]] = [[] for _ in sequence_ids]
        for attempt in range(1 + self.config.retries):
            for answer in answers:
                for place, member in enumerate(answer.question.members):
                    if answer.problem is not None:
                        problems[member].append(answer.problem)
                    elif attempt < len(answer.judgements):
                        text, numbers = answer.judgements[attempt]
                        row: dict = {"text": text, "number": numbers and numbers[place]}
                        if self.config.compares:
                            row["responses"] = [each.sequence for each in answer.read]
                        rows[member].append(row)
        return [self._mean(of_response, why) for of_response, why in zip(rows, problems, strict=True)]

    def _mean(self, rows: list[dict], problems: list[str]) -> JudgedResponse:
        numbers = [row["number"] for row in rows if row["number"] is not None]
        if numbers:
            return rows, fmean(numbers), ""
        if not rows and not problems:  # the only response to its prompt
            return [], ALONE, ""
        if problems:
            return rows, None, problems[0]
        last = rows[-1]["text"]
        shown = repr(last if len(last) <= _SHOWN else last[: _SHOWN - 3] + "...")
        return (rows, None, f"no number from {self.config.low:g} to {self.config.high:g} in the judgement {shown}")

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
