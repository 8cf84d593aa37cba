"""Reads every file of checkpoints once, divided over all ranks, and compares it with its checksum."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.checkpoint import folders
from megarl.checkpoint import manifest as manifests
from megarl.comm.load_balance import assign_by_cost
from megarl.errors import UsageError


def find_damage(checkpoints: list[Path], flag: str = "--load") -> dict[Path, str]:
    """{checkpoint: what is wrong with it}, the same on all ranks; a collective of the world.

    The files of frozen weights that a checkpoint names count as its own.
    """
    files = [file for folder in checkpoints for file in _files(folder, flag)]
    files.sort(key=lambda file: -file[3]["size"])
    sizes = torch.tensor([file[3]["size"] for file in files])
    readers = assign_by_cost(sizes, [torch.arange(len(files))], dist.get_world_size())
    mine = [file for file, rank in zip(files, readers.tolist(), strict=True) if rank == dist.get_rank()]
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        problems = pool.map(lambda file: manifests.check_content(*file[1:]), mine)
        found = [(mine[i][0], problem) for i, problem in enumerate(problems) if problem]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {folder: problem for of_rank in reversed(gathered) for folder, problem in reversed(of_rank)}


def _files(checkpoint: Path, flag: str) -> list[tuple[Path, Path, str, dict]]:
    """(checkpoint, folder, name, manifest entry) of each file."""
    manifest = folders.read_manifest(checkpoint, flag)
    held = {checkpoint: manifest}
    for role in manifest.get(folders.FROZEN, {}):
        with contextlib.suppress(UsageError):  # not copied with the checkpoint: a run that needs it has been rejected
            folder = folders.frozen_folder(checkpoint, manifest, role, flag)
            held[folder] = folders.read_manifest(folder, flag)
    return [(checkpoint, folder, *item) for folder, of in held.items() for item in sorted(of["files"].items())]
