"""The recipes: each sets its paper's algorithm and nothing else, and trains with the models that it needs."""

import math
import re
from pathlib import Path

import pytest
import yaml

from megarl import arguments
from megarl.algorithms import PREFERENCE_LOSSES
from tests.helpers.forked_programs import accepted
from tests.helpers.programs import RL_RECIPES, ROOT, SHAPE, inputs, metrics, preference_argv, train
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

FOLDER = ROOT / "configs" / "recipes"
PREFERENCE = {  # paper, values, whether it has a reference
    "dpo": ("2305.18290", {"preference-beta": 0.1, "preference-label-smoothing": 0.0}, True),
    "ipo": ("2310.12036", {"preference-beta": 0.1}, True),
    "simpo": (
        "2405.14734", {"preference-beta": 2.0, "preference-gamma": 1.0, "preference-label-smoothing": 0.0}, False
    ),
    "orpo": ("2403.07691", {"preference-coefficient": 0.1}, False),
    "kto": (
        "2402.01306",
        {"preference-beta": 0.1, "preference-desirable-weight": 1.0, "preference-undesirable-weight": 1.0}, True,
    ),
    "rpo": (
        "2404.19733",
        {"preference-beta": 0.1, "preference-coefficient": 1.0, "preference-label-smoothing": 0.0}, True,
    ),
}  # fmt: skip
MODELS = {  # besides the actor
    "ppo": ["critic", "reference"], "grpo": ["reference"], "rloo": ["reference"], "remax": ["reference"],
    "reinforce_plus_plus": ["reference"], "dr_grpo": [], "dapo": [], "gspo": [], "cispo": [], "gmpo": [],
    "dppo": [], "vespo": [], "glm5": [], "gdpo": [], "maxrl": [], "m2po": [],
}  # fmt: skip
PAPERS = {
    "ppo": "1707.06347", "grpo": "2402.03300", "rloo": "2402.14740", "remax": "2310.10505", "dapo": "2503.14476",
    "reinforce_plus_plus": "2501.03262", "dr_grpo": "2503.20783", "gspo": "2507.18071", "cispo": "2506.13585",
    "gmpo": "2507.20673", "dppo": "2602.04879", "vespo": "2602.10693", "glm5": "2602.15763",
    "gdpo": "2601.05242", "maxrl": "2602.02710", "m2po": "2510.01161",
}  # fmt: skip
GROUPS, NO_KL = {"advantage": "grpo", "group-std": True}, {"kl-coefficient": 0}
NO_PASS = {"old-logprobs": "rollout", **NO_KL}
IN_REWARD = {"kl-in": "reward", "kl-estimator": "k1", "kl-controller": "fixed"}
BY_TOKEN, BY_RESPONSE, SUM = (
    {"loss-aggregation": name} for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
)
VALUES = {
    "ppo": {"advantage": "gae", "gamma": 1.0, "gae-lambda": 0.95, "whiten-advantages": True, "policy-loss": "ppo-clip",
            "clip-range": 0.2, "value-clip-range": 0.2, **BY_TOKEN, "kl-coefficient": 0.02, **IN_REWARD},
    "grpo": {**GROUPS, "policy-loss": "ppo-clip", "clip-range": 0.2, **BY_RESPONSE, "kl-coefficient": 0.04,
             "kl-in": "loss", "kl-estimator": "k3", "kl-controller": "fixed"},
    "dr_grpo": {**GROUPS, "group-std": False, "policy-loss": "ppo-clip", "clip-range": 0.2,
                "loss-aggregation": "seq-mean-token-sum-norm", **NO_KL},
    "dapo": {**GROUPS, "policy-loss": "ppo-clip", "clip-range": 0.2, "clip-range-high": 0.28, **BY_TOKEN, **NO_KL,
             "group-filter": "correct", "dynamic-sampling": True, "max-sampling-rounds": 10, "overlong-buffer": 1,
             "overlong-penalty": 1.0},
    "rloo": {"advantage": "rloo", "policy-loss": "reinforce", "minibatch-size": None, **SUM, "kl-coefficient": 0.03,
             **IN_REWARD},
    "remax": {"advantage": "remax", "greedy-baseline": True, "policy-loss": "reinforce", "minibatch-size": None, **SUM,
              "kl-coefficient": 0.05, **IN_REWARD},
    "reinforce_plus_plus": {"advantage": "reinforce++", "gamma": 1.0, "whiten-advantages": True,
                            "policy-loss": "ppo-clip", "clip-range": 0.2, **BY_TOKEN, "kl-coefficient": 0.01,
                            **IN_REWARD},
    "gspo": {**GROUPS, "policy-loss": "gspo", "clip-range": 0.0003, "clip-range-high": 0.0004, **BY_RESPONSE, **NO_KL},
    "cispo": {**GROUPS, "policy-loss": "cispo", "clip-range": 1.0, "clip-range-high": 4.0, **BY_TOKEN, **NO_KL},
    "gmpo": {**GROUPS, "policy-loss": "gmpo", "clip-range": 0.4, "clip-range-high": 0.4, **BY_RESPONSE, **NO_KL},
    "dppo": {**GROUPS, "group-std": False, "policy-loss": "dppo-tv", "dppo-tv-low": 0.15, "dppo-tv-high": 0.15,
             "dppo-tv-cap": 20.0, "loss-aggregation": "seq-mean-token-sum-norm", **NO_PASS},
    "gdpo": {**GROUPS, "advantage": "gdpo", "whiten-advantages": True, "policy-loss": "ppo-clip", "clip-range": 0.2,
             **BY_TOKEN, **NO_KL},
    "maxrl": {"advantage": "maxrl", "policy-loss": "reinforce", "minibatch-size": None, **BY_TOKEN, **NO_KL},
    "m2po": {**GROUPS, "policy-loss": "m2po", "m2po-threshold": 0.04, "clip-range": 0.2, **BY_TOKEN, **NO_KL},
    "vespo": {**GROUPS, "policy-loss": "vespo", "vespo-k-positive": 2.0, "vespo-lambda-positive": 3.0,
              "vespo-k-negative": 3.0, "vespo-lambda-negative": 2.0, **BY_TOKEN, **NO_PASS},
    "glm5": {**GROUPS, "policy-loss": "rollout-is", "clip-range": 0.2, "clip-range-high": 0.28, **BY_TOKEN, **NO_PASS},
}  # fmt: skip
RUN = (
    " --prompts-per-step 4 --samples-per-prompt 4 --train-iters 2 --lr 1e-4 --rollout-buffer-gb 0.001"
    " --rollout-max-requests 16 --seed 5 --reward tests.helpers.programs:coarse_reward"
)


def parsed(save: Path, recipe: str, flags: str = "", size: int = 1) -> arguments.RunConfig:
    """A run of a recipe as a user starts it: the run's own flags, and the recipe's file."""
    files = {"--prompts": "train.jsonl", "--tokenizer-model": "tokenizer.model", "--pretrained-checkpoint": "sft"}
    paths = [token for flag, file in files.items() for token in (flag, str(inputs() / file))]
    config = ["--save", str(save), "--config", str(FOLDER / f"{recipe}.yaml")]
    return arguments.parse([*(SHAPE + RUN).split(), *paths, *config, *flags.split()], size)


def train_and_list_models(rank: int, program: arguments.RunConfig) -> list[bool]:
    """Trains on this rank; whether each model that was built on it has a value head."""
    from megarl import train_rl
    from megarl.extras import report
    from megarl.mcore.model import gpt
    from megarl.observe.timers import Timers

    built, build_model = [], gpt.build_model

    def build_and_note(args, vocab_size, pg_collection, value_head=False):
        built.append(value_head)
        return build_model(args, vocab_size, pg_collection, value_head)

    gpt.build_model = build_and_note
    report.write_report = lambda folder: None
    train_rl.train(program, Timers())
    return built


def check_rows(save: Path, recipe: str):
    """Both steps updated the policy, all metrics are finite, and absent roles have none."""
    rows = metrics(save)
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert all(value is not None and math.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0 and row["actor/updates_skipped"] == 0 and row["steps_skipped"] == 0
        assert any(name.startswith("critic/") for name in row) == ("critic" in MODELS[recipe])
        assert ("kl/reference" in row) == ("reference" in MODELS[recipe])
        assert ("actor/kl_loss" in row) == (recipe == "grpo")
        assert ("sampling/rounds" in row) == (recipe == "dapo")


def test_every_recipe_exists():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{name}.yaml" for name in (*MODELS, *PREFERENCE))
    assert sorted(PREFERENCE) == sorted(PREFERENCE_LOSSES) and [path.stem for path in RL_RECIPES] == sorted(MODELS)


@pytest.mark.parametrize("recipe", by_default(PREFERENCE, ("kto",)))
def test_a_recipe_of_preferences_sets_its_papers_values_and_trains(recipe, tmp_path):
    paper, values, has_reference = PREFERENCE[recipe]
    text = (FOLDER / f"{recipe}.yaml").read_text()
    assert paper in text.splitlines()[0] and yaml.safe_load(text) == values | {"preference-loss": recipe}
    argv = preference_argv(tmp_path, f"--config {FOLDER}/{recipe}.yaml --train-iters 2")
    assert any(recipe in line for line in accepted(argv, "preference"))  # says the loss, and no flag has no effect
    train("preference", argv)
    found = metrics(tmp_path)
    assert all(math.isfinite(value) for row in found.values() for value in row.values())
    assert sorted(found) == [1, 2] and all(row["preference/grad_norm"] > 0 for row in found.values())
    assert (tmp_path / "checkpoints/step_00000002/reference_logprobs.pt").exists() == has_reference


@pytest.mark.parametrize("recipe", by_default(MODELS, ("ppo", "dapo")))
def test_a_recipe_trains_the_models_it_needs(recipe, tmp_path):
    program = parsed(tmp_path, recipe)
    assert [role for role in program.roles if role in ("critic", "reference")] == MODELS[recipe]
    (built,) = run_world(train_and_list_models, 1, program)
    assert built == [False] + [name == "critic" for name in MODELS[recipe]]
    check_rows(tmp_path, recipe)


@pytest.mark.long
def test_a_role_map_without_a_critic(tmp_path):
    program = parsed(tmp_path, "grpo", "--role-map actor=0;reward=1;reference=1", size=2)
    assert run_world(train_and_list_models, 2, program) == [[False], [False]]
    check_rows(tmp_path, "grpo")


def values_of(program: arguments.RunConfig) -> dict:
    """The settings of a program by the names of a config file."""
    return {name.replace("_", "-"): value for name, value in program.megarl_settings().items()}


@pytest.mark.parametrize("recipe", MODELS)
def test_a_recipe_sets_the_values_of_its_paper_only(recipe):
    text = (FOLDER / f"{recipe}.yaml").read_text()
    chosen = yaml.safe_load(text)
    assert PAPERS[recipe] in text.splitlines()[0]
    assert {name for name, value in chosen.items() if value is None} <= {"minibatch-size"}
    several = "--reward exact-match+0.1*length" if recipe == "gdpo" else ""  # it is told of a single one
    program = parsed(Path("none"), recipe, several)
    assert program.warnings == ()  # every key has an effect
    assert chosen == VALUES[recipe] | {"ppo-epochs": 1}
    assert chosen.items() <= values_of(program).items()


@pytest.mark.parametrize("recipe", MODELS)
def test_a_recipe_works_after_the_quickstarts_file(recipe):
    """Flags of the quickstart that only PPO uses are dropped, and a warning names them."""
    quickstart = ROOT / "configs" / "quickstart.yaml"
    program = arguments.parse(["--config", str(quickstart), str(FOLDER / f"{recipe}.yaml")], 1)
    ours = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    assert ours.items() <= values_of(program).items()
    assert [role for role in program.roles if role in ("critic", "reference")] == MODELS[recipe]
    named = set(re.findall(r"--([a-z-]+)(?=, | \()", " ".join(program.warnings))) - {"advantage", "policy-loss"}
    idle = {"value-clip-range", "critic-lr"} if "critic" not in MODELS[recipe] else set()
    idle |= {"gae-lambda"} if ours["advantage"] != "gae" else set()
    idle |= {"gamma"} if "gamma" not in ours else set()
    idle |= {"clip-range"} if "clip-range" not in ours else set()
    assert named == idle
