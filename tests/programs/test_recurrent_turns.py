"""Episodes of a model with recurrent states: turns continue the states of the last prompt, and no byte changes."""

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.pages.combinations import RECURRENT
from tests.helpers.programs import metrics, rl_argv, samples, train
from tests.helpers.tiers import long

TURNS = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 4 --max-turn-length 16 --max-response-length 80"
    " --max-tokens-per-microbatch 200 --rollout-max-requests 32 --rollout-buffer-gb 0.01 --environment-timeout 60"
    " --samples-per-prompt 8 --reward environment --advantage grpo --kl-coefficient 0 --train-iters 2 --lr 1e-2"
)
NUMBERS = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens")
CACHED = "--rollout-prefix-caching"


@pytest.mark.parametrize("ranks, flags, more", [
    long((1, "", "")), long((1, "", "--rollout-state-snapshots 3 --speculative-rollout")),
    long((1, "--bf16 --lora-rank 2", "")), long((2, "--tensor-model-parallel-size 2", "--rollout-chunked-prefill")),
])  # fmt: skip
def test_prefix_caching_changes_no_byte(ranks, flags, more, tmp_path):
    for name, caching in (("plain", ""), ("cached", f"{CACHED} {more}")):
        argv = rl_argv(tmp_path / name, f"{RECURRENT} {TURNS} {flags} {caching}", warm_start=False)
        train("rl", argv, ranks)
    plain, cached = (metrics(tmp_path / name) for name in ("plain", "cached"))
    for step in (1, 2):
        assert samples(tmp_path / "plain", step) == samples(tmp_path / "cached", step)
        assert {key: plain[step][key] for key in NUMBERS} == {key: cached[step][key] for key in NUMBERS}
        assert cached[step]["rollout/logprob_gap_max"] <= largest_gap_allowed()
    assert sum(row["rollout/reused_tokens"] for row in cached.values()) > 0
