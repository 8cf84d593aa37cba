"""The PPO program: end to end, the same in every layout, resumed exactly, deterministic; training raises the reward."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import (
    GRADED,
    in_world,
    inputs,
    metrics,
    program,
    rl_argv,
    rows_of,
    samples,
    torchrun,
    train,
)
from tests.helpers.server.servers import ForkedLauncher
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY_SECONDS, RankFailed, run_world

TWO = "--role-map actor=0;critic=1;reward=1;reference=1"
DISJOINT = "--role-map actor=0-1;critic=2;reward=3;reference=3 --actor-tensor-model-parallel-size 2"
ROLE_PHASES = {
    "actor": ("rollout", "exchange", "logprobs", "advantages", "update"), "critic": ("values", "exchange", "update"),
    "reward": ("score", "exchange"), "reference": ("logprobs", "exchange"),
}  # fmt: skip
METRICS = [
    "step", "reward/mean", "reward/std", "actor/loss", "actor/ppo_kl", "actor/ppo_kl_first", "actor/clip_fraction",
    "actor/entropy", "actor/grad_norm", "critic/loss", "critic/explained_variance", "critic/grad_norm", "kl/reference",
    "kl/coefficient", "rollout/tokens", "rollout/tokens_per_s", "rollout/logprob_gap_max", "rollout/logprob_gap_mean",
    "weights/sync_bytes", "weights/sync_s", "time/step_s", "perf/tokens_per_s", "steps_skipped",
    *(f"time/{role}/{phase}_s" for role, phases in ROLE_PHASES.items() for phase in phases),
    *(f"time/{role}/idle_fraction" for role in ROLE_PHASES),
]  # fmt: skip


# -- as users run it ---------------------------------------------------------------------------------------------


def launched(argv: list[str], ranks: int, folder: Path) -> tuple[int, str, str]:
    """Status, output and errors of the program under megarl's launcher, in a fork: imports take most of a start."""
    process = ForkedLauncher(["--nproc-per-node", str(ranks), "train_rl", *argv], folder / "log")
    try:
        printed = process.stdout.read()
        return process.wait(SAFETY_SECONDS), printed, (folder / "log").read_text()
    finally:
        process.kill()


def by_torchrun(argv: list[str], ranks: int, folder: Path) -> tuple[int, str, str]:
    """The same as users of torchrun start it."""
    done = torchrun("megarl.train_rl", argv, ranks)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("start, ranks, roles", [
    (launched, 2, TWO), long((by_torchrun, 2, TWO)), long((by_torchrun, 4, DISJOINT)),
])  # fmt: skip
def test_end_to_end(start, ranks, roles, tmp_path):
    save = tmp_path / "run"
    held_out = f"--eval-prompts {inputs()}/heldout.jsonl --eval-interval 2"
    status, printed, errors = start(rl_argv(save, f"{roles} --train-iters 3 {held_out}"), ranks, tmp_path)
    assert status == 0, errors
    assert "Warning" not in errors and "Traceback" not in errors, errors
    kernels, *lines = printed.splitlines()
    assert kernels.startswith("megarl: kernels: ")
    assert lines[0].startswith("held-out accuracy before training: ") and lines[-1].startswith("held-out accuracy: ")
    assert [line.split("|")[0].split() for line in lines[1:-1]] == [["step", f"{i}/3"] for i in (1, 2, 3)]
    assert all(word in line for line in lines[1:-1] for word in ("reward", "kl", "tokens/s", " s |", "ETA"))
    for name in ("settings.yaml", "metrics.jsonl", "timeline.json", "report.png", "report.html",
                 "checkpoints/step_00000003/manifest.json"):  # fmt: skip
        assert (save / name).stat().st_size > 0, name
    assert list((save / "tensorboard").glob("events*"))
    assert (save / "checkpoints" / "latest").read_text().strip() == "step_00000003"
    events = json.loads((save / "timeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} >= {*range(ranks)}
    check_rows(metrics(save))
    check_samples(save)
    check_tokens(save)
    settings = yaml.safe_load((save / "settings.yaml").read_text())
    assert settings["environment"]["torch"]
    of_roles = {name: role["megatron"] for name, role in settings["roles"].items()}
    assert of_roles["actor"]["num_layers"] == 2 and of_roles["critic"]["lr"] == 3e-3
    sizes = {"tensor_model_parallel_size", "tensor_parallel_num_weight_shards", "world_size"}
    assert of_roles["reference"].keys() <= sizes, "of other roles what differs from the first"
    argv = rl_argv(save, f"{roles} --train-iters 3 {held_out}")
    assert settings["command_line"] == ["megarl.train_rl", *argv]
    assert {"prompts", "train_iters", "save"} <= set(settings["user_settings"]["megarl"])


def check_rows(rows: dict):
    assert sorted(rows) == [0, 1, 2, 3]
    evaluation = ("accuracy", "reward", "response_length_mean", "finished_fraction")
    assert set(rows[0]) == {"step", *(f"eval/{name}" for name in evaluation)}
    assert [step for step, row in rows.items() if "eval/accuracy" in row] == [0, 2, 3]
    phases = ("time/actor/rollout_s", "time/actor/eval_rollout_s", "time/reward/eval_score_s")
    assert [[name in rows[step] for name in phases] for step in (1, 2)] == [[True, False, False], [True] * 3]
    for step in (1, 2, 3):
        assert [name for name in METRICS if rows[step].get(name) is None] == []
        assert rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed()
        assert rows[step]["actor/ppo_kl_first"] == 0
        assert rows[step]["actor/ppo_kl"] != 0 and rows[step]["steps_skipped"] == 0
        assert rows[step]["weights/sync_bytes"] == 0 and not [name for name in rows[step] if "time/rollout" in name]


def check_samples(save: Path):
    assert len(list((save / "samples").iterdir())) == 3
    for step in (1, 2, 3):
        rows = rows_of(save, step)
        assert [row["sequence"] for row in rows] == list(range(12))
        for one, other in zip(rows[::2], rows[1::2], strict=True):
            assert one["prompt"] == other["prompt"]
        for row in rows:
            assert row["correct"] == (row["finished"] and row["response"] == row["answer"])
            assert row["reward"] == row["correct"] == row["reward_parts"]["exact_match"] and 1 <= row["length"] <= 4
            first, second = row["prompt"].rstrip("=").split("+")
            assert int(row["answer"]) == int(first) + int(second)


def check_tokens(save: Path):
    """The first 8 of 12 responses, token by token: the numbers are those of the metrics and of the samples."""
    for step in (1, 2, 3):
        lines = (save / "tokens" / f"step_{step:08d}.jsonl").read_text().splitlines()
        rows, wholes = (
            [json.loads(line) for line in lines],
            rows_of(save, step),
        )
        assert [row["sequence"] for row in rows] == list(range(8))
        for row, whole in zip(rows, wholes, strict=False):
            same = ("prompt", "response", "reward", "finished", "length")
            assert [row[name] for name in same] == [whole[name] for name in same]
            names = ("tokens", "token_ids", "rollout_logprobs", "logprobs", "reference_logprobs", "values", "returns")
            assert all(len(row[name]) == row["length"] for name in (*names, "advantages", "entropy"))
            gaps = [abs(a - b) for a, b in zip(row["logprobs"], row["rollout_logprobs"], strict=True)]
            assert max(gaps) <= largest_gap_allowed() and max(row["rollout_logprobs"]) <= 0


# -- seeds, resume -----------------------------------------------------------------------------------------------


def test_another_seed_is_another_run(tmp_path):
    for seed in (5, 6):
        train("rl", rl_argv(tmp_path / f"{seed}", f"--train-iters 1 --seed {seed}"))
    assert samples(tmp_path / "5", 1) != samples(tmp_path / "6", 1)


def test_another_schedule_is_rejected_unless_overridden(tmp_path):
    """Without --lr-decay-iters the decay ends at --train-iters: a longer run has another one."""
    train("rl", rl_argv(tmp_path, f"--train-iters 1 {GRADED}"))
    longer = f"--train-iters 4 --load {tmp_path} {GRADED}"
    with pytest.raises(RankFailed, match="UsageError: .*schedule.*--override-opt-param-scheduler"):
        train("rl", rl_argv(tmp_path, longer))
    train("rl", rl_argv(tmp_path, f"{longer} --override-opt-param-scheduler"))
    rows = metrics(tmp_path)
    assert sorted(rows) == [1, 2, 3, 4]
    assert [rows[step]["actor/learning_rate"] for step in (2, 3, 4)] == pytest.approx([5e-4, 2.5e-4, 0.0], abs=1e-9)


# -- learning ----------------------------------------------------------------------------------------------------


def test_ppo_raises_the_reward(tmp_path):
    flags = "--reward tests.helpers.programs:digit_reward --train-iters 12 --prompts-per-step 16 --samples-per-prompt 4"
    flags += " --minibatch-size 32 --max-tokens-per-microbatch 700 --lr 3e-3 --kl-coefficient 0.001 --temperature 1"
    flags += " --rollout-max-requests 64 --lr-decay-style constant"
    train("rl", rl_argv(tmp_path, flags))
    rewards = [row["reward/mean"] for row in metrics(tmp_path).values()]
    assert len(rewards) == 12
    assert rewards[0] < 0.1 and sum(rewards[-3:]) / 3 > 3 * max(rewards[0], 0.05), rewards


def watched(rank: int, parsed) -> list[tuple[dict, dict]]:
    """(actor's, critic's) weights before the first step and after each."""
    from megarl.trainers import rl_trainer

    seen = []

    def weights(run):
        networks = (run.actor.trainable_model.model, run.critic.trainable_model.model)
        return tuple({name: p.detach().clone() for name, p in model.named_parameters()} for model in networks)

    class Watched(rl_trainer.RLTrainer):
        def steps(self):
            seen.append(weights(self))
            return super().steps()

        def evaluate(self, step):
            seen.append(weights(self))
            super().evaluate(step)

    rl_trainer.RLTrainer = Watched
    in_world(rank, "rl", parsed)
    return seen


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_actor_is_unchanged_while_the_critic_warms_up(tmp_path):
    argv = rl_argv(tmp_path, f"--train-iters 3 --critic-warmup-steps 2 {GRADED}")
    start, first, second, third = run_world(watched, 1, program("rl", argv, 1))[0]
    assert same(start[0], first[0]) and same(start[0], second[0]) and not same(start[0], third[0])
    assert not same(start[1], first[1]) and not same(first[1], second[1]) and not same(second[1], third[1])
    rows = metrics(tmp_path)
    for name in ("actor/loss", "actor/updates"):
        assert [name in rows[step] for step in (1, 2, 3)] == [False, False, True]
    assert all("critic/loss" in rows[step] and "rollout/logprob_gap_max" in rows[step] for step in (1, 2, 3))


@pytest.mark.long
def test_the_schedule_goes_on_while_the_critic_warms_up(tmp_path):
    flags = f"--train-iters 4 --lr-decay-style linear --lr-decay-iters 4 --min-lr 0 {GRADED}"
    rates = []
    for name, more in (("plain", ""), ("warm-up", "--critic-warmup-steps 2")):
        run_world(watched, 1, program("rl", rl_argv(tmp_path / name, f"{flags} {more}"), 1))
        rows = metrics(tmp_path / name)
        rates.append([rows[step].get("actor/learning_rate") for step in (1, 2, 3, 4)])
    assert rates[1] == [None, None, *rates[0][2:]] and rates[0][2] > rates[0][3] == 0


def poisoned(rank: int, parsed) -> list:
    """A run whose second and fourth steps have NaN advantages on one replica."""
    from megarl.roles.advantage_computer import AdvantageComputer

    complete = AdvantageComputer.compute

    def poison(self, batch):
        complete(self, batch)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls in (2, 4) and rank == 1:
            batch["actor"].advantages[:] = float("nan")

    AdvantageComputer.compute = poison
    return watched(rank, parsed)


def test_a_step_that_is_not_finite_on_one_replica_is_skipped_by_all_and_counted(tmp_path):
    """Two such steps that are not in a row do not end the run."""
    argv = rl_argv(tmp_path, f"--train-iters 4 --minibatch-size 12 --ppo-epochs 2 --max-skipped-steps 2 {GRADED}")
    results = run_world(poisoned, 2, program("rl", argv, 2))
    for _, first, second, third, _ in results:
        assert same(first[0], second[0]) and not same(second[0], third[0])
        assert all(torch.isfinite(weight).all() for weight in third[0].values())
        assert not same(first[1], second[1])  # the critic had nothing to skip
    assert all(same(one[0], other[0]) for one, other in zip(*results, strict=True))
    rows = metrics(tmp_path)
    assert [rows[step]["actor/updates_skipped"] for step in (1, 2, 3, 4)] == [0, 2, 0, 2]
    assert [rows[step]["steps_skipped"] for step in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert rows[2]["actor/loss"] is None and rows[3]["actor/loss"] is not None


def test_a_run_ends_after_many_skipped_steps(tmp_path):
    flags = "--train-iters 4 --minibatch-size 12 --ppo-epochs 2 --save-interval 1 --max-skipped-steps 1"
    argv = rl_argv(tmp_path, f"{flags} {GRADED}")
    with pytest.raises(RankFailed, match="RunStopped: --max-skipped-steps 1: .* up to step 2, an update was skipped"):
        run_world(poisoned, 2, program("rl", argv, 2))
    assert list(metrics(tmp_path)) == [1, 2]  # and the checkpoint before it is the latest
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000001"
