"""Whether a turn thinks, and which tokens end that, as the format of the policy's family has it."""

import functools
import re
import time
from pathlib import Path

import pytest

from megarl.data.chat import ChatTemplate
from megarl.data.conversations import Encoder
from megarl.data.detokenizer import Vocabulary
from megarl.data.tokenizers import build_tokenizer
from megarl.tool_formats import FORMATS
from megarl.tool_formats.chosen_format import load_format
from megarl.tool_formats.reader import CONTENT, REASONING, Said
from megarl.tool_formats.thinking_budget import ThinkingBudget, ThoughtReader
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES

# A turn that thinks, and one that begins with an answer, if the prompt has begun no thoughts.
BEGINS = {"gpt-oss": ("<|channel|>analysis<|message|>ab", "<|channel|>final<|message|>ab"),
          "mistral": ("[THINK]ab", "ab")}  # fmt: skip


@functools.cache
def reader_of(family: str, folder: Path) -> tuple[ThoughtReader, Encoder]:
    each = FAMILY_TEMPLATES[family]
    tokenizer = build_tokenizer("HuggingFaceTokenizer", each.tokenizer(folder / family.replace(" ", "-")))
    encoder = Encoder(tokenizer, ChatTemplate(each.template, tokenizer))
    return ThoughtReader(Vocabulary(tokenizer), FORMATS[each.form]), encoder


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
def test_the_default_text_ends_the_thoughts_of_each_family(family, folder):
    reader, encoder = reader_of(family, folder)
    form = FORMATS[FAMILY_TEMPLATES[family].form]
    tokens = reader.encode(reader.default_text)
    thinks, answers = (
        encoder.tokenizer.encode_template(each) for each in BEGINS.get(form_name(family), ("<think>ab", "ab"))
    )
    prompt = encoder.chat_prompt([{"role": "user", "content": "<think>"}])
    assert reader.is_open(prompt, answers) == (family == "glm")  # its template has begun thoughts
    assert reader.is_open(prompt, thinks)
    assert not reader.is_open(prompt, [*thinks, *tokens])
    found = ThinkingBudget(len(thinks), reader.default_text, tokens, reader)
    assert found.forced(prompt, thinks) == range(len(thinks), len(thinks) + len(tokens))
    # What is read of the whole turn: the sentence belongs to the thoughts, what follows to the answer.
    whole = form.reader()
    parts = [*whole.feed(reader.text([*thinks, *tokens, *encoder.tokenizer.encode("yes")])), *whole.finish()]
    texts = {kind: "".join(part.text for part in parts if isinstance(part, Said) and part.kind == kind)
             for kind in (REASONING, CONTENT)}  # fmt: skip
    assert re.fullmatch(r"ab\s+My time .*\.\s*", texts[REASONING]) and texts[CONTENT].strip() == "yes"


def form_name(family: str) -> str:
    return FAMILY_TEMPLATES[family].form


@pytest.mark.parametrize(("prompt", "turn", "is_open"), [
    ("q<think>", "", True), ("q<think>\n ", "ab", True), ("q<think>", "<think>ab", True), ("q<think>", "ab</th", True),
    ("q<think>", "ab</think>", False), ("q<think>", "</think>ab<think>", False), ("q<think></think>\n", "ab", False),
    ("q", " <think>ab", True), ("q", "ab<think>", False), ("q", "", False), ("<think>q", "ab", False),
])  # fmt: skip
def test_thoughts_are_open_if_the_turn_or_the_prompt_has_begun_them(prompt, turn, is_open, folder):
    reader, encoder = reader_of("qwen3", folder)
    prompt, turn = map(encoder.tokenizer.encode_template, (prompt, turn))
    assert reader.is_open(prompt, turn) is is_open
    budget = ThinkingBudget(len(turn), "", (1, 2, 3), reader)
    for written in ((), (1,), (1, 2, 3), (1, 2, 3, 9)):
        assert budget.forced(prompt, [*turn, *written]) == (range(len(turn), len(turn) + 3) if is_open else range(0))
    # Written without the budget, or not long enough.
    assert not budget.forced(prompt, [*turn, 1, 3]) and not budget.forced(prompt, turn[:-1] if turn else [9])


def test_a_text_that_ends_no_thoughts_is_refused(folder):
    reader, _ = reader_of("qwen3", folder)
    for text, says in (("done", "needs </think>, with which"), ("</thinks", "needs </think>")):
        with pytest.raises(ValueError, match=says):
            reader.encode(text)


def test_the_length_of_a_turn_costs_time_in_proportion(folder):
    reader, encoder = reader_of("gpt-oss", folder)
    turn = encoder.tokenizer.encode_template("<|channel|>analysis<|message|>a<|end|><|start|>assistant") * 4000
    start = time.process_time()
    reader.is_open((), turn)
    assert time.process_time() - start < 20


def test_a_parser_of_a_user_leaves_thoughts_as_they_are(folder):
    form = load_format("tests.unit.tool_formats.test_thinking_budget:no_calls")
    _, encoder = reader_of("qwen3", folder)
    reader = ThoughtReader(Vocabulary(encoder.tokenizer), form)
    assert reader.is_open((), encoder.tokenizer.encode_template("<think>a")) and reader.encode(reader.default_text)


def no_calls(text: str):
    """A parser of turns without calls."""
    return text, [], []
