"""Turns as tokens: bridges of any messages, what is cut, what is refused."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.data.conversations import Encoder
from megarl.data.images.names import MARK, PATTERN, mark_of
from megarl.data.tokenizers import build_tokenizer
from megarl.data.turns import TurnTokens
from megarl.errors import UsageError
from tests.helpers.texts import picture_prompts
from tests.helpers.texts.chat_encoders import encoder_of, spelled, template_encoders
from tests.helpers.texts.chat_templates import GEMMA_TOOLS, LLAMA3, RECORDED, TEMPLATES
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES
from tests.helpers.texts.small_tokenizers import HUGGING_FACE, chatml, gemma, llama, sentence_piece
from tests.helpers.tiers import by_default
from tests.references import transformers_turns
from tests.references.transformers_turns import SPECIAL_FROM, conversations, prompts

QUICK = settings(max_examples=20)
PIECES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|im_", "end|>", "Hello",
          "the user", " ", "\n\n", "42", "\u4f60\u597d", "\U0001f642", "\u0301", "<tool_call>", "</tool_call>",
          "<tool_response>", "</think>", "<think>", "\ufdd0", "\ufdd00\ufdd1", "{{ bos_token }}", '"}']  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
                 max_size=6).map("".join)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer", "description": "d"}}, "required": ["x"]}}}]  # fmt: skip
LOSSLESS = ("qwen2.5", "hermes", "qwen3", "qwen3 thinking")  # tokens of these stand for themselves in every text


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return template_encoders(tmp_path_factory.mktemp("templates"))


def tool_turn(number, results, written):
    calls = [{"id": f"call_{number}_{k}", "type": "function", "function": {"name": "f", "arguments": {"x": written}}}
             for k in range(len(results))]  # fmt: skip
    turn = {"role": "assistant", "content": written, "tool_calls": calls}
    return turn, [{"role": "tool", "tool_call_id": f"call_{number}_{k}", "name": "f", "content": content}
                  for k, content in enumerate(results)]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bridge_is_what_the_whole_conversation_has_there(encoders, name):
    """The conversation is rendered as a whole, and the end of its turn is found by taking the last end token of it."""
    encoder, roles = encoders[name], TEMPLATES[name][2]
    template, tokens = encoder.template, TurnTokens(encoder, 10**6)

    @QUICK
    @given(asked=TEXTS, said=TEXTS, written=TEXTS, results=st.lists(TEXTS, min_size=1, max_size=3),
           role=st.sampled_from(roles), turns=st.integers(1, 3))  # fmt: skip
    def holds(asked, said, written, results, role, turns):
        messages = [{"role": "system", "content": said}, {"role": "user", "content": asked}]
        if name.startswith("qwen3"):  # a last turn without thoughts is shown with empty ones
            written = f"<think>\nb\n</think>\n\n{written}"
        for number in range(turns):
            if role == "tool":
                turn, answers = tool_turn(number, results, written)
            else:
                turn, answers = {"role": "assistant", "content": written}, [{"role": "user", "content": results[0]}]
            messages += [turn]
            before = template.render(messages)
            messages += answers
        whole = template.render(messages, add_generation_prompt=True)
        end = max(before.rfind(token) + len(token) for token in encoder.tokenizer.end_tokens)
        assume(whole.startswith(before[:end]) or "<think>" not in written)  # whose thoughts another <think> empties
        assert whole.startswith(before[:end])
        closing = tokens.closing_token()
        assert before[:end].endswith(next(s for s, i in encoder.tokenizer.special.items() if i == closing))
        bridge = tokens.bridge(answers)
        assert bridge == template.encode_following([(whole[:end], whole[end:])])[0]
        special = set(encoder.tokenizer.special.values())
        harmless = tokens.bridge([{**answer, "content": "a"} for answer in answers])
        assert [i for i in bridge if i in special] == [i for i in harmless if i in special]
        if name in LOSSLESS:
            assert spelled(encoder.tokenizer, bridge) == template.plain(whole[end:])

    holds()


def test_results_at_once_are_one_message_where_the_template_says_so(encoders):
    tokens = TurnTokens(encoders["qwen2.5"], 100)
    _, results = tool_turn(0, ["1", "2"], "")
    text = spelled(encoders["qwen2.5"].tokenizer, tokens.bridge(results))
    assert text == ("\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
                    "<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip
    mixed = tokens.bridge([*results, {"role": "user", "content": "3"}])
    assert spelled(encoders["qwen2.5"].tokenizer, mixed).endswith("user\n3<|im_end|>\n<|im_start|>assistant\n")


def test_the_first_prompt_shows_tools_and_earlier_calls(encoders):
    encoder = encoders["qwen2.5"]
    tokens, user = TurnTokens(encoder, 100), {"role": "user", "content": "Hello <|im_end|>"}
    assert tokens.first_prompt([user]) == encoder.chat_prompt([user])
    tools = [{"type": "function", "function": {"name": "f<|im_end|>"}}]
    turn, results = tool_turn(0, ["7"], "")
    turn["tool_calls"][0]["function"]["arguments"] = '{"x": "<|im_start|>"}'  # JSON text becomes an object
    ids = tokens.first_prompt([user, turn, *results], tools)
    text = spelled(encoder.tokenizer, ids)
    assert text.startswith('<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "f<|im_end|>"}}')
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "<|im_start|>"}}\n</tool_call>' in text
    assert ids.count(encoder.tokenizer.eos_id) == 4


@pytest.mark.parametrize("name", [*HUGGING_FACE, "sentence piece"])
@QUICK
@given(text=TEXTS.map(lambda text: text * 40), longest=st.integers(1, 60))
def test_a_long_message_is_cut_in_the_middle(tmp_path_factory, name, text, longest):
    tokenizer = made(tmp_path_factory, name)
    content = TurnTokens(Encoder(tokenizer), longest).shortened({"role": "user", "content": text})["content"]
    assert len(tokenizer.encode(content)) <= longest
    if len(tokenizer.encode(text)) <= longest:
        assert content == text
        return
    if "..." in text:  # of a drawn text
        return
    has_place = 2 * len(tokenizer.encode(f"\n[... {len(text)} characters cut ...]\n")) <= longest
    if has_place:
        head, number, tail = re.fullmatch(
            r"(.*)\n\[\.\.\. (\d+) characters cut \.\.\.\]\n(.*)", content, re.DOTALL
        ).groups()
        assert len(head) + int(number) + len(tail) == len(text)
    else:
        head, _, tail = content.partition("...")
        assert "..." in content or longest <= len(tokenizer.encode("...")) + 1
    assert text.startswith(head) and text.endswith(tail)


_TOKENIZERS = {}


def made(tmp_path_factory, name):
    if name not in _TOKENIZERS:
        folder = tmp_path_factory.mktemp("tokenizers")
        _TOKENIZERS[name] = (
            build_tokenizer("SentencePieceTokenizer", sentence_piece(folder / "t.model"))
            if name == "sentence piece"
            else build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](folder / name))
        )
    return _TOKENIZERS[name]


def test_a_cut_message_keeps_much_of_both_ends(tmp_path):
    encoder = encoder_of(tmp_path / "t", chatml, TEMPLATES["qwen2.5"][1])
    text = "".join(f"{number:06d} \U0001f642\u4f60\n" for number in range(100_000))  # over a million characters
    content = TurnTokens(encoder, 400).shortened({"role": "user", "content": text})["content"]
    head, tail = content.split(" characters cut ...]\n")
    head, count = head.split("\n[... ")
    assert text == head + text[len(head) : len(head) + int(count)] + tail
    assert 390 <= len(encoder.tokenizer.encode(content)) <= 400
    assert abs(len(encoder.tokenizer.encode(head)) - len(encoder.tokenizer.encode(tail))) <= 10
    assert "\ufffd" not in content


def test_each_message_has_its_own_limit(encoders):
    tokens = TurnTokens(encoders["qwen2.5"], 50)
    _, results = tool_turn(0, ["a" * 45, "b" * 60], "")
    text = spelled(encoders["qwen2.5"].tokenizer, tokens.bridge(results))
    assert "a" * 45 in text and "b" * 60 not in text and "bbb...bbb" in text


def test_halves_of_surrogate_pairs_do_no_harm(encoders):
    tokens = TurnTokens(encoders["qwen2.5"], 100)
    text = spelled(encoders["qwen2.5"].tokenizer, tokens.bridge([{"role": "user", "content": "a\ud800b \ud83d\ude42"}]))
    assert "user\na\ufffdb \U0001f642<|im_end|>" in text


def test_the_text_of_a_turn_ends_before_its_end_token(encoders):
    encoder = encoders["llama"]
    tokens, ids = TurnTokens(encoder, 10), encoder.tokenizer.encode("42 the")
    for end in encoder.tokenizer.end_ids:
        assert tokens.text([*ids, end]) == tokens.text(ids) == "42 the"
    assert tokens.text([]) == ""


def test_a_template_with_one_call_in_a_turn_shows_several_results(encoders):
    encoder = encoders["llama3"]
    _, results = tool_turn(0, ["1", "2"], "")
    text = spelled(encoder.tokenizer, TurnTokens(encoder, 10).bridge(results))
    header = "<|start_header_id|>%s<|end_header_id|>\n\n"
    shown = "".join(header % "ipython" + f'"{number}"<|eot_id|>' for number in (1, 2))
    assert text == shown + header % "assistant"


def test_ends_of_turns_of_families(tmp_path):
    """gpt-oss ends a turn without a call in another way than the policy; GLM's ends say who speaks next."""
    tokens = {}
    for name in ("gpt-oss", "glm", "kimi"):
        each = FAMILY_TEMPLATES[name]
        encoder = encoder_of(tmp_path / name, each.tokenizer, each.template)
        tokens[name], special = TurnTokens(encoder, 10), encoder.tokenizer.special
        if name != "glm":
            assert tokens[name].closing_token() == special[{"gpt-oss": "<|call|>", "kimi": "<|im_end|>"}[name]]
        if name == "gpt-oss":  # what a tool environment says of a call that cannot be read
            text = spelled(encoder.tokenizer, tokens[name].bridge([{"role": "user", "content": "Error"}]))
            assert text == "<|start|>user<|message|>Error<|end|><|start|>assistant"
    with pytest.raises(UsageError, match="which token ends an assistant's turn depends on what follows"):
        tokens["glm"].closing_token()


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_what_follows_a_turn_of_an_agent_is_the_bridge_of_an_environment(name, tmp_path):
    """For results of tools, after a turn that the policy has ended as its family does."""
    each = FAMILY_TEMPLATES[name]
    encoder = encoder_of(tmp_path / "folder", each.tokenizer, each.template)
    tokens, special = TurnTokens(encoder, 10), encoder.tokenizer.special
    turn, results = tool_turn(0, ["5"], "")
    turn["tool_calls"][0] |= {"id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}
    results[0]["tool_call_id"] = "call00000"
    bridge = tokens.bridge(results)
    ends = {number for number in encoder.tokenizer.end_ids if number in special.values()}
    found = {
        last: tokens.following([{"role": "user", "content": "q"}, turn, *results], 1, last, TOOLS) for last in ends
    }
    kept = {last for last, following in found.items() if following is not None}
    assert all(found[last] == bridge for last in kept)
    assert kept == ({special["<|observation|>"]} if name == "glm" else ends)


def test_marks_that_are_special_tokens_are_where_they_were(tmp_path):
    """Also between bytes of one character, in every kind of tokenizer; without marks the text is what it was."""
    for name in HUGGING_FACE:
        encoder = Encoder(build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](tmp_path / name)))
        tokens, end = TurnTokens(encoder, 10), encoder.tokenizer.eos_id
        mark, number = next(
            item for item in encoder.tokenizer.special.items() if item[1] not in encoder.tokenizer.end_ids
        )
        ids = encoder.tokenizer.encode("Hello the user 42")
        plain = tokens.text(ids)
        for at in range(1, len(ids)):
            marked = tokens.marked_text([*ids[:at], number, *ids[at:], end], [mark])
            assert marked.count(mark) == 1 and marked.replace(mark, "") == plain, (name, at)
            assert marked.startswith(tokens.text(ids[:at]).rstrip() if name != "wordpiece" else "")
        assert tokens.marked_text([*ids, number], ["other"]) is tokens.marked_text(ids, [mark]) is None
    letters = encoder_of(tmp_path / "bytes", chatml, TEMPLATES["qwen2.5"][1])
    tokens, ids = TurnTokens(letters, 10), letters.tokenizer.encode("\u4f60")
    special = letters.tokenizer.special["<|im_start|>"]
    split = tokens.marked_text([*ids[:1], special, *ids[1:]], ["<|im_start|>"])
    assert split.startswith("\ufffd<|im_start|>\ufffd") and tokens.text([*ids[:1], special, *ids[1:]]) == "\u4f60"


def test_without_a_template_messages_are_lines(tmp_path):
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentence_piece(tmp_path / "t.model"))
    tokens = TurnTokens(Encoder(tokenizer), 8)
    user, tool = {"role": "user", "content": "Hello"}, {"role": "tool", "content": "</s>"}
    assert tokens.first_prompt([user, user]) == tokens.bridge([user, user]) == tokenizer.encode("Hello\nHello")
    assert tokenizer.eos_id not in tokens.bridge([tool])
    with pytest.raises(ValueError, match="become no token"):
        tokens.bridge([{"role": "user", "content": ""}])
    with pytest.raises(UsageError, match="tools need --chat-template"):
        tokens.first_prompt([user], [{}])


@pytest.mark.parametrize("messages, reason", [
    ([], "without a message"),
    ([{"role": "assistant", "content": "a"}], "has the role assistant, for which the policy writes"),
    ([{"role": "user"}], "message 1 must be an object with role and content"),
    ([{"role": "user", "content": "a"}, {"role": "tool", "content": 3}], "the content of message 2 must be a string"),
])  # fmt: skip
def test_messages_that_cannot_follow(encoders, messages, reason):
    with pytest.raises(ValueError, match=reason):
        TurnTokens(encoders["qwen2.5"], 10).bridge(messages)


def test_templates_that_fail_or_go_on_within_a_turn(tmp_path):
    _, results = tool_turn(0, ["1", "2"], "")
    with pytest.raises(UsageError, match="no tools"):
        template = LLAMA3.replace("message.content | tojson", "raise_exception('no tools')")
        TurnTokens(encoder_of(tmp_path / "llama", llama, template), 10).bridge(results)
    with pytest.raises(UsageError, match="an assistant's turn does not end before what follows"):
        TurnTokens(encoder_of(tmp_path / "gemma", gemma, GEMMA_TOOLS), 10).bridge(results)


# -- prompts and bridges token by token with those of transformers: `references/transformers_turns.py` recorded them ---


FOUND = json.loads((Path(__file__).parents[2] / "references" / "transformers_turns.json").read_text())["results"]


@pytest.mark.parametrize("name", RECORDED)
def test_prompts_and_bridges_are_those_of_transformers(tmp_path, name):
    tokenizer, template, roles = RECORDED[name]
    encoder = encoder_of(tmp_path / "tokenizer", tokenizer, template)
    tokens, ends, bridges = TurnTokens(encoder, 10**6), encoder.tokenizer.end_ids, 0
    for number, (messages, rows) in enumerate(zip(conversations(roles), FOUND[name], strict=True)):
        if number >= SPECIAL_FROM:
            continue
        befores = prompts(messages)
        assert tokens.first_prompt(befores[0], transformers_turns.TOOLS if "tool" in roles else None) == rows[0]["ids"]
        for before, after, row in zip(befores, befores[1:], rows[1:], strict=False):
            bridge, ids = tokens.bridge(after[len(before) + 1 :]), row["ids"]
            turn = ids[: len(ids) - len(bridge)]
            assert ids[len(turn) :] == bridge
            assert turn[-1] in ends and not set(turn[:-1]) & set(ends)
            bridges += 1
    assert bridges > 12


@pytest.mark.parametrize("name", ["qwen2.5", "hermes", "llama", "qwen3", "llama3"])
def test_strings_of_special_tokens_in_contents_stay_text(tmp_path, name):
    """The text is that of transformers, the special tokens are those of harmless contents."""
    tokenizer, template, roles = RECORDED[name]
    encoder = encoder_of(tmp_path / "tokenizer", tokenizer, template)
    tokens, special, hostile = TurnTokens(encoder, 10**6), set(encoder.tokenizer.special.values()), 0
    for messages, rows in list(zip(conversations(roles), FOUND[name], strict=True))[SPECIAL_FROM:]:
        befores = prompts(messages)
        first = tokens.first_prompt(befores[0], transformers_turns.TOOLS if "tool" in roles else None)
        assert spelled(encoder.tokenizer, first) == rows[0]["text"]
        for before, after, row in zip(befores, befores[1:], rows[1:], strict=False):
            answers = after[len(before) + 1 :]
            bridge = tokens.bridge(answers)
            text = spelled(encoder.tokenizer, bridge)
            assert row["text"].endswith(text)
            harmless = tokens.bridge([{**message, "content": "a"} for message in answers])
            assert [i for i in bridge if i in special] == [i for i in harmless if i in special]
            hostile += any(string in message["content"] for message in answers for string in encoder.tokenizer.special)
    assert hostile >= 2


# -- images ------------------------------------------------------------------------------------------------------------


def pictured(tmp_path, family: str, **settings):
    """(an encoder of a vision folder, the marks of two images of it, their tokens)."""
    encoder = picture_prompts.encoder_of(picture_prompts.write_folder(tmp_path / family, family, **settings))
    pictures = picture_prompts.picture(96, 64, 1), picture_prompts.picture(64, 64, 2)
    refs = [encoder.images.add_bytes(picture_prompts.encoded(each)) for each in pictures]
    return encoder, [*map(mark_of, refs)], [encoder.images.tokens(ref) for ref in refs]


@pytest.mark.parametrize("family", by_default(picture_prompts.PROCESSORS, ["qwen3_vl", "glm4v", "mistral3", "llava"]))
def test_turns_with_images_are_the_conversation_given_as_data(family, tmp_path):
    encoder, (one, other), _ = pictured(tmp_path, family)
    tokens, end = TurnTokens(encoder, 10**6), encoder.tokenizer.end_tokens[0]
    asked, shown = ({"role": "user", "content": text} for text in (f"{one}a", f"b{other}{one} c"))
    turn = {"role": "assistant", "content": "picture"}
    prompt, bridge = tokens.first_prompt([asked]), tokens.bridge([shown])
    said = " picture" if family == "llava" else "picture"  # whose opening has no space
    written = [*encoder.tokenizer.encode(said), encoder.tokenizer.special[end]]
    whole = encoder.chat_prompt([asked, turn, shown])
    rows = [sum(token < 0 for token in ids) for ids in (prompt, bridge)]
    assert min(rows) > 0 and [*prompt, *written, *bridge] == whole
    assert tokens.following([asked, turn, shown], 1, written[-1]) == bridge
    assert tokens.shown(bridge).count("[image 64×64 sha:") == 1


def test_cut_messages_lose_whole_images(tmp_path):
    size = {"shortest_edge": 1024, "longest_edge": 65536}
    encoder, (one, other), counts = pictured(tmp_path, "qwen3_vl", size=size)
    text = "the picture " * 20
    whole = f"{one}{text}{other}{text}{one}"
    cuts = {}
    for longest in (30, 60, 100, 1000):
        cuts[longest] = cut = TurnTokens(encoder, longest).shortened({"role": "user", "content": whole})["content"]
        named = [match[0] for match in PATTERN.finditer(cut)]
        assert MARK not in PATTERN.sub("", cut) and set(named) <= {one, other}
        rows = sum(counts[(one, other).index(mark)] for mark in named)
        assert rows + len(encoder.tokenizer.encode(PATTERN.sub("", cut))) <= longest
    assert cuts[1000] == whole and cuts[100].startswith(one) and cuts[100].endswith(one) and other not in cuts[100]
    assert re.search(r"\[\.\.\. \d+ characters and 1 image cut \.\.\.\]", cuts[100])
