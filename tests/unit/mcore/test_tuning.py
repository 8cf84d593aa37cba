"""Choices by measurement: kept in a file, only among kernels whose rows do not depend on each other."""

import json

import pytest
import torch

from megarl.mcore import tuning
from megarl.mcore.kernels import linear, native

SIZES = ((48, 32), (32, 48))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "choices")
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    yield
    tuning.apply(tuning.Choices(tuning.available()[0], tuning.PARALLEL_WORK, {}))


def test_what_is_measured_is_kept_and_read_again(monkeypatch):
    first, file = tuning.choose(SIZES, False)
    assert (
        file is None and first.kernels in tuning.available() and first.times[min(first.times, key=first.times.get)] == 1
    )
    monkeypatch.setattr(tuning, "measure", None)  # is not called again
    again, file = tuning.choose(SIZES, False)
    assert again == first and json.loads(file.read_text())["kernels"] == first.kernels


def test_fresh_measures_again():
    tuning.choose(SIZES, False)
    assert tuning.choose(SIZES, True)[1] is None


@pytest.mark.parametrize("content", ["", "{", '{"kernels": "compiled"}', "[1]"])
def test_a_damaged_file_is_measured_again(content):
    tuning.choose(SIZES, False)
    (file,) = tuning.FOLDER.iterdir()
    file.write_text(content)
    choices, source = tuning.choose(SIZES, False)
    assert source is None and tuning.choose(SIZES, False) == (choices, file)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "file" / "choices")
    assert tuning.choose(SIZES, False)[1] is None


def test_a_kernel_whose_rows_depend_on_each_other_is_no_candidate(monkeypatch):
    product = tuning._product

    def with_neighbours(name, weight):
        exact = product(name, weight)
        return (lambda x: exact(x) + 1e-7 * len(x)) if name != tuning.BLAS else exact

    monkeypatch.setattr(tuning, "_product", with_neighbours)
    monkeypatch.setattr(tuning, "_is_invariant", tuning._is_invariant)
    assert set(tuning.measure(SIZES).times) <= {tuning.BLAS}


def test_the_compiled_kernels_are_candidates_wherever_they_are_built():
    for columns, inner in (*SIZES, (7, 5), (130, 300)):
        weight = torch.randn(columns, inner)
        assert not native.is_built() or tuning._is_invariant(tuning._product(tuning.COMPILED, weight), inner)


def test_choices_are_applied():
    weight, x = torch.randn(48, 32), torch.randn(9, 32)
    for name in tuning.available():
        tuning.apply(tuning.Choices(name, tuning.NEVER, {}))
        assert native.is_used() == (name == tuning.COMPILED)
        assert torch.equal(linear.matmul(x, weight), tuning._product(name, weight)(x))


def test_threads_are_measured_only_if_there_are_several():
    assert torch.get_num_threads() > 1 or tuning.measure(SIZES).parallel_work == tuning.PARALLEL_WORK
    text = str(tuning.Choices("onednn", 5, {"onednn": 1.0, "blas": 2.25}))
    assert text == "kernels: onednn (times as long: blas 2.2)"
