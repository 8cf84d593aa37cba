"""Where a role's initial weights come from: one of megarl's checkpoints, or a Hugging Face folder."""

from pathlib import Path
from typing import NamedTuple, Protocol

from megarl.arguments import RoleSettings
from megarl.checkpoint import run_state
from megarl.mcore.weights.hf.import_weights import import_weights
from megarl.mcore.weights.hf.weight_map import WeightMap


class PretrainedWeights(Protocol):
    """Weights that were checked against a role's flags."""

    def load(self, stages, pg_collection, optimizer=None):
        """Fills a model's chunks, and the optimizer's master weights if it has them. A collective of the role."""


class CheckpointWeights(NamedTuple):
    """A checkpoint of megarl."""

    folder: Path
    source: str | None = None  # role whose weights they are; None: `folders.source_of` the checkpoint

    def load(self, stages, pg_collection, optimizer=None):
        """Loads them in any layout."""
        run_state.load_weights(self.folder, stages, pg_collection, self.source, optimizer)


class FolderWeights(NamedTuple):
    """A Hugging Face folder."""

    weight_map: WeightMap

    def load(self, stages, pg_collection, optimizer=None):
        """Reads this rank's slices; no rank waits for another."""
        import_weights(self.weight_map, stages, pg_collection)
        if optimizer is not None:
            optimizer.reload_model_params()


def find_pretrained(
    role: RoleSettings, vocab_size: int, sources: tuple[str, ...] = ("actor",), value_head: bool = False
) -> PretrainedWeights | None:
    """The weights that a role starts from, checked before any work starts; None: weights drawn from the seed.

    A checkpoint (`--pretrained-checkpoint`) comes before the folder that describes the model (`--hf-model`).

    Args:
        vocab_size: of the model.
        sources: roles whose checkpoints the role may start from, as for `run_state.find_weights`.
        value_head: the role has a scalar head.

    Raises:
        UsageError: no such checkpoint or folder, or a model of other shapes.
    """
    if path := role.megatron.pretrained_checkpoint:
        flag = "--pretrained-checkpoint"
        return CheckpointWeights(run_state.find_weights(path, flag, role.name, role.megatron, vocab_size, sources))
    return folder_weights(role, value_head) if role.hf_model else None


def folder_weights(role: RoleSettings, value_head: bool = False) -> FolderWeights:
    """The weights in a role's Hugging Face folder. UsageError unless it holds exactly those of the role's model."""
    weight_map = WeightMap(role.hf_model, role.megatron, value_head)
    weight_map.check()
    return FolderWeights(weight_map)
