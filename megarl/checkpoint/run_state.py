"""Saves and restores a whole run: every role's models, optimizers and schedules, random states, data position."""

from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleMesh
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.files import write_atomically


def save(run: Path, step: int, mesh: RoleMesh, roles: dict, manifest: dict, files: dict[str, bytes] | None = None):
    """Writes `DIR/checkpoints/step_%08d`; a collective of the world.

    Args:
        roles: name -> the role's state on this rank (`TrainableModel.state`), for roles that this rank works for.
        manifest: facts about the run that the folder should tell. Of these, `best` (`BestCheckpoint.state_dict`) says which step
            `DIR/checkpoints/best` names, and `kept_for` "best" that the next best may remove this one.
        files: further files of the folder by name, written by rank 0.
    """
    folder = folders.step_folder(run, step)
    if mesh.rank == 0:
        folders.make_room(run, step)
    dist.barrier()
    dist_checkpoint.save({**roles, **dist_checkpoint.rank_state()}, folder)
    if mesh.rank == 0:
        for name, data in (files or {}).items():
            write_atomically(folder / name, data)
        folders.commit(run, step, {"world_size": mesh.size, **manifest})
    dist.barrier()


def load(folder: Path, mesh: RoleMesh, roles: dict, flag: str = "--load") -> dict:
    """Fills the roles' states from a checkpoint; a collective of the world. Returns them by role.

    Random states come back only into a world of the same size; nothing in megarl depends on them (every number is
    drawn from seed, step and place), so another layout goes on with the same numbers.
    """
    loaded = {}
    for name, place in mesh.roles.items():
        if name in roles:
            loaded[name] = dist_checkpoint.load_role(roles[name], folder, place.pg_collection)
    if folders.read_manifest(folder, flag)["world_size"] == mesh.size:
        dist_checkpoint.restore_rank_state(dist_checkpoint.load(dist_checkpoint.rank_state(), folder)["rng"])
    return loaded


def find_weights(path: str, flag: str, role: str, args, vocab_size: int, sources: tuple[str, ...] = ("actor",)) -> Path:
    """The checkpoint that a role's model starts from, checked before any work starts.

    Args:
        path: what `flag` says, as for `folders.find`.
        role: the one that starts, for the messages.
        args: its Megatron namespace.
        vocab_size: of its tokenizer.
        sources: what it may start from: "actor", a policy; "reward", a reward model, whose scalar head must be there.

    Raises:
        UsageError: no readable checkpoint, of another kind, or of a model of other shapes.
    """
    folder = folders.find(path, flag)
    source = folders.source_of(folder, flag)
    if source not in sources:
        kinds = {"actor": "a policy (of train_sft or train_rl)", "reward": "a reward model (of train_reward)"}
        allowed = " or ".join(kinds[each] for each in sources)
        raise UsageError(f"{flag} {path}: holds {kinds[source]}; {role} starts from {allowed}")
    shapes = gpt.weight_shapes(source, args, vocab_size, value_head=source == "reward")
    folders.check_weights(folder, flag, role, shapes)
    return folder


def load_weights(folder: Path, stages, pg_collection, source: str | None = None, optimizer=None):
    """Fills a model with weights from a checkpoint, whatever layout wrote it; a collective of its role.

    A scalar head takes the one of a reward model or critic and keeps its own weights where the source is a policy; what
    balances experts starts anew where the source has no such thing.

    Args:
        source: the role that was saved; None: the one that others start from, as `folders.source_of` tells.
        optimizer: of the model; it takes the weights up where it has copies of its own in another precision.
    """
    shapes = dist_checkpoint.tensor_shapes(folder)
    source = source or folders.source_of(folder, "--pretrained-checkpoint")
    has_scalar_head = shapes.get(f"{source}.{gpt.HEAD}", (0,))[0] == 1
    wanted = dist_checkpoint.model_state(source, stages, pg_collection, with_value_head=has_scalar_head)
    dist_checkpoint.drop_missing_balancing_buffers(wanted, shapes)
    dist_checkpoint.load_weights(stages, dist_checkpoint.load_role(wanted, folder, pg_collection), strict=False)
    if optimizer is not None:
        optimizer.reload_model_params()
