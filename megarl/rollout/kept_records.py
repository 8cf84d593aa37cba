"""What a checkpoint keeps of the rollout: a log for each of its replicas, with records of several kinds."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from megarl.data.pools import DifficultyPools
from megarl.errors import UsageError
from megarl.rollout import response_log
from megarl.rollout.response_log import Entry, Record

GROUPS = "groups"  # of an incomplete batch, that wait
BATCH = "batch"  # of a later step, generated ahead
UNFINISHED = "unfinished"  # groups with unfinished responses
POOLS = "pools"  # of difficulty; the first replica's
FIRST = f"rollout{response_log.SUFFIX}"


def file_name(dp_rank: int) -> str:
    """The name of a replica's log: that of the first one, or `rollout-00001.log`."""
    return f"rollout-{dp_rank:05d}{response_log.SUFFIX}" if dp_rank else FIRST


def packed(kind: str, record: Record, step: int | None = None) -> bytes:
    """A record as it is in the log. `step`: of a `BATCH`."""
    own = {"kind": kind} if step is None else {"kind": kind, "step": step}
    return response_log.packed({**own, **record.facts}, record.fields)


class KeptRecords:
    """The records of all replicas in a checkpoint."""

    def __init__(self, folder: Path):
        """UsageError if a log is damaged."""
        first = folder / FIRST
        paths = [first, *sorted(folder.glob(f"rollout-*{response_log.SUFFIX}"))] if first.exists() else []
        self._entries: list[Entry] = []
        for path in paths:
            self._entries += response_log.whole(path, f"--load {path}")

    def has(self, kind: str, step: int | None = None) -> bool:
        """Whether there are such records. Arguments as of `read`."""
        return any(True for _ in self._of(kind, step))

    def _of(self, kind: str, step: int | None) -> Iterator[Entry]:
        return (e for e in self._entries if (e.facts.get("kind"), e.facts.get("step")) == (kind, step))

    def read(self, kind: str, step: int | None = None) -> Iterator[Record]:
        """The records of a kind, of each replica in order, one at a time. `step`: of a `BATCH`."""
        for entry in self._of(kind, step):
            facts, fields = entry.read()
            yield Record({name: fact for name, fact in facts.items() if name not in ("kind", "step")}, fields)


def pools_record(pools: DifficultyPools) -> Record:
    return Record({}, {name: torch.from_numpy(values) for name, values in pools.state_dict().items()})


def load_pools(pools: DifficultyPools, records: Iterable[Record], where: str):
    """Restores the state of `pools_record`, if there is one. UsageError, which begins with `where`, for another."""
    for record in records:
        if not record.fields.keys() >= pools.state_dict().keys():
            raise UsageError(f"{where}: holds no pools")
        pools.load_state_dict({name: record.fields[name].numpy() for name in pools.state_dict()}, where)
