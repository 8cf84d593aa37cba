"""PPO on one CUDA device over NCCL, dense and with experts; needs one, so CI without a GPU leaves it out."""

import pytest

from tests.programs import metrics, rl_argv, torchrun


@pytest.mark.gpu
def test_ppo_on_a_cuda_device(tmp_path, monkeypatch):
    argv = rl_argv(tmp_path, "--train-iters 3 --reward exact-match")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # the test process hides the device from itself
    done = torchrun("megarl.train_rl", argv, 1, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    assert sorted(step for step in rows if step) == [1, 2, 3]
    for step in (1, 2, 3):
        assert rows[step]["memory/actor/peak_bytes"] > 0
        assert rows[step]["actor/ppo_kl_first"] == 0.0
        assert rows[step]["rollout/logprob_gap_max"] <= 1e-4  # fp32 kernels with other tilings


@pytest.mark.gpu
def test_the_rollouts_routes_are_replayed_on_a_cuda_device(tmp_path, monkeypatch):
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --bf16"
    replay = "--router-replay rollout --router-probe-interval 1 --train-iters 2 --reward exact-match"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    done = torchrun("megarl.train_rl", rl_argv(tmp_path, f"{experts} {replay}", warm_start=False), 1, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    for step in (1, 2):
        assert rows[step]["router/replayed_fraction"] == 1.0
        assert rows[step]["router/gap_replayed"] <= rows[step]["router/gap_live"] + 1e-3
