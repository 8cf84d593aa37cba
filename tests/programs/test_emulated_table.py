"""Programs with each flag, recipe and layout on emulated devices: in fp32 what a CPU computes, in bf16 a small gap."""

import pytest

from tests.emulator.programs import needs_emulator
from tests.helpers.pages import combinations
from tests.helpers.programs import (
    RL_RECIPES,
    metrics,
    reward_argv,
    samples,
    sft_argv,
    timeless,
    train,
    write_lines,
)
from tools.gpu import program_rows, programs

pytestmark = [needs_emulator, pytest.mark.long]
ALGORITHM, MODEL = program_rows.flags_of_all()
RECIPES = [f"--config {path}" for path in RL_RECIPES]
TP2, PP2, EXPERTS = combinations.TP2, combinations.PP2, f"{program_rows.ROUTED} --moe-grouped-gemm"
APART = "--role-map actor=0;critic=0;reference=0;reward=0;rollout=1"
LAGGING = "--role-map actor=0;critic=0;reference=0;reward=1;rollout=2 --generation-lag 2 --rollout-correction tis"
OVER_SAMPLED = "--partial-rollouts --over-sampling 2 --rollout-correction tis"
# DAPO's filter drops all groups here, since none is right. Its texts are compared.
LAYOUTS = {  # flags -> ranks
    TP2: 2, f"{TP2} --sequence-parallel": 2, PP2: 2, "--context-parallel-size 2": 2, "--use-torch-fsdp2": 2,
    "--use-distributed-optimizer --overlap-grad-reduce": 2, "--role-map actor=0;critic=1;reward=1;reference=0": 2,
    f"{APART} --verify-weights": 2, f"{APART} --generation-lag 1 --rollout-correction tis": 2,
    f"--actor{TP2[1:]} --rollout{TP2[1:-1]}1 --role-map actor=0-1;critic=2;reference=2;reward=2;rollout=2": 3,
    f"{PP2} --num-layers 3 --decoder-first-pipeline-num-layers 2": 2,
    f"{program_rows.ROUTED} --expert-model-parallel-size 2": 2,
    f"{program_rows.CHOOSING} {TP2} --sequence-parallel": 2, f"{program_rows.CHOOSING} --context-parallel-size 2": 2,
    f"{program_rows.CHOOSING} --num-layers 4 --dsa-indexer-layers 1,0,1,0 --speculative-rollout"
    " --rollout-prefix-caching --rollout-chunked-prefill": 1,
}  # fmt: skip
OF_16_BITS = {  # flags -> ranks
    f"{EXPERTS} --expert-model-parallel-size 2": 2, f"{EXPERTS} {TP2} --sequence-parallel": 2,
    f"{EXPERTS} --use-distributed-optimizer --offload": 1, f"{EXPERTS} --expert-model-parallel-size 2 --lora-rank 2": 2,
    f"{EXPERTS} {LAGGING}": 3, OVER_SAMPLED: 1, f"{EXPERTS} --mtp-train --mtp-drafts": 1,
    f"{TP2} --mtp-train --mtp-drafts": 2, f"{EXPERTS} --expert-model-parallel-size 2 --mtp-train --mtp-drafts": 2,
    f"{EXPERTS} --moe-latent-size 16 --expert-model-parallel-size 2": 2,
    f"{combinations.RECURRENT} --use-torch-fsdp2": 2, f"{combinations.MAMBA} {TP2} --lora-rank 2": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "flags, ranks", [*((flags, 1) for flags in ["", *MODEL, *ALGORITHM, *RECIPES]), *LAYOUTS.items()], ids=str
)
def test_a_device_computes_in_fp32_what_a_cpu_does(flags, ranks, emulator, tmp_path):
    emulator.run("rl", program_rows.argv_of(flags, tmp_path / "device"), ranks)
    train("rl", program_rows.argv_of(flags, tmp_path / "cpu"), ranks)
    found, wanted = (metrics(tmp_path / name) for name in ("device", "cpu"))
    steps = [step for step in wanted if step]
    assert len(steps) == 2 and ("dapo" in flags or any(wanted[step].get("actor/grad_norm") for step in steps))
    share, name = programs.difference([found[step] for step in steps], [wanted[step] for step in steps])
    assert share < 0.05, f"{name}: {found} {wanted}"
    assert programs.texts_of(tmp_path / "device") == programs.texts_of(tmp_path / "cpu")


@pytest.mark.parametrize(
    "flags, ranks", [*((flags, 1) for flags in MODEL), *LAYOUTS.items(), *OF_16_BITS.items()], ids=str
)
def test_rollout_and_training_agree_in_bf16(flags, ranks, emulator, tmp_path):
    counts = emulator.run("rl", program_rows.argv_of(f"--bf16 {flags}", tmp_path / "run"), ranks)
    rows = [row for step, row in metrics(tmp_path / "run").items() if step]
    assert len(rows) == 2 and counts["aten::mm"] > 10
    kernels = "triton delta_rows", "triton walk_chunks", "triton convolve_runs"
    assert "--linear-attention-freq" not in flags or all(counts[name] > 0 for name in kernels)
    assert "--dsa-indexer-topk" not in flags or min(counts["triton choose_key_bits"], counts["triton attend_rows"]) > 9
    first, second = (row.get("rollout/logprob_gap_max", 0.0) for row in rows)
    assert first < 2e-2 and (second < 2e-2 or "--rollout-correction" in flags)  # an older policy drew some tokens


@pytest.mark.parametrize("name, command", [("sft", sft_argv), ("reward", reward_argv)])
def test_other_programs_train_as_on_a_cpu(name, command, emulator, tmp_path):
    flags = "--train-iters 3 --use-cpu-initialization"
    emulator.run(name, command(tmp_path / "device", flags))
    train(name, command(tmp_path / "cpu", flags))
    found, wanted = (metrics(tmp_path / place) for place in ("device", "cpu"))
    assert found.keys() == wanted.keys() and len(wanted) >= 3
    for step, row in wanted.items():
        assert timeless(found[step]) == pytest.approx(timeless(row), rel=1e-4, abs=1e-5), step


@pytest.mark.parametrize(
    "flags, ranks",
    [("", 1), ("--bf16", 1), ("--bf16 --offload --use-distributed-optimizer", 1),
     (f"--bf16 {TP2} --sequence-parallel", 2)],
    ids=str,
)  # fmt: skip
def test_a_resumed_run_is_the_whole_one_to_the_bit(flags, ranks, emulator, tmp_path):
    flags = f"--save-interval 1 {flags}"
    emulator.run("rl", program_rows.argv_of(flags, tmp_path / "whole"), ranks)
    for steps in (1, 2):
        emulator.run("rl", program_rows.argv_of(f"{flags} --train-iters {steps}", tmp_path / "resumed"), ranks)
    found, wanted = (metrics(tmp_path / place) for place in ("resumed", "whole"))
    assert timeless(found[2]) == timeless(wanted[2]) and wanted[2]["actor/grad_norm"] > 0
    assert samples(tmp_path / "resumed", 2) == samples(tmp_path / "whole", 2)


EPISODES = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 3 --max-turn-length 4 --max-prompt-length 8"
    " --max-response-length 18 --max-tokens-per-microbatch 100 --environment-timeout 600"
)


def test_episodes_are_those_of_a_cpu_and_in_bf16_the_same_with_graphs_and_without(emulator, tmp_path):
    flags = {"fp32": "", "graphs": "--bf16", "steps": "--bf16 --decode-graphs off"}
    counts = {name: emulator.run("rl", program_rows.argv_of(f"{EPISODES} {more}", tmp_path / name))
              for name, more in flags.items()}  # fmt: skip
    train("rl", program_rows.argv_of(EPISODES, tmp_path / "cpu"))
    assert counts["graphs"]["graph launch"] >= 4 and "graph launch" not in counts["steps"]
    for name, other in (("fp32", "cpu"), ("graphs", "steps")):
        assert metrics(tmp_path / other)[1]["environment/turns_mean"] > 1
        assert programs.texts_of(tmp_path / name) == programs.texts_of(tmp_path / other)


# Prompts have whole blocks of a device, of 64 tokens.
STATES = (
    "--advantage grpo --environment tests.helpers.envs.sum_environments:Sums --max-turns 4"
    " --max-turn-length 70 --max-prompt-length 90 --max-response-length 300 --max-tokens-per-microbatch 400"
    " --environment-timeout 600 --rollout-buffer-gb 0.02 --rollout-max-requests 16 --rollout-prefix-caching"
    " --samples-per-prompt 4 --reward environment"
)


@pytest.mark.parametrize("layers", ["RECURRENT", "MAMBA"])
def test_turns_that_continue_recurrent_states_are_those_of_a_cpu(emulator, layers, tmp_path):
    prompts = write_lines(
        tmp_path / "long.jsonl", [{"prompt": f"{'1+' * 34}{i}=", "answer": str(34 + i)} for i in range(9)]
    )
    flags = f"{getattr(combinations, layers)} {STATES} --prompts {prompts}"
    emulator.run("rl", program_rows.argv_of(flags, tmp_path / "device"))
    train("rl", program_rows.argv_of(flags, tmp_path / "cpu"))
    rows = [row for step, row in metrics(tmp_path / "device").items() if step]
    assert sum(row["rollout/reused_tokens"] for row in rows) >= 64
    assert all(row["rollout/logprob_gap_max"] < 1e-5 for row in rows)
    assert programs.texts_of(tmp_path / "device") == programs.texts_of(tmp_path / "cpu")
