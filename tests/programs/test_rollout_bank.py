"""A run that is killed while it generates: its finished responses are used again, and nothing else changes."""

import functools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.programs import in_world, metrics, program, rl_argv, samples, timeless
from tests.helpers.rollout.thinkers import BUDGET, FILES, TEXT, with_thinkers
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import RankFailed, run_world

FLAGS = "--advantage grpo --kl-coefficient 0 --train-iters 2 --save-interval 1 --rollout-max-requests 4"
COUNT = 12  # responses of a step


def counted(rank: int, parsed, killed_at: tuple[int, int, int] | None) -> Counter:
    """Runs train_rl; returns the responses that this rank's engine generated for the bank, by step.

    `killed_at`: (rank, step, responses) after which a rank is killed.
    """
    from megarl.rollout import bank

    keep, counts = bank.RolloutBank.keep, Counter()

    def watched(self, request, completion):
        keep(self, request, completion)
        counts[self._step] += 1
        if (rank, self._step, counts[self._step]) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    bank.RolloutBank.keep = watched
    in_world(rank, "rl", parsed)
    return counts


def run(save: Path, flags: str, size: int = 1, killed_at: tuple[int, int, int] | None = None) -> list[Counter]:
    """Runs train_rl."""
    argv = rl_argv(save, with_thinkers(f"{FLAGS} {flags}"), warm_start=False)
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    return run_world(counted, size, program("rl", argv, size), killed_at)


@functools.cache
def whole(folder: Path, flags: str, size: int = 1) -> tuple[Path, list[Counter]]:
    """An undisturbed run."""
    save = folder / f"whole{len(list(folder.iterdir()))}"
    return save, run(save, flags, size)


def kill(save: Path, flags: str, size: int, killed_at: tuple[int, int, int]) -> list[Path]:
    """Runs until the kill; returns the files of the bank."""
    # Another rank may be the first to notice, by a connection that the killed one has closed.
    ended = f"rank {killed_at[0]} of {size} ended with exit code -9"
    with pytest.raises(RankFailed, match=ended if size == 1 else f"{ended}|[Cc]onnection"):
        run(save, flags, size, killed_at)
    return sorted(save.glob(f"responses/step_{killed_at[1]:08d}/*.log"))


def resume(save: Path, flags: str, size: int = 1) -> Counter:
    """Resumes a killed run; responses that all ranks have generated, by step."""
    return sum(run(save, f"{flags} --load {save}", size), Counter())


def assert_same_results(save: Path, expected: Path, steps=(1, 2)):
    for step in steps:
        assert samples(save, step) == samples(expected, step)
        found, wanted = (timeless(metrics(run)[step]) | {"weights/sync_s": 0} for run in (save, expected))
        assert found == wanted


STATIC = "--rollout-dispatch static"  # so that a certain replica generates a certain number of responses
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"
CASES = {
    "one rank": ("", 1, (0, 2, 5)),
    "before the first checkpoint": ("", 1, (0, 1, 5)),
    "two replicas": (STATIC, 2, (1, 2, 3)),
    "a replica of two ranks": ("--tensor-model-parallel-size 2", 2, (0, 2, 5)),
    "recorded routes": (f"{MIXTURE} {STATIC} --expert-model-parallel-size 2", 2, (0, 2, 3)),
    "dynamic sampling": ("--reward tests.helpers.programs:coarse_reward --group-filter reward --dynamic-sampling", 1,
                         (0, 2, 15)),
    "partial rollouts": ("--over-sampling 2 --partial-rollouts --rollout-correction tis --max-response-length 30"
                         " --max-tokens-per-microbatch 100", 1, (0, 2, 4)),
    "a thinking budget": (f"{FILES} --thinking-budget {BUDGET} --thinking-budget-text {TEXT} --max-response-length 16"
                          " --max-prompt-length 12 --max-tokens-per-microbatch 100", 1, (0, 2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(CASES, ("before the first checkpoint",)))
def test_a_killed_generation_is_completed(case, folder, tmp_path):
    flags, size, killed_at = CASES[case]
    (expected, counts), save = whole(folder, flags, size), tmp_path / "run"
    assert kill(save, flags, size, killed_at)
    _, step, number = killed_at
    generated = resume(save, flags, size) if step > 1 else sum(run(save, flags, size), Counter())
    assert_same_results(save, expected)
    saved = number * (2 if "tensor" in flags else 1)  # both ranks of a replica count
    assert generated[step] <= sum(counts, Counter())[step] - saved
    assert size > 1 or generated[step] == counts[0][step] - saved
    assert not (save / "responses").exists(), "nothing is kept once a step has its checkpoint"


@pytest.mark.parametrize("size", [long(1), 2])
def test_replicas_draw_what_the_bank_lacks(size, folder, tmp_path):
    (expected, _), save = whole(folder, STATIC if size == 2 else "", size), tmp_path / "run"
    assert kill(save, STATIC, 2, (1, 2, 3))[-1].name == "00001-000.log"
    assert resume(save, "", size)[2] <= COUNT - 3
    assert samples(save, 2) == samples(expected, 2)
    if size == 2:
        assert_same_results(save, expected)


def test_damaged_records_are_generated_again(folder, tmp_path, capfd):
    (expected, _), save = whole(folder, ""), tmp_path / "run"
    (path,) = kill(save, "", 1, (0, 2, 5))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    path.with_name("00000-001.log").symlink_to(path)
    assert resume(save, "")[2] == COUNT - 4
    assert_same_results(save, expected)
    err = capfd.readouterr().err
    assert "is damaged: its checksum is wrong" in err and "00000-001.log: is ignored" in err
    assert f"megarl: step 2: 4 responses are in {save}/responses" in err


@pytest.mark.long
def test_responses_of_another_policy_are_not_used(folder, tmp_path):
    """The first step's policy is the same; after it, another learning rate has made another one."""
    save = tmp_path / "run"
    kill(save, "", 1, (0, 2, 5))
    (expected, _) = whole(folder, "--lr 2e-3")
    (generated,) = run(save, "--lr 2e-3 --overwrite")
    assert generated == {1: COUNT, 2: COUNT}
    assert_same_results(save, expected)
    kill(tmp_path / "hot", "", 1, (0, 1, 5))
    (generated,) = run(tmp_path / "hot", "--temperature 0.8")
    assert generated == {1: COUNT, 2: COUNT}


@pytest.mark.long
def test_a_batch_that_was_generated_ahead(folder, tmp_path):
    flags = "--generation-lag 1 --rollout-correction tis --role-map actor=0;reward=0;rollout=1 --train-iters 3"
    (expected, counts), save = whole(folder, flags, 2), tmp_path / "run"
    kill(save, flags, 2, (1, 3, 5))  # while the actor may still be training on step 2
    generated = resume(save, flags, 2)
    assert generated[3] == COUNT - 5 and counts[1][3] == COUNT
    assert_same_results(save, expected, (1, 2, 3))


@pytest.mark.parametrize("flags, warns", [
    ("", True), ("--keep-responses false", False), ("--router-replay none", False),
])  # fmt: skip
def test_routes_of_several_stages_are_not_kept_and_a_line_says_so(flags, warns, tmp_path, capsys):
    from megarl.trainers.rl_inputs import RLInputs

    flags = f"{MIXTURE} --pipeline-model-parallel-size 2 {flags}"
    RLInputs(program("rl", rl_argv(tmp_path / "run", flags, warm_start=False), 2))
    assert ("several pipeline stages in the rollout responses are not kept" in capsys.readouterr().err) == warns
