"""tools/make_prompts.py: disjoint and reproducible prompt files, wrong use."""

import collections.abc
import hashlib
import json
import re
import typing

import pytest

from megarl.data.prompts import load_prompts
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample
from megarl.rewards.chosen_verifiers import Options, build_named_verifiers, check_prompts
from tests.helpers.texts.small_prompts import SHORT, SUMS, make, make_prompts
from tests.helpers.tools import run_tool


def test_files_are_what_training_reads(sums):
    train, heldout = load_prompts(str(sums / "train.jsonl")), load_prompts(str(sums / "heldout.jsonl"))
    assert (len(train), len(heldout)) == (300, 60)
    verifier = build_named_verifiers(Options.of(Settings()), ["reasoning-gym"])["reasoning-gym"]

    def is_correct(sample: Sample) -> bool:
        (score,) = verifier.outcomes([sample])
        return score.correct

    for prompts in (train, heldout):
        check_prompts(Settings(reward="reasoning-gym"), prompts, scores_here=True)
        check_prompts(Settings(reward="exact-match"), prompts)
        for prompt in prompts:
            assert prompt.task == "chain_sum"
            left, operator, right, equals = prompt.prompt.split()
            assert equals == "=" and int(left) + int(f"{operator}{right}") == int(prompt.answer)
            assert is_correct(Sample(prompt.prompt, prompt.answer, prompt.answer, prompt.metadata))
            wrong = Sample(prompt.prompt, str(int(prompt.answer) + 1000), prompt.answer, prompt.metadata)
            assert not is_correct(wrong)


def test_no_question_is_in_both_files(sums):
    train, heldout = load_prompts(str(sums / "train.jsonl")), load_prompts(str(sums / "heldout.jsonl"))
    questions = [prompt.prompt for prompt in train] + [prompt.prompt for prompt in heldout]
    assert len(set(questions)) == 360


def test_both_files_follow_one_distribution(tmp_path):
    # First-come allotment would put the few one-digit questions into one file.
    assert make(tmp_path, *SUMS, train=2000, heldout=100) == 0

    def one_digit_share(name):
        prompts = load_prompts(str(tmp_path / name))
        return sum(prompt.metadata["num_digits"] == 1 for prompt in prompts) / len(prompts)

    assert abs(one_digit_share("train.jsonl") - one_digit_share("heldout.jsonl")) < 0.15


def test_prompts_that_keep_does_not_match_are_left_out(tmp_path):
    keep = r"^\d\d [+-] \d\d ="
    assert make(tmp_path / "all", *SUMS, *SHORT) == make(tmp_path / "kept", *SUMS, *SHORT, "--keep", keep) == 0
    everything, kept = (
        [
            prompt.prompt
            for name in ("train", "heldout")
            for prompt in load_prompts(str(tmp_path / folder / f"{name}.jsonl"))
        ]
        for folder in ("all", "kept")
    )
    assert len(everything) == len(kept) == 360
    assert not all(re.search(keep, prompt) for prompt in everything) and all(re.search(keep, prompt) for prompt in kept)
    assert json.loads((tmp_path / "kept" / "prompts.json").read_text())["keep"] == keep


def test_manifest(sums):
    manifest = json.loads((sums / "prompts.json").read_text())
    assert manifest["task"] == "chain_sum" and manifest["seed"] == 1
    assert manifest["task_options"] == ["max_digits=2", "max_terms=2"]
    assert manifest["reasoning_gym"]
    for name, count in (("train.jsonl", 300), ("heldout.jsonl", 60)):
        digest = hashlib.sha256((sums / name).read_bytes()).hexdigest()
        assert manifest["files"][name] == {"count": count, "sha256": digest}


@pytest.mark.long
@pytest.mark.parametrize("task", ["isomorphic_strings", "list_functions"])
def test_same_arguments_same_bytes(tmp_path, task):
    # Entries of one depend on Python's hash seed, of the other on the process's own generator as well; the first is
    # fixed only in the program as a user runs it.
    for folder, hash_seed in (("a", "1"), ("b", "2")):
        flags = "--task", task, "--train", 40, "--heldout", 10, "--out", tmp_path / folder
        done = run_tool("make_prompts", *flags, PYTHONHASHSEED=hash_seed)
        assert (done.returncode, done.stderr) == (0, "")
    for name in ("train.jsonl", "heldout.jsonl", "prompts.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_seeds_give_other_questions(tmp_path):
    options = ["--task", "chain_sum", "--task-option", "min_digits=4"]
    questions = []
    for seed in ("1", "2"):
        assert make(tmp_path / seed, *options, "--seed", seed) == 0
        questions.append({prompt.prompt for prompt in load_prompts(str(tmp_path / seed / "train.jsonl"))})
    # Seed 2 must not be seed 1 moved on by one entry.
    assert len(questions[0] & questions[1]) < 10


def test_the_whole_of_a_small_task_can_be_used(tmp_path):
    # Two one-digit terms with + or -: 10 * 10 * 2 questions.
    options = ["--task", "chain_sum", "--task-option", "max_terms=2", "--task-option", "max_digits=1"]
    assert make(tmp_path, *options, train=150, heldout=50) == 0
    assert make(tmp_path, *options, train=150, heldout=51) == 2


def test_prompts_that_hide_the_question_are_not_repeated(tmp_path, refusal):
    # Different questions, equal prompts: held-out prompts would be in train.
    assert "gave 2 in" in refusal(make, tmp_path, *SUMS, "--prompt-template", "{metadata[num_digits]}")


def test_an_overlap_in_the_files_ends_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_prompts, "split", lambda lines, heldout, seed: (lines, lines[:heldout]))
    assert make(tmp_path, *SUMS, *SHORT) == 1
    assert "60 held-out questions are in train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "chainsum"], "--task chainsum: reasoning_gym has no such task; did you mean chain_sum"),
        (["--task", "chain_sum", "--task-option", "max_digit=2"], "no option 'max_digit'; did you mean max_digits"),
        (["--task", "chain_sum", "--task-option", "seed=2"], "no option 'seed'"),
        (["--task", "chain_sum", "--task-option", "max_digits"], "must be NAME=VALUE"),
        (["--task", "chain_sum", "--task-option", "max_digits=two"], "max_digits must be int"),
        (["--task", "chain_sum", "--task-option", "max_digits=2.5"], "max_digits must be int"),
        (["--task", "chain_sum", "--task-option", "allow_negation=1"], "allow_negation must be bool"),
        ([*SUMS, "--task-option", "max_digits=3"], "max_digits is given twice"),
        (["--task", "chain_sum", "--task-option", "max_digits=0"], "max_digits must be >= min_digits"),
        (["--task", "chain_sum", "--prompt-template", "{expression}"], "KeyError 'expression'; fields: question, meta"),
        (["--task", "chain_sum", "--prompt-template", "{question"], "--prompt-template '{question': ValueError"),
        (["--task", "chain_sum", "--prompt-template", " "], "gives an empty prompt"),
        (["--task", "rearc"], "cannot be scored after they were written as JSON"),
        (["--task", "game_of_life_halting"], "its scorer calls the text ? right, where"),
        (["--task", "chain_sum", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--task", "chain_sum", "--train", "0"], "--train 0: must be at least 1"),
        (["--task", "chain_sum", "--keep", "("], "--keep '(': is no regular expression: missing )"),
        ([*SUMS, "--keep", "apples"], "gave 0 in"),
        (["--task", "chain_sum", "--seed", "-1"], "--seed -1: must not be negative"),
        ([], "--task"),
    ],
)
def test_wrong_arguments_give_one_line_and_status_2(tmp_path, refusal, arguments, message):
    assert message in refusal(make, tmp_path / "out", *arguments) and not (tmp_path / "out").exists()


def test_folder_that_cannot_be_written(tmp_path, refusal):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(make, tmp_path / "file", *SUMS, train=5, heldout=2)


def test_convert():
    optional = typing.Optional[int]
    cases = ((2, int, 2), (2, float, 2.0), (True, bool, True), (None, optional, None), (3, optional, 3),
             (["+"], list[str], ["+"]), (["a", "b"], tuple[str, ...], ("a", "b")), ([1, 2], tuple, (1, 2)),
             (["a"], typing.Sequence[str], ["a"]), ([[1, 2.5]], list[tuple[float, float]], [(1.0, 2.5)]),
             ("x", typing.Literal["x", "y"], "x"))  # fmt: skip
    for value, hint, expected in cases:
        result = make_prompts.convert(value, hint)
        assert result == expected and type(result) is type(expected), hint


@pytest.mark.parametrize(
    "value, hint",
    [
        (True, int),
        (1, bool),
        (1, str),
        ("+", list[str]),
        ([1], list[str]),
        ("z", typing.Literal["x", "y"]),
        (None, int),
        (1, collections.abc.Sequence),
        ("1", float),
    ],
)
def test_convert_rejects(value, hint):
    with pytest.raises(TypeError):
        make_prompts.convert(value, hint)
