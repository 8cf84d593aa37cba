"""Training of reward models: pairs become ordered; runs that start from it. Layouts and resume are in tests/laws."""

import json
import math

import pytest
import torch

from tests.helpers.checkpoints import stored_weights
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import REWARD_STEPS as STEPS
from tests.helpers.programs import (
    in_world,
    inputs,
    metrics,
    preferences,
    program,
    reward_argv,
    reward_model,
    rl_argv,
    train,
    write_lines,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world

NAMES = ["reward/loss", "reward/accuracy", "reward/margin", "reward/mean"]
EVALUATED = ["eval/loss", "eval/accuracy", "eval/margin", "eval/mean"]


def held_out() -> str:
    """The flag of the held-out pairs."""
    return f"--eval-prompts {preferences()}/heldout-preferences.jsonl"


def test_held_out_pairs_become_correctly_ordered():
    rows = metrics(reward_model())
    assert rows[1]["reward/loss"] == pytest.approx(math.log(2), abs=2e-6)  # a head of zeros: all scores are 0
    assert [rows[1][f"reward/{name}"] for name in ("margin", "mean", "accuracy")] == [0.0, 0.0, 0.0]
    assert rows[10]["eval/loss"] > rows[STEPS]["eval/loss"] and rows[STEPS]["eval/accuracy"] >= 0.9
    assert all(row["reward/grad_norm"] > 0 and row["steps_skipped"] == 0 for row in rows.values())
    manifest = json.loads((reward_model() / f"checkpoints/step_{STEPS:08d}/manifest.json").read_text())
    assert manifest["program"] == "train_reward" and manifest["step"] == STEPS


def test_only_centring_moves_all_scores_together(tmp_path):
    """Differences of scores have no gradient for the head's bias, not even that of rounding, which Adam would scale."""
    train("reward", reward_argv(tmp_path, "--train-iters 3 --global-batch-size 3 --centring-coefficient 0.1"))
    bias, centred = (stored_weights(save, step, "reward")["output_layer.bias"]
                     for save, step in [(reward_model(), STEPS), (tmp_path, 3)])  # fmt: skip
    assert torch.equal(bias, torch.zeros(1)) and centred != 0


def own_means(network, pairs, lines, margin: float, centring: float) -> list[float]:
    """Loss, accuracy, margin and mean score of pairs, each text alone through a model of one chunk, in float64."""
    from megarl.mcore.model.forward_pass import inference_mode, sequence_scores

    def score(tokens):
        return float(sequence_scores(network, torch.tensor(tokens), torch.tensor([len(tokens)])))

    rows = []
    with inference_mode(network):
        for line in lines:
            c, r = (score(tokens) for tokens, _ in pairs[line])
            loss = math.log1p(math.exp(-(c - r - pairs.margins[line] - margin))) + centring * (c + r) ** 2
            rows.append([loss, float(c > r), c - r, (c + r) / 2])
    return torch.tensor(rows, dtype=torch.float64).mean(0).tolist()


def watched(rank: int, parsed) -> list[tuple[list, list]]:
    """(own, recorded) means of each step and, last, of the evaluation."""
    from megarl.trainers import preference_trainer

    seen, options = [], (parsed.settings.preference_margin, parsed.settings.centring_coefficient)

    class Watched(preference_trainer.RewardModelTrainer):
        def next_batch(self):
            lines = self.order.indices(self.order.position, self.role.megatron.global_batch_size)
            drawn = super().next_batch()
            seen.append((own_means(self.trainable_model.model[0], self.inputs.examples, lines, *options), []))
            assert all(part.host_metadata.shared for part, places in self.microbatches(drawn.batch) if len(places))
            return drawn

        def log(self, step):
            super().log(step)
            seen[-1][1].extend(self.metrics[name] for name in NAMES)
            if "eval/loss" in self.metrics:
                own = own_means(self.trainable_model.model[0], self.inputs.held_out, range(5), *options)
                seen.append((own, [self.metrics[name] for name in EVALUATED]))

    preference_trainer.RewardModelTrainer = Watched
    in_world(rank, "reward", parsed)
    return seen


def test_losses_and_metrics_equal_the_formulas(tmp_path):
    """Margins of the lines and of the run, centring, accuracy: as the formula says, over two replicas."""
    lines = map(json.loads, (preferences() / "preferences.jsonl").read_text().splitlines())
    rows = write_lines(tmp_path / "rows.jsonl", [row | {"margin": i % 3 / 2} for i, row in enumerate(lines)])
    flags = "--preference-margin 0.25 --centring-coefficient 0.5 --train-iters 3 --global-batch-size 5 --eval-samples 5"
    parsed = program("reward", reward_argv(tmp_path / "run", f"{flags} --prompts {rows} {held_out()}"), 2)
    for seen in run_world(watched, 2, parsed):
        assert len(seen) == 4
        for own, recorded in seen:
            assert recorded == pytest.approx(own, rel=1e-5, abs=1e-7)
        assert seen[2][0][2] != 0.0  # scores differ by then


def test_a_run_ends_at_its_target_accuracy(tmp_path):
    start = f"--pretrained-checkpoint {reward_model()} {held_out()} --eval-interval 1 --target-eval-accuracy 0.9"
    train("reward", reward_argv(tmp_path, f"--train-iters 9 {start}"))
    rows = metrics(tmp_path)
    assert sorted(rows) == [1] and rows[1]["reward/loss"] < 0.3  # it went on with the head of the reward model
    assert (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").exists()


def test_a_reward_model_starts_from_a_policy(tmp_path):
    train("reward", reward_argv(tmp_path / "policy", f"--train-iters 1 --pretrained-checkpoint {inputs()}/sft"))
    train("reward", reward_argv(tmp_path / "scratch", "--train-iters 1"))
    one, other = metrics(tmp_path / "policy")[1], metrics(tmp_path / "scratch")[1]
    assert one["reward/loss"] == other["reward/loss"] == pytest.approx(math.log(2), abs=2e-6)
    assert one["reward/grad_norm"] != pytest.approx(other["reward/grad_norm"], rel=0.01)  # of other hidden states


# -- who starts from a reward model ------------------------------------------------------------------------------


def started(rank: int, parsed, pairs):
    """Scores of a frozen reward model, values of a critic that started from it, and the critic's after an update."""
    from megarl.checkpoint import pretrained
    from megarl.comm import role_mesh
    from megarl.mcore.model import forward_pass, gpt
    from megarl.mcore.training import optimizer
    from megarl.roles.trainable_model import TrainableModel

    here = role_mesh.create_mesh(parsed.roles, SAFETY)
    role, place = parsed.roles["critic"], here["critic"]
    described = ("--pretrained-checkpoint", role, 16, ("actor", "reward"))
    folder = pretrained.checkpoint_weights(str(reward_model()), *described).folder
    model = gpt.build_frozen_model(role.megatron, 16, place.pg_collection, value_head=True)
    pretrained.load_weights(folder, model, place.pg_collection)
    critic = TrainableModel(role, place, 16, updates=1, value_head=True)
    pretrained.load_weights(folder, critic.model, place.pg_collection, optimizer=critic.optimizer)
    texts = [tokens for pair in pairs for tokens, _ in pair]
    scores, values = [], []
    with torch.no_grad():
        for tokens in texts:
            whole, longer = torch.tensor(tokens), torch.tensor([*tokens, 3])
            scores.append(float(forward_pass.sequence_scores(model[0], whole, torch.tensor([len(whole)]))))
            values.append(float(forward_pass.token_values(critic.model[0], longer, torch.tensor([len(longer)]))[-1]))
    before = [p.detach().clone() for p in critic.model.parameters()]
    critic.wrapped[0].zero_grad_buffer()
    assert optimizer.update(critic.optimizer)[0]  # no gradient: nothing but its own copies could move the weights
    moved = max(float((p - q).abs().max()) for p, q in zip(before, critic.model.parameters(), strict=True))
    return scores, values, moved


@pytest.mark.parametrize("size, flags", [long((1, "")), (2, "--tensor-model-parallel-size 2"), long((1, "--bf16"))])
def test_the_critic_starts_as_the_reward_model(size, flags, tmp_path):
    from megarl.trainers.preference_trainer import RewardModelTrainer
    from megarl.trainers.supervised_trainer import SupervisedInputs

    pairs = SupervisedInputs(program("reward", reward_argv(tmp_path, held_out()), 1), RewardModelTrainer).held_out
    parsed = program("rl", rl_argv(tmp_path, f"{flags} --weight-decay 0", warm_start=False), size)
    expected = metrics(reward_model())[STEPS]["eval/margin"]  # made before the ranks are forked
    for scores, values, moved in run_world(started, size, parsed, pairs):
        assert values == pytest.approx(scores, abs=0 if size == 1 else 1e-5)
        assert moved == 0.0
        margins = torch.tensor(scores).view(-1, 2) @ torch.tensor([1.0, -1.0])
        assert float(margins.mean()) == pytest.approx(expected, rel=0.05 if "bf16" in flags else 1e-5)


# -- wrong input -------------------------------------------------------------------------------------------------

GOOD = {"prompt": "1+2=", "chosen": "4", "rejected": "3"}
WRONG = {
    "no chosen": ({"chosen": None}, "", "rows.jsonl:2: a preference needs chosen"),
    "equal": ({"rejected": "4"}, "", "rows.jsonl:2: chosen and rejected are the same"),
    "negative margin": ({"margin": -0.5}, "", "rows.jsonl:2: margin"),
    "no room for a pair": ({}, "--max-tokens-per-microbatch 19", "--max-tokens-per-microbatch 19"),
    "other shapes": ({}, "--hidden-size 64 --pretrained-checkpoint {reward}", "[32, 32]"),
    "a policy's run": ({}, "--load {sft}", "was written by train_sft"),
    "no steps left": ({}, f"--train-iters {STEPS} --load {{reward}}", "--train-iters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, tmp_path):
    row, flags, needle = WRONG[case]
    rows = write_lines(tmp_path / "rows.jsonl", [GOOD, GOOD | row])
    flags = f"--prompts {rows} " + flags.format(reward=reward_model(), sft=inputs() / "sft")
    assert needle in refusal(reward_argv(tmp_path / "run", flags), "reward")
