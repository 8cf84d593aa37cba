"""A teacher that reads a correct sibling's response: which one, its numbers, and what is said; more in tests/laws."""

import re
from pathlib import Path

import pytest
import torch

from megarl.checkpoint import resume
from megarl.planning import traffic
from megarl.roles.teacher_prompts import siblings
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import (
    GRADED,
    in_world,
    metrics,
    program,
    rl_argv,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

COMPARED = ["distill/divergence", "distill/forward_kl", "distill/reverse_kl", "distill/top1_agreement",
            "teacher/logprob", "teacher/context_fraction"]  # fmt: skip
SIBLING = "--teacher-context sibling --teacher-max-prompt-length 12 --samples-per-prompt 4 --prompts-per-step 3"
APART = "--role-map actor=0;reward=1;reference=0;teacher=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    (folder / "template.txt").write_text("{response}={question}\n")
    return folder


def argv_of(folder: Path, save: Path, flags: str) -> list[str]:
    own = f"--kl-coefficient 0 --ppo-epochs 1 --minibatch-size 6 --train-iters 2 --teacher self {SIBLING}"
    template = f"--teacher-context-template {folder}/template.txt"
    return rl_argv(save, f"--advantage grpo {own} {template} {flags}")


@pytest.mark.parametrize("rewards, scored, threshold, expected", [
    ([0, 1, 0, 1], [True] * 4, 0, [1, 3, 1, 1]), ([0, 1, 0], [True] * 3, 0, [1, None, 1]),
    ([0, 0], [True] * 2, 0, [None, None]), ([0.5, 1, 0.2], [True] * 3, 1, [None] * 3),
    ([2, 1, 1], [False, True, True], 0, [None, 2, 1]), ([-1, -2], [True] * 2, -3, [None, 0]),
    ([float("nan"), 1], [False, True], 0, [None, None]), ([], [], 0, []),
])  # fmt: skip
def test_the_first_other_response_with_the_highest_reward_is_the_sibling(rewards, scored, threshold, expected):
    assert siblings(rewards, scored, threshold) == expected


def watched(rank: int, parsed) -> list[tuple]:
    """For each step (the teacher's log-probs of the responses, the same of each alone after what it should read)."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores
    from megarl.trainers import rl_trainer

    steps = []

    class Watched(rl_trainer.RLTrainer):
        def dispatch(self, batch):
            super().dispatch(batch)
            steps.append(batch)

        def log(self, step):
            super().log(step)
            batch, tokenizer = steps[-1]["actor"], self.tokenizer
            starts, found, wanted, read = batch.cu_seqlens.tolist(), [], [], 0
            for position, line in enumerate(batch.prompt_ids.tolist()):
                span, prompt = slice(starts[position], starts[position + 1]), int(batch.prompt_lengths[position])
                group = range(position // 4 * 4, position // 4 * 4 + 4)
                rewards = (batch.correct.float() if "0*" in self.settings.reward else batch.scores).tolist()
                best = max(rewards[other] for other in group)
                other = [other for other in group if other != position and rewards[other] == best > 0]
                before = batch.tokens[span][:prompt]
                if other:
                    start = starts[other[0]] + int(batch.prompt_lengths[other[0]])
                    text = tokenizer.decode(batch.tokens[start : starts[other[0] + 1]].tolist())
                    before = torch.tensor(tokenizer.encode(f"{text}={self.inputs.prompts[line].prompt}"))
                    read += 1
                sequence = torch.cat([before, batch.tokens[span][prompt:]])
                model = self.teacher.frozen_models[0].model
                with inference_mode(model):
                    alone = token_scores(model[0], sequence, torch.tensor([len(sequence)]), 1.0, tokenizer.vocab_size)
                wanted.append(alone.logprobs[len(before) :].tolist())
                found.append(batch.teacher_logprobs[span][prompt:].tolist())
            steps[-1] = found, wanted, read / len(batch), self._metrics["teacher/context_fraction"]

    rl_trainer.RLTrainer = Watched
    in_world(rank, "rl", parsed)
    return steps


@pytest.mark.parametrize("reward", [
    GRADED, long(f"{GRADED} --group-filter reward"),
    long("--reward 0*tests.helpers.programs:coarse_reward --advantage none"),  # where no reward counts: a correct one
])  # fmt: skip
def test_the_teacher_reads_the_sibling_and_then_the_question(folder, tmp_path, reward):
    argv = argv_of(folder, tmp_path, f"--distill reward {reward}")
    for found, wanted, share, metric in run_world(watched, 1, program("rl", argv, 1))[0]:
        assert found == wanted and 0 < share == metric


def test_what_is_too_long_is_left_out_and_said_once(folder, tmp_path):
    flags = f"--distill loss {GRADED} --teacher-max-prompt-length 7"
    (printed,) = run_world(with_warnings, 1, program("rl", argv_of(folder, tmp_path, flags), 1))
    for row in metrics(tmp_path).values():
        assert row["teacher/context_too_long_fraction"] > 0
        assert row["teacher/context_fraction"] + row["teacher/context_too_long_fraction"] < 1
    assert len(re.findall("--teacher-context sibling: of 12 responses", printed)) == 1


def with_warnings(rank: int, parsed) -> str:
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        in_world(rank, "rl", parsed)
    return printed.getvalue()


def test_rewards_must_be_known_before_the_teacher_reads(folder, tmp_path):
    ahead = "--role-map actor=0;reward=0;teacher=1;rollout=1 --generation-lag 1 --rollout-correction tis"
    line = refusal(argv_of(folder, tmp_path, f"--distill loss {GRADED} {ahead}"), size=2)
    assert "--teacher-context needs the scores of a batch before it is trained on" in line


def test_the_plan_counts_the_rewards_that_the_teacher_gets(folder, tmp_path):
    for flags, sent in (("", [("reward", "teacher")]), ("--group-filter reward", [])):
        config = program("rl", argv_of(folder, tmp_path, f"--distill loss {GRADED} {flags}"), 1)
        moves = [move for move in traffic.moves(config.settings, config.roles) if move.destination == "teacher"]
        assert [(move.source, move.destination) for move in moves if move.source != "rollout"] == sent
        assert resume.settings_entry(config)["--teacher-context-template"].startswith("of sha256 ")
