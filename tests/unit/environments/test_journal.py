"""The journal: what a kill leaves of it, other layouts, and what is forgotten."""

import json
import os

import pytest

from megarl.environments.journal import Journal, JournalEntry
from megarl.environments.protocol import Observation, Turn
from megarl.errors import UsageError


def turns(*texts: str) -> list[Turn]:
    return [Turn(number, text, text) for number, text in enumerate(texts)]


def entry(text: str, **fields) -> JournalEntry:
    return Observation([{"role": "user", "content": text}], **fields), []


def test_entries_are_found_by_episode_and_all_texts(tmp_path):
    journal = Journal(tmp_path, 0, 1)
    message = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "é"}
    full = Observation([message], 0.1, True, False, {"a": 0.3}), [{"type": "function"}]
    journal.add("a", [], *full)
    journal.add("a", turns("x", "y"), *entry("2"))
    journal.flush()
    again = Journal(tmp_path, 0, 1)
    assert again.find("a", []) == full and again.find("a", turns("x", "y")) == entry("2")
    assert again.find("b", turns("x", "y")) is None
    for texts in (["x"], ["xy"], ["x", "y", ""], ["", "xy"], ["z", "y"]):
        assert again.find("a", turns(*texts)) is None


def test_a_torn_line_is_left_out_and_cut_off(tmp_path):
    journal = Journal(tmp_path, 0, 1)
    for number in range(3):
        journal.add(f"{number}", [], *entry("a"))
    journal.flush()
    content = journal.path.read_bytes()
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    for cut in {*range(0, len(content), 11), *(end + k for end in ends for k in (-1, 0, 1) if end + k < len(content))}:
        journal.path.write_bytes(content[:cut])
        again = Journal(tmp_path, 0, 1)
        whole = content[:cut].count(b"\n")
        assert [again.find(f"{n}", []) is not None for n in range(3)] == [n < whole for n in range(3)] or (
            content[cut : cut + 1] == b"\n"  # a line that lacks only its end is whole
        )
        again.add("new", [], *entry("b"))
        again.flush()
        assert Journal(tmp_path, 0, 1).find("new", []) == entry("b")


def test_another_layout_reads_all_files_and_forgets_them(tmp_path):
    for replica, step in enumerate((3, 5, 4)):
        journal = Journal(tmp_path, replica, 3)
        journal.step = step
        journal.add(f"{replica}", [], *entry(str(replica)))
        journal.flush()
    one = Journal(tmp_path, 0, 1)
    assert [one.find(f"{n}", []) for n in range(3)] == [entry(str(n)) for n in range(3)]
    one.discard(through=4)
    assert [one.find(f"{n}", []) is None for n in range(3)] == [True, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["replica_00001.jsonl"]
    again = Journal(tmp_path, 0, 1)
    assert again.find("1", []) == entry("1") and again.find("0", []) is None
    again.discard(through=5)
    assert not list(tmp_path.iterdir()) and again.find("1", []) is None


def test_an_answer_is_forgotten_with_the_step_that_got_it(tmp_path):
    """The second step continues with an episode of the first."""
    journal = Journal(tmp_path, 0, 1)
    for journal.step, texts in ((1, ["x"]), (2, ["x", "y"])):
        journal.add("1/7/0", turns(*texts), *entry("a"))
    journal.flush()
    for of_file in (journal, Journal(tmp_path, 0, 1)):
        of_file.discard(through=1)
        assert of_file.find("1/7/0", turns("x")) is None
        assert of_file.find("1/7/0", turns("x", "y")) == entry("a")


def test_what_was_found_first_counts(tmp_path):
    journal = Journal(tmp_path, 0, 1)
    journal.add("a", [], *entry("first"))
    journal.flush()
    other = Journal(tmp_path, 1, 2)
    other.add("a", [], *entry("second"))
    other.flush()
    assert Journal(tmp_path, 0, 2).find("a", []) == entry("first")


def test_foreign_lines_are_passed_over(tmp_path):
    (tmp_path / "replica_00000.jsonl").write_text(
        '[]\n{"place": 1}\n\nno json\n{"place": "a", "observation": {"x": 1}, "tools": []}\n'
    )
    journal = Journal(tmp_path, 0, 1)
    journal.add("b", [], *entry("b"))
    journal.discard(through=-1)
    assert Journal(tmp_path, 0, 1).find("b", []) == entry("b")


RECORD = {"place": "a", "observation": {"reward": 0.5}, "tools": [], "step": 1}
DAMAGED = {
    "no record": "7", "deep lists": "[" * 100_000, "5,000 digits": '{"step": ' + "7" * 5000 + "}",
    "no messages": json.dumps(RECORD | {"observation": {"messages": "text"}}),
    "no message": json.dumps(RECORD | {"observation": {"messages": [{"role": "root", "content": "x"}]}}),
    "endless reward": json.dumps(RECORD).replace("0.5", "1e999"), "an unknown field": json.dumps(
        RECORD | {"observation": {"file": "x"}}),
    "no tools": json.dumps(RECORD | {"tools": "x"}), "no step": json.dumps(RECORD | {"step": -1}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_line_that_no_environment_answered_is_left_out(name, tmp_path):
    path = tmp_path / "replica_00000.jsonl"
    path.write_text(f"{json.dumps(RECORD)}\n{DAMAGED[name]}\n")
    Journal(tmp_path, 0, 1)
    assert path.read_text() == json.dumps(RECORD) + "\n"


def test_a_pipe_is_no_journal(tmp_path):
    os.mkfifo(tmp_path / "replica_00000.jsonl")
    with pytest.raises(UsageError, match="is no regular file"):
        Journal(tmp_path, 0, 1)
