"""The two tools that prepare data: disjoint, reproducible prompt files and a tokenizer that loses nothing."""

import collections.abc
import hashlib
import json
import os
import subprocess
import sys
import typing

import pytest

from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample
from megarl.rewards.build import Options, build_named_verifiers, check_prompts
from tests.helpers.tools import TOOLS, load_tool

SUMS = ["--task", "chain_sum", "--task-option", "max_terms=2", "--task-option", "max_digits=2"]
SHORT = ["--prompt-template", "{metadata[expression]} ="]


make_prompts = load_tool("make_prompts")
train_tokenizer = load_tool("train_tokenizer")


def make(folder, *arguments, train=300, heldout=60):
    return make_prompts.main(["--train", str(train), "--heldout", str(heldout), "--out", str(folder), *arguments])


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    assert make(folder, *SUMS, *SHORT) == 0
    return folder


def test_files_are_what_training_reads(sums):
    train, heldout = load_prompts(str(sums / "train.jsonl")), load_prompts(str(sums / "heldout.jsonl"))
    assert (len(train), len(heldout)) == (300, 60)
    reward = build_named_verifiers(Options.of(Settings()), ["reasoning-gym"])["reasoning-gym"]
    for prompts in (train, heldout):
        check_prompts(Settings(reward="reasoning-gym"), prompts, scores_here=True)
        check_prompts(Settings(reward="exact-match"), prompts)
        for prompt in prompts:
            assert prompt.task == "chain_sum"
            left, operator, right, equals = prompt.prompt.split()
            assert equals == "=" and int(left) + int(f"{operator}{right}") == int(prompt.answer)
            assert reward(Sample(prompt.prompt, prompt.answer, prompt.answer, prompt.metadata)).correct
            wrong = Sample(prompt.prompt, str(int(prompt.answer) + 1000), prompt.answer, prompt.metadata)
            assert not reward(wrong).correct


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


def test_manifest(sums):
    manifest = json.loads((sums / "prompts.json").read_text())
    assert manifest["task"] == "chain_sum" and manifest["seed"] == 1
    assert manifest["task_options"] == ["max_digits=2", "max_terms=2"]
    assert manifest["reasoning_gym"]
    for name, count in (("train.jsonl", 300), ("heldout.jsonl", 60)):
        digest = hashlib.sha256((sums / name).read_bytes()).hexdigest()
        assert manifest["files"][name] == {"count": count, "sha256": digest}


def run_tool(name, *arguments, **environment):
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    root = str(TOOLS.parent)
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root, **environment}
    )


@pytest.mark.parametrize("task", ["isomorphic_strings", "list_functions"])
def test_same_arguments_same_bytes(tmp_path, task):
    # Entries of one depend on Python's hash seed, of the other on the process's own generator as well; the first is
    # fixed only in the program as a user runs it.
    for folder, hash_seed in (("a", "1"), ("b", "2")):
        done = run_tool(
            "make_prompts",
            "--task",
            task,
            "--train",
            40,
            "--heldout",
            10,
            "--out",
            tmp_path / folder,
            PYTHONHASHSEED=hash_seed,
        )
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


def test_prompts_that_hide_the_question_are_not_repeated(tmp_path, capsys):
    # Different questions, equal prompts: held-out prompts would be in train.
    assert make(tmp_path, *SUMS, "--prompt-template", "{metadata[num_digits]}") == 2
    assert "gave 2 in" in capsys.readouterr().err


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
        (["--task", "chain_sum", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--task", "chain_sum", "--train", "0"], "--train 0: must be at least 1"),
        (["--task", "chain_sum", "--seed", "-1"], "--seed -1: must not be negative"),
        ([], "--task"),
    ],
)
def test_wrong_arguments_give_one_line_and_status_2(tmp_path, capsys, arguments, message):
    assert make(tmp_path / "out", *arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert error.startswith("make_prompts: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file", *SUMS, train=5, heldout=2) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, hint, expected",
    [
        (2, int, 2),
        (2, float, 2.0),
        (True, bool, True),
        (None, typing.Optional[int], None),
        (3, typing.Optional[int], 3),
        (["+"], list[str], ["+"]),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([1, 2], tuple, (1, 2)),
        (["a"], typing.Sequence[str], ["a"]),
        ([[1, 2.5]], list[tuple[float, float]], [(1.0, 2.5)]),
        ("x", typing.Literal["x", "y"], "x"),
    ],
)
def test_convert(value, hint, expected):
    result = make_prompts.convert(value, hint)
    assert result == expected and type(result) is type(expected)


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


# ---- train_tokenizer ----


def train_on(prefix, *files, vocab_size=32, options=()):
    return train_tokenizer.main(
        ["--input", *map(str, files), "--vocab-size", str(vocab_size), "--out", str(prefix), *options]
    )


def test_tokenizer_round_trips_every_prompt_and_answer(sums, tmp_path):
    assert train_on(tmp_path / "deep" / "tok", sums / "train.jsonl") == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "deep" / "tok.model"))
    assert tokenizer.vocab_size <= 32
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
    for name in ("train.jsonl", "heldout.jsonl"):
        for prompt in load_prompts(str(sums / name)):
            ids = tokenizer.encode(prompt.prompt) + tokenizer.encode(prompt.answer)
            assert tokenizer.decode(ids) == prompt.prompt + prompt.answer
            assert len(tokenizer.encode(prompt.answer)) == len(prompt.answer)
    vocab = (tmp_path / "deep" / "tok.vocab").read_text(encoding="utf-8").splitlines()
    assert len(vocab) == tokenizer.vocab_size and vocab[3].split("\t")[0] == "</s>"


def test_tokenizer_is_reproducible_and_holds_no_path(sums, tmp_path):
    for name in ("a", "b"):
        assert train_on(tmp_path / name, sums / "train.jsonl") == 0
    model = (tmp_path / "a.model").read_bytes()
    assert model == (tmp_path / "b.model").read_bytes()
    assert str(tmp_path).encode() not in model and str(sums).encode() not in model


def test_tokenizer_with_difficult_text(tmp_path):
    texts = ["two  spaces ", " lead\n\ttab", "é漢🙂", "x" * 20000 + "y", "ｆｕｌｌ ﬁ"]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "response": text[::-1]}) for text in texts))
    assert train_on(tmp_path / "tok", path, vocab_size=64) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tok.model"))
    for text in texts + [text[::-1] for text in texts]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # The smallest vocabulary that fits: one token for each character.
    smallest = len(set("".join(texts))) + 4
    assert train_on(tmp_path / "tok", path, vocab_size=smallest) == 0
    assert train_on(tmp_path / "tok", path, vocab_size=smallest - 1) == 2


def test_byte_fallback_spells_unknown_characters(sums, tmp_path):
    assert train_on(tmp_path / "plain", sums / "train.jsonl") == 0
    assert train_on(tmp_path / "bytes", sums / "train.jsonl", vocab_size=300, options=["--byte-fallback"]) == 0
    plain, spelt = (
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / f"{name}.model")) for name in ("plain", "bytes")
    )
    assert spelt.decode(spelt.encode("7 × é")) == "7 × é"
    assert plain.decode(plain.encode("7 × é")) != "7 × é"


def test_tokenizer_errors_are_one_line(sums, tmp_path, capsys):
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"prompt": "a\u2581b"}))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{')
    (tmp_path / "file").write_text("")
    for expected, arguments in [
        ("--vocab-size 8: too small", (tmp_path / "tok", sums / "train.jsonl", 8)),
        ("cannot represent 'a\u2581b'", (tmp_path / "tok", odd, 32)),
        (f"--input {broken}:2: malformed JSON", (tmp_path / "tok", broken, 32)),
        ("--input gone.jsonl: no such file", (tmp_path / "tok", "gone.jsonl", 32)),
        ("cannot be written", (tmp_path / "file" / "tok", sums / "train.jsonl", 32)),
    ]:
        prefix, path, vocab_size = arguments
        assert train_on(prefix, path, vocab_size=vocab_size) == 2
        error = capsys.readouterr().err
        assert error.startswith("train_tokenizer: ") and expected in error and error.count("\n") == 1
    assert not (tmp_path / "tok.model").exists()


def test_tokenizer_program_is_quiet(sums, tmp_path):
    done = run_tool("train_tokenizer", "--input", sums / "train.jsonl", "--vocab-size", 32, "--out", tmp_path / "tok")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
