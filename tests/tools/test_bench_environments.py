"""The cost of slow tools and of HTTP: a small run's figures."""

import json

import pytest

from tests.helpers.tools import run_tool

SMALL = ("--prompts", 1, "--turns", 2, "--sleep", 0.01, "--steps", 2, "--rounds", 1, "--hidden", 32)


@pytest.mark.long
def test_all_sides_generate_the_same(tmp_path):
    file = tmp_path / "figures.json"
    result = run_tool("bench/environments", *SMALL, "--json", file, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["turns"] > 8 and set(found["best_cpu"]) == {"environment", "agent", "program"}
    assert set(found["best"]) == {
        f"{side}, {pace}" for side in ("environment", "agent", "program") for pace in ("awake", "asleep")
    }
    assert "program: asleep" in result.stdout
