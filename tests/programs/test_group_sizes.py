"""Runs in which files of a mixture have groups of their own sizes: schedules, one size for all, groups of one.

That resumes, layouts and all that samples know the sizes is in tests/laws."""

import itertools
import json
from pathlib import Path

import pytest

from tests.helpers.programs import addition, inputs, metrics, rl_argv, samples, train, write_lines
from tools import _metric_catalog as metric_catalog

# Mini-batches of two prompts.
FLAGS = "--advantage grpo --kl-coefficient 0 --prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 8"


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """Mixtures of `many` and `few`, in equal shares, by what they say about groups: `few` has two responses to a prompt
    ("two"), one, or four as the flag says, and in "both" `many` is said to have four, too."""
    folder = tmp_path_factory.mktemp("mixtures")
    few = write_lines(folder / "few.jsonl", [addition(35, n) for n in range(6)])
    texts = {"two": ("", 2), "one": ("", 1), "both": ("  samples-per-prompt: 4\n", 4)}
    for name, (of_many, size) in texts.items():
        own = f"  samples-per-prompt: {size}\n"
        text = f"many:\n  prompts: {inputs() / 'train.jsonl'}\n{of_many}few:\n  prompts: {few}\n{own}"
        (folder / f"{name}.yaml").write_text(text)
    (folder / "silent.yaml").write_text(text.replace("  samples-per-prompt: 4\n", ""))
    return {path.stem: path for path in folder.glob("*.yaml")}


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


def group_sizes(rows: list[dict]) -> dict[str, list[int]]:
    """Sizes of the groups of each file; all prompts of a step differ."""
    found: dict[str, list[int]] = {"many": [], "few": []}
    for prompt, group in itertools.groupby(rows, lambda row: row["prompt"]):
        found["few" if prompt.startswith("35+") and len(prompt) == 5 else "many"].append(len(list(group)))
    return found


def assert_same(found: Path, expected: Path, steps):
    for step in steps:
        assert samples(found, step) == samples(expected, step)
        one, other = (metric_catalog.reproducible(metrics(save)[step]) for save in (found, expected))
        assert one | {"weights/sync_bytes": 0} == other | {"weights/sync_bytes": 0}  # nothing is sent to saved rollouts


@pytest.mark.long
def test_a_recorded_schedule_knows_the_sizes(mixtures, tmp_path):
    roles = "actor=0;reward=1;rollout=1"
    flags = (
        f"{FLAGS} --prompts {mixtures['two']} --reward tests.helpers.programs:coarse_reward --over-sampling 1.5"
        " --partial-rollouts --rollout-correction tis --generation-lag 2 --train-iters 4 --lr-decay-iters 9"
    )
    train("rl", rl_argv(tmp_path / "run", f"{flags} --role-map {roles} --generation-schedule recorded"), 2)
    for name, size, own in (("same", 2, roles), ("other", 3, "actor=0;reward=1-2;rollout=1-2")):
        replay = f"{flags} --role-map {own} --replay-schedule {tmp_path}/run"
        train("rl", rl_argv(tmp_path / name, replay), size)
    assert_same(tmp_path / "same", tmp_path / "run", [1, 2, 3, 4])
    assert samples(tmp_path / "other", 1) == samples(tmp_path / "run", 1)


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--samples-per-prompt 8 --minibatch-size 16"])
def test_files_that_all_say_one_size_are_as_the_flag_alone(flags, mixtures, tmp_path):
    """Also if the flag, by which the size of mini-batches is counted, says another one."""
    for name, own in (("both", flags), ("silent", "")):
        argv = rl_argv(tmp_path / name, f"{FLAGS} --prompts {mixtures[name]} --train-iters 1 --save-interval 1 {own}")
        train("rl", argv)
    assert_same(tmp_path / "both", tmp_path / "silent", [1])
    one, other = (tmp_path / name / "checkpoints" / "step_00000001" for name in ("both", "silent"))
    files = sorted(path.relative_to(one) for path in one.rglob("*.distcp"))
    assert files and all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.long
def test_a_group_may_have_one_response_where_none_are_compared(mixtures, tmp_path):
    train("rl", rl_argv(tmp_path, f"{FLAGS} --advantage reinforce++ --prompts {mixtures['one']} --train-iters 2"), 2)
    assert all(group_sizes(rows_of(tmp_path, step)) == {"many": [4, 4], "few": [1, 1]} for step in (1, 2))
