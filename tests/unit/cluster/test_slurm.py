"""torchrun's variables from those of srun. The environments are those that Slurm 22.05 gave on two nodes."""

import pytest

from megarl.cluster import slurm
from megarl.errors import UsageError

# The third of four tasks: srun --nodes 2 --ntasks-per-node 2.
TASK = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[017-018]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "PATH": "/bin",
}  # fmt: skip


def test_a_task_is_a_rank():
    assert slurm.rank_environment(TASK) == {
        "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu017", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "slurm-17.3",
    }  # fmt: skip


@pytest.mark.parametrize("started", [
    {"RANK": "0"},  # torchrun
    {"WORLD_SIZE": "4"},  # the check of our launcher
])  # fmt: skip
def test_ranks_of_another_launcher_in_a_task_stay_what_they_are(started):
    assert slurm.rank_environment(TASK | started) == {}


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_batch_scripts_and_shells_are_no_ranks(missing):
    """sbatch sets SLURM_PROCID in its script, salloc neither."""
    assert slurm.rank_environment({name: value for name, value in TASK.items() if name != missing}) == {}


def test_a_job_that_slurm_started_again_is_a_restart_and_set_variables_win():
    given = TASK | {"SLURM_RESTART_COUNT": "2", "MASTER_ADDR": "10.0.0.1"}
    found = slurm.rank_environment(given)
    assert found["TORCHELASTIC_RESTART_COUNT"] == "2" and "MASTER_ADDR" not in found
    found = slurm.rank_environment(given | {"TORCHELASTIC_RESTART_COUNT": "5"})
    assert "TORCHELASTIC_RESTART_COUNT" not in found


@pytest.mark.parametrize("changed, says", [
    ({"SLURM_STEP_TASKS_PER_NODE": "2,4"}, "SLURM_STEP_TASKS_PER_NODE 2,4: allowed is the same number"),
    ({"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "must be consecutive; allowed is srun --distribution=block"),
])  # fmt: skip
def test_layouts_that_roles_cannot_use_are_refused(changed, says):
    with pytest.raises(UsageError, match=says):
        slurm.rank_environment(TASK | changed)


def test_a_missing_variable_is_named():
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST is not set"):
        slurm.rank_environment({name: value for name, value in TASK.items() if name != "SLURM_STEP_NODELIST"})


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("changed, says", [
    ({"RANK": "one"}, "RANK 'one': allowed is a number"), ({"RANK": "-1"}, "RANK '-1'"),
    ({"LOCAL_RANK": ""}, "LOCAL_RANK ''"),
    ({"WORLD_SIZE": "1"}, "RANK 1: allowed are 0 to WORLD_SIZE 1 - 1"), ({"WORLD_SIZE": None}, "but WORLD_SIZE is not"),
    ({"MASTER_ADDR": None}, "RANK is set, but MASTER_ADDR is not"), ({"MASTER_PORT": None}, "but MASTER_PORT is not"),
])  # fmt: skip
def test_variables_that_are_left_from_a_shell_are_refused(changed, says):
    given = {name: value for name, value in (LAUNCHED | changed).items() if value is not None}
    with pytest.raises(UsageError, match=says):
        slurm.check_launcher(given)


def test_variables_of_launchers_are_accepted():
    """Of torchrun, of srun, of the check of our launcher, and of a process without one."""
    for given in (LAUNCHED, TASK | slurm.rank_environment(TASK), {"WORLD_SIZE": "4"}, {}):
        slurm.check_launcher(given)


@pytest.mark.parametrize("nodes, first", [
    ("node1", "node1"), ("node1,node2", "node1"), ("gpu[017-032,040],login1", "gpu017"), ("a[3,5-7]", "a3"),
    ("rack[0-1]node[04-05]", "rack0node04"), ("n-[1-2]-ib", "n-1-ib"), ("login1,gpu[1-2]", "login1"),
])  # fmt: skip
def test_the_first_node_of_a_list(nodes, first):
    assert slurm.first_host(nodes) == first


@pytest.mark.parametrize("tasks, count", [("8(x64)", 8), ("1", 1), ("4(x3),4", 4)])
def test_tasks_of_a_node(tasks, count):
    assert slurm.ranks_per_node(tasks) == count


def test_threads_are_the_cores_of_a_task():
    assert slurm.threads_per_rank({"SLURM_CPUS_PER_TASK": "12", "LOCAL_WORLD_SIZE": "8"}, 64) == 12
    assert slurm.threads_per_rank({"LOCAL_WORLD_SIZE": "8"}, 64) == 8
    assert slurm.threads_per_rank({"LOCAL_WORLD_SIZE": "8"}, 4) == 1
