"""Several changes together: what is printed fits, experts are divided first, and the user's own flags stay."""

import pytest

from megarl.planning import changes, hardware, layouts, verdict
from megarl.planning.hardware import GPUS, Cluster
from megarl.planning.memory import GIB
from megarl.planning.question import Question
from tests.helpers.launch_scripts import model_flags

RUN = (
    "--bf16 --use-distributed-optimizer --advantage grpo --kl-coefficient 0.01 --max-prompt-length 1024"
    " --max-response-length 4096 --prompts-per-step 128 --samples-per-prompt 8 --rollout-buffer-gb 8"
    " --rollout-max-requests 256"
)


def question(model: str, ranks: int, flags: str = "") -> Question:
    words, vocab_size = model_flags(model)
    return Question([*words, *f"{RUN} {flags}".split()], ranks, 8, vocab_size=vocab_size)


def found(asked: Question, gib: float = 80):
    return verdict.verdict(asked, asked.price(), gib)


@pytest.mark.parametrize("model, ranks, flags, first", [
    ("qwen3_30b_a3b", 64, "", "--expert-model-parallel-size"),
    ("qwen2.5_72b", 128, "", "--tensor-model-parallel-size"),
    ("qwen2.5_32b", 16, "--tensor-model-parallel-size 2 --sequence-parallel", "--tensor-model-parallel-size"),
])  # fmt: skip
def test_what_is_printed_fits(model, ranks, flags, first):
    asked = question(model, ranks, flags)
    answer = found(asked)
    assert not answer.fits
    change = answer.together or answer.changes[0]
    assert change.flags[0] == first and change.bytes <= answer.available
    assert asked.price(change.flags).fullest.bytes == change.bytes  # as the run with these flags is priced
    assert f"fits): {' '.join(change.flags)}\n" in verdict.text(answer, searches=False)
    assert "--gpu NAME --best-layouts" in verdict.text(answer, searches=False)


def test_the_host_helps_where_no_layout_does():
    asked = question("qwen2.5_32b", 8)
    change = changes.fitting(asked, asked.price(), hardware.available(60))
    assert change is not None and "--offload" in change.flags


def test_experts_that_are_spread_over_nodes_are_marked():
    cluster = Cluster("h100", GPUS["h100"], hardware.MFU, hardware.NETWORK * 1e9, 8)
    best = [layouts.Layout(("--expert-model-parallel-size", "32"), GIB, 9.0, 4), layouts.Layout((), GIB, 9.5, 1)]
    lines = layouts.text(layouts.Found(best, best[0], GIB, 2, 2), cluster).splitlines()[-2:]
    assert ["all-to-all over 4 nodes" in line for line in lines] == [True, False]
    args = question("qwen3_30b_a3b", 64, "--expert-model-parallel-size 32").program().roles["actor"].megatron
    assert [hardware.expert_nodes(args, ranks) for ranks in (4, 8, 32, 64)] == [8, 4, 1, 1]
