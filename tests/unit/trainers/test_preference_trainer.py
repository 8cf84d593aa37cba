"""Training on pairs: the first loss, the formula, layouts, resume, runs that start from it, and wrong input."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from megarl.errors import UsageError
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import (
    in_world,
    inputs,
    metrics,
    preference_argv,
    preferences,
    program,
    rl_argv,
    train,
    write_lines,
)
from tests.helpers.worlds import run_world

STEPS = 30


def held_out() -> str:
    """The flag of the held-out pairs."""
    return f"--eval-prompts {preferences()}/heldout-preferences.jsonl"


@functools.cache
def dpo_run(folder: Path) -> Path:
    """Folder of a run with evaluations and a checkpoint at its end."""
    flags = f"--train-iters {STEPS} --lr 5e-3 {held_out()} --eval-interval 10 --preference-beta 0.5"
    train("preference", preference_argv(folder / "dpo", flags))
    return folder / "dpo"


def test_the_policy_comes_to_prefer_the_chosen_response(folder):
    rows = metrics(dpo_run(folder))
    assert rows[1]["preference/loss"] == math.log(2)  # policy and reference are equal to the last bit
    assert rows[1]["preference/margin"] == rows[1]["preference/chosen_reward"] == 0
    assert rows[STEPS]["eval/accuracy"] >= 0.9 and rows[STEPS]["eval/loss"] < rows[10]["eval/loss"]
    manifest = json.loads((folder / f"dpo/checkpoints/step_{STEPS:08d}/manifest.json").read_text())
    assert manifest["program"] == "train_preference" and manifest["step"] == STEPS


def test_reinforcement_learning_starts_from_it(folder, tmp_path):
    start = f"--pretrained-checkpoint {dpo_run(folder)} --advantage grpo --train-iters 1 --kl-coefficient 0"
    train("rl", rl_argv(tmp_path, start, warm_start=False))
    assert metrics(tmp_path)[1]["rollout/logprob_gap_max"] == 0


# -- the loss ----------------------------------------------------------------------------------------------------

BETA, ALPHA = 0.4, 0.3


def alone(network, sequence) -> float:
    """Σ log π over the response tokens of a sequence that is alone in its batch."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    tokens, mask = (torch.tensor(column) for column in sequence)
    with inference_mode(network):
        scores = token_scores(network, tokens, torch.tensor([len(tokens)]), 1.0, 16, None, mask)
    return float(scores.logprobs[mask].double().sum())


def watched(rank: int, parsed) -> list[tuple[float, float]]:
    """(own, recorded) loss of each step and of the evaluation after the last one."""
    from megarl.trainers import preference_trainer

    seen, reference = [], {}

    class Watched(preference_trainer.PairTrainer):
        def own_loss(self, name: str, lines) -> float:
            """RPO's, written out; `name`: of the set."""
            terms, pairs = [], self.inputs.examples if name == "train" else self.inputs.held_out
            for line in lines:
                pair = pairs[line]
                w, l = (alone(self.trainable_model.model[0], s) for s in pair)  # noqa: E741
                rw, rl = reference.setdefault((name, line), (w, l))  # of the first step: the run's start
                d = BETA * ((w - rw) - (l - rl)) - pairs.margins[line]
                terms.append(math.log1p(math.exp(-d)) - ALPHA * w / sum(pair[0][1]))
            return sum(terms) / len(terms)

        def next_batch(self):
            lines = self.order.indices(self.order.position, self.role.megatron.global_batch_size)
            if not reference:
                self.own_loss("train", range(len(self.inputs.examples)))
                self.own_loss("held out", range(5))
            drawn = super().next_batch()
            assert all(part.host_metadata.shared for part, places in self.microbatches(drawn.batch) if len(places))
            seen.append([self.own_loss("train", lines)])
            return drawn

        def log(self, step):
            super().log(step)
            seen[-1].append(self.metrics["preference/loss"])
            if "eval/loss" in self.metrics:
                own = self.own_loss("held out", range(5))
                seen.append([own, self.metrics["eval/loss"]])

    preference_trainer.PairTrainer = Watched
    in_world(rank, "preference", parsed)
    return seen


def test_losses_equal_the_formula(tmp_path):
    """Over two replicas, with margins, shared prompts, and a reference that stays that of the start."""
    lines = [json.loads(line) for line in (preferences() / "preferences.jsonl").read_text().splitlines()[:7]]
    rows = write_lines(tmp_path / "rows.jsonl", [row | {"margin": i % 3 / 2} for i, row in enumerate(lines)])
    flags = f"--preference-loss rpo --preference-beta {BETA} --preference-coefficient {ALPHA} --lr 1e-2"
    flags += f" --train-iters 3 --global-batch-size 5 --eval-samples 5 --prompts {rows} {held_out()}"
    for seen in run_world(watched, 2, program("preference", preference_argv(tmp_path / "run", flags), 2)):
        assert len(seen) == 4 and len({recorded for _, recorded in seen}) == 4
        for own, recorded in seen:
            assert recorded == pytest.approx(own, rel=1e-5)


# -- wrong input -------------------------------------------------------------------------------------------------

GOOD = {"prompt": "1+2=", "chosen": "4", "rejected": "3"}
WRONG = {
    "no rejected": ({"rejected": None}, "", "rows.jsonl:2: a preference needs chosen and rejected"),
    "equal": ({"rejected": "4"}, "", "rows.jsonl:2: chosen and rejected are the same"),
    "empty": ({"chosen": ""}, "", "rows.jsonl:2: chosen: the response is empty"),
    "long": ({"chosen": "12345"}, "", "rows.jsonl:2: chosen: the response has 6 tokens with EOS"),
    "no room for a pair": ({}, "--max-tokens-per-microbatch 19", "--max-tokens-per-microbatch 19"),
    "a fine-tuning run": ({}, "--load {sft}", "was written by train_sft"),
    "other pairs": ({}, "--load {dpo} --load-changed-data --train-iters 99 --override-opt-param-scheduler",
                    "--prompts has changed, and the reference's"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, folder, tmp_path):
    row, flags, needle = WRONG[case]
    rows = write_lines(tmp_path / "rows.jsonl", [GOOD, GOOD | row])
    if "{dpo}" in flags:
        flags = flags.format(dpo=dpo_run(folder))
    flags = f"--prompts {rows} " + flags.format(sft=inputs() / "sft")
    assert needle in refusal(preference_argv(tmp_path / "run", flags), "preference")


def test_a_resumed_run_needs_its_references_logprobs(folder, tmp_path):
    """Another loss, more held-out pairs, a damaged file."""
    from megarl.trainers.preference_trainer import read_reference

    def refused(flags: str) -> str:
        return refusal(preference_argv(tmp_path / "new", f"--train-iters 9 {held_out()} {flags}"), "preference")

    once = f"--train-iters 1 --lr-decay-iters 9 {held_out()}"
    train("preference", preference_argv(tmp_path / "simpo", f"--preference-loss simpo {once}"))
    says = "has no log-probs of a reference, which only a run with such a loss computes at its start; start a new run"
    assert says in refused(f"--load {tmp_path}/simpo --preference-loss ipo")
    train("preference", preference_argv(tmp_path / "few", f"--eval-samples 3 {once}"))
    assert "log-probs of 3 held-out pairs" in refused(f"--load {tmp_path}/few --eval-samples 4")
    file = tmp_path / "reference_logprobs.pt"
    for content in ([1], {"prompts": torch.zeros(3)}):
        torch.save(content, file)
        with pytest.raises(UsageError, match="holds no log-probs of a reference"):
            read_reference(file)


def test_margins_that_a_loss_does_not_read_are_named(tmp_path):
    from megarl.trainers.preference_trainer import KTOTrainer, PairTrainer
    from megarl.trainers.supervised_trainer import SupervisedInputs

    rows = [GOOD | {"rejected": ""}, GOOD | {"prompt": "2+2="}]  # EOS alone may be rejected
    for loss, margin, count in (("ipo", 1, 1), ("dpo", 1, 0), ("kto", 1, 1), ("kto", 0, 0)):
        trainer = KTOTrainer if loss == "kto" else PairTrainer
        file = write_lines(tmp_path / f"{margin}.jsonl", [row | {"margin": margin} for row in rows])
        argv = preference_argv(tmp_path / "run", f"--prompts {file} --preference-loss {loss}")
        notes = SupervisedInputs(program("preference", argv, 1), trainer).prompt_sets["prompts"].notes
        assert sum(f"--preference-loss {loss} does not read the column margin" in note for note in notes) == count
