"""`--optimizer-cpu-offload` on emulated CUDA devices: the same numbers, memory that is really freed, checkpoints."""

import pytest
import torch

from megarl.checkpoint import folders
from tests.emulator.programs import needs_emulator
from tests.helpers.models.lora_models import stored_tensors
from tests.helpers.programs import metrics, preference_argv, reward_argv, rl_argv, sft_argv, timeless

pytestmark = needs_emulator
HOST, SHARDED = "--optimizer-cpu-offload", "--use-distributed-optimizer"
HALF, OVERLAP = f"{HOST} --optimizer-offload-fraction 0.5", "--overlap-cpu-optimizer-d2h-h2d"
RATES = "--lr-multipliers *.mlp.*=0.5 --weight-decay 0.1 --weight-decay-multipliers *.linear_qkv.*=3"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm --router-replay rollout"
SMALL = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
STEPS = "--train-iters 3 --save-interval 1 --lr-warmup-iters 0 --lr-decay-iters 9"
RUNS = {  # name -> (ranks, flags of both runs, flags of the run with states on the host)
    "bf16, warm start": (1, f"--bf16 {RATES}", f"{HALF} {OVERLAP}"),
    "bf16, all": (1, "--bf16 --ema-decay 0.5 --reference-update-interval 1", f"{HOST} {OVERLAP}"),
    "fp32, warm start": (1, "", f"{HALF} --no-pin-cpu-grads"),
    "fp32, overlap": (1, "", f"{HALF} {OVERLAP}"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024", HOST),
    "frozen": (1, f"--bf16 {RATES} --freeze embedding.* *.layers.0.*", f"{HALF} {OVERLAP}"),
    "two ranks": (2, "--bf16 --overlap-grad-reduce", f"{HALF} {OVERLAP} --critic-optimizer-offload-fraction 0.25"),
    "experts": (2, f"{EXPERTS} --bf16 --expert-model-parallel-size 2", f"{HALF} {OVERLAP}"),
    "offload": (1, "--bf16 --offload", f"{HALF} {OVERLAP}"),
    "actor alone": (1, "--bf16 --critic-offload", f"--actor{HALF[1:].replace(' --', ' --actor-')}"),
    "factors": (1, "--bf16 --lora-rank 4", f"{HALF} {OVERLAP}"),
    "moments of 16 bits": (1, f"--bf16 {SMALL}", f"{HALF} {OVERLAP}"),
    "drafts": (1, "--bf16 --mtp-train --mtp-drafts", f"{HALF} {OVERLAP}"),
}


def argv(save, flags: str, warm_start: bool = False) -> list[str]:
    return rl_argv(save, f"{STEPS} {SHARDED} {flags}", warm_start=warm_start)


def without_memory(rows: dict) -> dict:
    """Metrics without times and memory."""
    return {step: {name: value for name, value in timeless(row).items() if not name.startswith("memory/")}
            for step, row in rows.items()}  # fmt: skip


def differing(one, other, step: int) -> list[str]:
    """Names of the tensors of a step's checkpoints, optimizer states included, whose bits differ."""
    found, wanted = (stored_tensors(folders.step_folder(save, step)) for save in (one, other))
    assert found.keys() == wanted.keys() and any("exp_avg_sq" in name for name in found)
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_updates_by_the_host_have_all_bits_and_every_checkpoint_continues(name, emulator, tmp_path):
    """Metrics, weights and states; resumed with states on the host and without, from checkpoints of both kinds."""
    ranks, common, host = RUNS[name]
    runs = {"device": common, "host": f"{common} {host}"}
    is_warm = "warm" in name  # from other weights than those that the optimizers were built with
    counts = {kind: emulator.run("rl", argv(tmp_path / kind, flags, is_warm), ranks) for kind, flags in runs.items()}
    rows = {kind: metrics(tmp_path / kind) for kind in runs}
    assert without_memory(rows["device"]) == without_memory(rows["host"])
    assert differing(tmp_path / "host", tmp_path / "device", 3) == []
    if ranks == 1 and "offload" not in common:  # exactly what the host has
        on_host = sum(value for key, value in rows["host"][3].items() if key.endswith("/offloaded_bytes"))
        moments = 4 if SMALL in common else 8
        per_element = moments + (0 if name.startswith("fp32") else 4)  # of the device's states
        freed = on_host * per_element // (moments + 8)
        peaks = [counts[kind]["bytes allocated at the peak"] for kind in runs]
        assert freed > 0 and peaks[0] - peaks[1] == freed
    for source in runs:
        for kind, flags in runs.items():
            save = tmp_path / f"{kind}-from-{source}"
            start = f"--load {folders.step_folder(tmp_path / source, 1)}"
            emulator.run("rl", argv(save, f"{flags} {start}"), ranks)
            assert differing(save, tmp_path / "device", 3) == []


SUPERVISED = {"sft": sft_argv, "reward": reward_argv, "preference": preference_argv}


@pytest.mark.long
@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_programs_have_all_bits(name, emulator, tmp_path):
    for kind, flags in (("device", ""), ("host", f"{HALF} {OVERLAP}")):
        own = f"--train-iters 3 --save-interval 3 --bf16 {SHARDED} {flags}"
        emulator.run(name, SUPERVISED[name](tmp_path / kind, own))
    assert differing(tmp_path / "host", tmp_path / "device", 3) == []


ROUTE = [  # data-parallel ranks, flags
    (1, f"{HALF} {OVERLAP}"), (2, f"{HOST} {OVERLAP}"), (2, ""), (1, HOST),
    (2, f"{HALF} --tensor-model-parallel-size 2"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_a_checkpoint_continues_on_other_ranks_with_other_fractions(precision, emulator, tmp_path):
    """One step each; then again without states on the host, from the same checkpoints."""
    source = None
    for number, (ranks, flags) in enumerate(ROUTE):
        found = []
        for kind, own in (("host", flags), ("device", flags.replace(HALF, "").replace(HOST, "").replace(OVERLAP, ""))):
            save = tmp_path / f"{number}-{kind}"
            start = f"--load {source} --train-iters {number + 1}" if source else "--train-iters 1"
            emulator.run("rl", argv(save, f"{precision} {own} {start}"), ranks)
            found.append(save)
        assert without_memory(metrics(found[0])) == without_memory(metrics(found[1]))
        assert differing(*found, number + 1) == []
        source = folders.step_folder(found[0], number + 1)
