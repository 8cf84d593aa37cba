"""tests/planted_faults.yaml: each fault has its place in the code, and every room has one."""

import pytest

from tools import planted_faults

FAULTS = {fault["name"]: fault for fault in planted_faults.faults()}
ROOMS = {path.name for path in (planted_faults.ROOT / "megarl").iterdir() if (path / "__init__.py").exists()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_place(name):
    fault = FAULTS[name]
    planted_faults.planted(fault, (planted_faults.ROOT / fault["file"]).read_text())
    planted_faults.tests_of(fault)


@pytest.mark.nightly
def test_every_room_has_a_fault():
    assert len(FAULTS) == len(planted_faults.faults()) >= 40
    assert {fault["room"].split("/")[0] for fault in FAULTS.values()} >= ROOMS
