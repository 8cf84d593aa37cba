"""The last complete step in host memory (`--save-memory`): where it is, who removes it, and what each node has of it.

A run has a folder on a tmpfs of each of its nodes, with a checkpoint as on the disk. Its name is a token that the file
`checkpoints/memory` of the run has: a start that does not resume from memory takes a new one, so that nobody reads what
an earlier branch of the run has left. A node has the files of its own ranks, and in a ring those of the next node, so
that one node at a time may be lost. Weights in `checkpoints/frozen` stay on the disk.

The folder is removed at the end of the run. What a killed run leaves stays until it goes on, or until another run with
`--save-memory` begins on the node and the token is no longer that of its run.
"""

import fcntl
import json
import os
import re
import shutil
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megarl.arguments import RunConfig
from megarl.checkpoint import folders, manifest
from megarl.comm import role_mesh
from megarl.data import node_files
from megarl.errors import UsageError, warn
from megarl.observe.files import step_of, write_atomically
from megarl.plain_files import read_text, resolved
from megarl.planning.memory import checkpoint_bytes

ROOT, DEFAULT = "MEGARL_MEMORY", "/dev/shm"  # environment variable: a folder of a tmpfs
POINTER = "memory"  # file in a run's `checkpoints`: the token
RUN = "run"  # file in a folder in memory: whose it is
BOOT = Path("/proc/sys/kernel/random/boot_id")
TOKEN = re.compile("[0-9a-f]{32}")
CHUNK = 2**26  # bytes that a rank sends at a time
OF_RANK = 2**20  # bytes of a rank besides tensors, at most: random states, metadata


def _root() -> Path:
    return Path(os.environ.get(ROOT) or DEFAULT)


def _base() -> Path:
    return _root() / f"megarl-memory-{os.getuid()}"


def _token(run: Path) -> str | None:
    """The name of a run's folder in memory; None: it has none."""
    try:
        token = read_text(run / "checkpoints" / POINTER).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return token if TOKEN.fullmatch(token) else None


def attach(run: str, only_whole: bool = False):
    """Makes `folders.find` also look into the folder of a run in memory, if it has one.

    `only_whole`: not if a checkpoint has files on other nodes.
    """
    checkpoints, token = None, _token(Path(run))
    if token is not None:
        checkpoints = _base() / token / "checkpoints"
        if only_whole and any(_lacks_files(folder) for folder in folders.complete(checkpoints)):
            checkpoints = None
    folders.look_also(run, checkpoints)


def _lacks_files(folder: Path) -> bool:
    try:
        folders.check(folder, "--load")
    except (UsageError, OSError):
        return True
    return False


# -- room ------------------------------------------------------------------------------------------------------------


def needed(config: RunConfig, tokens: int, node: int, ranks_per_node: int, world_size: int) -> int:
    """Bytes that a node's checkpoints take, at most: two, one of which is being written, and as many of the next node.

    `tokens`: of the run's tokenizer. Groups of responses that wait are not counted.
    """
    several, ranks = world_size > ranks_per_node, range(node * ranks_per_node, (node + 1) * ranks_per_node)
    found = OF_RANK * ranks_per_node
    for role in map(config.roles.__getitem__, config.trained):
        count = len(set(role.ranks) & set(ranks))
        average = config.settings.ema_decay is not None and role.name == config.trained[0]
        found += checkpoint_bytes(role, tokens, count, average)
    return 2 * (1 + several) * found


def check_room(config: RunConfig, tokens: int):
    """UsageError, on the first rank of a node, unless what `--save-memory` writes there fits."""
    if not config.settings.save_memory or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    root, where = _root(), f"--save-memory: {ROOT} {_root()}" if os.environ.get(ROOT) else f"--save-memory: {_root()}"
    if not root.is_dir() or _file_system(root) != "tmpfs":
        raise UsageError(f"{where}: is no folder of a tmpfs, whose files are in host memory; {ROOT} names another")
    try:
        base = node_files.private_folder(_base())
    except OSError as error:
        raise UsageError(f"{where}: cannot be used ({error.strerror or error})") from None
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    size_of_node = needed(config, tokens, rank // per_node, per_node, size)
    own = {_token(Path(str(config.settings.save)))}
    free = sum(_size(folder) for folder in base.iterdir() if folder.name in own or _is_stale(folder))
    room = {"on this tmpfs": shutil.disk_usage(root).free, "of this node's memory": psutil.virtual_memory().available}
    for what, available in room.items():
        if size_of_node > available + free:
            others = [f"{folder} has {_gb(_size(folder))}" for folder in base.iterdir() if folder.name not in own]
            raise UsageError(
                f"{where}: the checkpoints of a node take up to {_gb(size_of_node)}, and {_gb(available + free)} "
                f"{what} are free; {ROOT} names another tmpfs" + "".join(f"; {other}" for other in others)
            )


def _file_system(folder: Path) -> str:
    place = resolved(folder)
    found = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else ""


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _is_stale(folder: Path) -> bool:
    """Whether nobody can resume from a folder in memory, or uses it."""
    try:
        run = read_text(folder / RUN).strip()
    except (OSError, UnicodeDecodeError):
        run = ""
    return _token(Path(run)) != folder.name and not node_files.is_in_use(folder)


# -- the folder of a run ---------------------------------------------------------------------------------------------


def open_folder(run: Path, resumed: Path | None) -> tuple[Path, list[list[int]]]:
    """Prepares the run's folder on each node: (the folder, the ranks of each node). Collective, after `begin_branch`.

    `resumed`: the checkpoint from which the run resumes; all others are removed.
    """
    token = [_chosen(run, resumed) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(token, src=0)
    folder, base = _base() / str(token[0]), node_files.private_folder(_base())
    found: list = [None] * dist.get_world_size()
    stat = base.stat()
    dist.all_gather_object(found, (BOOT.read_text(), stat.st_dev, stat.st_ino))
    nodes = [[rank for rank, place in enumerate(found) if place == node] for node in dict.fromkeys(found)]
    if dist.get_rank() in [node[0] for node in nodes]:
        _prepare(folder, run, resumed)
    if dist.get_rank() == 0:
        write_atomically(run / "checkpoints" / POINTER, f"{folder.name}\n")
    return folder, nodes


def _chosen(run: Path, resumed: Path | None) -> str:
    (run / "checkpoints").mkdir(exist_ok=True)
    is_kept = resumed is not None and resumed in folders.in_memory(run)
    return str(_token(run)) if is_kept else uuid.uuid4().hex


def _make(folder: Path, run: Path):
    """Makes a run's folder in memory, where `folders.frozen_folder` finds the weights on the disk."""
    checkpoints, frozen = folder / "checkpoints", resolved(run / "checkpoints" / folders.FROZEN)
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUN, f"{resolved(run)}\n")
    (checkpoints / folders.FROZEN).unlink(missing_ok=True)
    (checkpoints / folders.FROZEN).symlink_to(frozen)


def _prepare(folder: Path, run: Path, resumed: Path | None):
    _make(folder, run)
    node_files.lock(folder / node_files.USERS, fcntl.LOCK_SH)  # until this process ends
    for path in (folder / "checkpoints").glob("*step_*"):
        if path != resumed:
            shutil.rmtree(path)
    for other in folder.parent.iterdir():
        is_own = other != folder and (other / RUN).is_file() and read_text(other / RUN).strip() == str(resolved(run))
        if is_own or _is_stale(other) and other != folder:
            shutil.rmtree(other, ignore_errors=True)


def say_source(run: Path, resumed: Path | None):
    """A line about where a run with `--save-memory` goes on from, if it goes on."""
    if resumed is None or not folders.is_of_run(resumed, run):
        return
    in_memory, on_disk = folders.in_memory(run), folders.complete(run / "checkpoints")
    place, beside, others = "on the disk", "host memory", in_memory
    if resumed in in_memory:
        place, beside, others = f"in host memory, {resolved(resumed).parent}", "the disk", on_disk
    there = f"step {step_of(others[-1])}" if others else "none"
    print(f"megarl: resumes from step {step_of(resumed)} {place}; {beside} has {there}", file=sys.stderr, flush=True)


def forget(run: Path):
    """Makes a run have no folder in memory, on its first rank; what a node has becomes stale."""
    (run / "checkpoints" / POINTER).unlink(missing_ok=True)


def discard(run: Path):
    """Removes what this node has of a run that has nothing left to do; its first rank does."""
    if (token := _token(run)) and os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(_base() / token, ignore_errors=True)


def remove(folder: Path, nodes: list[list[int]]):
    """Removes a run's folder on each node."""
    if dist.get_rank() in [node[0] for node in nodes]:
        shutil.rmtree(folder, ignore_errors=True)


# -- several nodes ---------------------------------------------------------------------------------------------------


def pass_on(folder: Path, nodes: list[list[int]], of_ranks: list[dict[str, dict]], more: dict[str, bytes], group):
    """Sends this rank's files to a rank of the node before, and writes what ranks of the next node send.

    A collective of the world. OSError if a file cannot be read or written; this rank has sent and received all the
    same.

    Args:
        of_ranks: {name: seal} of the files of each rank.
        more: files of the first rank alone, which every node gets.
        group: of all ranks, for tensors in host memory.
    """
    rank = dist.get_rank()
    own = next(i for i, node in enumerate(nodes) if rank in node)
    before, after = nodes[own - 1], nodes[(own + 1) % len(nodes)]
    to = before[nodes[own].index(rank) % len(before)]
    sources = [each for i, each in enumerate(after) if nodes[own][i % len(nodes[own])] == rank]
    chunks = {each: _chunks(of_ranks[each]) for each in (rank, *sources)}
    problems: list[OSError] = []
    if rank == nodes[own][0] and own != 0:
        for name, data in more.items():
            _attempt(problems, lambda name=name, data=data: (folder / name).write_bytes(data))
    for number in range(max(map(len, chunks.values()))):
        work, received = [], []
        for each in (each for each in sources if number < len(chunks[each])):
            data = torch.empty(chunks[each][number][2], dtype=torch.uint8)
            received.append((chunks[each][number], data))
            work.append(dist.irecv(data, each, group=group))
        if number < len(chunks[rank]):
            data = torch.zeros(chunks[rank][number][2], dtype=torch.uint8)
            _attempt(problems, lambda data=data, number=number: _read(folder, chunks[rank][number], data))
            work.append(dist.isend(data, to, group=group))
        for each_work in work:
            each_work.wait()
        for chunk, data in received:
            _attempt(problems, lambda chunk=chunk, data=data: _write(folder, chunk, data))
    if problems:
        raise problems[0]


def _attempt(problems: list[OSError], action):
    """Runs an action, or notes why it is impossible."""
    try:
        action()
    except OSError as error:
        problems.append(error)


def _chunks(files: dict[str, dict]) -> list[tuple[str, int, int]]:
    """(name, first byte, bytes) of what is sent at a time, in order; an empty file has one."""
    return [
        (name, start, min(CHUNK, seal["size"] - start))
        for name, seal in sorted(files.items())
        for start in range(0, max(seal["size"], 1), CHUNK)
    ]


def _read(folder: Path, chunk: tuple[str, int, int], data: torch.Tensor):
    name, start, _ = chunk
    with (folder / name).open("rb") as file:
        file.seek(start)
        file.readinto(data.numpy())


def _write(folder: Path, chunk: tuple[str, int, int], data: torch.Tensor):
    name, start, _ = chunk
    with (folder / name).open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(data.numpy())


def recover(run: Path, timeout: timedelta):
    """Before a run goes on: each of its nodes gets all files of the newest step that they have together in memory.

    What else a node has in memory is removed: nodes must not choose differently. So is a step that is not whole, or
    not later than the disk's. A collective of all ranks, which need not have joined the process group.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    per_node, token = int(os.environ.get("LOCAL_WORLD_SIZE", size)), _token(run)
    if token is None or size == per_node:
        return
    store = dist.PrefixStore("memory", role_mesh.meet(timeout)[0])
    store.set_timeout(timeout)
    nodes = size // per_node
    if rank % per_node == 0:
        folder = _base() / token
        node_files.private_folder(folder.parent)
        _make(folder, run)
        chosen = _shared(store, rank // per_node, nodes, run, folder / "checkpoints")
        for other in (folder / "checkpoints").glob("*step_*"):
            if other.name != chosen:
                shutil.rmtree(other)
        store.set(f"done/{rank // per_node}", "")
    store.wait([f"done/{node}" for node in range(nodes)])
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < size:  # it may serve the store
        time.sleep(0.01)


def _shared(store, node: int, nodes: int, run: Path, checkpoints: Path) -> str | None:
    """The name of the step that all nodes have whole when this returns; None: there is none."""
    on_disk = max((step_of(each) for each in folders.complete(run / "checkpoints")), default=-1)
    held = {folder.name: _intact(folder) for folder in folders.complete(checkpoints)}
    report = {"held": held, "disk": on_disk, "free": shutil.disk_usage(checkpoints).free}
    store.set(f"held/{node}", json.dumps(report))
    reports = [json.loads(store.get(f"held/{each}")) for each in range(nodes)]
    later = {name for each in reports for name in each["held"] if step_of(Path(name)) > reports[0]["disk"]}
    for name in sorted(later, reverse=True):
        of_step, free = [each["held"].get(name, {}) for each in reports], [each["free"] for each in reports]
        problem = _complete(store, node, of_step, checkpoints / name, free)
        if problem is None:
            return name
        if node == 0:
            warn([f"--save-memory: {name} in host memory: {problem}; an earlier checkpoint is used"])
    return None


def _intact(folder: Path) -> dict:
    """The manifest's text of a checkpoint, and which of its files this node has; {} if it cannot be read."""
    try:
        files = sorted(folders.read_manifest(folder, "--save-memory")["files"].items())
    except UsageError as error:
        warn([str(error)])
        return {}
    here = [(name, seal) for name, seal in files if (folder / name).exists()]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        problems = [*pool.map(lambda file: manifest.check_content(folder, file[0], file[1]), here)]
    warn(f"--save-memory: {folder}: {problem}" for problem in problems if problem)
    intact = [name for (name, _), problem in zip(here, problems, strict=True) if problem is None]
    return {"manifest": (folder / folders.MANIFEST).read_text(), "files": intact}


def _complete(store, node: int, held: list[dict], folder: Path, free: list[int]) -> str | None:
    """Copies the files of a step that nodes lack from those that have them; what is wrong, the same on all nodes.

    `held`: of `_intact`, by node; `free`: bytes of its tmpfs.
    """
    texts = {each["manifest"] for each in held if each}
    if len(texts) != 1:
        return "its nodes have different ones" if texts else "no node can read it"
    (text,) = texts
    files = json.loads(text)["files"]
    has = [set(each.get("files", ())) for each in held]
    if missing := sorted(files.keys() - {name for each in has for name in each}):
        return f"no node has {missing[0]} whole"
    for number, size in enumerate(free):
        room = sum(seal["size"] for name, seal in files.items() if name not in has[number])
        if room > size:
            return f"node {number} has no room for all files ({_gb(room)})"
    problems: list[OSError] = []
    folder.mkdir(exist_ok=True)
    leaders: Any = dist.ProcessGroupGloo(dist.PrefixStore(folder.name, store), node, len(held), store.timeout)
    for name in sorted(name for name in files if any(name not in each for each in has)):
        source = next(number for number, each in enumerate(has) if name in each)
        for chunk in _chunks({name: files[name]}):
            data = torch.zeros(chunk[2], dtype=torch.uint8)
            if node == source:
                _attempt(problems, lambda chunk=chunk, data=data: _read(folder, chunk, data))
            leaders.broadcast(data, source).wait()
            if name not in has[node]:
                _attempt(problems, lambda chunk=chunk, data=data: _write(folder, chunk, data))
    received = [manifest.check_content(folder, name, files[name]) for name in sorted(files.keys() - has[node])]
    _attempt(problems, lambda: write_atomically(folder / folders.MANIFEST, text))
    found = next((f"{error}" for error in problems), None) or next(filter(None, received), "")
    store.set(f"{folder.name}/{node}", found)
    answers = [store.get(f"{folder.name}/{number}").decode() for number in range(len(held))]
    return next(filter(None, answers), None)
