"""What scores text in a program, read and checked before any rank joins another, and the role that it becomes."""

import os
from pathlib import Path

from megarl.arguments import RunConfig
from megarl.checkpoint import run_state
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.observe.timers import Timers
from megarl.rewards.build import build_verifiers, check_prompts
from megarl.roles.reward import Reward
from megarl.roles.reward_model import RewardModel
from megarl.trainers.setup import build_role_encoder

FLAG = "--reward-model"


class RewardFactory:
    """Verifiers and reward models of `--reward`."""

    def __init__(self, config: RunConfig, *prompts: PromptSet):
        """Checks that all of these prompts can be scored; the ranks that will, and rank 0, look deeper.

        Raises:
            UsageError: an unknown verifier, a prompt that lacks what one needs, a wrong reward model or tokenizer.
        """
        self.config, role = config, config.roles["reward"]
        rank = int(os.environ.get("RANK", 0))
        scores_here = rank == 0 or rank in role.ranks  # rank 0 tells what is wrong
        self.verifiers = build_verifiers(config.settings)
        for each in prompts:
            check_prompts(config.settings, each, scores_here)
        self.encoder: Encoder | None = None
        self.folders: list[Path] = []
        if role.has_model:
            self.encoder = build_role_encoder(role, config.settings)
            for each in prompts if scores_here else ():
                each.encode(self.encoder)
            self.folders = [self._found(path) for path in config.settings.reward_model.split(",")]

    def _found(self, path: str) -> Path:
        args = self.config.roles["reward"].megatron
        return run_state.find_weights(
            path, FLAG, "reward", args, self.encoder.tokenizer.vocab_size, sources=("reward",)
        )

    def role(self, role_groups: RoleGroups, tokenizer: Tokenizer, timers: Timers) -> Reward:
        """The reward role on this rank; `tokenizer` is the policy's. A collective of the role."""
        s, reward_model = self.config.settings, None
        if self.folders and role_groups.is_member:
            reward_model = RewardModel(s, self.config.roles["reward"], role_groups, self.encoder, self.folders, timers)
        return Reward(s, self.config.rewards, role_groups, tokenizer, self.verifiers, reward_model, timers)
