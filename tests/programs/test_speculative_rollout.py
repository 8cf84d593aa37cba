"""`--speculative-rollout`, and prefixes of recurrent states in episodes: the run without them, byte by byte."""

import functools
from pathlib import Path

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.pages.combinations import RECURRENT
from tests.helpers.programs import metrics, rl_argv, samples, timeless, train
from tests.helpers.tiers import long

# At this temperature, random weights repeat themselves, so many drafts are right.
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --temperature 0.05 --max-response-length 60 --prompts-per-step 4"
    " --minibatch-size 4 --max-tokens-per-microbatch 200 --train-iters 2"
)
COUNTS = ("rollout/decode_steps", "rollout/accepted_tokens_per_step", "rollout/draft_acceptance")
PARTIAL = "--over-sampling 2 --partial-rollouts --rollout-correction tis"


@functools.cache
def run_of(folder: Path, flags: str, size: int) -> Path:
    from megarl.mcore.inference.drafter import StepCosts

    save, on_cpu = folder / f"run{len(list(folder.iterdir()))}", StepCosts.on_cpu
    with pytest.MonkeyPatch.context() as patch:  # with a model as small as this one, drafts would not pay
        free = {"looking": 0.0, "looking_row": 0.0, "drafting": 0.0}
        patch.setattr(StepCosts, "on_cpu", lambda *sizes: on_cpu(*sizes)._replace(**free))
        train("rl", rl_argv(save, f"{FLAGS} {flags}", warm_start=False), size)
    return save


@pytest.mark.parametrize(("size", "flags"), [
    long((1, f"{PARTIAL} --rollout-max-requests 6")),
    long((1, "--rollout-max-requests 4 --rollout-buffer-gb 0.0005")),
    long((2, "--rollout-max-requests 4 --rollout-buffer-gb 0.0005")),
    long((1, "--rollout-chunked-prefill")), long((1, "--rollout-prefix-caching")),
    long((2, "--pipeline-model-parallel-size 2 --rollout-max-requests 6")),
    long((2, "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2"
          " --rollout-max-requests 6")),
])  # fmt: skip
def test_nothing_changes_but_the_steps(size, flags, folder):
    plain, found = run_of(folder, flags, size), run_of(folder, f"{flags} --speculative-rollout", size)
    for step in (1, 2):
        assert samples(found, step) == samples(plain, step)
        row, expected = timeless(metrics(found)[step]), timeless(metrics(plain)[step])
        steps, tokens, acceptance = (row.pop(name) for name in COUNTS)
        assert row == expected
        if not row["rollout/tokens"]:
            continue  # the groups that waited suffice
        assert tokens > 1.1 and 0.3 < acceptance <= 1
        assert 0 < steps < 60 * (4 if "--rollout-max-requests" in flags else 1)


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
