"""The policy of a program that does not train: its tokenizer and weights, read and checked, and its model."""

from pathlib import Path

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint import folders, pretrained
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.trainers.setup import build_role_encoder, check_required, check_vocabulary


class PolicyInputs:
    """Tokenizer and weights of `--load` or `--hf-model`, before the process group exists. UsageError for wrong ones.

    A program whose responses a server generates (`--rollout-server`) has only the tokenizer.
    """

    def __init__(self, config: RunConfig):
        s, actor = config.settings, config.roles["actor"]
        if s.rollout_server is None:
            check_required({"--load or --hf-model": s.load or actor.hf_model})
        check_required({"--tokenizer-model": actor.tokenizer_model})
        other = actor.megatron.pretrained_checkpoint
        if other and not s.load:
            raise self._no_place(other)
        self.config, self.encoder = config, build_role_encoder(actor, s)
        self.tokenizer = self.encoder.tokenizer
        check_vocabulary(actor, self.tokenizer.vocab_size)
        self.vocab_size = actor.model_vocab_size(self.tokenizer.vocab_size)
        self.checkpoint: Path | None = None
        self.weights: pretrained.PretrainedWeights | None = None
        if s.load:
            self.weights = pretrained.checkpoint_weights(s.load, "--load", actor, self.vocab_size)
            self.checkpoint = self.weights.folder
        elif s.rollout_server is None:
            self.weights = pretrained.folder_weights(actor)
        if other and isinstance(self.weights, pretrained.CheckpointWeights):  # else it may be under low-rank factors
            raise self._no_place(other)

    @staticmethod
    def _no_place(path: str) -> UsageError:
        return UsageError(f"--pretrained-checkpoint {path}: weights come from --load; leave it out")

    def source(self) -> dict:
        """Where the weights come from, for results."""
        if self.weights is None:
            return {"rollout_server": self.config.settings.rollout_server}
        if self.checkpoint is None:
            assert isinstance(self.weights, pretrained.FolderWeights)
            return {"hf_model": str(self.weights.weight_map.model.folder.path)}
        manifest = folders.read_manifest(self.checkpoint, "--load")
        return {"checkpoint": str(self.checkpoint), "program": manifest["program"], "step": manifest["step"]}

    def load(self, role_groups: RoleGroups) -> gpt.ModelChunks | None:
        """The policy on this rank with these weights; None outside the role. Collective of the role."""
        return load_policy(self.config.roles["actor"], role_groups, self.vocab_size, self.weights)

    def rollout_role(self) -> RoleSettings:
        """The rollout's settings, with the low-rank factors of the checkpoint if it has any."""
        return pretrained.with_stored_factors(self.config.roles["rollout"], self.weights)


def load_policy(
    role: RoleSettings, role_groups: RoleGroups, vocab_size: int, weights: pretrained.PretrainedWeights
) -> gpt.ModelChunks | None:
    """A policy on this rank with these weights; None outside the role. Collective of the role."""
    if not role_groups.is_member:
        return None
    policy = gpt.build_frozen_model(role.megatron, vocab_size, role_groups.pg_collection)
    weights.load(policy, role_groups.pg_collection)
    return policy
