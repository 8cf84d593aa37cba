"""Names of the files that replicas of the rollout add to a checkpoint."""

import pytest

from megarl.rollout import replica_files
from megarl.rollout.replica_files import GROUP_BUFFER_FILE, PARTIAL_ROLLOUTS_FILE, of_replica


@pytest.mark.parametrize("name", [GROUP_BUFFER_FILE, PARTIAL_ROLLOUTS_FILE])
def test_files_of_all_replicas_are_read(name, tmp_path):
    assert replica_files.find(tmp_path, name) == []
    for dp_rank in (0, 2, 1):
        (tmp_path / of_replica(name, dp_rank)).write_bytes(bytes([dp_rank]))
    found = replica_files.find(tmp_path, name)
    assert [data for data, _ in replica_files.read(found)] == [b"\0", b"\1", b"\2"]
    assert [where for _, where in replica_files.read(found)] == [f"--load {path}" for path in found]
