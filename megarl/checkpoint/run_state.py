"""Restores a run: all roles' models, optimizers and schedules, random states, and the data position."""

from pathlib import Path

from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleMesh
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.mcore.weights import dist_checkpoint


def load(folder: Path, mesh: RoleMesh, roles: dict) -> dict:
    """Loads the roles' states from a checkpoint and returns them by role; a collective of the world.

    Random states are restored only if the world size is the same. No result depends on them: megarl draws every random
    number from seed, step and position, so a run can resume in another layout with the same numbers.
    """
    loaded, manifest = {}, folders.read_manifest(folder, "--load")
    for name, role_groups in mesh.roles.items():
        if name in roles:
            held = folders.frozen_folder(folder, manifest, name, "--load")
            loaded[name] = dist_checkpoint.load_role(roles[name], held, role_groups.pg_collection)
    if manifest["world_size"] == mesh.size:
        dist_checkpoint.restore_rank_state(dist_checkpoint.load(dist_checkpoint.rank_state(), folder)["rng"])
    return loaded


def find_weights(path: str, flag: str, role: str, args, vocab_size: int, sources: tuple[str, ...] = ("actor",)) -> Path:
    """The checkpoint that a role's model starts from, checked before any work starts.

    Args:
        path: value of `flag`, as for `folders.find`.
        role: the role that starts from it, for messages.
        args: its Megatron namespace.
        vocab_size: of its tokenizer.
        sources: what it may start from: "actor" (a policy) or "reward" (a reward model with its scalar head).

    Raises:
        UsageError: no readable checkpoint, one of another kind, or a model of other shapes.
    """
    folder = folders.find(path, flag)
    source = folders.source_of(folder, flag)
    check_source(path, flag, role, source, sources)
    shapes = gpt.weight_shapes(source, args, vocab_size, value_head=source == "reward")
    folders.check_weights(folder, flag, role, shapes)
    return folder


def check_source(path: str, flag: str, role: str, source: str, sources: tuple[str, ...]):
    """UsageError unless the role whose weights a checkpoint holds is one of `sources`."""
    if source not in sources:
        kinds = {"actor": "a policy (of train_sft or train_rl)", "reward": "a reward model (of train_reward)"}
        allowed = " or ".join(kinds[name] for name in sources)
        raise UsageError(f"{flag} {path}: holds {kinds[source]}; {role} starts from {allowed}")


def load_weights(folder: Path, stages, pg_collection, source: str | None = None, optimizer=None):
    """Loads weights from a checkpoint of any layout into a model; a collective of its role.

    A scalar head is loaded from a reward model or critic, and keeps its initial weights if the source is a policy.
    Buffers of expert balancing keep their initial values if the source has none.

    Args:
        source: role whose weights are loaded; None: `folders.source_of` the checkpoint.
        optimizer: of the model; updates its master weights, if it has them.
    """
    shapes = dist_checkpoint.tensor_shapes(folder)
    source = source or folders.source_of(folder, "--pretrained-checkpoint")
    has_scalar_head = shapes.get(f"{source}.{gpt.HEAD}", (0,))[0] == 1
    wanted = dist_checkpoint.model_state(source, stages, pg_collection, with_value_head=has_scalar_head)
    dist_checkpoint.drop_missing_balancing_buffers(wanted, shapes)
    dist_checkpoint.load_weights(stages, dist_checkpoint.load_role(wanted, folder, pg_collection), strict=False)
    if optimizer is not None:
        optimizer.reload_model_params()
