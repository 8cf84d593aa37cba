"""Runs on mixtures of prompt files: exact shares, limits by file, the same prompts in every layout, exact resume."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import addition, inputs, metrics, rl_argv, samples, sft_argv, train, write_lines
from tests.helpers.tiers import by_default, long
from tools import _metric_catalog as metric_catalog

FLAGS = "--advantage grpo --kl-coefficient 0 --prompts-per-step 4"
SHORT = 2  # tokens of a response to the prompts of `few`


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """Three draws in four from `many`, one from `few`, whose responses are short."""
    folder = tmp_path_factory.mktemp("mixture")
    write_lines(folder / "few.jsonl", [addition(35, n) for n in range(5)])
    (folder / "mix.yaml").write_text(
        f"many:\n  prompts: {inputs() / 'train.jsonl'}\n  weight: 3\n"
        f"few:\n  prompts: {folder / 'few.jsonl'}\n  max-response-length: {SHORT}\n"
    )
    (folder / "mix.yaml.own.yaml").write_text(f"few:\n  prompts: {folder / 'few.jsonl'}\n  max-prompt-length: 4\n")
    return folder / "mix.yaml"


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


def check(save: Path, steps: int):
    """The shares of the draws, and the lengths of their responses."""
    few = {f"35+{n}=" for n in range(5)}
    drawn, row = Counter(), {}
    for step in range(1, steps + 1):
        rows, row = rows_of(save, step), metrics(save)[step]
        drawn.update("few" if each["prompt"] in few else "many" for each in rows)
        assert (row["mixture/few/prompts"], row["mixture/many/prompts"]) == (step, 3 * step)
        assert not metric_catalog.unknown(row)
        for each in (each for each in rows if each["prompt"] in few):
            assert each["length"] <= SHORT and each["finished"] == (each["length"] < SHORT or each["finished"])
        assert any(each["length"] == SHORT and not each["finished"] for each in rows if each["prompt"] in few)
        assert any(each["length"] > SHORT for each in rows if each["prompt"] not in few)
    assert drawn["few"] / sum(drawn.values()) == 0.25


LAYOUTS = {
    "two replicas": (2, ""), "four replicas": (4, ""), "TP2": (2, "--tensor-model-parallel-size 2"),
    "apart": (3, "--role-map actor=0;reward=1;rollout=1-2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(mixture, tmp_path_factory) -> Path:
    save = tmp_path_factory.mktemp("alone") / "run"
    train("rl", rl_argv(save, f"{FLAGS} --prompts {mixture} --train-iters 3 --overlong-buffer 1"))
    return save


def test_each_file_has_its_share_and_its_limit(alone):
    check(alone, 3)
    rows = [row for row in rows_of(alone, 1) if row["length"] == SHORT and not row["finished"]]
    assert rows and all(row["reward_parts"]["overlong"] == -1.0 for row in rows)


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["two replicas"]))
def test_every_layout_draws_the_same_prompts(layout, alone, mixture, tmp_path):
    size, flags = LAYOUTS[layout]
    train("rl", rl_argv(tmp_path, f"{FLAGS} --prompts {mixture} --train-iters 3 --overlong-buffer 1 {flags}"), size)
    assert samples(tmp_path, 1) == samples(alone, 1)
    for step in (1, 2, 3):
        assert [row["prompt"] for row in rows_of(tmp_path, step)] == [row["prompt"] for row in rows_of(alone, step)]


KINDS = {
    "plain": "",
    "partial rollouts": "--over-sampling 2 --partial-rollouts --rollout-correction tis",
    "a filter": "--group-filter reward --dynamic-sampling --max-sampling-rounds 3",
    "a lag": "--role-map actor=0;reward=0;rollout=1 --generation-lag 1 --rollout-correction tis",
}  # fmt: skip


@pytest.mark.parametrize("kind", by_default(KINDS, ["partial rollouts"]))
def test_a_resumed_run_draws_as_the_uninterrupted_one(kind, mixture, tmp_path):
    flags, size = f"{FLAGS} --prompts {mixture} --save-interval 1 {KINDS[kind]}", 2 if kind == "a lag" else 1
    train("rl", rl_argv(tmp_path / "whole", f"{flags} --train-iters 4"), size)
    middle = tmp_path / "whole" / "checkpoints" / "step_00000002"
    train("rl", rl_argv(tmp_path / "part", f"{flags} --train-iters 4 --load {middle}"), size)
    for step in (3, 4):
        assert samples(tmp_path / "part", step) == samples(tmp_path / "whole", step)
        one, other = (metrics(tmp_path / name)[step] for name in ("part", "whole"))
        assert metric_catalog.reproducible(one) == metric_catalog.reproducible(other)


@pytest.mark.parametrize("size", [long(1)])
def test_supervised_training_draws_from_mixtures(size, mixture, tmp_path):
    plain = tmp_path / "plain.yaml"
    plain.write_text("".join(line for line in mixture.open() if "max-response" not in line))
    train("sft", sft_argv(tmp_path / "whole", f"--prompts {plain} --train-iters 4 --save-interval 2"), size)
    middle = tmp_path / "whole" / "checkpoints" / "step_00000002"
    train("sft", sft_argv(tmp_path / "part", f"--prompts {plain} --train-iters 4 --load {middle}"), size)
    assert metrics(tmp_path / "part")[4]["sft/loss"] == metrics(tmp_path / "whole")[4]["sft/loss"]


REFUSALS = {
    "--max-response-length 1": "few: max-response-length 2: allowed is at most --max-response-length 1",
    "--overlong-buffer 3": "few: max-response-length 2: allowed is at least --overlong-buffer 3",
    "--environment tests.helpers.sum_environments:Sums": "few: max-response-length: not allowed with --environment",
    "--prompts {}.own.yaml": "allows 4; --filter-long-prompts drops such lines (the limit of its file in the mixture)",
    "--eval-interval 1 --eval-prompts {}": "--eval-prompts {}: many: weight is unknown here; allowed: environm",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSALS)
def test_what_a_mixture_cannot_have_is_refused(flags, mixture, tmp_path):
    line = refusal(rl_argv(tmp_path / "run", f"{FLAGS} --prompts {mixture} {flags.format(mixture)}"))
    assert REFUSALS[flags].format(mixture) in line
