"""The cost of slow tools: a small run's figures."""

import json

import pytest

from tests.helpers.tools import run_tool

SMALL = ("--episodes", 6, "--turns", 2, "--sleep", 0.01, "--requests", 3, "--rounds", 2)


@pytest.mark.long
def test_both_sides_generate_the_same_and_the_ratio_is_of_the_fastest(tmp_path):
    file = tmp_path / "figures.json"
    result = run_tool("bench/environments", *SMALL, "--json", file, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["tokens"] > 6 * 2 and found["ratio"] == min(found["seconds"]["asleep"]) / min(
        found["seconds"]["awake"]
    )
    assert [len(seconds) for seconds in found["seconds"].values()] == [2, 2]
    assert "nothing to generate" in result.stdout
