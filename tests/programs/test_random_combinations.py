"""Random combinations of flags, a night's work: what is accepted runs, and neutral flags change no byte.

A case is drawn from a seed and its number, so a failure can be repeated alone: `case_of(seed, number)`. A case that
fails is shrunk: flags are taken out as long as it still fails in the same way.
"""

import contextlib
import os
import random
import re
from pathlib import Path

import pytest

from megarl.errors import UsageError
from tests.helpers.pages.combinations import AXES, NEUTRAL, argv_of
from tests.helpers.programs import metrics, program, samples, train
from tests.helpers.worlds import RankFailed

CASES = 300
SEED = int(os.environ.get("MEGARL_FUZZ_SEED", "0"))
ALONE = "with --partial-rollouts an agent asks for one turn at a time"  # known once it asks for two
NUMBERS = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "kl/reference", "rollout/entropy")


def case_of(seed: int, number: int) -> tuple[list[str], str | None]:
    """(values of some axes, a neutral flag or None) of a case."""
    draw = random.Random(f"{seed}/{number}")
    axes = draw.sample(sorted(AXES), draw.randint(2, 7))
    return [draw.choice(AXES[axis]) for axis in axes], draw.choice(NEUTRAL) if number % 3 == 0 else None


def size_of(values: list[str]) -> int:
    return 2 if any(value in AXES["layout"] or "--role-map" in value for value in values) else 1


def outcome(values: list[str], save: Path) -> str:
    """'refused', 'ran', or the kind of error with which a case fails."""
    argv, size = argv_of(values, save), size_of(values)
    try:
        with contextlib.redirect_stderr(None):
            program("rl", argv, size)
    except UsageError as error:
        text = str(error)
        return "refused" if "\n" not in text and "unknown flag" not in text else f"refused: {text}"
    try:
        train("rl", argv, size)
    except RankFailed as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        if "UsageError" in last or "RunStopped" in last or ALONE in last:
            return "refused"
        return f"failed: {re.sub('[0-9]+', 'N', last.strip())[:200]}"
    return "ran"


def neutral_difference(values: list[str], neutral: str, folder: Path) -> str | None:
    """What a neutral flag changes in a case that runs; None if nothing, or if it is not accepted there."""
    if outcome([*values, neutral], folder / "neutral") != "ran":
        return None
    one, other = metrics(folder / "plain")[1], metrics(folder / "neutral")[1]
    changed = [name for name in NUMBERS if one.get(name) != other.get(name)]
    if samples(folder / "plain", 1) != samples(folder / "neutral", 1):
        changed.append("samples")
    return f"{neutral} changes {', '.join(changed)}" if changed else None


def shrunk(values: list[str], how: str, folder: Path) -> list[str]:
    """The case without the values that its failure does not need."""
    for value in list(values):
        fewer = [other for other in values if other != value]
        if outcome(fewer, folder / f"shrunk-{len(fewer)}-{values.index(value)}") == how:
            values = fewer
    return values


def check(numbers: range, folder: Path) -> dict[str, int]:
    """Runs cases; counts of what became of them. Fails with all faults, each in its smallest form."""
    counts, faults = {"refused": 0, "ran": 0, "compared": 0}, []
    for number in numbers:
        values, neutral = case_of(SEED, number)
        place = folder / str(number)
        how = outcome(values, place / "plain")
        if how in counts:
            counts[how] += 1
        else:
            faults.append(f"case {number} {how}\n    {' '.join(shrunk(values, how, place))}")
        if how == "ran" and neutral is not None:
            counts["compared"] += metrics(place / "plain")[1].get("actor/updates", 0) > 0
            if changed := neutral_difference(values, neutral, place):
                faults.append(f"case {number}: {changed}\n    {' '.join(values)}")
    assert not faults, "\n".join(faults)
    return counts


@pytest.mark.long
def test_some_cases(tmp_path):
    """The machinery: a few cases, among them accepted ones and refused ones."""
    counts = check(range(6), tmp_path)
    assert counts["ran"] >= 1 and counts["ran"] + counts["refused"] == 6


def test_a_failure_is_shrunk(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "outcome", lambda values, save: "failed" if "b" in values else "ran")
    assert shrunk(["a", "b", "c"], "failed", tmp_path) == ["b"]


@pytest.mark.nightly
def test_random_combinations_run_or_are_refused(tmp_path):
    counts = check(range(CASES), tmp_path)
    print(counts)
    assert counts["ran"] >= CASES // 4 and counts["compared"] >= CASES // 20
