"""Each feature of a model in each layout that accepts it: the texts and numbers of one rank, over two steps."""

import contextlib

import pytest

from megarl.errors import UsageError
from tests.helpers.pages import combinations
from tests.helpers.pages.combinations import AXES, LATENT, PP2, TP2, with_groups_that_fit
from tests.helpers.programs import GRADED, assert_close, metrics, program, rl_argv, samples, train

NUMBERS = ["reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/reference"]
CP2, EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {  # flags -> ranks
    TP2: 2, f"{TP2} --sequence-parallel": 2, f"{TP2} --sequence-parallel {FULL}": 2, PP2: 2, f"{CP2} {FULL}": 2,
    f"{CP2} --use-distributed-optimizer": 2, EP2: 2, f"{EP2} {TP2} --sequence-parallel": 2, "--use-torch-fsdp2": 2,
    f"{TP2} {PP2} --sequence-parallel": 4, f"{TP2} {CP2}": 4, f"{EP2} {PP2} --use-distributed-optimizer": 4,
}  # fmt: skip
CHOOSING = f"{LATENT} --dsa-indexer-topk 3 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16"
MTP, SHARED = "--mtp-train --mtp-drafts", "--moe-shared-expert-intermediate-size 16"
EXPERTS = combinations.EXPERTS
FEATURES = [
    "", *AXES["experts"], *AXES["attention"], *AXES["model"], *AXES["factors"], MTP, LATENT, f"{EXPERTS} {MTP}",
    CHOOSING,
    f"{EXPERTS} {SHARED} --moe-shared-expert-gate", f"{LATENT} {EXPERTS} {MTP}", f"{combinations.RECURRENT} {EXPERTS}",
    f"{EXPERTS} --lora-rank 2", f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    f"{EXPERTS} --moe-latent-size 16 {SHARED}", "--window-size 3,0 --softmax-type learnable --num-query-groups 1",
    "--add-qkv-bias --qk-layernorm --num-query-groups 1", f"{EXPERTS} --moe-latent-size 16 --lora-rank 2",
]  # fmt: skip


def argv_of(flags: str, save) -> list[str]:
    """A command line."""
    both = f"--train-iters 2 --prompts-per-step 4 --use-cpu-initialization --lr 1e-4 --critic-lr 1e-4 {GRADED}"
    return with_groups_that_fit(rl_argv(save, f"{both} --num-layers 2 {flags}", warm_start=False))


def is_accepted(argv: list[str], size: int) -> bool:
    """Whether a command line is; one that is not has one line that says why."""
    try:
        with contextlib.redirect_stderr(None):
            program("rl", argv, size)
    except UsageError as error:
        assert "\n" not in str(error) and "unknown flag" not in str(error)
        return False
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("flags", FEATURES, ids=str)
def test_no_layout_changes_what_a_feature_learns(flags, tmp_path):
    train("rl", argv_of(flags, tmp_path / "one"))
    wanted = metrics(tmp_path / "one")
    assert wanted[2]["actor/grad_norm"] > 0 and wanted[2]["critic/grad_norm"] > 0
    accepted, faults = 0, []
    for number, (layout, size) in enumerate(LAYOUTS.items()):
        save = tmp_path / str(number)
        if not is_accepted(argv_of(f"{flags} {layout}", save), size):
            continue
        accepted += 1
        try:
            train("rl", argv_of(f"{flags} {layout}", save), size)
            for step in (1, 2):
                found = metrics(save)[step]
                assert found.get("rollout/logprob_gap_max", 0.0) == 0.0
                assert samples(save, step) == samples(tmp_path / "one", step), "samples"
                assert_close(found, wanted[step], [name for name in NUMBERS if name in wanted[step]], 1e-4)
        except Exception as error:
            faults.append(f"{layout}: {str(error)[-600:]}")
    assert not faults, "\n\n".join(faults)
    assert accepted >= 5
