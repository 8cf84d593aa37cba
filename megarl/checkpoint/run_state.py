"""Restores a run: all roles' models, optimizers and schedules, random states, and the data position."""

from pathlib import Path

from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleMesh
from megarl.mcore.model import gpt
from megarl.mcore.weights import dist_checkpoint

PREDICTION = "prediction"  # the state of multi-token prediction in that of its role


def load(folder: Path, mesh: RoleMesh, roles: dict) -> dict:
    """Loads the roles' states from a checkpoint and returns them by role; a collective of the world.

    Random states are restored only if the world size is the same. No result depends on them: megarl draws every random
    number from seed, step and position, so a run can resume in another layout with the same numbers.
    """
    loaded, manifest = {}, folders.read_manifest(folder, "--load")
    for name, role_groups in mesh.roles.items():
        if name in roles:
            held, groups = folders.frozen_folder(folder, manifest, name, "--load"), role_groups.pg_collection
            prediction = roles[name].pop(PREDICTION, None)
            loaded[name] = dist_checkpoint.load_role(roles[name], held, groups)
            if prediction is not None:  # the run that wrote the checkpoint may have had none
                of_role = dist_checkpoint.prediction_of(name)
                found = dist_checkpoint.load_if_held(prediction, held, groups, of_role)
                loaded[name] |= {} if found is None else {PREDICTION: found}
    if manifest["world_size"] == mesh.size:
        dist_checkpoint.restore_rank_state(dist_checkpoint.load(dist_checkpoint.rank_state(), folder)["rng"])
    return loaded


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
