"""Kernels and ranks of a run: what flags name, what all ranks have, and which number of ranks is measured as faster."""

import os
import types

import pytest
import torch

from megarl import arguments, rank_choice
from megarl.errors import UsageError
from megarl.mcore import tuning
from megarl.mcore.kernels import native
from megarl.trainers import kernel_choice
from tests.helpers.worlds import run_world

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu --max-prompt-length 8"
    " --max-response-length 8"
)


def config_of(flags="", ranks=1):
    return arguments.parse([*MODEL.split(), *flags.split()], ranks, "rl")


def test_kernels_that_the_machine_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda: ["onednn", "blas"])
    with pytest.raises(UsageError, match="--kernels compiled: not on this machine; allowed here: auto, onednn, blas"):
        kernel_choice.check_kernels(config_of("--kernels compiled"))
    kernel_choice.check_kernels(config_of("--kernels blas"))


@pytest.mark.parametrize(("flags", "kernels", "work"), [
    ("--kernels blas --parallel-work 7", "blas", 7), ("--tune off --kernels blas", "blas", tuning.PARALLEL_WORK),
    ("--tune off --parallel-work 7", None, 7),
])  # fmt: skip
def test_flags_decide_without_a_measurement(flags, kernels, work, monkeypatch):
    applied = []
    monkeypatch.setattr(tuning, "choose", None)
    monkeypatch.setattr(tuning, "apply", applied.append)
    kernel_choice.choose_kernels(config_of(flags), types.SimpleNamespace(rank=0, size=1))
    assert applied == [tuning.Choices(kernels or tuning.available()[0], work, {})]


def test_a_flag_wins_over_what_is_measured(monkeypatch, capsys):
    applied, measured = [], tuning.Choices("blas", 5, {"blas": 1.0})
    monkeypatch.setattr(tuning, "choose", lambda *_: (measured, None))
    monkeypatch.setattr(tuning, "apply", applied.append)
    monkeypatch.setattr(native, "absence", lambda: "")
    kernel_choice.choose_kernels(config_of("--parallel-work 9"), types.SimpleNamespace(rank=0, size=1))
    assert applied == [tuning.Choices("blas", 9, {"blas": 1.0})]
    assert capsys.readouterr().out == "megarl: kernels: blas (measured)\n"


def kernels_of_rank(rank, lacking):
    """The kernels that a rank applies if one rank lacks some."""
    applied, all_kernels = [], list(tuning.KERNELS)
    tuning.available = lambda: [name for name in all_kernels if rank != 1 or name not in lacking]
    tuning.choose = lambda *_: (tuning.Choices("compiled", 100 + rank, {}), None)
    tuning.apply = applied.append
    kernel_choice.choose_kernels(config_of("", 2), types.SimpleNamespace(rank=rank, size=2))
    return applied[0].kernels, applied[0].parallel_work


@pytest.mark.parametrize(("lacking", "wanted"), [((), "compiled"), (("compiled",), "onednn"),
                                                 (("compiled", "onednn"), "blas")])  # fmt: skip
def test_all_ranks_take_kernels_that_each_has(lacking, wanted):
    assert run_world(kernels_of_rank, 2, lacking) == [(wanted, 100)] * 2


# -- ranks -------------------------------------------------------------------------------------------------------


def ranks_for(flags="", program="rl"):
    return rank_choice.ranks_for([*MODEL.split(), *flags.split()], program, 2)


@pytest.mark.parametrize(
    ("one", "two", "wanted"), [(1.0, 0.9, 2), (1.0, 0.99, 1), (1.0, 1.5, 1), (1.0, float("inf"), 1)]
)
def test_several_ranks_must_be_clearly_faster(one, two, wanted, monkeypatch):
    monkeypatch.setattr(rank_choice, "_in_children", lambda function, ranks: [one] if ranks == 1 else [0.1, two])
    assert ranks_for() == wanted


@pytest.mark.parametrize("flags", ["--role-map actor=0", "--tensor-model-parallel-size 3", "--no-such-flag 1"])
def test_flags_that_place_roles_or_are_wrong_leave_one_rank(flags, monkeypatch):
    monkeypatch.setattr(rank_choice, "_in_children", None)
    assert ranks_for(flags) == 1


def test_models_whose_copies_do_not_fit_run_on_one_rank(monkeypatch):
    monkeypatch.setattr(rank_choice, "_in_children", None)
    assert ranks_for("--num-layers 4000 --hidden-size 8192 --ffn-hidden-size 28672") == 1


@pytest.mark.parametrize("program", ["rl", "sft", "reward"])
def test_both_ways_are_measured_in_processes_of_their_own(program):
    flags = MODEL if program == "rl" else MODEL.replace("--max-prompt-length 8 --max-response-length 8", "")
    before = torch.get_num_threads()
    assert rank_choice.ranks_for(flags.split(), program, 2) in (1, 2)
    assert torch.get_num_threads() == before


def test_a_child_that_fails_counts_as_never_done():
    parent = os.getpid()

    def fails(ranks):
        assert os.getpid() != parent
        if ranks == 2:
            raise SystemExit(3)
        return 0.5

    assert rank_choice._in_children(fails, 1) == [0.5]
    assert rank_choice._in_children(fails, 2) == [float("inf")] * 2


def test_the_kernels_of_this_process_are_as_before():
    assert native.is_used() == native.is_built()
