"""What holds for every feature: a resume, another layout, a kill, a replay or a neutral flag changes nothing of a run.

By default one row of a kind: that of a feature whose state no other one has. `-m long` runs all.
"""

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from megarl.checkpoint import folders
from megarl.errors import UsageError
from tests.helpers import faults
from tests.helpers.folders import any_types
from tests.helpers.programs import (
    GRADED,
    assert_close,
    samples,
)
from tests.helpers.rollout.engine_records import generated_rows
from tests.helpers.rollout.replays import played
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world
from tests.laws import files
from tests.laws.features import FEATURES, NEUTRAL
from tests.laws.features.feature import DISJOINT, GRPO, SMALL, TP2, TWO, Feature
from tests.laws.runs import argv, assert_same, assert_same_texts, numbers, run, whole
from tools import record_runs

# What is compared of two layouts: rewards, losses, and what they are made of.
NUMBERS = re.compile(
    "reward/(mean|std|accuracy|margin)|.*/(loss|grad_norm|entropy|mtp_loss|mtp_grad_norm|learning_rate|explained_variance)"
    "|rollout/tokens|kl/(reference|coefficient)|(distill|teacher|sampling|eval)/.*"
    "|judge/(readable_fraction|length_mean|order_agreement)|preference/(kl|chosen_logprob|rejected_logprob)"
    "|.*indexer/disagreement.*"
)
# The rows that run by default: one of each kind of state, of way to lay out, and of replay.
RESUMED = (
    "adaptive kl, epochs", "waiting groups", "partial rollouts, a filter", "lag, reward of the trained ranks", "pools",
    "average of factors", "drafts", "refresh of other ranks", "frozen, rates, sgd", "shared turns over rounds, late",
    "chosen keys that layers share", "pictures",
)  # fmt: skip
ALSO_ELSEWHERE = [("adaptive kl, epochs", *TP2)]
LAID_OUT = [
    ("ppo", *DISJOINT), ("virtual stages", *FEATURES["virtual stages"].layouts[1]), ("mixture", *TWO),
    ("grouped reward", *TWO), ("rewards by file", *TWO), ("judged groups", *TWO),
    ("pictures", *FEATURES["pictures"].layouts[-1]),
    ("reward", 1, SMALL),
]  # fmt: skip
KILLED = (
    "waiting groups", "partial rollouts", "lag", "lag, partial rollouts", "pools", "mixture", "average of factors",
    "drafts", "refresh", "frozen, rates, sgd", "factors", "turns", "an agent's turns", "branching agent",
    "carried turns", "carried agent", "shared turns over rounds", "siblings", "modules", "chosen keys",
    "pictures, turns", "pictures, carried turns",
)  # fmt: skip
TRAINED_AGAIN = (
    "waiting groups", "ppo", "routes ahead", "routes of two stages", "greedy baselines, a filter", "sizes, partial",
    "turns of experts", "partial rollouts, a filter", "carried turns of experts", "thoughts", "thoughts in turns",
    "modules", "modules of experts", "pictures", "pictures, turns",
)  # fmt: skip
PLAYED = (
    "turns", "waiting groups", "opening turns of two stages", "turns ahead", "branching agent", "mixture", "drafts",
    "turns of factors", "thoughts", "thoughts in turns", "carried turns",
    "modules", "modules of unlike layers", "chosen keys", "chosen keys in turns", "pictures",
    "pictures, turns",
)  # fmt: skip
PARALLEL = "model-parallel-size 2"


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_default([name for name in FEATURES if FEATURES[name].resumed], RESUMED))
def test_a_resumed_run_is_the_whole_one_to_the_bit(name, tmp_path):
    feature, expected = FEATURES[name], whole(name)
    found = run(feature, tmp_path, f"--load {folders.step_folder(expected, feature.resumed)}")
    assert_same(found, expected, range(feature.resumed + 1, feature.steps + 1))


def other_layouts(kind: str) -> list[tuple[str, int, str]]:
    """(feature, ranks, flags) of all `layouts`, or of those in which runs go on (`moved`)."""
    return [(name, *layout) for name, feature in FEATURES.items() for layout in getattr(feature, kind)]


@pytest.mark.parametrize("name, ranks, flags", by_default(other_layouts("moved"), ALSO_ELSEWHERE), ids=str)
def test_a_run_goes_on_in_another_layout(name, ranks, flags, tmp_path):
    feature, expected = FEATURES[name], whole(name)
    found = run(feature, tmp_path, f"--load {folders.step_folder(expected, feature.resumed)} {flags}", ranks)
    step = feature.resumed + 1
    assert_same_texts(found, expected, [step])
    assert_close_steps(feature, found, expected, [step])


# -- layouts ---------------------------------------------------------------------------------------------------------


def assert_close_steps(feature: Feature, found: Path, expected: Path, steps):
    """The metrics of these steps are equal up to rounding, or to the bit if the feature has no tolerance."""
    for step in steps if feature.numbers else ():
        one, other = numbers(found, step), numbers(expected, step)
        if feature.tolerance == 0:
            assert one == other
        else:
            names = [name for name in other if NUMBERS.fullmatch(name) and other[name] is not None]
            assert names
            assert_close(one, other, names, feature.tolerance)


def state_of(save: Path, step: int) -> dict[str, str]:
    """Digests of a checkpoint, without what each rank or replica has for itself."""
    found = record_runs.checkpoints_of(save, folders.step_folder(save, step).name)
    return {key: value for key, value in found.items() if not re.search("/rng/|/manifest|/waiting|/parts", key)}


@pytest.mark.parametrize("name, ranks, flags", by_default(other_layouts("layouts"), LAID_OUT), ids=str)
def test_no_layout_changes_a_run(name, ranks, flags, tmp_path):
    feature, expected = FEATURES[name], whole(name)
    found = run(feature, tmp_path, flags, ranks)
    assert_same_texts(found, expected, range(1, min(feature.texts, feature.steps) + 1))
    assert_close_steps(feature, found, expected, range(1, min(feature.numbers, feature.steps) + 1))
    if feature.tolerance == 0:
        assert state_of(found, feature.steps) == state_of(expected, feature.steps)
    elif feature.program == "rl" and "-parallel" not in flags:  # whose sums are others, and so the log-probs
        assert generated_rows(found) == generated_rows(expected)


LAYOUTS_OF_TYPES = ((1, ""), (2, "--use-torch-fsdp2"), TP2)
# Types with a plan whose small model tensor parallelism refuses, and what the line says: one has a single key head, or
# parts that need whole what the plan splits.
UNSPLIT = dict.fromkeys(
    ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), "with 1 keys, which it does not divide"
)
UNSPLIT |= {"gemma3n_text": "computes something else in parts", "cohere": "cannot run"}
# Limits of (metrics, log-probs) between layouts, where they are not (1e-5, 1e-5): the slope of xIELU jumps by 1.3 near
# 0, so rounding can move a gradient; transformers' own fp32 is 3e-5 from its fp64.
ROUNDED = dict.fromkeys(("apertus", "apertus1p5_text"), (5e-3, 1e-5)) | {"olmo_hybrid": (1e-5, 6e-5)}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", any_types.running())
def test_each_type_of_transformers_in_each_layout(kind, tmp_path):
    """Two steps, and a resume after the first to the bit; layouts agree in responses, log-probs and gradients."""
    run_world(files.save_type, 1, kind, tmp_path / "model")
    flags = f"--hf-model {tmp_path / 'model'} --model-source transformers {GRPO} {GRADED} --lr 1e-5"
    flags += " --rollout-buffer-gb 0.01"  # for states, which are large beside such a model
    problems = []
    for number, (ranks, layout) in enumerate(LAYOUTS_OF_TYPES):
        of_metrics, of_logprobs = ROUNDED.get(kind, (1e-5, 1e-5))
        feature = Feature(f"{flags} {layout}", ranks, warm_start=False, steps=2, tolerance=of_metrics)
        try:
            found = run(feature, tmp_path / str(number))
            assert kind not in UNSPLIT or (ranks, layout) != TP2
            assert_resumed_and_close(feature, found, tmp_path / "0", of_logprobs)
        except UsageError as error:
            if UNSPLIT.get(kind, "has no plan for tensor parallelism") not in str(error):
                problems.append(f"{layout}: {error}")
        except AssertionError as error:
            problems.append(f"{layout or 'one rank'}: {error}")
    assert not problems, "\n\n".join(problems)


def assert_resumed_and_close(feature: Feature, found: Path, expected: Path, limit: float):
    """A run of two steps is like its resumed one, to the bit, and like that of another layout, up to rounding; `limit`:
    of log-probs."""
    assert numbers(found, 1)["actor/grad_norm"] > 0 and weights(found, 1) != weights(found, 2)
    resumed = run(feature, found.with_name(f"{found.name}-resumed"), f"--load {folders.step_folder(found, 1)}")
    assert_same_texts(resumed, found, [2])
    assert numbers(resumed, 2) == numbers(found, 2) and weights(resumed, 2) == weights(found, 2) != {}
    assert_same_texts(found, expected, (1, 2))
    assert_close_steps(feature, found, expected, (1, 2))
    for step in (1, 2):
        one, other = (generated_rows(save, step) for save in (found, expected))
        pairs = [pair for (_, row), (_, wanted) in zip(one, other, strict=True)
                 for pair in zip(row[1], wanted[1], strict=True)]  # fmt: skip
        assert len(pairs) > 40 and max(abs(a - b) for a, b in pairs) <= limit


# -- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, phase", [
    (name, phase) for name, phase in itertools.product(KILLED, ["rollout", "update", "update, memory"])
    if phase == "rollout" or name != "waiting groups"  # which has no update in this step
])  # fmt: skip
@pytest.mark.long  # by default tests/programs/test_faults.py
def test_a_killed_run_is_started_again_and_is_the_whole_one(name, phase, tmp_path, capfd):
    """The rollout's rank, or the actor's, is killed in the second step; with `memory` the disk has no checkpoint."""
    feature, more = FEATURES[name], "--save-memory --save-interval 0" if "memory" in phase else ""
    places = [("rollout", "rollout"), ("actor", "rollout")] if phase == "rollout" else [("actor", "update")]
    killed = tmp_path.with_name(f"{tmp_path.name}_killed")

    def kill():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        for place in places if faults.attempt() == 0 else ():  # the actor's, where it is the rollout
            faults.in_phase(place, min(2, feature.steps), kill)

    assert faults.run(argv(feature, tmp_path, more), feature.ranks, prepare, restarts=1) == 0 and killed.exists()
    assert not more or "resumes from step 1 in host memory" in capfd.readouterr().err
    # What is read of images: responses that were kept are not generated again.
    assert_same(tmp_path, whole(name), range(1, feature.steps + 1), but="images/")


# -- replays ---------------------------------------------------------------------------------------------------------


def weights(save: Path, step: int) -> dict:
    """SHA-256 of the files with the weights and optimizers of a checkpoint."""
    manifest = folders.read_manifest(folders.step_folder(save, step), "")
    return {name: seal["sha256"] for name, seal in manifest["files"].items() if name.endswith(".distcp")}


@pytest.mark.parametrize("name", by_default(TRAINED_AGAIN, TRAINED_AGAIN[:1]))
def test_saved_rollouts_are_trained_on_again_with_the_same_bits(name, tmp_path):
    feature, expected = FEATURES[name], whole(name)
    start = folders.step_folder(expected, feature.resumed)
    found = run(
        feature, tmp_path, f"--load {start} --load-rollouts {expected} --debug-train-only --save-rollouts false"
    )
    for step in range(feature.resumed + 1, feature.steps + 1):
        one, other = ({name: value for name, value in numbers(save, step).items() if not name.startswith("weights/")}
                      for save in (found, expected))  # fmt: skip
        assert one == other and samples(found, step) == samples(expected, step)
        assert weights(found, step) == weights(expected, step) != {}


@pytest.mark.long  # by default tests/unit/test_replay.py
@pytest.mark.parametrize("name", PLAYED)
def test_a_saved_response_is_generated_again(name):
    save, feature = whole(name), FEATURES[name]
    ranks = feature.ranks if PARALLEL in feature.flags else 1
    status, text = played(save, ["--step", f"{feature.steps}", "--sample", "1"], ranks)
    lines = [line for line in text.splitlines() if line.startswith("turn ")]
    assert status == 0 and lines
    of_record = "from the record alone: earlier policies have written some of it" in text
    assert of_record or all(line.endswith("the same tokens and log-probs") for line in lines), text


# -- neutral flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", by_default([" ".join(NEUTRAL), *NEUTRAL], [" ".join(NEUTRAL)]))
@pytest.mark.parametrize("name", by_default(["ppo", "turns", "waiting groups", "partial rollouts"], ["ppo"]))
def test_neutral_flags_change_nothing(name, flags, tmp_path):
    feature, expected = FEATURES[name], whole(name)
    found = run(feature, tmp_path, flags)
    for step in range(1, feature.steps + 1):
        one, other = numbers(found, step), numbers(expected, step)
        assert {name: one[name] for name in other} == other
        assert samples(found, step) == samples(expected, step)
