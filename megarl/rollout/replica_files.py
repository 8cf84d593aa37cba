"""Files of a checkpoint that each replica of the rollout writes for itself."""

from collections.abc import Iterator
from pathlib import Path

GROUP_BUFFER_FILE = "waiting.pt"  # groups of an incomplete batch
PARTIAL_ROLLOUTS_FILE = "parts.pt"  # groups with unfinished responses


def of_replica(name: str, dp_rank: int) -> str:
    """The name of a replica's file: `parts.pt` of the first one, `parts-00001.pt` of the next."""
    stem, _, suffix = name.rpartition(".")
    return name if dp_rank == 0 else f"{stem}-{dp_rank:05d}.{suffix}"


def read_replicas(folder: Path, name: str) -> Iterator[tuple[bytes, str]]:
    """(content, start of an error message) of each replica's file in a checkpoint, one at a time."""
    stem, _, suffix = name.rpartition(".")
    for path in (folder / name, *sorted(folder.glob(f"{stem}-*.{suffix}"))):
        yield path.read_bytes(), f"--load {path}"
