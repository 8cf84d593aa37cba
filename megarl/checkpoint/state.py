"""Saves and restores a whole run: every role's models, optimizers and schedules, random states, data position."""

from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint import folders
from megarl.mcore import checkpoint
from megarl.observe.files import write_atomically
from megarl.world import World


def save(run: Path, step: int, world: World, roles: dict, manifest: dict, files: dict[str, bytes] | None = None):
    """Writes `DIR/checkpoints/step_%08d`; a collective of the world.

    Args:
        roles: name -> the role's state on this rank (`Learner.state`), for roles that this rank works for.
        manifest: facts about the run that the folder should tell. Of these, `best` (`Best.state_dict`) says which step
            `DIR/checkpoints/best` names, and `kept_for` "best" that the next best may remove this one.
        files: further files of the folder by name, written by rank 0.
    """
    folder = folders.step_folder(run, step)
    if world.rank == 0:
        folders.make_room(run, step)
    dist.barrier()
    checkpoint.save({**roles, **checkpoint.rank_state()}, folder)
    if world.rank == 0:
        for name, data in (files or {}).items():
            write_atomically(folder / name, data)
        folders.commit(run, step, {"world_size": world.size, **manifest})
    dist.barrier()


def load(folder: Path, world: World, roles: dict, flag: str = "--load") -> dict:
    """Fills the roles' states from a checkpoint; a collective of the world. Returns them by role.

    Random states come back only into a world of the same size; nothing in megarl depends on them (every number is
    drawn from seed, step and place), so another layout goes on with the same numbers.
    """
    loaded = {}
    for name, place in world.places.items():
        if name in roles:
            loaded[name] = checkpoint.load_role(roles[name], folder, place.collection)
    if folders.read_manifest(folder, flag)["world_size"] == world.size:
        checkpoint.restore_rank_state(checkpoint.load(checkpoint.rank_state(), folder)["rng"])
    return loaded


def load_weights(folder: Path, stages, collection, source: str = "actor"):
    """Fills a model with the policy's weights in a checkpoint, whatever layout wrote it; a collective of its role.

    A scalar head, which the policy does not have, keeps its own weights, and what balances its experts starts anew
    where the policy has no such thing. `source` is the role that was saved.
    """
    wanted = checkpoint.model_state(source, stages, collection, with_value_head=False)
    checkpoint.leave_out_balancing(wanted, checkpoint.tensor_shapes(folder))
    checkpoint.load_weights(stages, checkpoint.load_role(wanted, folder, collection), strict=False)
