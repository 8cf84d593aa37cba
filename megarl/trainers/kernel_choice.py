"""The kernels of a run on CPUs: those that the flags name, or the first rank's measurement for all ranks."""

import dataclasses
from typing import TextIO

import torch
import torch.distributed as dist

from megarl.arguments import RoleSettings, RunConfig
from megarl.comm.role_mesh import RoleMesh
from megarl.errors import UsageError
from megarl.mcore import device, tuning
from megarl.mcore.kernels import native

AUTO = "auto"


def check_kernels(config: RunConfig):
    """UsageError if `--kernels` names some that this machine does not have."""
    wanted, allowed = config.settings.kernels, [AUTO, *tuning.available()]
    if wanted not in allowed and not device.has_cuda():
        raise UsageError(f"--kernels {wanted}: not on this machine; allowed here: {', '.join(allowed)}")


def choose_kernels(config: RunConfig, mesh: RoleMesh, notes: TextIO | None = None):
    """Makes all ranks compute with the same kernels; does nothing with CUDA. A collective of the world.

    The first rank prints one line about what it measured to `notes`, by default to standard output.
    """
    if device.has_cuda():
        return
    s = config.settings
    choices, note = _without_measuring(config), ""
    if mesh.rank == 0 and s.tune != "off" and AUTO in (s.kernels, s.parallel_work or AUTO):
        found, file = tuning.choose(_product_sizes(config.with_models()), s.tune == "fresh")
        choices, note = _with_flags(found, config), f"from {file}" if file else "measured"
        absence = native.absence()
        print(f"megarl: {choices} ({note})" + f"; {absence}" * bool(absence), file=notes, flush=True)
    tuning.apply(_of_first_rank(choices, mesh))


def _without_measuring(config: RunConfig) -> tuning.Choices:
    return _with_flags(tuning.Choices(tuning.available()[0], tuning.PARALLEL_WORK, {}), config)


def _with_flags(choices: tuning.Choices, config: RunConfig) -> tuning.Choices:
    s = config.settings
    kernels = choices.kernels if s.kernels == AUTO else s.kernels
    return dataclasses.replace(choices, kernels=kernels, parallel_work=s.parallel_work or choices.parallel_work)


def _of_first_rank(choices: tuning.Choices, mesh: RoleMesh) -> tuning.Choices:
    """The first rank's choices, with the best kernels that all ranks have if some rank lacks the chosen ones."""
    if mesh.size == 1:
        return choices
    sent = torch.tensor([tuning.KERNELS.index(choices.kernels), choices.parallel_work])
    dist.broadcast(sent, 0)
    lacks = torch.tensor([name not in tuning.available() for name in tuning.KERNELS]).int()
    dist.all_reduce(lacks, op=dist.ReduceOp.MAX)
    chosen, work = sent.tolist()
    if lacks[chosen]:
        chosen = lacks.tolist().index(0)
    return dataclasses.replace(choices, kernels=tuning.KERNELS[chosen], parallel_work=work)


def _product_sizes(roles: list[RoleSettings]) -> tuning.Sizes:
    """Sizes of the products with weights of the roles' models on one rank."""
    return tuple(sorted({size for role in roles for size in tuning.product_sizes(role.megatron)}))
