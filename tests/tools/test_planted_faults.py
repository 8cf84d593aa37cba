"""tests/planted_faults.yaml: each fault has its place in the code, and every room has one."""

from tools import planted_faults

FAULTS = {fault["name"]: fault for fault in planted_faults.faults()}
ROOMS = {path.name for path in (planted_faults.ROOT / "megarl").iterdir() if (path / "__init__.py").exists()}


def problem_of(fault: dict[str, str]) -> str:
    """Why a fault cannot be planted; "" if it can."""
    try:
        planted_faults.planted(fault, (planted_faults.ROOT / fault["file"]).read_text())
        planted_faults.tests_of(fault)
    except (ValueError, OSError) as problem:
        return str(problem)
    return ""


def test_each_fault_has_its_place():
    """Checked on every change, because a change that moves code must move its fault, too."""
    assert "\n".join(filter(None, map(problem_of, FAULTS.values()))) == ""
    moved = FAULTS["first-answer-counts"] | {"old": "no such line", "file": "megarl/rewards/text.py"}
    assert problem_of(moved) == "first-answer-counts: megarl/rewards/text.py has its text 0 times, not once"


def test_every_room_has_a_fault():
    assert len(FAULTS) == len(planted_faults.faults()) >= 40
    assert {fault["room"].split("/")[0] for fault in FAULTS.values()} >= ROOMS
