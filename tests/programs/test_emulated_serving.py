"""The generation server and evaluation on emulated devices: in fp32 the tokens and log-probs of a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulator.programs import needs_emulator
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.server.server_clients import ServerClient
from tests.helpers.server.servers import (
    ADMIN_KEY,
    MOE,
    SERVED,
    checkpoint,
    completions,
    key_files,
    requests,
    serve_argv,
)
from tests.helpers.worlds import SAFETY_SECONDS

pytestmark = needs_emulator
FEW = "--rollout-max-requests 4"  # places, fewer than requests: these join and end while others run
STEPS = ["step_00000001", "step_00000002"]  # the second is what a server begins with
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
ALL_KINDS = requests(15)
# Sampled, with temperatures, and greedy ones: what the device samples.
PLANNED_THERE = [replace(each, top_logprobs=0) for each in ALL_KINDS if not each.sampling.is_restricted]
LAYOUTS = {
    "one rank": ("", 1), "two replicas": ("", 2), "TP 2": ("--tensor-model-parallel-size 2", 2),
    "PP 2": ("--pipeline-model-parallel-size 2", 2),
}  # fmt: skip


def weights_of(flags: str) -> Path:
    """The checkpoints of a server's model."""
    return (checkpoint(MOE) if EXPERTS in flags else checkpoint()) / "checkpoints"


def answers_of(emulator, asked: list, flags: str, ranks: int) -> tuple[list, dict[str, int]]:
    """What a server answers with the weights that it has, then with those of each step, and its counts."""
    weights = weights_of(flags)
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {weights}"
    with emulator.served(serve_argv(f"{SERVED} {FEW} {keys} {flags}", weights.parent), ranks) as (url, counts):
        client = ServerClient(url, admin_key=ADMIN_KEY, seconds=SAFETY_SECONDS)
        found = [client.generate(asked)]
        for version, step in enumerate(STEPS, 1):
            assert client.update_weights(step) == version
            found.append(client.generate(asked))
    return found, counts


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_answers_with_the_same_bits_with_graphs_and_without(layout, emulator):
    flags, ranks = LAYOUTS[layout]
    (found, graphs), (wanted, steps) = (
        answers_of(emulator, PLANNED_THERE, f"--bf16 {flags} --decode-graphs {value}", ranks)
        for value in ("auto", "off")
    )
    assert graphs["graph launch"] > graphs["triton paged_decode"] > 0  # launches of kernels in other steps
    # A replica of one rank launches the next step before the host reads the tokens of this one.
    assert (graphs.get("host waits for an event", 0) > 30) == ("parallel" not in flags)
    assert "host waits for an event" not in steps
    assert "graph launch" not in steps and steps["triton paged_decode"] > 100
    assert found == wanted and found[0] == found[2] != found[1]


@pytest.mark.long
def test_experts_of_several_ranks_are_served_kernel_by_kernel_with_the_bits_of_one_rank(emulator):
    (found, steps), (wanted, graphs) = (
        answers_of(emulator, PLANNED_THERE, f"--bf16 {EXPERTS} --moe-grouped-gemm {layout}", ranks)
        for layout, ranks in (("--expert-model-parallel-size 2", 2), ("", 1))
    )
    assert graphs["graph launch"] > 30 and "graph launch" not in steps and steps["aten::_grouped_mm"] > 100
    assert found == wanted and found[0] == found[2] != found[1]


@pytest.mark.long
@pytest.mark.parametrize("flags, ranks", [*LAYOUTS.values(), (f"{EXPERTS} --expert-model-parallel-size 2", 2)], ids=str)
def test_a_server_answers_in_fp32_as_on_a_cpu(flags, ranks, emulator):
    folder, experts = weights_of(flags), EXPERTS * (EXPERTS in flags)
    wanted = {step: completions(serve_argv(f"{SERVED} {FEW} {experts}", folder / step), ALL_KINDS) for step in STEPS}
    found, counts = answers_of(emulator, ALL_KINDS, flags, ranks)
    assert counts["aten::bmm"] > 200
    for answers, step in zip(found, [STEPS[1], *STEPS], strict=True):
        assert [each.tokens for each in answers] == [each.tokens for each in wanted[step]]
        for mine, other in zip(answers, wanted[step], strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=2e-6)


EVALUATIONS = {  # flags -> ranks
    "": 1,
    "--eval-responses 4 --eval-temperature 0.7 --eval-k 1,4": 1,
    # The counts are the first rank's, whose share of the requests must not depend on its speed.
    "--eval-responses 2 --eval-temperature 1.1 --rollout-dispatch static": 2,
    "--tensor-model-parallel-size 2": 2,
}


@pytest.mark.long
@pytest.mark.parametrize("flags, ranks", EVALUATIONS.items(), ids=str)
def test_an_evaluation_finds_what_a_cpu_does(flags, ranks, emulator, tmp_path):
    """In fp32; in bf16 graphs change nothing."""
    run_evaluate(evaluate_argv(tmp_path / "cpu", flags), ranks)
    variants = {"fp32": "", "graphs": "--bf16", "steps": "--bf16 --decode-graphs off"}
    counts = {
        name: emulator.run("evaluate", evaluate_argv(tmp_path / name, f"{flags} {more}"), ranks)
        for name, more in variants.items()
    }
    for name, other in (("fp32", "cpu"), ("graphs", "steps")):
        for file in ("samples.jsonl", "evaluation.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / other / file).read_bytes() != b""
    assert counts["fp32"]["aten::bmm"] > 10 and "graph launch" not in counts["steps"]
    assert counts["graphs"]["graph launch"] >= 3
