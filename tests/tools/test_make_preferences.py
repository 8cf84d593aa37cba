"""tools/make_preferences.py: which pairs are made and which are skipped, disjointness, reproducibility, wrong use."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from tests.helpers.programs import write_lines
from tests.helpers.tools import load_tool

make_preferences = load_tool("make_preferences")

WORDS = ["stone", "paper", "linen", "amber", "cloud"]
HELDOUT = ["river", "quilt"]


def line(word: str) -> dict:
    metadata = {"source_dataset": "spell_backward", "word": word, "question_id": f"id of {word}"}
    return {"prompt": f"{word}:", "answer": word[::-1], "task": "spell_backward", "metadata": metadata}


def samples(words: list[str]) -> list[dict]:
    """Of each word a right answer (twice), one with 3 of 5 letters right, one with 2, and an unfinished one."""
    rows = []
    for word in words:
        right = word[::-1]
        for response in (right, right, f"{right[:3]}!!", f"{right[:2]}!!!"):
            rows.append({"prompt": f"{word}:", "response": response, "finished": True, "reward": 7.0})
        rows.append({"prompt": f"{word}:", "response": right + "x", "finished": False})
    return rows


def make(folder: Path, *flags: str, train: list | None = None, heldout: list | None = None, words=WORDS) -> int:
    """The tool on files in `folder`, its results in `folder`/out."""
    rows = {"prompts": list(map(line, words)), "heldout-prompts": list(map(line, HELDOUT))}
    for name, given, of_words in (("samples", train, WORDS), ("heldout-samples", heldout, HELDOUT)):
        rows[name] = samples(of_words) if given is None else given
    argv = []
    for name, lines in rows.items():
        argv += [f"--{name}", str(write_lines(folder / f"{name}.jsonl", lines))]
    return make_preferences.main([*argv, *flags, "--out", str(folder / "out")])


def pairs(folder: Path, name: str = "train") -> list[Prompt]:
    return list(load_prompts(str(folder / "out" / f"{name}.jsonl")))


def test_the_better_response_is_chosen(tmp_path, capsys):
    """Correct before wrong, larger gaps first; unfinished responses make no pair; sampled scores are ignored."""
    assert make(tmp_path, "--corrupted-pairs", "0", "--sampled-pairs", "9", "--min-gap", "0.19") == 0
    for word in WORDS:
        right = word[::-1]
        wrong = [f"{right[:3]}!!", f"{right[:2]}!!!"]
        expected = Counter([(right, wrong[0], 1.0, 0.6), (right, wrong[1], 1.0, 0.4), (*wrong, 0.6, 0.4)])
        found = Counter(
            (p.chosen, p.rejected, p.metadata["chosen_score"], round(p.metadata["rejected_score"], 6))
            for p in pairs(tmp_path)
            if p.prompt == f"{word}:"
        )
        assert {key[:2] for key in found} == {key[:2] for key in expected} and max(found.values()) == 1
    assert [p.metadata["question_id"] for p in pairs(tmp_path, "heldout")] == ["id of river"] * 3 + ["id of quilt"] * 3
    printed = capsys.readouterr().out
    assert "15 training and 6 held-out pairs" in printed and printed.count("\n") == 1


def test_wrong_responses_with_close_scores_make_no_pair(tmp_path):
    assert make(tmp_path, "--corrupted-pairs", "0", "--sampled-pairs", "9", "--min-gap", "0.25") == 0
    assert len(pairs(tmp_path)) == 2 * len(WORDS)
    assert all(p.chosen == p.prompt[-2::-1] for p in pairs(tmp_path))


def test_answers_are_paired_with_corrupted_ones(tmp_path):
    assert make(tmp_path, "--corrupted-pairs", "3", "--sampled-pairs", "0") == 0
    found = pairs(tmp_path)
    assert len(found) == 3 * len(WORDS)
    letters = set("".join(WORDS))
    for pair in found:
        right = pair.prompt[-2::-1]
        assert pair.chosen == right != pair.rejected and pair.metadata["rejected_score"] < 1
        assert set(pair.rejected) <= letters and abs(len(pair.rejected) - len(right)) <= make_preferences.MOST_EDITS
    assert len({(pair.prompt, pair.rejected) for pair in found}) == len(found)


def test_corruption_makes_every_kind_of_change_and_takes_any_text():
    draw = random.Random(1)
    made = {make_preferences.corrupted("abcdef", "xyz", draw) for _ in range(400)}
    for kind in ("bacdef", "bcdef", "aabcdef", "xbcdef"):  # swapped, lost, doubled, replaced
        assert kind in made
    assert {make_preferences.corrupted("a", "z", draw) for _ in range(99)} >= {"", "aa", "z"}


def test_files_are_reproducible_and_a_seed_changes_them(tmp_path):
    found = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        folder = tmp_path / name
        folder.mkdir()
        assert make(folder, "--seed", seed) == 0
        found[name] = (folder / "out" / "train.jsonl").read_bytes()
    assert found["a"] == found["b"] != found["c"]
    manifest = json.loads((tmp_path / "a" / "out" / "prompts.json").read_text())
    assert manifest["files"]["train.jsonl"]["sha256"] == hashlib.sha256(found["a"]).hexdigest()
    assert (manifest["seed"], manifest["files"]["heldout.jsonl"]["count"]) == (1, len(pairs(tmp_path / "a", "heldout")))


@pytest.mark.parametrize("prompt, question", [("River:", "new"), ("other", "id of river")])
def test_a_held_out_question_among_training_prompts_is_an_exit_status(prompt, question, tmp_path, capsys):
    """The same text but for case, or the same question in another text; no training pair needs to have it."""
    known = line("river")
    known |= {"prompt": prompt, "metadata": known["metadata"] | {"question_id": question}}
    words = write_lines(tmp_path / "words.jsonl", [*map(line, WORDS), known])
    assert make(tmp_path, "--prompts", str(words)) == 1
    printed = capsys.readouterr()
    assert f"1 held-out questions are in training prompts, e.g. '{prompt}'" in printed.err and printed.out == ""


@pytest.mark.parametrize("flags, change, says", [
    (["--min-gap", "-1"], {}, "--min-gap -1.0: must not be negative"),
    ([], {"train": [{"prompt": "stone:"}]}, "samples.jsonl:1: not a sample"),
    ([], {"train": [{"prompt": "moon:", "response": "x", "finished": True}]}, "has no such prompt: 'moon:'"),
    ([], {"heldout": []}, "no two responses to one prompt differ"),
    ([], {"words": [*WORDS, "stone"]}, "prompts.jsonl:6: repeats the prompt of line 1"),
    (["--samples", "gone.jsonl"], {}, "--samples gone.jsonl: cannot be read"),
])  # fmt: skip
def test_wrong_use_is_reported_in_one_line(flags, change, says, tmp_path, refusal):
    assert says in refusal(make, tmp_path, *flags, **change) and not (tmp_path / "out").exists()
