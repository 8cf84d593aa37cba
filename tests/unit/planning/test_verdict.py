"""The verdict of the plan: a GPU that is just large enough, the largest component, and changes that help."""

import pytest

from megarl.planning import layouts, step_time, verdict
from megarl.planning.memory import GIB
from megarl.planning.step_time import GPUS, Cluster
from megarl.planning.summary import Question
from tests.helpers.launch_scripts import model_flags
from tests.helpers.models.tiny_models import LENGTHS, SHAPES
from tests.helpers.tiers import long

GRPO = f"{SHAPES['llama']} {LENGTHS} --advantage grpo --kl-coefficient 0 --bf16 --max-tokens-per-microbatch 8192"


def ask(flags: str, gib: float | None = None, spare: int = 0):
    """(question, verdict) of one rank with `gib` of memory; default: with so many bytes more than it needs."""
    question = Question(f"{GRPO} {flags}".split(), 1, None, vocab_size=20)
    price = question.price()
    if gib is None:
        gib = (price.fullest.bytes + spare) / GIB / (1 - verdict.RESERVE)
    return question, verdict.verdict(question, price, gib)


def test_a_part_of_the_memory_stays_free():
    assert verdict.available(80) == int(80 * GIB * (1 - verdict.RESERVE))


def test_a_run_fits_if_its_fullest_rank_does():
    _, enough = ask("", spare=2**10)
    assert enough["fits"] and 0 <= enough["left"] <= 2**10 and enough["changes"] == []
    _, less = ask("", spare=-(2**10))
    assert not less["fits"] and -(2**11) < less["left"] < 0 and less["changes"]
    assert less["bytes"] == enough["bytes"] and less["roles"] == ["actor", "reward", "rollout"]


def test_the_largest_component_and_the_cheapest_change_that_fits():
    """A cache of 1 GiB beside 76,096 gradients of four bytes, in whose memory a part of it is."""
    question, found = ask("--rollout-buffer-gb 1", gib=0.75)
    assert not found["fits"] and found["largest"] == {
        "role": "rollout",
        "name": "kv_cache",
        "bytes": 2**30 - 4 * 76_096,
    }
    half = found["changes"][0]
    assert half["flags"] == ["--rollout-buffer-gb", "0.5"] and found["bytes"] - half["bytes"] == 2**29
    assert [change["bytes"] <= found["available"] for change in found["changes"]] == [True] + [False] * (
        len(found["changes"]) - 1
    )
    text = verdict.text(found, searches=True)
    assert "does not fit" in text and "--rollout-buffer-gb 0.5" in text and text.endswith("--best-layouts")


def test_changes_that_the_run_refuses_or_that_save_nothing_are_not_shown():
    question, found = ask("--rollout-buffer-gb 0.001", gib=1e-3)
    flags = [change["flags"] for change in found["changes"]]
    assert found["together"] is None and "No combination of " in verdict.text(found, searches=False)
    assert len(flags) == verdict.SHOWN and ["--rollout-buffer-gb", "0.0005"] not in flags
    assert not any("parallel" in each[0] for each in flags)  # one rank
    assert all(found["bytes"] - change["bytes"] >= verdict.MIN_SAVING * found["bytes"] for change in found["changes"])
    assert [change["bytes"] for change in found["changes"]] == [question.price(each).fullest.bytes for each in flags]


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
    long(("qwen2.5_72b", 128, "", "--tensor-model-parallel-size")),
    ("qwen2.5_32b", 16, "--tensor-model-parallel-size 2 --sequence-parallel", "--tensor-model-parallel-size"),
])  # fmt: skip
def test_what_is_printed_fits(model, ranks, flags, first):
    asked = question(model, ranks, flags)
    answer = found(asked)
    assert not answer["fits"]
    change = answer["together"] or answer["changes"][0]
    assert change["flags"][0] == first and change["bytes"] <= answer["available"]
    assert asked.price(change["flags"]).fullest.bytes == change["bytes"]  # as the run with these flags is priced
    assert f"fits): {' '.join(change['flags'])}\n" in verdict.text(answer, searches=False)
    assert "--gpu NAME --best-layouts" in verdict.text(answer, searches=False)


def test_the_host_helps_where_no_layout_does():
    asked = question("qwen2.5_32b", 8)
    change = verdict.fitting(asked, asked.price(), verdict.available(60))
    assert change is not None and "--offload" in change[0]


def test_experts_that_are_spread_over_nodes_are_marked():
    cluster = Cluster("h100", GPUS["h100"], step_time.MFU, step_time.NETWORK * 1e9, 8)
    best = [{"flags": (), "bytes": GIB, "seconds": 9.0, "expert_nodes": nodes} for nodes in (4, 1)]
    found = {"best": best, "closest": best[0], "available": GIB, "legal": 2, "fitting": 2}
    lines = layouts.text(found, cluster).splitlines()[-2:]
    assert ["all-to-all over 4 nodes" in line for line in lines] == [True, False]
    args = question("qwen3_30b_a3b", 64, "--expert-model-parallel-size 32").program().roles["actor"].megatron
    assert [step_time.expert_nodes(args, ranks) for ranks in (4, 8, 32, 64)] == [8, 4, 1, 1]
