"""Reads and checks verifiers and reward models before the process group exists, then builds the reward role."""

import os

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint.pretrained import PretrainedWeights, checkpoint_weights, folder_weights
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.observe.timers import Timers
from megarl.rewards.build import build_verifiers, check_prompts
from megarl.roles.reward import Reward
from megarl.roles.reward_model import RewardModel
from megarl.trainers.setup import build_role_encoder, check_vocabulary

FLAG = "--reward-model"


class RewardFactory:
    """The verifiers and reward models of `--reward`."""

    def __init__(self, config: RunConfig):
        """Builds the verifiers. UsageError for an unknown one, or a wrong option."""
        self.config = config
        self.verifiers = build_verifiers(config.settings)
        self.encoder: Encoder | None = None
        self.weights: list[PretrainedWeights] = []

    def check(self, *prompts: PromptSet):
        """Reads the reward models and checks that all prompts can be scored.

        Rank 0 and the scoring ranks check every prompt.

        Raises:
            UsageError: a prompt without a field that a verifier needs, a wrong reward model or tokenizer.
        """
        settings, role = self.config.settings, self.config.roles["reward"]
        rank = int(os.environ.get("RANK", "0"))
        checks_prompts = rank == 0 or rank in role.ranks  # rank 0 prints the error
        for prompt_set in prompts:
            check_prompts(settings, prompt_set, checks_prompts)
        if role.has_model:
            self.encoder = build_role_encoder(role, settings)
            self.encoder.check_turns()
            for prompt_set in prompts if checks_prompts else ():
                prompt_set.encode(self.encoder)
            self.weights = self._find_weights(role)

    def _find_weights(self, role: RoleSettings) -> list[PretrainedWeights]:
        paths = self.config.settings.reward_model
        check_vocabulary(role, self.encoder.tokenizer.vocab_size)
        if paths is None:
            if not role.hf_model.has_scalar_head:
                raise role.hf_model.folder.error("a language model; a reward model is a …ForSequenceClassification")
            return [folder_weights(role, value_head=True)]
        vocab_size = role.model_vocab_size(self.encoder.tokenizer.vocab_size)
        return [checkpoint_weights(path, FLAG, role, vocab_size, sources=("reward",)) for path in paths.split(",")]

    def role(self, role_groups: RoleGroups, tokenizer: Tokenizer, timers: Timers) -> Reward:
        """Builds the reward role on this rank; `tokenizer` is the policy's. A collective of the role."""
        s, reward_model = self.config.settings, None
        if self.weights and role_groups.is_member:
            reward_model = RewardModel(self.config.roles["reward"], role_groups, self.encoder, self.weights, timers)
        return Reward(s, self.config.rewards, role_groups, tokenizer, self.verifiers, reward_model, timers)
