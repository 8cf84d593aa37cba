"""PPO on one CUDA device over NCCL: dense, with experts, with offload."""

import subprocess
import sys

import pytest

from tests.helpers.programs import environment, inputs, metrics, rl_argv, samples, timeless, torchrun


@pytest.fixture(autouse=True)
def device_of_programs(monkeypatch):
    """The programs that tests start have the device, and compiled kernels; the test process has neither, and makes
    their data, the weights of a warm start among them, on the CPU."""
    inputs()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("TRITON_INTERPRET")


@pytest.mark.gpu
def test_ppo_on_a_cuda_device(tmp_path):
    argv = rl_argv(tmp_path, "--train-iters 3 --reward exact-match")
    done = torchrun("megarl.train_rl", argv, 1)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    assert sorted(step for step in rows if step) == [1, 2, 3]
    for step in (1, 2, 3):
        assert rows[step]["memory/actor/peak_bytes"] > 0
        assert rows[step]["actor/ppo_kl_first"] == 0.0
        assert rows[step]["rollout/logprob_gap_max"] <= 1e-4  # fp32 kernels with other tilings


@pytest.mark.gpu
def test_the_rollouts_routes_are_replayed_on_a_cuda_device(tmp_path):
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --bf16"
    replay = "--router-replay rollout --router-probe-interval 1 --train-iters 2 --reward exact-match"
    done = torchrun("megarl.train_rl", rl_argv(tmp_path, f"{experts} {replay}", warm_start=False), 1)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    for step in (1, 2):
        assert rows[step]["router/replayed_fraction"] == 1.0
        assert rows[step]["router/gap_replayed"] <= rows[step]["router/gap_live"] + 1e-3


@pytest.mark.gpu
def test_offload_gives_the_same_run_in_less_device_memory(tmp_path):
    wide = "--hidden-size 512 --ffn-hidden-size 1024 --deterministic --train-iters 2 --reward exact-match"
    for name, offload in (("kept", ""), ("moved", "--offload")):
        done = torchrun("megarl.train_rl", rl_argv(tmp_path / name, f"{wide} {offload}", warm_start=False), 1)
        assert done.returncode == 0, done.stderr
    kept, moved = metrics(tmp_path / "kept"), metrics(tmp_path / "moved")
    for step in (1, 2):
        assert timeless(moved[step]) == timeless(kept[step])
        assert samples(tmp_path / "moved", step) == samples(tmp_path / "kept", step)
    gone = kept[2]["memory/actor/peak_bytes"] - moved[2]["memory/actor/peak_bytes"]
    assert gone > moved[2]["memory/critic/offloaded_bytes"] / 2


@pytest.mark.gpu
def test_updates_by_the_host_are_those_of_the_device_in_less_memory(tmp_path):
    """But for the rounding of two Adams, which the second step shows."""
    wide = "--hidden-size 512 --ffn-hidden-size 1024 --deterministic --train-iters 2 --reward exact-match"
    host = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    for name, flags in (("device", ""), ("host", host)):
        argv = rl_argv(tmp_path / name, f"{wide} --use-distributed-optimizer {flags}", warm_start=False)
        done = torchrun("megarl.train_rl", argv, 1)
        assert done.returncode == 0, done.stderr
    device, moved = metrics(tmp_path / "device"), metrics(tmp_path / "host")
    for step in (1, 2):
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm"):
            assert moved[step][name] == pytest.approx(device[step][name], rel=1e-3, abs=1e-5), (step, name)
    gone = device[2]["memory/actor/peak_bytes"] - moved[2]["memory/actor/peak_bytes"]
    on_host = sum(moved[2][f"memory/{role}/offloaded_bytes"] for role in ("actor", "critic"))
    assert gone > 0.9 * on_host / 2  # fp32: 8 of 16 bytes


@pytest.mark.gpu
def test_offload_on_a_cuda_device_is_exact_and_uses_pinned_memory():
    script = (
        "import torch; from megarl.mcore.offload import Arena\n"
        "tensors = [torch.randn(1000, 1001, device='cuda').to(t) for t in (torch.float32, torch.bfloat16)]\n"
        "copies = [t.clone() for t in tensors]; arena = Arena(lambda: tensors); assert arena.host_copy.is_pinned()\n"
        "for _ in range(3):\n"
        "    assert not arena.storage.nbytes(); arena.arrive(); arena.is_changed = True\n"
        "    [t.add_(1) for t in (*tensors, *copies)]; arena.leave(); noise = torch.randn(3000, 1001, device='cuda')\n"
        "arena.arrive(); assert all(map(torch.equal, tensors, copies))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags", ["", "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"], ids=["dense", "experts"]
)
def test_graphs_change_no_token_and_no_logprob(flags):
    script = (
        "import torch; from tests.helpers.rollout.engines import NEVER, make_engine, make_requests, settings_of\n"
        "from megarl.comm import role_mesh; from tests.helpers.worlds import SAFETY\n"
        "role_mesh.join_process_group(SAFETY)\n"
        f"engine, *_ = make_engine('--bf16 {flags}'); decode, found = engine.engine.device_decode, []\n"
        "for decode.has_graphs in (True, False):\n"
        "    found.append(engine.generate(make_requests(), NEVER, settings_of()))\n"
        "assert decode._graphs._graphs and found[0] == found[1]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
