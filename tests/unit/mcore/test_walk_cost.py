"""The clocks of host and device that predict a phase's time, and the runs for which they cannot."""

import pytest

from megarl.errors import UsageError
from megarl.planning.summary import Question
from tests.cuda_walk.cost import cases, phases
from tests.cuda_walk.cost.timeline import Collective, Constants, Replay, Wait, predict
from tests.cuda_walk.cost.work import Work
from tests.cuda_walk.start import needs_compiler, walks

C = Constants(1e12, 1e14, 1e13, kernel=1e-6, gap=0.0, operator=10e-6, call=2e-6, step=0.0)
SHORT, LONG = Work("add", 1e6), Work("mm", 0.0, 99e8)  # 2 µs and 100 µs of the device


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([SHORT] * 5, 52e-6),  # the host issues, and the last one runs
        ([LONG] * 5, 510e-6),  # the device computes, after the first is issued
        ([LONG, SHORT, Wait(), SHORT], 124e-6),  # the host issues the last one when the device is done
        ([SHORT._replace(is_backward=True)] * 5, 12e-6),
        ([Replay([SHORT] * 5)], 12e-6),
        ([Collective("allreduce", 36e9, 1)], 10e-6),  # of one rank
        ([Collective("allreduce", 36e6, 8)], 130e-6),
    ],
)
def test_the_slower_of_host_and_device_decides(events, seconds):
    assert predict(events, C).seconds == pytest.approx(seconds)


def test_products_of_32_bits_take_longer():
    assert predict([LONG._replace(is_fp32=True)], C).device == pytest.approx(991e-6)


@pytest.mark.parametrize(
    "flag", ["--pipeline-model-parallel-size 2", "--context-parallel-size 2", "--lora-rank 8", "--speculative-rollout"]
)
def test_runs_of_which_a_part_would_be_missed_are_refused(flag):
    program = Question([*cases.FLAGS.split(), *flag.split()], 2, None, cases.VOCAB).program()
    with pytest.raises(UsageError, match=f"{flag.split()[0]} .*is not predicted"):
        phases.check(program)


def test_a_small_run_is_not_refused():
    phases.check(Question(cases.FLAGS.split(), 2, None, cases.VOCAB).program())


@needs_compiler
def test_no_phase_launches_more_kernels_than_its_ceiling_allows(tmp_path):
    """A ceiling is what is launched: whoever launches less lowers it, whoever launches more says why."""
    counted = [(cases.Ceiling(*ceiling), kernels) for ceiling, kernels in walks(tmp_path, ["launches"])["launches"]]
    assert [ceiling for ceiling, _ in counted] == cases.CEILINGS
    assert [(ceiling, kernels) for ceiling, kernels in counted if kernels != ceiling.kernels] == []
