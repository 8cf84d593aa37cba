"""Whole programs on emulated CUDA devices, with numbers: `tests/emulator`."""

import json
import subprocess
import sys

import pytest

from megarl.mcore.recurrence import fused_chunks
from tests.emulator.programs import needs_emulator
from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.folders import any_types
from tests.helpers.pages.combinations import MAMBA, RECURRENT
from tests.helpers.programs import GRADED, ROOT, inputs, metrics, rl_argv, rows_of, samples, timeless, train
from tests.helpers.tiers import by_default, long
from tools.gpu.programs import texts_of

pytestmark = needs_emulator
# Prompts and responses of several lengths, so that requests end in different steps, and an evaluation between steps.
LENGTHS = "--max-response-length 12 --max-tokens-per-microbatch 60 --train-iters 3"
EVALUATION = "--eval-interval 1 --eval-samples 4"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm --router-replay rollout"
SMALL_MOMENTS = (
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
    " --offload --use-distributed-optimizer"
)
TP2, EP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--expert-model-parallel-size 2"
# Evaluations of other weights between the steps, and a reference that changes.
COPIES = "--ema-decay 0.5 --evaluate-ema --reference-update-interval 1 --reference-mixup 0.5"
RUNS = {  # name -> (flags, ranks)
    "dense": (f"{COPIES} --train-iters 2", 1),
    "tensor and sequence parallel": (TP2, 2),
    "one query group of two ranks": (f"{TP2} --num-query-groups 1", 2),
    "experts": (EXPERTS, 1),
    "experts, distributed optimizer": (f"{EXPERTS} --use-distributed-optimizer", 1),
    "experts on several ranks": (f"{EXPERTS} {EP2}", 2),
    "experts on several ranks, tensor parallel": (f"{EXPERTS} {EP2} {TP2}", 2),
    "experts and tensors on several ranks, offload": (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 32 --expert-model-parallel-size 4 {TP2} --offload", 4),
    "offload": (f"--offload --use-distributed-optimizer {COPIES}", 1),
    "LoRA": (f"--lora-rank 4 {COPIES}", 1),
    "roles on ranks of their own": (f"--role-map actor=0;critic=1;reward=1;reference=1 {COPIES}", 2),
    "pipeline": ("--pipeline-model-parallel-size 2 --ppo-epochs 2", 2),
    "pipeline, experts": (f"{EXPERTS} --pipeline-model-parallel-size 2 --ppo-epochs 2", 2),
    "drafts": ("--speculative-rollout", 1),
    "drafts of a layer": ("--mtp-train --mtp-drafts", 1),
    "drafts of a layer, tensor and sequence parallel": (f"{TP2} --mtp-train --mtp-drafts", 2),
    "gated delta nets": (f"{RECURRENT} {COPIES}", 1),
    "gated delta nets, pipeline": (f"{RECURRENT} --num-layers 4 --pipeline-model-parallel-size 2", 2),
    "Mamba-2, tensor and sequence parallel": (f"{MAMBA} {TP2}", 2),
}  # fmt: skip
BY_DEFAULT = ["dense"]
ROLLOUT_APART = "--role-map actor=0-1;critic=0-1;reward=0-1;reference=0-1;rollout=2 --verify-weights"
LAYOUTS = {  # name -> (flags, ranks, a call of NCCL on the first rank, or a graph's launch)
    "pipeline": ("--pipeline-model-parallel-size 2", 2, "nccl recv"),
    "context": ("--context-parallel-size 2", 2, "nccl all_gather_single"),
    "experts on several ranks of the rollout": (
        f"{EXPERTS} --role-map rollout=0-1;actor=2;critic=2;reward=2;reference=2 --rollout{EP2[1:]} --verify-weights",
        3, "graph launch"),
    "sharded parameters": (f"--use-torch-fsdp2 {COPIES}", 2, "nccl reduce_scatter_single"),
    "tensor, rollout apart": (f"{ROLLOUT_APART} --tensor-model-parallel-size 2 --rollout-tensor-model-parallel-size 1",
                              3, "nccl send"),
    "pipeline, rollout of experts apart": (f"{ROLLOUT_APART} {EXPERTS} {COPIES} --pipeline-model-parallel-size 2"
                                           " --rollout-pipeline-model-parallel-size 1", 3, "nccl send"),
}  # fmt: skip


def argv(save, flags: str) -> list[str]:
    held_out = f"--eval-prompts {inputs() / 'heldout.jsonl'} {EVALUATION}"
    return rl_argv(save, f"{LENGTHS} {held_out} {flags}", warm_start=False)


@pytest.mark.parametrize("name", by_default(RUNS, BY_DEFAULT))
def test_graphs_change_nothing_in_bf16(name, emulator, tmp_path):
    """Nor do they read memory that was freed since they were captured: it holds NaN."""
    flags, ranks = RUNS[name]
    graphs, steps = (emulator.run("rl", argv(tmp_path / value, f"--bf16 {flags} --decode-graphs {value}"), ranks)
                     for value in ("auto", "off"))  # fmt: skip
    assert graphs["graph launch"] >= 20 and "graph launch" not in steps and steps["triton paged_decode"] >= 20
    rotations = [
        graphs.get(f"triton {name}_heads", 0) for name in ("rotate", "split")
    ]  # with norms of queries, without
    assert sum(rotations) >= 20 and graphs["triton sum_norm_backward"] >= 20
    assert 2 * graphs["triton paged_decode"] < steps["triton paged_decode"]
    is_staged = "pipeline" in name  # whose first rank has no head
    assert is_staged or (graphs["triton head_sums"] >= 6 and graphs["triton head_gradient"] >= 3)
    assert name == "LoRA" or graphs["aten::addmm.dtype_out"] >= 80  # weight gradients
    found, wanted = (metrics(tmp_path / value) for value in ("auto", "off"))
    assert {step: timeless(row) for step, row in found.items()} == {step: timeless(row) for step, row in wanted.items()}
    assert all(row["rollout/logprob_gap_max"] < 1e-6 for step, row in found.items() if step)
    assert all(row["actor/grad_norm"] > 0 for step, row in found.items() if step)


@pytest.mark.long
@pytest.mark.parametrize("tied", ["", "--untie-embeddings-and-output-weights"])
def test_gradients_in_bf16_are_near_those_in_fp32(tied, emulator, tmp_path):
    """Three steps with several updates each, of several micro-batches."""
    for name, flags in {"bf16": "--bf16", "fp32": ""}.items():
        emulator.run("rl", argv(tmp_path / name, f"{flags} {tied} {GRADED}"))
    found, wanted = (metrics(tmp_path / name) for name in ("bf16", "fp32"))
    for step in (1, 2, 3):
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert found[step][name] == pytest.approx(wanted[step][name], rel=5e-2), (step, name)


# Type of transformers -> what its steps on a device show: a graph, grouped experts; attention and passes with waits.
TYPES = {
    "ernie4_5_moe": {"graph launch", "aten::_grouped_mm", "triton paged_decode"},
    "granite": {"graph launch", "triton paged_decode"},
    "longcat_flash": {"triton paged_decode"},
    "gpt_oss": {"aten::_grouped_mm"},
}


def argv_of_type(kind: str, folder, save, flags: str) -> list[str]:
    """The command line of train_rl with a model of transformers of two layers."""
    if not folder.exists():
        any_types.save(kind, folder, num_hidden_layers=2)
    files = f"--hf-model {folder} --model-source transformers --prompts {inputs() / 'train.jsonl'} --save {save}"
    sizes = "--max-prompt-length 48 --max-response-length 6 --max-tokens-per-microbatch 240 --train-iters 2"
    step = "--prompts-per-step 2 --samples-per-prompt 2 --lr 1e-3 --rollout-buffer-gb 0.01 --advantage grpo"
    return f"{files} {sizes} {step} --reward exact-match --entropy-coefficient 0.05 {flags}".split()


@pytest.mark.parametrize("kind", by_default(TYPES, ("ernie4_5_moe",)))
def test_graphs_change_nothing_of_a_model_of_transformers(kind, emulator, tmp_path):
    graphs, steps = (
        emulator.run("rl", argv_of_type(kind, tmp_path / "hf", tmp_path / value, f"--bf16 --decode-graphs {value}"))
        for value in ("auto", "off")
    )
    shown = {"graph launch", "aten::_grouped_mm", "triton paged_decode"}
    assert shown & graphs.keys() == TYPES[kind] and "graph launch" not in steps
    found, wanted = (metrics(tmp_path / value) for value in ("auto", "off"))
    assert {step: timeless(row) for step, row in found.items()} == {step: timeless(row) for step, row in wanted.items()}
    limit = 2e-2 if kind == "gpt_oss" else 1e-6
    assert all(row["rollout/logprob_gap_max"] < limit and row["actor/grad_norm"] > 0 for row in (found[1], found[2]))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, flags, ranks",
    [*((kind, "", 1) for kind in TYPES), ("granite", "--use-torch-fsdp2", 2),
     ("granite", "--tensor-model-parallel-size 2", 2), ("granite", "--recompute-granularity full "
      "--recompute-method uniform --recompute-num-layers 1", 1)],
)  # fmt: skip
def test_a_model_of_transformers_trains_as_on_a_cpu(kind, flags, ranks, emulator, tmp_path):
    """Its gradients in bf16, by grouped products and added to fp32, are near those in fp32."""
    places = {"cpu": flags, "fp32": flags, "bf16": f"{flags} --bf16"}
    lines = {name: argv_of_type(kind, tmp_path / "hf", tmp_path / name, more) for name, more in places.items()}
    train("rl", lines["cpu"], ranks)
    for name in ("fp32", "bf16"):
        emulator.run("rl", lines[name], ranks)
    cpu, fp32, bf16 = (metrics(tmp_path / name) for name in places)
    assert texts_of(tmp_path / "fp32") == texts_of(tmp_path / "cpu") != []
    for step in (1, 2):
        assert fp32[step]["actor/grad_norm"] == pytest.approx(cpu[step]["actor/grad_norm"], rel=1e-3)
        assert fp32[step]["rollout/logprob_gap_max"] < 1e-5
    near = 0.05 if kind == "ernie4_5_moe" else 0.2  # its head is tied: without the embedding's part 0.12 are missing
    assert bf16[1]["actor/grad_norm"] == pytest.approx(cpu[1]["actor/grad_norm"], rel=near)


REFUSED = {  # type, flags -> what one line says
    (
        "cohere2",
        "--bf16 --exact-rollout",
    ): "--exact-rollout True: with --model-source transformers allowed is none on CUDA:"
    " Cohere2LayerNorm computes mean of 64 terms itself",
    ("gpt_oss", "--bf16 --attention-backend varlen"): "--attention-backend varlen: with"
    " --model-source transformers allowed is eager, for softcaps and sinks",
}


@pytest.mark.long
@pytest.mark.parametrize("kind, flags", REFUSED)
def test_what_a_device_does_not_compute_is_refused(kind, flags, emulator, tmp_path):
    with pytest.raises(AssertionError) as error:
        emulator.run("rl", argv_of_type(kind, tmp_path / "hf", tmp_path / "run", flags))
    assert "status 2: megarl: error: " in str(error.value) and REFUSED[kind, flags] in str(error.value)


@pytest.mark.nightly
@pytest.mark.skipif(fused_chunks.version() is None, reason="fla-core is not installed: pip install 'megarl[recurrent]'")
def test_kernels_of_flash_linear_attention_train_as_pytorchs_operators(emulator, tmp_path):
    """Up to rounding. The kernels are interpreted, so the run is small."""
    small = "--prompts-per-step 2 --samples-per-prompt 2 --max-response-length 6 --train-iters 2"
    flags = f"{small} --bf16 {RECURRENT} --linear-num-value-heads 2 {GRADED}"
    counts, rows = {}, {}
    for name in ("fla", "torch"):
        line = rl_argv(tmp_path / name, f"{flags} --delta-rule-backend {name}", warm_start=False)
        counts[name], rows[name] = emulator.run("rl", line), metrics(tmp_path / name)
    kernels = {"triton chunk_fwd_kernel_o", "triton prepare_wy_repr_bwd_kernel"}
    assert counts["fla"].keys() > kernels and not counts["torch"].keys() & kernels
    for step in (1, 2):
        assert rows["fla"][step]["actor/ppo_kl_first"] == 0 and rows["fla"][step]["rollout/logprob_gap_max"] < 0.02
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert rows["fla"][step][name] == pytest.approx(rows["torch"][step][name], rel=1e-2), (step, name)


@pytest.mark.long
def test_products_of_grouped_experts_copy_no_weights(emulator, tmp_path):
    """A stack that is no view is a call of cat."""
    names = ("experts", "experts, distributed optimizer")
    plain, distributed = (emulator.run("rl", argv(tmp_path / name, f"--bf16 {RUNS[name][0]}")) for name in names)
    assert plain["aten::_grouped_mm"] == distributed["aten::_grouped_mm"] > 100
    assert plain["aten::cat"] == distributed["aten::cat"]


@pytest.mark.parametrize("name", list(map(long, LAYOUTS)))
def test_layouts_pass_the_checks(name, emulator, tmp_path):
    flags, ranks, call = LAYOUTS[name]
    counts = emulator.run("rl", argv(tmp_path, f"--bf16 {flags}"), ranks)
    assert counts[call] >= 4
    rows = metrics(tmp_path)
    assert all(rows[step]["rollout/logprob_gap_max"] < 0.01 and rows[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    if EXPERTS in flags:
        assert all(rows[step]["router/replayed_fraction"] == 1.0 for step in (1, 2, 3))


@pytest.mark.parametrize("flags", ["", long(SMALL_MOMENTS)])
def test_the_device_computes_what_a_cpu_does_in_fp32(flags, emulator, tmp_path):
    emulated, cpu = (argv(tmp_path / name, f"--train-iters 2 {GRADED} {flags}") for name in ("emulated", "cpu"))
    counts = emulator.run("rl", emulated)
    assert counts["aten::mm"] > 100
    train("rl", cpu)
    assert texts_of(tmp_path / "emulated") == texts_of(tmp_path / "cpu") != []
    found, wanted = (metrics(tmp_path / name) for name in ("emulated", "cpu"))
    for step in (1, 2):
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "kl/reference"):
            assert found[step][name] == pytest.approx(wanted[step][name], rel=1e-4, abs=1e-6), (step, name)


NO_WAIT = "reads what aten::fill_ on the default stream writes, without waiting for it"
FAULTS = {  # of `faults.py` -> (ranks, what names it)
    "host_tensor_in_a_collective": (2, "No backend type associated with device type cpu (allreduce over NCCL)"),
    "host_index": (1, "found cuda:0 and cpu, in aten::index_select"),
    "item_in_a_capture": (1, "emulator: cudaStreamSynchronize while a graph is captured"),
    "freed_table_in_a_graph": (1, "a graph's aten::mul uses memory that was freed since the capture"),
    "table_that_no_graph_holds": (1, "a graph's aten::mul uses memory that was freed since the capture"),
    "missing_wait": (1, NO_WAIT),
    "offload_without_wait": (1, NO_WAIT),
    "offload_read_early": (1, "the host uses the pinned memory that aten::copy_ on stream"),
    "host_update_of_gradients_on_their_way": (1, "the host uses the pinned memory that aten::copy_ on stream"),
    "host_update_of_gradients_not_computed": (1, NO_WAIT),
    "weights_of_a_host_update_read_early": (1, "on the default stream reads what aten::copy_ on stream"),
    "missing_record_stream": (1, "aten::fill_ on the default stream overwrites what aten::sum on stream"),
    "collective_without_wait": (2, "aten::mul on the default stream reads what nccl allreduce on NCCL's stream"),
    "swapped_collectives": (2, "emulator: collective 1 of the group: rank"),
    "collective_of_one_rank": (2, "calls broadcast torch.float32 × 1024 root 0"),
    "allocation_in_a_capture": (1, "emulator: cudaMalloc while a graph is captured"),
    "pinned_memory_reused": (1, "has written into the pinned memory that aten::copy_ on the default stream reads"),
    "pinned_memory_read_early": (1, "the host uses the pinned memory that aten::copy_ on the default stream writes"),
    "seed_in_a_capture": (1, "set_current_seed can be called during stream capture only"),
    "int16_collective": (2, "not supported for NCCL process group: torch.int16 (allreduce)"),
    "strided_collective": (2, "Tensors must be contiguous (allreduce over NCCL)"),
    "send_without_receiver": (2, "rank 0 sends torch.float32 × 1024"),
    "both_send_first": (2, "exchange 1 of the group's ranks"),
    "not_deterministic": (1, "aten::put_ on CUDA does not have a deterministic implementation"),
}


ONE_OF_A_KIND = (
    "host_tensor_in_a_collective", "host_index", "item_in_a_capture", "freed_table_in_a_graph", "missing_wait",
    "offload_read_early", "missing_record_stream", "collective_without_wait", "swapped_collectives",
)  # fmt: skip


@pytest.mark.parametrize("fault", by_default(FAULTS, ONE_OF_A_KIND))
def test_planted_faults_are_named(fault, emulator):
    ranks, message = FAULTS[fault]
    assert message in emulator.error(fault, ranks)


def test_a_program_without_faults_passes_all_checks(emulator):
    counts = emulator.run("planted", ["healthy"], ranks=2)
    assert counts["graph launch"] == 3 and counts["nccl send"] == 1 and counts["host waits for a receiver"] == 1


def test_memory_that_no_tensor_uses_is_counted(emulator):
    counts = emulator.run("planted", ["fragmented"])
    lost = counts["bytes reserved at the peak"] - counts["bytes allocated at the peak"]
    assert 32 << 20 <= lost < 40 << 20


@pytest.mark.long
def test_a_decode_step_of_experts_on_two_ranks_waits_for_nothing_in_its_layers():
    """The figures of docs/figures.md."""
    command = [sys.executable, "-m", "tests.emulator", "--ranks", "2", "tests.emulator.decode_steps"]
    done = subprocess.run(
        [*command, "--num-experts", "4", "--moe-router-topk", "2"], cwd=ROOT, capture_output=True, text=True
    )
    forms = {row["decode steps"]: row for row in map(json.loads, done.stdout.splitlines())}
    names = ("graphs", "kernel by kernel", "by numbers of rows")
    graphs, kernels, by_numbers = (forms[name]["a layer"] for name in names)
    assert graphs == {"launches": 0, "collectives": 0, "host waits": 0}
    assert (kernels["collectives"], kernels["host waits"]) == (2, 0)
    assert (by_numbers["collectives"], by_numbers["host waits"]) == (3, 1)
    assert 20 < kernels["launches"] < by_numbers["launches"]


@pytest.mark.long
def test_a_judge_writes_the_same_with_graphs_and_without(emulator, tmp_path):
    """Its weights are on the host between steps; a graph that read others' memory there would write other texts."""
    config = write(tmp_path / "judge.yaml")
    judge = judge_flags(config, "--reward-offload --judge-max-length 96 --reward-max-failures 1 --bf16")
    for name, flags in (("graphs", ""), ("off", "--decode-graphs off")):
        counts = emulator.run("rl", argv(tmp_path / name, f"{judge} --train-iters 2 {flags}"))
        assert ("graph launch" in counts) == (name == "graphs")
    for step in (1, 2):
        assert rows_of(tmp_path / "off", step)[0]["judgements"]
        assert samples(tmp_path / "graphs", step) == samples(tmp_path / "off", step)
