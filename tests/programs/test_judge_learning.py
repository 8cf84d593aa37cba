"""A policy that a judge rewards learns the task: the judged number and the truth, which has no weight, both rise."""

import random
from pathlib import Path

import pytest

from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.rewards.base import Sample
from megarl.rewards.judge.config import read_config
from megarl.rewards.judge.judge_prompts import JudgePrompts
from tests.helpers.envs.judges import LENGTH, judge_flags, write
from tests.helpers.programs import inputs, metrics, rl_argv, sft_argv, train, write_lines

TRUTH = "tests.programs.test_judge_learning:is_even"


def is_even(sample) -> float:
    """A plug-in: 1 for a response that is an even number."""
    return float(sample.response.isdigit() and int(sample.response) % 2 == 0)


def lessons(config: Path, count: int) -> list[dict]:
    """Lines that teach a judge: what it reads of a text, and 1 if this is an even number, else 0."""
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    prompts, draw, rows = JudgePrompts(read_config(str(config)), Encoder(tokenizer), 5, LENGTH, 4), random.Random(0), []
    for _ in range(count):
        text = str(draw.randrange(10 ** draw.randrange(1, 5)))
        if draw.random() < 0.3:  # no number
            text = "".join(draw.choice("+=? 0123456789") for _ in range(draw.randrange(5)))
        (message,) = prompts.messages(Prompt(0), [text])
        rows.append({"prompt": message["content"], "response": str(int(is_even(Sample("", text))))})
    return rows


@pytest.mark.long
def test_a_policy_learns_from_a_judge(tmp_path):
    config = write(
        tmp_path / "judge.yaml", messages=[{"role": "user", "content": "{response}"}], range=[0, 1],
        number={"choice": {"1": 1, "0": 0}}, temperature=0, samples=1, retries=0,
    )  # fmt: skip
    lines = write_lines(tmp_path / "lessons.jsonl", lessons(config, 3000))
    shape = "--{0}hidden-size 64 --{0}ffn-hidden-size 128"
    teach = f"--prompts {lines} --train-iters 500 --global-batch-size 64 --lr 3e-3 --lr-warmup-iters 20"
    lengths = "--max-prompt-length 60 --max-tokens-per-microbatch 4096"
    train("sft", sft_argv(tmp_path / "judge", f"{teach} {lengths} {shape.format('')}"))
    flags = judge_flags(config, reward=f"judge+0*{TRUTH}").replace(f"{inputs()}/sft", f"{tmp_path}/judge")
    more = "--train-iters 40 --minibatch-size 12 --ppo-epochs 1 --lr 2e-3 --advantage grpo --kl-coefficient 0.02"
    more += f" {shape.format('reward-')}"
    train("rl", rl_argv(tmp_path / "run", f"{flags} {more} --prompts-per-step 6 --samples-per-prompt 4"), 2)
    found = metrics(tmp_path / "run")
    for name in ("reward/judge/mean", f"reward/{TRUTH}/mean"):
        first, last = (sum(found[step][name] for step in steps) / 5 for steps in (range(1, 6), range(36, 41)))
        assert last > first + 0.2, (name, first, last)
