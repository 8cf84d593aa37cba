"""The environment of a rank that srun started: torchrun's variables, from Slurm's own.

`srun python -m megarl.train_rl …` needs no wrapper: one task is one rank. A variable that is set already wins.
"""

import re
from collections.abc import Mapping

from megarl.errors import UsageError

JOB = "TORCHELASTIC_RUN_ID"  # torchrun's name: it separates this job's processes from those of another job on the node
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # torchrun's name: how often the ranks were started again
NEEDED = (
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_STEP_NODELIST"
    " SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID"
).split()


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of srun, without MASTER_PORT; {} for any other process.

    The ranks agree on a port when they meet (`rendezvous`). A job that Slurm has started again counts as a restart.

    Raises:
        UsageError: a variable of Slurm is missing, nodes have different numbers of tasks, or the tasks of a node are
            not consecutive.
    """
    if {"RANK", "WORLD_SIZE"} & environment.keys() or not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys():
        return {}  # of a launcher of ours or torchrun's, or no task
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise UsageError(f"{missing[0]} is not set, but SLURM_STEP_ID is: start the ranks with srun")
    rank, local_rank, node = (int(environment[name]) for name in NEEDED[:3])
    per_node = ranks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if rank != node * per_node + local_rank:
        raise UsageError(
            f"SLURM_PROCID {rank} is task {local_rank} of node {node}: the ranks of a node must be consecutive; "
            "allowed is srun --distribution=block"
        )
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        ATTEMPT: environment.get("SLURM_RESTART_COUNT", "0"),
        JOB: f"slurm-{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}",
    }
    return {name: value for name, value in found.items() if name not in environment}


def check_launcher(environment: Mapping[str, str]):
    """UsageError for a launcher's variables that are no numbers, or of which some are missing, as left from a shell."""
    for name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environment.keys():
        if not re.fullmatch("[0-9]{1,9}", environment[name]):
            raise UsageError(f"{name} {environment[name]!r}: allowed is a number, as torchrun and srun set it")
    if "RANK" not in environment:
        return
    # The ranks of srun agree on a port when they meet.
    needed = ("WORLD_SIZE", "MASTER_ADDR", *(() if JOB in environment else ("MASTER_PORT",)))
    if missing := [name for name in needed if name not in environment]:
        raise UsageError(
            f"RANK is set, but {missing[0]} is not: start with torchrun or srun, or unset RANK for one process"
        )
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        raise UsageError(f"RANK {environment['RANK']}: allowed are 0 to WORLD_SIZE {environment['WORLD_SIZE']} - 1")


def ranks_per_node(tasks: str) -> int:
    """`8(x64)` -> 8, the tasks of each node. UsageError if nodes differ, as in `8(x63),4`."""
    counts = {re.sub(r"\(x\d+\)", "", entry) for entry in tasks.split(",")}
    if len(counts) > 1:
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE {tasks}: allowed is the same number of ranks on each node")
    return int(counts.pop())


def first_host(nodes: str) -> str:
    """The first node of a list as Slurm writes it: `gpu[017-032,040],login1` -> gpu017."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else nodes


def threads_per_rank(environment: Mapping[str, str], cores: int) -> int:
    """The cores that Slurm gave each task, else this rank's share of the node's `cores`."""
    given = environment.get("SLURM_CPUS_PER_TASK")
    return int(given) if given else max(1, cores // int(environment["LOCAL_WORLD_SIZE"]))
