"""status.json: whole files with the newest state, and the state of a run that was killed."""

import json

from megarl.observe import status_file
from megarl.observe.status_file import StatusFile

ROWS = [["actor", "update", 1, 0.5, 0.1, False], []]


def content(folder) -> dict:
    return json.loads((folder / status_file.NAME).read_text())


def test_the_last_state_is_written_before_the_file_closes(tmp_path):
    file = StatusFile(tmp_path, 2, 2.0, 60.0)
    file.post([[], []])
    file.close(ROWS, status_file.HUNG, "no rank has made progress")
    file.post([[], []])  # another thread, while the process ends
    found = content(tmp_path)
    assert (found["state"], found["problem"], found["ranks"]) == ("hung", "no rank has made progress", ROWS)
    assert (found["world_size"], found["interval"], found["limit"]) == (2, 2.0, 60.0)
    assert [path.name for path in tmp_path.iterdir()] == [status_file.NAME]


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    StatusFile(tmp_path / "none", 1, 2.0, 60.0).close([[]], status_file.ENDED)
    status_file.end_killed(tmp_path / "none", None)
    assert not list(tmp_path.iterdir())
