"""Random combinations of flags, a night's work: what is accepted runs, and neutral flags change no byte.

A case is drawn from a seed and its number, so a failure can be repeated alone: `case_of(seed, number)`. A case that
fails is shrunk: flags are taken out as long as it still fails in the same way.
"""

import contextlib
import os
import random
import re
from pathlib import Path

import pytest

from megarl.errors import UsageError
from tests.helpers.programs import metrics, program, rl_argv, samples, train
from tests.helpers.worlds import RankFailed

CASES = 300
SEED = int(os.environ.get("MEGARL_FUZZ_SEED", "0"))
BASE = "--train-iters 1 --kl-coefficient 0 --prompts-per-step 4 --minibatch-size 4 --ppo-epochs 1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"

# A case has one value of some of these axes. A value may need another one's: then the case is not accepted, and ends.
AXES = {
    "advantage": ["--advantage grpo", "--advantage rloo", "--advantage opo", "--advantage reinforce++",
                  "--advantage reinforce++-baseline", "--advantage remax --greedy-baseline", "--advantage gae",
                  "--advantage gae --critic-warmup-steps 1", "--advantage grpo --group-std false"],
    "loss": [f"--policy-loss {name}" for name in ("cispo", "gmpo", "gspo", "gspo-token", "reinforce", "sapo")],
    "aggregation": [f"--loss-aggregation seq-mean-token-{name}" for name in ("mean", "sum", "sum-norm")],
    "kl": ["--kl-coefficient 0.1", "--kl-coefficient 0.1 --kl-in loss", "--kl-coefficient 0.1 --kl-in loss "
           "--kl-estimator k3+", "--kl-coefficient 0.1 --kl-controller adaptive --kl-target 0.1"],
    "updates": ["--ppo-epochs 2", "--minibatch-size 2", "--entropy-coefficient 0.01", "--clip-range 0.3"],
    "masks": ["--mask-truncated-responses", "--overlong-buffer 2", "--reward-failure fallback"],
    "sampling": ["--temperature 0.7", "--top-k 3", "--top-p 0.8", "--samples-per-prompt 4", "--samples-per-prompt 1"],
    "groups": ["--group-filter reward", "--group-filter reward --dynamic-sampling --max-sampling-rounds 2",
               "--group-filter correct --dynamic-sampling --over-sampling 2"],
    "correction": ["--rollout-correction tis", "--rollout-correction mis --rollout-correction-level sequence",
                   "--rollout-correction icepop --rollout-correction-floor 0.5"],
    "overlap": ["--one-step-off --rollout-correction tis", "--partial-rollouts --over-sampling 2 --rollout-correction "
                "tis"],
    "experts": [f"{EXPERTS} {flags}" for flags in (
        "", "--moe-z-loss-coeff 0.1", "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-shared-expert-intermediate-size 16", "--moe-layer-freq 2", "--router-replay rollout",
        "--router-replay old-logprob")],
    "attention": ["--qk-layernorm", "--window-size 3,0", "--softmax-type off-by-one", "--softmax-type learnable",
                  "--attn-logit-softcapping 5", "--position-embedding-type learned_absolute", "--kv-channels 16",
                  "--position-embedding-type yarn --rotary-scaling-factor 4"],
    "model": ["--untie-embeddings-and-output-weights", "--normalization LayerNorm", "--apply-layernorm-1p",
              "--layernorm-position sandwich", "--num-layers 3", "--final-logit-softcapping 5"],
    "precision": ["--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --accumulate-allreduce-grads-in-fp32"],
    "optimizer": ["--adam-beta2 0.9", "--use-distributed-optimizer", "--clip-grad 0", "--weight-decay 0.1",
                  "--use-distributed-optimizer --overlap-grad-reduce", "--lr-decay-style cosine --lr-warmup-iters 0"],
    "recompute": ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                  "--recompute-granularity selective --recompute-modules mlp"],
    "factors": ["--lora-rank 2", "--lora-rank 2 --lora-targets q_proj"],
    "memory": ["--actor-offload", "--max-tokens-per-microbatch 20", "--exact-rollout", "--kernels blas"],
    "evaluation": ["--eval-prompts {heldout} --eval-interval 1 --eval-samples 4", "--save-interval 1"],
    "layout": [TP2, f"{TP2} --sequence-parallel", PP2, "--context-parallel-size 2", "--use-torch-fsdp2",
               "--expert-model-parallel-size 2", "--role-map actor=0;critic=1;reward=1;reference=0",
               "--role-map actor=0-1;reward=1", f"--rollout{TP2[1:]}", "--actor-pipeline-model-parallel-size 2"],
}  # fmt: skip
# What changes no byte of the samples, and no number of the updates.
NEUTRAL = [
    "--rollout-max-requests 3", "--rollout-dispatch static", "--rollout-prefix-caching", "--speculative-rollout",
    "--rollout-chunked-prefill", "--async-save --save-interval 1", "--reward-workers 1", "--verify-weights",
]  # fmt: skip
NUMBERS = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "kl/reference", "rollout/entropy")


def case_of(seed: int, number: int) -> tuple[list[str], str | None]:
    """(values of some axes, a neutral flag or None) of a case."""
    draw = random.Random(f"{seed}/{number}")
    axes = draw.sample(sorted(AXES), draw.randint(2, 7))
    return [draw.choice(AXES[axis]) for axis in axes], draw.choice(NEUTRAL) if number % 3 == 0 else None


def argv_of(values: list[str], save: Path) -> list[str]:
    from tests.helpers.programs import inputs

    flags = " ".join([BASE, *values]).format(heldout=inputs() / "heldout.jsonl")
    has_critic = "--advantage" not in flags or "--advantage gae" in flags
    return rl_argv(save, flags + " --critic-lr 1e-3" * (has_critic and "--advantage" in flags), warm_start=False)


def size_of(values: list[str]) -> int:
    return 2 if any(value in AXES["layout"] for value in values) else 1


def outcome(values: list[str], save: Path) -> str:
    """'refused', 'ran', or the kind of error with which a case fails."""
    argv, size = argv_of(values, save), size_of(values)
    try:
        with contextlib.redirect_stderr(None):
            program("rl", argv, size)
    except UsageError as error:
        text = str(error)
        return "refused" if "\n" not in text and "unknown flag" not in text else f"refused: {text}"
    try:
        train("rl", argv, size)
    except RankFailed as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        return "refused" if "UsageError" in last else f"failed: {re.sub('[0-9]+', 'N', last.strip())[:200]}"
    return "ran"


def neutral_difference(values: list[str], neutral: str, folder: Path) -> str | None:
    """What a neutral flag changes in a case that runs; None if nothing, or if it is not accepted there."""
    if outcome([*values, neutral], folder / "neutral") != "ran":
        return None
    one, other = metrics(folder / "plain")[1], metrics(folder / "neutral")[1]
    changed = [name for name in NUMBERS if one.get(name) != other.get(name)]
    if samples(folder / "plain", 1) != samples(folder / "neutral", 1):
        changed.append("samples")
    return f"{neutral} changes {', '.join(changed)}" if changed else None


def shrunk(values: list[str], how: str, folder: Path) -> list[str]:
    """The case without the values that its failure does not need."""
    for value in list(values):
        fewer = [other for other in values if other != value]
        if outcome(fewer, folder / f"shrunk-{len(fewer)}-{values.index(value)}") == how:
            values = fewer
    return values


def check(numbers: range, folder: Path) -> dict[str, int]:
    """Runs cases; counts of what became of them. Fails with all faults, each in its smallest form."""
    counts, faults = {"refused": 0, "ran": 0, "compared": 0}, []
    for number in numbers:
        values, neutral = case_of(SEED, number)
        place = folder / str(number)
        how = outcome(values, place / "plain")
        if how in counts:
            counts[how] += 1
        else:
            faults.append(f"case {number} {how}\n    {' '.join(shrunk(values, how, place))}")
        if how == "ran" and neutral is not None:
            counts["compared"] += metrics(place / "plain")[1].get("actor/updates", 0) > 0
            if changed := neutral_difference(values, neutral, place):
                faults.append(f"case {number}: {changed}\n    {' '.join(values)}")
    assert not faults, "\n".join(faults)
    return counts


def test_some_cases(tmp_path):
    """The machinery: a few cases, among them accepted ones and refused ones."""
    counts = check(range(6), tmp_path)
    assert counts["ran"] >= 1 and counts["ran"] + counts["refused"] == 6


def test_a_failure_is_shrunk(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "outcome", lambda values, save: "failed" if "b" in values else "ran")
    assert shrunk(["a", "b", "c"], "failed", tmp_path) == ["b"]


@pytest.mark.nightly
def test_random_combinations_run_or_are_refused(tmp_path):
    counts = check(range(CASES), tmp_path)
    print(counts)
    assert counts["ran"] >= CASES // 4 and counts["compared"] >= CASES // 20
