"""`--stop`, `--stop-token-ids`: responses end there, in training, with environments and in evaluations."""

import functools
import json
from pathlib import Path

import pytest

from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import metrics, rl_argv, rows_of, samples, timeless, train
from tests.helpers.tiers import long

STOP = '["1","52"]'
RUN = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-3 --train-iters 2 --max-response-length 12 --temperature 1.5"
    f" --max-tokens-per-microbatch 60 --prompts-per-step 4 --minibatch-size 4 --stop {STOP}"
)
PARTIAL = "--over-sampling 2 --partial-rollouts --rollout-correction tis"
TURNS = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 3 --max-turn-length 6 --max-response-length 34"
    " --max-tokens-per-microbatch 100 --environment-timeout 60 --reward environment"
)


@functools.cache
def run_of(folder: Path, flags: str, size: int) -> Path:
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", rl_argv(save, f"{RUN} {flags}"), size)
    return save


def first_stop(text: str) -> int | None:
    """Where the first stop string of a text ends."""
    ends = [text.find(stop) + len(stop) for stop in json.loads(STOP) if stop in text]
    return min(ends, default=None)


@pytest.mark.parametrize("size, flags", [
    (1, ""), (1, PARTIAL), long((2, PARTIAL)), long((1, "--rollout-max-requests 4 --rollout-buffer-gb 0.0005")),
    long((2, "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis")),
    long((2, "--tensor-model-parallel-size 2")),
])  # fmt: skip
def test_no_response_goes_on_after_a_stop_string(size, flags, folder):
    save, stopped = run_of(folder, flags, size), 0
    for step in (1, 2):
        for row in rows_of(save, step):
            end = first_stop(row["response"])
            assert end is None or end == len(row["response"]), row
            stopped += end is not None
        assert metrics(save)[step]["rollout/logprob_gap_max"] <= largest_gap_allowed() or "correction" in flags
    assert stopped >= 3


def test_a_stop_string_of_one_token_is_a_stop_token(folder, tmp_path):
    from megarl.data.tokenizers import build_tokenizer
    from tests.helpers.programs import inputs

    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    numbers = [i for i in range(tokenizer.vocab_size) if "1" in tokenizer.decode([i])]
    flags = RUN.partition(" --stop ")[0]
    train("rl", rl_argv(tmp_path / "ids", f"{flags} --stop-token-ids {','.join(map(str, numbers))}"))
    train("rl", rl_argv(tmp_path / "text", f"{flags} --stop 1"))
    for step in (1, 2):
        assert samples(tmp_path / "ids", step) == samples(tmp_path / "text", step)
    assert timeless(metrics(tmp_path / "ids")[2]) == timeless(metrics(tmp_path / "text")[2])


def test_turns_end_with_them_and_are_closed_for_the_policy_but_not_by_it(folder):
    save = run_of(folder, TURNS, 1)
    for step in (1, 2):
        turns = [turn for row in rows_of(save, step) for turn in row["turns"]]
        ends = [first_stop(turn["text"]) for turn in turns]
        assert all(end in (None, len(turn["text"])) for end, turn in zip(ends, turns, strict=True))
        assert sum(end is not None for end in ends) > 1 and len(turns) > len(rows_of(save, step))
        assert metrics(save)[step]["rollout/logprob_gap_max"] <= largest_gap_allowed()


def test_evaluations_and_what_is_refused(folder, tmp_path):
    save = run_of(folder, "", 1)
    flags = f"--eval-samples 8 --eval-temperature 1.5 --max-response-length 12 --stop {STOP}"
    run_evaluate(evaluate_argv(tmp_path / "out", flags, load=save))
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    ends = [(first_stop(row["response"]), len(row["response"])) for row in rows]
    assert rows and all(end in (None, size) for end, size in ends) and any(end for end, _ in ends)
    flags = RUN.partition(" --stop ")[0]
    for more, words in (("--stop-token-ids 99999", "--stop-token-ids 99999: allowed are ids below"),
                        ('--stop ["a"', "--stop"), ("--stop-token-ids 7,-1", "--stop-token-ids")):  # fmt: skip
        assert words in refusal(rl_argv(tmp_path / "x", f"{flags} {more}"), "rl")
