"""Episodes that fail: left out of the batch, and above a limit the end of the run."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.envs.sum_environments import EPISODES, FOLDER
from tests.helpers.forked_programs import launch
from tests.helpers.programs import metrics, rl_argv, train
from tests.helpers.worlds import RankFailed

SUMS = "tests.helpers.envs.sum_environments"


def run(save: Path, environment: str, flags: str = "", size: int = 1) -> Path:
    argv = rl_argv(save, f"{EPISODES} --environment {SUMS}:{environment} {flags}", warm_start="experts" not in flags)
    train("rl", argv, size)
    return save


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_a_prompt_that_an_environment_makes_too_long_fails(tmp_path):
    with pytest.raises(RankFailed, match="tokens with the tools and the first observation; --max-prompt-length"):
        run(tmp_path / "run", "OpeningSums", "--max-prompt-length 5 --filter-long-prompts --environment-max-failures 0")


def test_what_fails_for_good_is_left_out_and_stops_the_run_above_the_limit(tmp_path):
    found = run(tmp_path / "run", "OnceOnlySums", "--environment-max-failures 1")
    failures = [metrics(found)[step]["environment/failures"] for step in (1, 2)]
    assert 0 < sum(failures) < 24 and all(count % 2 == 0 for count in failures)  # whole groups of two
    flags = f"{EPISODES} --environment {SUMS}:OnceOnlySums --environment-max-failures 0"
    status, _, err = launch(tmp_path, rl_argv(tmp_path / "stopped", flags))
    file = tmp_path / "stopped" / "samples" / "failed_step_00000001_rank_0.jsonl"
    line = rf"environments failed in .*-failures allows 0 of them.*broken.*; the samples of the step are in {file}\n"
    assert status == 1 and re.search(line, err), err
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    failed = [row for row in rows if row.get("failed")]
    assert 0 < len(failed) < len(rows) and all(row["prompt"] for row in rows)
    assert all(row["response"] and row["turns"] and row["reward"] is None for row in rows if row not in failed)
