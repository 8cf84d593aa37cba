"""Prompts that open thoughts, and a tokenizer that has the marks of thoughts as tokens, for the small programs."""

import functools
import io
import json
from pathlib import Path

import sentencepiece

from tests.helpers.programs import inputs, rl_argv, write_lines

BUDGET, TEXT, LONG_TEXT = 5, "+=</think>", "+=" * 12 + "</think>"
FORCED = {TEXT: 3, LONG_TEXT: 25}  # tokens
FLAGS = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-3 --train-iters 2 --temperature 1 --max-prompt-length 12"
    f" --max-response-length 16 --max-tokens-per-microbatch 100 --prompts-per-step 4 --minibatch-size 4"
    f" --reward tests.helpers.programs:graded_reward --thinking-budget {BUDGET} --thinking-budget-text {TEXT}"
)


FILES = "--prompts THINKERS/train.jsonl --tokenizer-model THINKERS/tokenizer.model"
TURNS = (
    "--environment tests.helpers.envs.sum_environments:ThinkingSums --max-turns 3 --max-turn-length 14"
    " --reward environment --max-response-length 70 --max-tokens-per-microbatch 300 --environment-timeout 60"
)


@functools.cache
def thinkers() -> Path:
    """Folder with train.jsonl, heldout.jsonl and tokenizer.model, in which `<think>` and `</think>` are tokens."""
    folder = inputs() / "thinkers"
    folder.mkdir()
    rows = [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()]
    rows = [row | {"prompt": f"{row['prompt']}<think>"} for row in rows]
    write_lines(folder / "train.jsonl", rows[12:])
    write_lines(folder / "heldout.jsonl", rows[:12])
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([row["prompt"] for row in rows]), model_writer=model, model_type="char", vocab_size=18,
        hard_vocab_limit=False, user_defined_symbols=["<think>", "</think>"], normalization_rule_name="identity",
        add_dummy_prefix=False, remove_extra_whitespaces=False, pad_id=0, unk_id=1, bos_id=2, eos_id=3, num_threads=1,
        minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def with_thinkers(flags: str) -> str:
    """Flags with the folder of `thinkers` in place of its name."""
    return flags.replace("THINKERS", str(thinkers())) if "THINKERS" in flags else flags


def thinking_argv(save: Path, flags: str = "") -> list[str]:
    """Command line of a small run of train_rl with a thinking budget, from random weights."""
    return rl_argv(save, with_thinkers(f"{FLAGS} {FILES} {flags}"), warm_start=False)
