"""Conversations as supervised examples, with templates that treat earlier turns as the published ones do."""

import json

import pytest

from megarl.data.columns import Columns
from megarl.data.examples import sft_examples
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.programs import write_lines
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES
from tests.helpers.texts.template_conversations import CONVERSATIONS, TOOLS, check_conversation, trained_turns

ONE_CALL = {name for name, family in FAMILY_TEMPLATES.items() if family.calls == 1 and name != "gpt-oss"}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    return {name: encoder_of(folder / str(number), family.tokenizer, family.template)
            for number, (name, family) in enumerate(FAMILY_TEMPLATES.items())}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_every_turn_follows_what_the_policy_reads(encoders, name):
    encoder = encoders[name]
    for kind, messages in CONVERSATIONS.items():
        if kind == "two calls" and name in ONE_CALL:
            with pytest.raises(UsageError, match="one call at a time"):
                encoder.conversation(messages, TOOLS)
            continue
        encoder.unshown_thoughts = 0
        texts = check_conversation(encoder, messages, TOOLS if "call" in kind else None)
        turns = sum(message["role"] == "assistant" for message in messages)
        shown = sum("hmm" in text for text in texts)
        assert shown + encoder.unshown_thoughts == (turns if "thoughts" in kind else 0), kind


@pytest.mark.parametrize("name, kind, expected", [
    ("qwen3", "two turns", ["<think>\n\n</think>\n\nso<|im_end|>", "<think>\n\n</think>\n\nwell<|im_end|>"]),
    ("qwen3", "thoughts apart", ["<think>\nhmm\n</think>\n\nso<|im_end|>"] * 2),
    ("glm", "two turns", ["\n<think></think>\nso<|user|>", "\n<think></think>\nwell<|user|>"]),
    ("glm", "thoughts in contents", ["\n<think>hmm</think>\nso<|user|>"] * 2),
    ("gpt-oss", "two turns", ["<|channel|>final<|message|>so<|return|>", "<|channel|>final<|message|>well<|return|>"]),
])  # fmt: skip
def test_what_is_trained_on(encoders, name, kind, expected):
    encoder = encoders[name]
    found = trained_turns(encoder.conversation(CONVERSATIONS[kind]))
    assert [spelled(encoder.tokenizer, turn) for _, turn in found] == expected
    if kind != "thoughts apart":  # the same turn as a response of its own
        question, answer = CONVERSATIONS[kind][:2]
        assert encoder.response(Prompt(0, [question]), answer["content"]) == found[0][1]


def test_a_call_ends_with_the_token_that_begins_its_result(encoders):
    (_, turn), (_, answer) = trained_turns(encoders["glm"].conversation(CONVERSATIONS["a call"], TOOLS))
    ends = [spelled(encoders["glm"].tokenizer, turn[-1:]) for turn in (turn, answer)]
    assert ends == ["<|observation|>", "<|user|>"]


def test_a_line_becomes_as_many_examples_as_it_needs(encoders, tmp_path):
    kinds = ["one turn", "two turns", "thoughts apart"]
    rows = [{"messages": CONVERSATIONS[kind]} for kind in kinds]
    rows[2] = json.loads(json.dumps(rows[2]).replace("reasoning_content", "thinking"))  # gpt-oss's name
    prompts = load_prompts(str(write_lines(tmp_path / "p.jsonl", rows)), columns=Columns("sft"))
    examples = sft_examples(prompts, encoders["qwen3"], 200, 100)
    assert len(examples) == len(examples.prompts) == 5
    assert [examples.prompts.where(number)[-1] for number in range(5)] == ["1", "2", "2", "3", "3"]
    assert "2 of 3 conversations become 4 examples" in examples.prompts.notes[-1]
    turns = [
        spelled(encoders["qwen3"].tokenizer, turn) for (sequence,) in examples for _, turn in trained_turns([sequence])
    ]
    assert len(turns) == 5 and turns[3:] == ["<think>\nhmm\n</think>\n\nso<|im_end|>"] * 2
    assert sorted(examples.prompts.order(1).take(5)) == [0, 1, 2, 3, 4]
    # Only the first sequences of lines 2 and 3 would fit; all of a line are dropped with it.
    longest = max(len(tokens) for ((tokens, _),) in examples)
    kept = sft_examples(prompts, encoders["qwen3"], longest - 1 - 40, 40, drops_long=True)
    assert len(kept.prompts) == len(kept) < 5 and "dropped 1 of 3 examples" in kept.prompts.notes[0]


def test_thoughts_that_a_template_leaves_out_are_said(encoders, tmp_path):
    rows = [{"messages": CONVERSATIONS[kind]} for kind in ("thoughts in contents", "two turns")]
    path = write_lines(tmp_path / "p.jsonl", [*rows, {"prompt": "a", "response": "<think>b</think>c"}])
    for name, count in {"llama": 0, "deepseek": 3}.items():
        prompts = sft_examples(load_prompts(str(path), columns=Columns("sft")), encoders[name], 200, 100).prompts
        notes = [note for note in prompts.notes if "leaves out the thoughts" in note]
        assert len(notes) == bool(count) and all(f"of {count} turns" in note for note in notes)
