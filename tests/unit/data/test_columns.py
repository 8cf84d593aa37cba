"""Columns of other frameworks: which are recognised, what becomes of them, and the errors that name them."""

import decimal
import itertools
import math

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megarl.data.columns import FOREIGN, LABELLED, NAMES, REWARD, RL, SFT, UNREAD, UNREAD_THOUGHTS, Columns
from megarl.data.examples import preference_pairs
from megarl.data.prompt import FIELD_TYPES, Prompt
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.texts.character_tokenizer import CHAT, PLAIN
from tests.helpers.texts.prompt_tables import write_arrow, write_jsonl, write_parquet
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import by_default

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}


def read(tmp_path, rows: list[dict], columns: Columns = Columns()) -> list[Prompt]:
    """The prompts of a Parquet file with these rows, which are those of a JSON file with them, too."""
    found = load_prompts(write_parquet(tmp_path / "p.parquet", rows), columns=columns)
    if not set().union(*rows) <= set(FIELD_TYPES) or columns.named:
        lines = load_prompts(write_jsonl(tmp_path / "p.jsonl", rows), columns=columns)
        assert list(lines) == list(found)
        assert [note.partition("; ")[2] for note in lines.notes] == [note.partition("; ")[2] for note in found.notes]
    return list(found)


RL_ROWS = {
    "verl": (
        {"data_source": "gsm8k", "prompt": [USER], "ability": "math", "extra_info": {"index": 3},
         "reward_model": {"style": "rule", "ground_truth": "2"}},
        Prompt(0, [USER], "2", "gsm8k", {"data_source": "gsm8k", "ability": "math", "extra_info": {"index": 3},
                                         "reward_model": {"style": "rule", "ground_truth": "2"}}),
    ),
    "verl with tests as ground truth": (
        {"prompt": [USER], "reward_model": {"ground_truth": ["a", "b"]}},
        Prompt(0, [USER], metadata={"reward_model": {"ground_truth": ["a", "b"]}}),
    ),
    "TRL, prompt only": ({"prompt": "1+1=", "tests": [1]}, Prompt(0, "1+1=", metadata={"tests": [1]})),
    "TRL, messages": ({"prompt": [USER], "solution": "$2$"}, Prompt(0, [USER], "$2$")),
    "question and answer": ({"question": "1+1=", "answer": "1+1=2\n#### 2"}, Prompt(0, "1+1=", "1+1=2\n#### 2")),
    "problem, solution, answer": (
        {"problem": "1+1=", "solution": "add", "answer": 2}, Prompt(0, "1+1=", "2", metadata={"solution": "add"}),
    ),
    "OpenRLHF": ({"input": "1+1=", "label": 2.0}, Prompt(0, "1+1=", "2")),
    "slime": (
        {"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "math"}, "level": 1},
        Prompt(0, "1+1=", "2", metadata={"level": 1, "rm_type": "math"}),
    ),
    "an object called task": (
        {"question": "1+1=", "task": {"id": 3}}, Prompt(0, "1+1=", metadata={"task": {"id": 3}}),
    ),
    "messages with null entries": (
        {"prompt": [USER | {"name": None}], "answer": "2", "task": "t", "id": None}, Prompt(0, [USER], "2", "t"),
    ),
}  # fmt: skip
NUMBERS = {
    "float": (pyarrow.array([72.0, math.nan, None, 1e22]), ["72", None, None, "10000000000000000000000"]),
    "float32": (pyarrow.array([0.1, 16777216, None], pyarrow.float32()), ["0.1", "16777216", None]),
    "float16": (pyarrow.array(np.array([0.1, 3], np.float16)), ["0.1", "3"]),
    "decimal": (
        pyarrow.array([decimal.Decimal("12345678901234567890.12"), decimal.Decimal("0.10"), decimal.Decimal("7.00")]),
        ["12345678901234567890.12", "0.1", "7"],
    ),
    "inside": (pyarrow.array([{"x": 1, "ground_truth": 0.1}], pyarrow.struct([("x", pyarrow.int64()),
                             ("ground_truth", pyarrow.float32())])), ["0.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_as_answers(name, tmp_path):
    column, expected = NUMBERS[name]
    column_name = "reward_model" if name == "inside" else "answer"
    table = pyarrow.table({"question": ["q"] * len(column), column_name: column})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert [prompt.answer for prompt in load_prompts(str(tmp_path / "p.parquet"))] == expected


def test_numbers_of_json_as_answers(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "q", "answer": NaN}\n{"question": "q", "answer": 0.1}\n')
    assert [prompt.answer for prompt in load_prompts(str(path))] == [None, "0.1"]
    path.write_text('{"question": "q", "answer": Infinity}\n')
    with pytest.raises(UsageError, match="p.jsonl:1: answer is inf; it must be a finite number"):
        load_prompts(str(path))


@pytest.mark.parametrize("name", RL_ROWS)
def test_columns_of_reinforcement_learning(name, tmp_path):
    row, expected = RL_ROWS[name]
    if name in ("TRL, prompt only", "messages with null entries"):  # in JSON lines they need --prompt-column
        assert list(load_prompts(write_parquet(tmp_path / "p.parquet", [row]))) == [expected]
        assert read(tmp_path, [row], Columns(prompt="prompt")) == [expected]
    else:
        assert read(tmp_path, [row]) == [expected]


SFT_ROWS = {
    "messages": ({"messages": [USER, ASSISTANT], "source": "x"}, Prompt(0, messages=[USER, ASSISTANT])),
    "from and value": (
        {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
        Prompt(0, messages=[USER, ASSISTANT]),
    ),
    "prompt and completion": ({"prompt": "1+1=", "completion": "2"}, Prompt(0, "1+1=", response="2")),
    "in messages": ({"prompt": [USER], "completion": [ASSISTANT]}, Prompt(0, [USER], response="2")),
    "question and answer": ({"question": "1+1=", "answer": "2"}, Prompt(0, "1+1=", response="2")),
    "input and output": ({"input": "1+1=", "output": "2"}, Prompt(0, "1+1=", response="2")),
}


@pytest.mark.parametrize("name", SFT_ROWS)
def test_columns_of_supervised_training(name, tmp_path):
    row, expected = SFT_ROWS[name]
    if name == "messages":  # "source" is no known name, so that it might be a slip in JSON lines
        assert list(load_prompts(write_parquet(tmp_path / "p.parquet", [row]), columns=Columns(SFT))) == [expected]
        assert read(tmp_path, [row], Columns(SFT, messages="messages")) == [expected]
    else:
        assert read(tmp_path, [row], Columns(SFT)) == [expected]


REWARD_ROWS = {
    "explicit prompt": ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
                        Prompt(0, "1+1=", chosen="2", rejected="3", margin=0.5)),
    "explicit prompt in messages": ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WRONG]},
                                    Prompt(0, [USER], chosen="2", rejected="3")),
    "implicit prompt": ({"chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]},
                        Prompt(0, [USER], chosen="2", rejected="3")),
    "implicit prompt in text": ({"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"},
                                Prompt(0, "1 + 1 =", chosen=" 2", rejected=" 3")),
    "the prompt twice": ({"prompt": "1+1=", "chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]},
                         Prompt(0, [USER], chosen="2", rejected="3")),
    "question": ({"question": "1+1=", "chosen": "2", "rejected": "3", "score": 1},
                 Prompt(0, "1+1=", chosen="2", rejected="3")),
}  # fmt: skip


@pytest.mark.parametrize("name", REWARD_ROWS)
def test_columns_of_preferences(name, tmp_path):
    row, expected = REWARD_ROWS[name]
    assert read(tmp_path, [row], Columns(REWARD)) == [expected]
    # What training reads of them is what it reads of megarl's own fields.
    own = {name: value for name, value in vars(expected).items() if value is not None and name != "index"}
    encoder = CHAT if isinstance(expected.prompt, list) else PLAIN
    pairs = [
        preference_pairs(prompts, encoder, 30)
        for prompts in (
            load_prompts(str(tmp_path / "p.parquet"), columns=Columns(REWARD)),
            load_prompts(write_jsonl(tmp_path / "own.jsonl", [own]), columns=Columns(REWARD)),
        )
    ]
    assert list(pairs[0]) == list(pairs[1]) and pairs[0].margins == pairs[1].margins


def test_columns_that_the_user_names(tmp_path):
    row = {"a": {"b": "1+1=", "c": 2}, "text": "3+3=", "goal": "6", "prompt": "no", "answer": "neither"}
    assert read(tmp_path, [row], Columns(prompt="a.b", answer="a.c"))[0].answer == "2"
    (found,) = read(tmp_path, [row], Columns(prompt="text", answer="goal"))
    assert (found.prompt, found.answer) == ("3+3=", "6")
    assert found.metadata == {"a": row["a"], "prompt": "no", "answer": "neither"}
    assert read(tmp_path, [row], Columns(SFT, prompt="text", response="goal")) == [Prompt(0, "3+3=", response="6")]
    pair = Columns(REWARD, chosen="goal", rejected="answer")
    assert read(tmp_path, [row], pair) == [Prompt(0, "no", chosen="6", rejected="neither")]
    # A column that has a dot in its own name.
    assert read(tmp_path, [{"a.b": "x", "a": {"b": "y"}}], Columns(prompt="a.b"))[0].prompt == "x"
    conversation = {"messages": [USER, ASSISTANT], "q": "3+3=", "r": "6"}
    assert read(tmp_path, [conversation], Columns(SFT, prompt="q", response="r")) == [Prompt(0, "3+3=", response="6")]


def test_a_column_that_only_some_lines_have(tmp_path):
    rows = [{"question": "a"}, {"question": "b", "label": 1, "x": None}, {"question": "c", "label": None, "x": 0}]
    assert read(tmp_path, rows) == [Prompt(0, "a"), Prompt(1, "b", "1"), Prompt(2, "c", metadata={"x": 0})]


ERRORS = [
    ({"text": "a", "id": 1}, Columns(), "prompt is missing: known names of its column are prompt, question, problem, "
     "instruction, input, query; --prompt-column names another; the file has text, id"),
    ({"prompt": "a", "q": 1}, Columns(answer="anwser"), "has no such column; the file has prompt, q"),
    ({"prompt": "a", "q": {"r": 1}}, Columns(answer="q.s"), "has no such column; the file has prompt, q"),
    ({"text": "a"}, Columns(SFT), "prompt is missing: known names of its column are prompt, question, problem, "
     "instruction, input, query (or messages or conversations); --prompt-column names another; the file has text"),
    ({"question": "a", "x": 1}, Columns(SFT), "response is missing: known names"),
    ({"question": "a", "chosen": "b"}, Columns(REWARD), "rejected is missing: known names of its column are rejected;"),
    ({"\x1b[2Jtext": "a"}, Columns(), "the file has \N{REPLACEMENT CHARACTER}[2Jtext"),
]  # fmt: skip


@pytest.mark.parametrize("row, columns, message", ERRORS, ids=[message[:40] for *_, message in ERRORS])
@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_errors_about_columns(row, columns, message, write, tmp_path):
    path = write(tmp_path / {write_parquet: "p.parquet", write_jsonl: "p.jsonl"}[write], [row])
    said = refusal(load_prompts, path, columns=columns)
    assert message in said and path in said
    assert said.startswith("--answer-column" if columns.answer else f"--prompts {path}")


TURNS = [USER, ASSISTANT, USER]
BAD_ROWS = [
    (Columns(), {"question": None}, "question is missing"),
    (Columns(), {"question": " "}, "question is empty"),
    (Columns(), {"question": "b", "label": True}, "label must be a string, not bool"),
    (Columns(), {"question": "b", "label": ["x"]}, "label must be a string, not list"),
    (Columns(), {"question": [USER, ASSISTANT]}, "the prompt's last message must not be the assistant's"),
    (Columns(), {"question": [{"role": "me", "content": "a"}]}, "question: message 1 has the role 'me'"),
    (Columns(), {"question": 3}, "question must be a string or a list of messages, not int"),
    (Columns(), {"question": "b", "data_source": 3}, "data_source must be a string, not int"),
    (Columns(SFT), {"question": [USER], "completion": [USER]}, "completion must be text or one message of the assist"),
    (Columns(SFT), {"question": [USER], "completion": [ASSISTANT] * 2}, "completion must be text or one message"),
    (Columns(SFT), {"question": [USER], "completion": ["2"]}, "completion: message 1 must be an object with role"),
    (Columns(REWARD), {"chosen": [USER, ASSISTANT], "rejected": [WRONG]}, "chosen and rejected differ before"),
    (Columns(REWARD), {"chosen": [USER, ASSISTANT], "rejected": "3"}, "chosen must be a string, not list"),
    (Columns(REWARD), {"chosen": TURNS, "rejected": TURNS}, "the last message of chosen and of rejected must be"),
    (Columns(REWARD), {"chosen": "2", "rejected": "3"}, "there is no prompt: chosen and rejected have no common"),
    (Columns(REWARD), {"chosen": [ASSISTANT], "rejected": [WRONG]}, "prompt is missing"),
    (Columns(REWARD), {"prompt": "x", "chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]},
     "chosen and rejected do not continue the prompt"),
]  # fmt: skip


@pytest.mark.parametrize("columns, row, message", BAD_ROWS, ids=[message[:45] for *_, message in BAD_ROWS])
def test_a_wrong_row_is_named(columns, row, message, tmp_path):
    good = {"question": "a"} if columns.purpose != REWARD else {"chosen": "ab", "rejected": "ac"}
    good |= {"completion": "c"} if columns.purpose == SFT else {"data_source": "d"}
    good |= {"prompt": "a"} if "prompt" in row else {}
    path = write_jsonl(tmp_path / "p.jsonl", [good, row, good])
    assert refusal(load_prompts, path, columns=columns).startswith(f"--prompts {path}:2: {message}")


def test_a_wrong_row_of_a_table_is_named(tmp_path):
    rows = [{"question": "a", "answer": 1}] * 1500 + [{"question": None, "answer": 2}, {"question": "a", "answer": 3}]
    path = write_parquet(tmp_path / "p.parquet", rows)
    with pytest.raises(UsageError, match=r"p\.parquet:1501: question is missing"):
        load_prompts(path)
    with pytest.raises(UsageError, match=r"p\.parquet:1: answer must be a string or a list of messages, not int"):
        load_prompts(path, columns=Columns(prompt="answer"))


# -- columns that change a prompt ----------------------------------------------------------------------------------


def test_two_columns_that_others_join(tmp_path):
    row = {"instruction": "Add.", "input": "1+1", "output": "2"}
    path = write_jsonl(tmp_path / "p.jsonl", [row, row | {"input": ""}])
    for columns, unread in ((Columns(SFT), "input"), (Columns(SFT, prompt="input"), "instruction")):
        if unread == "instruction":
            path = write_jsonl(tmp_path / "p.jsonl", [row, row])
        prompts = load_prompts(path, columns=columns)
        assert prompts[0].prompt != row[unread]
        assert f"warning: {unread} changes the prompt and is not read, in {len(unread) // 5} of 2" in prompts.notes[-1]


def test_the_systems_column_and_a_message_of_the_system(tmp_path):
    own = {"role": "system", "content": "mine"}
    rows = [{"system": text, "messages": [own, USER, ASSISTANT]} for text in ("mine", "other", "")]
    prompts = load_prompts(write_parquet(tmp_path / "p.parquet", rows), columns=Columns(SFT))
    assert [prompt.messages for prompt in prompts] == [[own, USER, ASSISTANT]] * 3
    assert prompts.notes[-1].endswith("system changes the prompt and is not read, in 1 of 3 rows; the messages begin "
                                      "with one of the system")  # fmt: skip
    pair = {"system": "s", "chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]}
    assert read(tmp_path, [pair], Columns(REWARD))[0].prompt == [{"role": "system", "content": "s"}, USER]
    path = write_parquet(tmp_path / "p.parquet", [{"question": "a", "system": 3}])
    with pytest.raises(UsageError, match=r"p\.parquet:1: system must be a string, not int"):
        load_prompts(path)


# -- names of columns --------------------------------------------------------------------------------------------------


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
