"""Columns that change a prompt: those that every program reads, and those that are named in a warning."""

import itertools

import pytest

from megarl.data.column_names import FOREIGN, LABELLED, NAMES, RL, UNREAD, UNREAD_THOUGHTS
from megarl.data.columns import REWARD, SFT, Columns
from megarl.data.prompts import load_prompts
from tests.helpers.texts.prompt_tables import write_arrow, write_jsonl, write_parquet
from tests.helpers.tiers import by_default

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
ROW_OF = {
    "rl": {"prompt": "1+1=", "answer": "2"},
    "sft": {"prompt": "1+1=", "response": "2"},
    "conversation": {"messages": [USER, ASSISTANT]},
    "reward": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "labelled": {"prompt": "1+1=", "response": "2", "desirable": True},
}
PURPOSE = {"conversation": SFT} | {name: name for name in (RL, SFT, REWARD, LABELLED)}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
USED = {"system": "Be terse.", "system_prompt": "Be terse.", "tools": TOOLS}
VALUES = {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False, "history": [["a", "b"]]}
WRITERS = {"parquet": write_parquet, "arrow": write_arrow, "jsonl": write_jsonl}


def with_column(tmp_path, suffix: str, kind: str, **values):
    """The set of a file of one row of a kind of prompt with these columns, and one without values in them."""
    row = ROW_OF[kind] | {"ability": "x"}  # which no field of megarl is
    path = WRITERS[suffix](tmp_path / f"p.{suffix}", [row | values, row | dict.fromkeys(values)])
    return load_prompts(path, columns=Columns(PURPOSE[kind]))


@pytest.mark.parametrize("kind", ROW_OF)
@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_that_are_part_of_every_prompt(suffix, kind, tmp_path):
    for name, value in USED.items():
        prompt, without = with_column(tmp_path, suffix, kind, **{name: value})
        messages = prompt.messages or prompt.prompt
        if name == "tools":
            assert prompt.tools == TOOLS and without.tools is None
        else:
            assert messages[0] == {"role": "system", "content": "Be terse."} and messages[1] == USER
            assert (without.messages or without.prompt) == (ROW_OF[kind].get("messages") or "1+1=")


QUICK = [("parquet", "rl"), ("arrow", "conversation"), *(("jsonl", kind) for kind in ROW_OF)]


@pytest.mark.parametrize("suffix, kind", by_default(itertools.product(WRITERS, ROW_OF), QUICK))
def test_a_column_that_changes_the_prompt_and_is_not_read_is_named(suffix, kind, tmp_path):
    thoughts = UNREAD_THOUGHTS if kind not in ("rl", "conversation") else {}
    for name, cure in (UNREAD | thoughts).items():
        prompts = with_column(tmp_path, suffix, kind, **{name: VALUES.get(name, "x")})
        note = f"warning: {name} changes the prompt and is not read, in 1 of 2 rows; {cure}"
        assert [each for each in prompts.notes if "warning" in each] == [f"--prompts {prompts.path}: {note}"]
    prompts = with_column(tmp_path, suffix, kind, level=3)
    assert not any("warning" in note for note in prompts.notes)


def test_images_in_bytes_are_named_in_every_program(tmp_path):
    for kind in ROW_OF:
        prompts = with_column(tmp_path, "parquet", kind, images=[{"bytes": b"x", "path": None}])
        why = "in 2 of 2 rows; the model has no vision tower, or no chat template"
        assert prompts.notes[-1].endswith(f"images changes the prompt and is not read, {why}")


@pytest.mark.parametrize("purpose", NAMES)
def test_every_field_of_a_line_is_read_from_a_table(purpose, tmp_path):
    """What megarl's own fields say in JSON lines, a table says, too: no field is metadata alone."""
    values = {"prompt": [USER], "answer": "2", "task": "t", "response": "2", "tools": TOOLS, "chosen": "2",
              "rejected": "3", "margin": 0.5, "environment": "e", "desirable": True, "teacher_prompt": [USER],
              "teacher": "x"}  # fmt: skip
    row = {name: values[name] for name in NAMES[purpose] if name in values}
    own = load_prompts(write_jsonl(tmp_path / "p.jsonl", [row]), columns=Columns(purpose))
    assert not own.notes and len(row) >= 4
    for found in (
        load_prompts(write_parquet(tmp_path / "p.parquet", [row]), columns=Columns(purpose)),
        load_prompts(write_jsonl(tmp_path / "f.jsonl", [row | {"ability": "a"}]), columns=Columns(purpose)),
    ):
        for name, value in row.items():
            assert getattr(found[0], name) == value == getattr(own[0], name), name


def test_a_published_column_is_no_typing_mistake():
    assert {"system", "instruction", "chat_template_kwargs", "images", "history"} <= FOREIGN
    assert not {"prompt", "messages", "tools", "response"} & FOREIGN
