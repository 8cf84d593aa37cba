"""Examples of supervised training and preference pairs: tokens and masks, limits, the line that each error names."""

from pathlib import Path

import pytest

from megarl.data.columns import REWARD, SFT, Columns
from megarl.data.examples import preference_pairs, sft_examples
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import UsageError
from tests.helpers.programs import write_lines
from tests.helpers.texts.character_tokenizer import CHAT, PLAIN


def prompts_of(folder: Path, *lines: dict, columns: Columns = Columns()) -> PromptSet:
    return load_prompts(str(write_lines(folder / "p.jsonl", [*lines])), columns=columns)


def test_sft_tokens_and_mask(tmp_path):
    prompts = prompts_of(tmp_path, {"prompt": "ab", "response": "c", "answer": "z"}, {"prompt": "d", "answer": "ef"})
    assert list(sft_examples(prompts, PLAIN, max_prompt_length=2, max_response_length=3)) == [
        [([97, 98, 99, 0], [False, False, True, True])],
        [([100, 101, 102, 0], [False, True, True, True])],
    ]


def test_sft_of_conversations(tmp_path):
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "b$d\t", strict=True)]
    prompts = prompts_of(tmp_path, {"messages": turns}, {"prompt": turns[:1], "response": "c"})
    ((whole, mask),), ((tokens, learnt),) = sft_examples(prompts, CHAT, 5, 4)
    # A dollar sign in the contents does not end a turn.
    assert whole == [*map(ord, "uba$"), 0, *map(ord, "uda"), 0]
    assert mask == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert (tokens, learnt) == ([*map(ord, "ubac"), 0], [False] * 3 + [True] * 2)
    with pytest.raises(UsageError, match=r"p\.jsonl:1: the conversation has 9 tokens; .* allow 8 together"):
        sft_examples(prompts, CHAT, 5, 3)


def test_preference_pairs(tmp_path):
    lines = [
        {"prompt": "ab", "chosen": "c", "rejected": ""},
        {"prompt": [{"role": "user", "content": "d"}], "chosen": "ef", "rejected": "efg", "margin": 2},
    ]
    pairs = preference_pairs(prompts_of(tmp_path, *lines), CHAT, 5)
    # The first line's chosen text is one token too long: the prompt loses its start.
    texts = ["abac", "uaba"], ["daef", "aefg"]
    assert list(pairs) == [[([*map(ord, text), 0], [False] * 4 + [True]) for text in pair] for pair in texts]
    assert pairs.margins.tolist() == [0.0, 2.0]


GOOD = {"prompt": "a", "answer": "b", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("line, message", [
    ({"prompt": "a"}, "needs a response"), ({"prompt": "a", "response": "\t"}, "the response is empty"),
    ({"prompt": "a", "response": "abc"}, "4 tokens with EOS; --max-response-length allows 3"),
    ({"prompt": "abcd", "response": "a"}, "4 tokens; --max-prompt-length allows 3"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "a conversation in messages needs --chat-template"),
    ({"prompt": "a", "chosen": "b"}, "rejected is missing"), ({"prompt": "a", "rejected": "b"}, "chosen is missing"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same text"),
    ({"prompt": "a", "chosen": "b", "rejected": "b\t"}, "chosen and rejected become the same tokens"),
    ({"prompt": "a", "chosen": "xabc", "rejected": "yabc"}, "become the same tokens"),
    ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}, "needs --chat-template"),
])  # fmt: skip
def test_errors_name_the_line(tmp_path, line, message):
    prompts = prompts_of(tmp_path, GOOD, line)
    with pytest.raises(UsageError, match=rf"p\.jsonl:2: .*{message}"):
        if {"chosen", "rejected"} & line.keys():
            preference_pairs(prompts, PLAIN, 4)
        else:
            sft_examples(prompts, PLAIN, max_prompt_length=3, max_response_length=3)


WRITTEN = {"role": "assistant", "content": "x"}
LONG_LINES = {  # reader, encoder, limits; lines; those that are too long; the note about them; the flags of an error
    "prompts": (
        (sft_examples, PLAIN, 2, 3),
        [{"prompt": "abc", "response": "a"}, {"prompt": "ab", "response": "ab"}, {"prompt": "abcd", "answer": "a"}],
        {0, 2}, "2 of 3 examples longer than 2 + 3 tokens", "--max-prompt-length 2 --max-response-length 3:",
    ),
    "responses": (
        (sft_examples, PLAIN, 2, 3),
        [{"prompt": "a", "response": "ab"}, {"prompt": "ab", "response": "abc"}, {"prompt": "a", "answer": "b"}],
        {1}, "1 of 3 examples longer than 2 + 3 tokens", "--max-prompt-length 2 --max-response-length 3:",
    ),
    "conversations": (
        (sft_examples, CHAT, 2, 3),
        [{"messages": [{"role": "user", "content": text}, WRITTEN]} for text in ("", "ab")],
        {1}, "1 of 2 examples longer than 2 + 3 tokens", "--max-prompt-length 2 --max-response-length 3:",
    ),
    "pairs": (
        (preference_pairs, CHAT, 5),
        [{"prompt": "a", "chosen": c, "rejected": r} for c, r in (("b", "cde"), ("b", "c"), ("bcd", "e"), ("f", ""))],
        {0, 2}, "2 of 4 pairs longer than 5 tokens", "--max-prompt-length and --max-response-length of 5 together:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_LINES)
def test_lines_that_are_too_long_are_dropped_on_request(name, tmp_path):
    (read, *how), lines, long, note, flags = LONG_LINES[name]
    columns = Columns(REWARD if name == "pairs" else SFT)
    whole, path = prompts_of(tmp_path, *lines, columns=columns), tmp_path / "p.jsonl"
    found = read(whole, *how, drops_long=True)
    kept = [number for number in range(len(lines)) if number not in long]
    rest = tmp_path / "rest"
    rest.mkdir()
    alone = prompts_of(rest, *[lines[number] for number in kept], columns=columns)
    assert list(found) == list(read(alone, *how)) and len(found) == len(kept) == len(found.prompts)
    assert [found.prompts.where(i) for i in range(len(kept))] == [f"--prompts {path}:{number + 1}" for number in kept]
    assert found.prompts.notes == (*whole.notes, f"--prompts {path}: dropped {note}")
    assert found.prompts.sha256() != whole.sha256()
    same = read(alone, *how, drops_long=True)
    assert same.prompts is alone and list(same) == list(found)
    only = prompts_of(rest, *[lines[number] for number in long], columns=columns)
    with pytest.raises(UsageError, match=f"^{flags} each of the {len(long)} "):
        read(only, *how, drops_long=True)
    # Without the filter an example is an error, and the prompt of a pair loses its start; both name the flag.
    if name == "pairs":
        cut = read(whole, *how)
        assert len(cut) == len(lines) and cut.prompts.sha256() == whole.sha256()
        (said,) = cut.prompts.notes[len(whole.notes) :]
        assert said == f"--prompts {path}: cut prompts at their start in {note}; --filter-long-prompts drops them"
    else:
        with pytest.raises(UsageError, match=rf"p\.jsonl:{min(long) + 1}: .*; --filter-long-prompts drops such lines$"):
            read(whole, *how)
