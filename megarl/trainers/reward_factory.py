"""Reads and checks verifiers, reward models and judges before the process group exists, then builds the reward role."""

import functools
import os
from collections.abc import Callable

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint.pretrained import PretrainedWeights, checkpoint_weights, folder_weights
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.flags.settings import group_sizes
from megarl.observe.timers import Timers
from megarl.rewards.chosen_verifiers import build_verifiers, check_prompts, prompts_of_terms
from megarl.rewards.expression import JUDGE, MODEL
from megarl.rewards.judge.config import read_config
from megarl.rewards.judge.judge_prompts import JudgePrompts
from megarl.roles.judge import Judge
from megarl.roles.reward import Reward
from megarl.roles.reward_model import RewardModel
from megarl.trainers.setup import build_role_encoder, check_vocabulary

FLAG = "--reward-model"


class RewardFactory:
    """The verifiers, and the reward models or the judge, of `--reward`."""

    def __init__(self, config: RunConfig):
        """Builds the verifiers, and reads the file of the judge. UsageError for an unknown one, or a wrong option."""
        self.config, s = config, config.settings
        self.judge = read_config(s.judge_config) if JUDGE in {term.name for term in config.rewards} else None
        self.judge_prompts: JudgePrompts | None = None
        if self.judge is not None and self.judge.mode == "pair":
            self._check_pairs()
        self.verifiers = build_verifiers(config.settings)
        self.encoder: Encoder | None = None
        self.weights: list[PretrainedWeights] = []

    def _check_pairs(self):
        s, evaluates = self.config.settings, "actor" not in self.config.trained
        if 1 in group_sizes(s) and not evaluates or s.greedy_baseline:
            by_file = f"--prompts {s.prompts}: samples-per-prompt 1"
            flag = "--samples-per-prompt 1" if s.samples_per_prompt == 1 else by_file
            flag = "--greedy-baseline" if s.greedy_baseline else flag
            raise UsageError(f"{flag}: {self.judge.where} has the mode pair, which compares the responses to a prompt")

    def check(self, *prompts: PromptSet):
        """Reads the reward models or the judge and checks that all prompts can be scored.

        Rank 0 and the scoring ranks check every prompt.

        Raises:
            UsageError: a prompt without a field that a verifier or judge needs, a wrong model or tokenizer.
        """
        settings, role = self.config.settings, self.config.roles["reward"]
        rank = int(os.environ.get("RANK", "0"))
        checks_prompts = rank == 0 or rank in role.ranks  # rank 0 prints the error
        for prompt_set in prompts:
            check_prompts(settings, prompt_set, checks_prompts)
        if role.has_model:
            self.encoder = build_role_encoder(role, settings)
            check_vocabulary(role, self.encoder.tokenizer.vocab_size)
            self._read_images(role, prompts)
            check = self._prompt_check()
            for prompt_set in prompts if checks_prompts else ():
                own = prompts_of_terms(settings, prompt_set).get(JUDGE if role.is_judge else MODEL)
                if own is not None:
                    check(own)
            self.weights = [self._judge_weights(role)] if role.is_judge else self._find_weights(role)

    def _read_images(self, role: RoleSettings, prompts: tuple[PromptSet, ...]):
        """Makes the images of prompts known to the encoder of the role's model. UsageError: it reads none."""
        for prompt_set in (prompt_set for prompt_set in prompts if len(prompt_set.images)):
            if role.hf_model is None:
                raise UsageError("reward: prompts have images; its model needs a vision-language folder")
            if self.encoder.images is None:
                raise role.hf_model.folder.error("prompts have images; its model has no vision tower, or no template")
            try:
                self.encoder.images.add(prompt_set.images, prompt_set.images.read)
            except UsageError as error:
                raise UsageError(f"{prompt_set.flag} {prompt_set.path}: {error}") from None

    def _prompt_check(self) -> Callable[[PromptSet], object]:
        """What checks that the model of the role can read each prompt of a set."""
        s = self.config.settings
        if self.judge is None:
            self.encoder.check_turns()
            return lambda prompt_set: prompt_set.encode(self.encoder)
        self.judge_prompts = JudgePrompts(self.judge, self.encoder, s.seed, s.judge_max_length, s.max_response_length)
        group_size = max(*group_sizes(s), s.eval_responses)
        return functools.partial(self.judge_prompts.check, group_size=group_size)

    def _judge_weights(self, role: RoleSettings) -> PretrainedWeights:
        path = self.config.settings.judge_load
        if path is not None:
            return checkpoint_weights(path, "--judge-load", role, self._vocab_size(role))
        if role.hf_model.has_scalar_head:
            raise role.hf_model.folder.error("a model with a scalar head; a judge is a …ForCausalLM")
        return folder_weights(role)

    def _vocab_size(self, role: RoleSettings) -> int:
        return role.model_vocab_size(self.encoder.tokenizer.vocab_size)

    def _find_weights(self, role: RoleSettings) -> list[PretrainedWeights]:
        paths = self.config.settings.reward_model
        if paths is None:
            if not role.hf_model.has_scalar_head:
                raise role.hf_model.folder.error("a language model; a reward model is a …ForSequenceClassification")
            return [folder_weights(role, value_head=True)]
        vocab_size = self._vocab_size(role)
        return [checkpoint_weights(path, FLAG, role, vocab_size, sources=("reward",)) for path in paths.split(",")]

    def role(self, role_groups: RoleGroups, encoder: Encoder, timers: Timers) -> Reward:
        """Builds the reward role on this rank; `encoder` is the policy's. A collective of the role."""
        s, role, model = self.config.settings, self.config.roles["reward"], None
        if role_groups.is_member and self.judge is not None:
            model = Judge(s, self.judge, role, role_groups, self.judge_prompts, self.weights[0], timers)
        elif role_groups.is_member and self.weights:
            model = RewardModel(role, role_groups, self.encoder, self.weights, timers)
        compares = self.judge is not None and self.judge.compares
        return Reward(s, self.config.rewards, role_groups, encoder.decode, self.verifiers, model, timers, compares)
