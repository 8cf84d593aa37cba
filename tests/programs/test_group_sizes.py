"""Runs in which files of a mixture have groups of their own sizes: layouts, resumes, all that reads groups."""

import itertools
import json
from pathlib import Path

import pytest

from megarl.rewards import grouped
from tests.helpers.flag_cases import ONLINE
from tests.helpers.forked_programs import refusal
from tests.helpers.judges import judge_flags, write
from tests.helpers.programs import GRADED, addition, inputs, metrics, rl_argv, samples, train, write_lines
from tests.helpers.replays import played
from tests.helpers.tiers import by_default, long
from tools import _metric_catalog as metric_catalog

# Mini-batches of two prompts.
FLAGS = "--advantage grpo --kl-coefficient 0 --prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 8"
COARSE = "--reward tests.helpers.programs:coarse_reward --group-filter reward --dynamic-sampling"
PARTIAL = "--over-sampling 2 --partial-rollouts --rollout-correction tis"
TURNS = (
    "--environment tests.helpers.sum_environments:Sums --max-turns 3 --max-turn-length 4 --max-response-length 18"
    " --max-tokens-per-microbatch 100 --reward environment"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"


JUDGED = "JUDGED --judge-max-length 160 --reward-max-failures 1"  # see `in_folder`


def in_folder(folder: Path, flags: str, *paths: Path) -> str:
    """Flags with a folder in place of its name, and those of a judge whose file is there."""
    return flags.format(*paths, folder=folder).replace("JUDGED", judge_flags(folder / "judge.yaml"))


@grouped
def places(samples) -> list[float]:
    """The place of each response in its group, which is whole."""
    assert len(samples) == (2 if samples[0].prompt.startswith("35+") else 4)
    return [place / len(samples) for place in range(len(samples))]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """Mixtures of `many` and `few`, in equal shares, by what they say about groups: `few` has two responses to a prompt
    ("two"), one, eight, or four as the flag says, and in "both" `many` is said to have four, too."""
    folder = tmp_path_factory.mktemp("mixtures")
    few = write_lines(folder / "few.jsonl", [addition(35, n) for n in range(6)])
    texts = {"two": ("", 2), "one": ("", 1), "eight": ("", 8), "both": ("  samples-per-prompt: 4\n", 4)}
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


@pytest.fixture(scope="module")
def alone(mixtures, tmp_path_factory) -> Path:
    save = tmp_path_factory.mktemp("alone") / "run"
    train("rl", rl_argv(save, f"{FLAGS} --prompts {mixtures['two']} --train-iters 2 --save-interval 1"))
    return save


def test_groups_have_the_sizes_of_their_files_and_a_run_resumes(alone, mixtures, tmp_path):
    for step in (1, 2):
        assert group_sizes(rows_of(alone, step)) == {"many": [4, 4], "few": [2, 2]}
        assert metrics(alone)[step]["actor/updates"] == 2
    middle = alone / "checkpoints" / "step_00000001"
    train("rl", rl_argv(tmp_path, f"{FLAGS} --prompts {mixtures['two']} --train-iters 2 --load {middle}"))
    assert_same(tmp_path, alone, [2])


LAYOUTS = {
    "two replicas": (2, ""), "four replicas": (4, ""), "TP2": (2, "--tensor-model-parallel-size 2"),
    "apart": (3, "--role-map actor=0;reward=1;rollout=1-2"), "a static rollout": (2, "--rollout-dispatch static"),
}  # fmt: skip


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["two replicas"]))
def test_every_layout_gives_the_same_responses(layout, alone, mixtures, tmp_path):
    size, flags = LAYOUTS[layout]
    train("rl", rl_argv(tmp_path, f"{FLAGS} --prompts {mixtures['two']} --train-iters 2 {flags}"), size)
    assert samples(tmp_path, 1) == samples(alone, 1)
    one, other = (metrics(save)[1] for save in (tmp_path, alone))
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


SAMPLING = {  # flags, and the ranks and flags of another layout
    "a filter": (f"{COARSE} --max-sampling-rounds 2", 2, ""),
    "over-sampling": (f"{COARSE} --over-sampling 2 --max-sampling-rounds 2", 2, ""),
    "partial rollouts": (PARTIAL, 2, ""),
    "stale groups": (f"{PARTIAL} --max-staleness 4 --rollout-prefix-caching", 2, ""),
    "a lag": ("--role-map actor=0;reward=0;rollout=1 --generation-lag 1 --rollout-correction tis", 3,
              "--role-map actor=0;reward=0;rollout=1-2"),
    "a lag and partial rollouts": (f"--role-map actor=0;reward=0;rollout=1 --generation-lag 1 {PARTIAL}", 3,
                                   "--role-map actor=0;reward=0;rollout=1-2"),
    "an environment": (TURNS, 2, ""),
    "turns": (f"{TURNS} --advantage rloo --credit turns", 2, ""),
    "partial episodes": (f"{TURNS} {PARTIAL}", 2, ""),
    "partial agents": (f"{TURNS} {PARTIAL}".replace("sum_environments:Sums", "agents:sums"), 2, ""),
    "greedy baselines": ("--advantage remax --greedy-baseline", 2, ""),
    "greedy baselines and a filter": (f"{COARSE} --max-sampling-rounds 2 --advantage remax --greedy-baseline", 2, ""),
    "pools": ("--pool-bounds 0.3,0.7 --reward tests.helpers.programs:coarse_reward", 2, ""),
    "routes": (f"{EXPERTS} {PARTIAL}", 2, ""),
    "a comparing loss": ("--policy-loss real", 2, ""),
    "a bank": ("--rollout-bank {folder}/bank", 2, "--rollout-dispatch static"),
    "a grouped reward": ("--reward tests.programs.test_group_sizes:places --ppo-epochs 1 --minibatch-size 16", 2, ""),
    "preferences": (f"{ONLINE} --minibatch-size 16 --ppo-epochs 1 --kl-coefficient 0.1", 2, ""),
    "the optimal baseline": ("--advantage otb", 2, ""),
    "pairs that are judged": (JUDGED, 3, "--role-map actor=0;rollout=1;reward=2"),
    "siblings": (f"--distill reward --teacher self --teacher-context sibling --teacher-max-prompt-length 300 {GRADED}"
                 " --max-tokens-per-microbatch 400", 2, ""),
    "a critic": ("--advantage gae --critic-lr 1e-3", 2, "--role-map actor=0;critic=1;reward=1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [long(kind) for kind in SAMPLING])
def test_all_that_samples_knows_the_sizes(kind, mixtures, tmp_path):
    """The sizes of all groups, the same responses in another layout, an exact resume."""
    flags, size, other = SAMPLING[kind]
    ranks = 2 if "rollout=1" in flags else 1

    write(tmp_path / "judge.yaml", mode="pair", messages=[{"role": "user", "content": "{first}{second}="}])

    def run(name: str, more: str, ranks: int) -> Path:
        own = f"{in_folder(tmp_path, flags)} --train-iters 3 --save-interval 1 {more}"
        common = f"{FLAGS} --prompts {mixtures['two']} {own}"
        train("rl", rl_argv(tmp_path / name, common, "experts" not in flags), ranks)
        return tmp_path / name

    whole, middle = run("whole", "", ranks), f"--load {tmp_path}/whole/checkpoints/step_00000002"
    every = [group_sizes(rows_of(whole, step)) for step in (1, 2, 3)]
    assert all(any(found[name] for found in every) for name in ("many", "few"))
    for found in every:
        assert {*found["many"]} <= {4} and {*found["few"]} <= {2}
    assert not metric_catalog.unknown(metrics(whole)[3])
    assert_same(run("part", middle, ranks), whole, [3])
    assert samples(run("other", other, size), 1) == samples(whole, 1)
    moved = group_sizes(rows_of(run("moved", f"{middle} {other}", size), 3))
    assert {*moved["many"]} <= {4} and {*moved["few"]} <= {2} and sum(moved.values(), [])


@pytest.mark.long
def test_a_run_is_repeated_from_its_rollouts(mixtures, tmp_path):
    flags = f"{FLAGS} --prompts {mixtures['two']} {COARSE} {PARTIAL} --max-sampling-rounds 2 --train-iters 2"
    train("rl", rl_argv(tmp_path / "run", f"{flags} --save-rollouts"))
    again = f"--debug-train-only --load-rollouts {tmp_path}/run"
    for name, size in (("one", 1), ("two", 2)):
        train("rl", rl_argv(tmp_path / name, f"{flags} {again}"), size)
        assert samples(tmp_path / name, 1) == samples(tmp_path / "run", 1)
    assert_same(tmp_path / "one", tmp_path / "run", [1, 2])
    rows = rows_of(tmp_path / "run", 2)
    last = max(row["sequence"] for row in rows)
    status, text = played(tmp_path / "run", ["--step", "2", "--sample", str(last)])
    assert status == 0 and "the record alone" in text or "the same tokens" in text, text


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


ONE = "--advantage reinforce++ "  # compares no responses
REFUSALS = {  # mixture, flags, the line
    "an estimator": ("one", "", "few: samples-per-prompt 1: --advantage grpo compares the responses to a prompt"),
    "mini-batches": ("eight", "--minibatch-size 6", "--minibatch-size 6: --prompts {}: few: samples-per-prompt 8"),
    "a filter": ("one", f"{ONE} --group-filter reward", "few: samples-per-prompt 1: --group-filter reward: needs "),
    "pools": ("one", f"{ONE} --pool-bounds 0.2,0.8", "few: samples-per-prompt 1: --pool-bounds 0.2,0.8: needs"),
    "a term": ("one", f"{ONE} --reward exact-match+0.1*adaptive-length", "few: samples-per-prompt 1: adaptive-length"),
    "a loss": ("one", f"{ONE} --policy-loss real", "few: samples-per-prompt 1: --policy-loss real: compares"),
    "pairs": ("one", f"{ONE} {JUDGED}", "--prompts {}: samples-per-prompt 1: --judge-config"),
    "a horizon": ("eight", "--kl-coefficient 0.1 --kl-controller adaptive --kl-target 0.1 --kl-horizon 5",
                  "few: samples-per-prompt 8: --kl-horizon 5.0: allowed is more than 0.2 × 32 responses of a step"),
    "an evaluation": ("one", f"{ONE} --eval-interval 1 --eval-prompts {{}}", "few: samples-per-prompt is unknown here"),
}  # fmt: skip


@pytest.mark.parametrize("what", by_default(REFUSALS, ["an estimator", "mini-batches"]))
def test_sizes_that_a_run_cannot_have_are_refused(what, mixtures, tmp_path):
    name, flags, message = REFUSALS[what]
    write(tmp_path / "judge.yaml", mode="pair", messages=[{"role": "user", "content": "{first}{second}="}])
    path = mixtures[name]
    own = in_folder(tmp_path, flags, path)
    assert message.format(path) in refusal(rl_argv(tmp_path / "run", f"{FLAGS} --prompts {path} {own}"))
