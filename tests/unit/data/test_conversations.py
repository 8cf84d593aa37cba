"""Responses re-encoded from one tokenizer to another: any pair, any text, with and without a chat template."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.chat import ChatTemplate
from megarl.data.columns import Columns
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.examples import sft_examples
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from tests.helpers.programs import write_lines
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES
from tests.helpers.texts.small_tokenizers import CHATML, HUGGING_FACE, PLAIN, sentence_piece
from tests.helpers.texts.template_conversations import CONVERSATIONS, TOOLS, check_conversation, trained_turns

QUICK = settings(max_examples=15)
KINDS = ("sp_bpe", "sp_unigram", *HUGGING_FACE)
# These give back every text; the others lose case, white space or characters.
LOSSLESS = ("sp_bpe", "sp_unigram", "chatml", "llama", "gemma")

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>",
           "<|eot_id|>", "<eos>", "<bos>", "<end_of_turn>", "[CLS]", "[SEP]", "[PAD]", "\uff1cs\uff1e",
           "\uff1c/s\uff1e", "[sep]", "<|im_", "end|>", "<</s>s>"]  # fmt: skip
OTHER = ["Hello", "the user", " ", "\n\n", "42", "\u4f60\u597d", "\U0001f642",
         "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u05e9\u05dc\u05d5\u05dd",
         "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0301", "e\u0301\u0323", "\ufffd",
         "\ufdd0", "\ufdd00\ufdd1", "{{ bos_token }}", "assistant|"]  # fmt: skip
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"), max_size=6)
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.sampled_from(OTHER) | CHARACTERS, max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {name: build_tokenizer("HuggingFaceTokenizer", make(folder / name)) for name, make in HUGGING_FACE.items()}
    for kind in ("bpe", "unigram"):
        path = sentence_piece(folder / f"{kind}.model", model_type=kind, vocab_size=330 if kind == "bpe" else 305)
        made[f"sp_{kind}"] = build_tokenizer("SentencePieceTokenizer", path)
    return made


@pytest.fixture(scope="module")
def encoders(tokenizers):
    """Two of each kind: plain text, and a chat template (the tokenizer's own if it has one)."""
    return {
        name: (
            Encoder(tokenizer),
            build_encoder(tokenizer, "tokenizer") if tokenizer.template
            else Encoder(tokenizer, ChatTemplate(PLAIN, tokenizer)),
        )
        for name, tokenizer in tokenizers.items()
    }  # fmt: skip


def special_ids(tokenizer, ids):
    return [i for i in ids if i in tokenizer.special.values()]


def check_scored(encoder, prompt, text, longest):
    """Properties of every scored text."""
    tokenizer = encoder.tokenizer
    prompt_ids, response = encoder.prompt(prompt), encoder.response(prompt, text)
    whole, cut = encoder.reward_model_inputs([(prompt, text)], 10**6)[0]
    assert whole == prompt_ids + response and cut == 0
    assert whole[-1] == tokenizer.eos_id
    # The same special tokens as around harmless text: none came from the contents, and BOS is where it was.
    harmless = encoder.reward_model_inputs([(Prompt(0, "a"), "b")], 10**6)[0][0]
    assert special_ids(tokenizer, whole) == special_ids(tokenizer, harmless)
    assert special_ids(tokenizer, response) == [tokenizer.eos_id]
    assert special_ids(tokenizer, tokenizer.encode(text)) == []
    if tokenizer.bos_id is not None:
        has_bos = encoder.template is not None or bool(encoder.prefix_ids)
        assert whole.count(tokenizer.bos_id) == (whole[0] == tokenizer.bos_id) == has_bos
    shortened, cut = encoder.reward_model_inputs([(prompt, text)], longest)[0]
    assert len(shortened) == min(longest, len(whole)) and cut == len(whole) - len(shortened)
    opening = 1 if cut and longest > 1 and whole[0] == tokenizer.bos_id else 0
    assert shortened == whole[:opening] + whole[len(whole) - len(shortened) + opening :]


@pytest.mark.parametrize("reward", KINDS)
def test_a_response_is_re_encoded_from_any_tokenizer(encoders, reward):
    @QUICK
    @given(said=TEXTS, answered=TEXTS, longest=st.integers(1, 40), templated=st.booleans())
    def holds(said, answered, longest, templated):
        encoder, texts = encoders[reward][templated], {answered}
        for policy in KINDS:
            written = encoders[policy][0].tokenizer
            text = written.decode([*written.encode(answered), written.eos_id])
            assert text == answered or policy not in LOSSLESS
            texts.add(text)
        for text in texts:
            check_scored(encoder, Prompt(0, said), text, longest)
            if reward in LOSSLESS:
                kept = text.strip() if reward in ("llama", "gemma") and templated else text
                assert encoder.tokenizer.decode(encoder.response(Prompt(0, said), text)) == kept

    holds()


@QUICK
@given(samples=st.lists(st.tuples(TEXTS, TEXTS), max_size=5), longest=st.integers(1, 30))
def test_a_batch_is_its_samples_one_by_one(encoders, samples, longest):
    prompts = [(Prompt(0, said), answered) for said, answered in samples]
    for encoder in itertools.chain(*encoders.values()):
        alone = [encoder.reward_model_inputs([each], longest)[0] for each in prompts]
        assert encoder.reward_model_inputs(prompts, longest) == alone


def conversations():
    return st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", KINDS)
def test_the_mask_of_a_conversation_covers_each_answer_and_its_end(encoders, name):
    encoder = encoders[name][1]
    tokenizer = encoder.tokenizer

    @QUICK
    @given(turns=conversations())
    def holds(turns):
        messages = [{"role": role, "content": text} for turn in turns
                    for role, text in zip(("user", "assistant"), turn, strict=True)]  # fmt: skip
        ((ids, mask),) = encoder.conversation(messages)
        assert len(ids) == len(mask) and not mask[0]
        runs = [[i for i, _ in run] for learnt, run in
                itertools.groupby(zip(ids, mask, strict=True), key=lambda item: item[1]) if learnt]  # fmt: skip
        starts = [i for i, (before, now) in enumerate(itertools.pairwise([False, *mask])) if now and not before]
        assert len(runs) == len(turns)
        for turn, (run, start) in enumerate(zip(runs, starts, strict=True)):
            prompt = Prompt(0, messages[: 2 * turn + 1])
            assert run == encoder.response(prompt, turns[turn][1])
            # Metaspace may add a space in front of each part of a text that is encoded in parts.
            shown = [tokenizer.decode(part).replace(" ", "") for part in (ids[:start], encoder.prompt(prompt))]
            assert shown[0] == shown[1]
        assert ids[: starts[0]] == encoder.prompt(Prompt(0, messages[:1]))

    holds()


def test_without_a_template_it_is_text_and_end(tokenizers):
    for tokenizer in tokenizers.values():
        encoder = build_encoder(tokenizer, None, "reward-")
        prompt = Prompt(0, "Hello")
        before = list(tokenizer.prefix_ids)
        assert encoder.prompt(prompt) == [*before, *tokenizer.encode("Hello")]
        assert encoder.response(prompt, "world") == [*tokenizer.encode("world"), tokenizer.eos_id]
        whole = [*before, *tokenizer.encode("Hello"), tokenizer.eos_id]
        assert encoder.reward_model_inputs([(prompt, "")], 100) == [(whole, 0)]
        assert encoder.reward_model_inputs([(Prompt(0, ""), "")], 1) == [([tokenizer.eos_id], len(before))]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        for rejected, value in ((encoder.conversation, messages), (encoder.prompt, Prompt(0, messages[:1]))):
            with pytest.raises(UsageError, match="messages needs --reward-chat-template"):
                rejected(value)


def test_a_prompt_is_rendered_and_encoded_once(tokenizers, monkeypatch):
    encoder = Encoder(tokenizers["chatml"], ChatTemplate(CHATML, tokenizers["chatml"]))
    rendered, render = [], encoder.template.render

    def counted(*args, **named):
        rendered.append(named)
        return render(*args, **named)

    monkeypatch.setattr(encoder.template, "render", counted)
    encoder.reward_model_inputs([(Prompt(0, "Hello"), str(i)) for i in range(20)], 100)
    assert rendered.count({"add_generation_prompt": True, "tools": None}) == 1
    # What a caller does to a prompt's tokens does not reach the next caller's.
    encoder.prompt(Prompt(0, "Hello")).clear()
    assert encoder.prompt(Prompt(0, "Hello"))


BEGINS, ENDS = "does not begin with its rendered prompt", "ends without the tokenizer's EOS"
TWICE = "writes BOS '<s>' twice"
REFUSED = [
    ("{{ messages|length }}{{ eos_token }}{% if add_generation_prompt %}x{% endif %}", BEGINS),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", ENDS),
    ("{% for m in messages %}{{ m.content + eos_token if m.content }}{% endfor %}", ENDS),
    ("{{ bos_token }}<s>{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", TWICE),
]


@pytest.mark.parametrize("source, message", REFUSED, ids=["begin", "end", "empty", "bos"])
def test_a_template_unfit_for_training_is_rejected(tokenizers, source, message):
    template = ChatTemplate(source, tokenizers["sp_bpe"], "--reward-chat-template t.jinja")
    with pytest.raises(UsageError, match=f"^--reward-chat-template t.jinja: .*{message}"):
        Encoder(tokenizers["sp_bpe"], template).check_turns()


def test_a_template_that_rewrites_earlier_turns_makes_several_sequences(tokenizers):
    # As some do with earlier thoughts: only the last answer is given in full.
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}u{{ m.content }}a{% else %}"
        "{{ m.content if loop.last else '-' }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    encoder = Encoder(tokenizers["sp_bpe"], ChatTemplate(source, tokenizers["sp_bpe"]))
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    found = encoder.conversation(turn * 2)
    texts = [encoder.tokenizer.decode([i for i in ids if i != encoder.tokenizer.eos_id]) for ids, _ in found]
    assert texts == ["uxay", "uxa-uxay"]
    assert [sum(mask) for _, mask in found] == [sum(mask) for _, mask in encoder.conversation(turn)] * 2
    assert all(mask[-1] for _, mask in found)


# -- what a policy writes of a turn ------------------------------------------------------------------------------------


ONE_CALL = {name for name, family in FAMILY_TEMPLATES.items() if family.calls == 1 and name != "gpt-oss"}


@pytest.fixture(scope="module")
def family_encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("family_encoders")
    return {name: encoder_of(folder / str(number), family.tokenizer, family.template)
            for number, (name, family) in enumerate(FAMILY_TEMPLATES.items())}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_every_turn_follows_what_the_policy_reads(family_encoders, name):
    encoder = family_encoders[name]
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
def test_what_is_trained_on(family_encoders, name, kind, expected):
    encoder = family_encoders[name]
    found = trained_turns(encoder.conversation(CONVERSATIONS[kind]))
    assert [spelled(encoder.tokenizer, turn) for _, turn in found] == expected
    if kind != "thoughts apart":  # the same turn as a response of its own
        question, answer = CONVERSATIONS[kind][:2]
        assert encoder.response(Prompt(0, [question]), answer["content"]) == found[0][1]


def test_a_call_ends_with_the_token_that_begins_its_result(family_encoders):
    (_, turn), (_, answer) = trained_turns(family_encoders["glm"].conversation(CONVERSATIONS["a call"], TOOLS))
    ends = [spelled(family_encoders["glm"].tokenizer, turn[-1:]) for turn in (turn, answer)]
    assert ends == ["<|observation|>", "<|user|>"]


def test_a_line_becomes_as_many_examples_as_it_needs(family_encoders, tmp_path):
    kinds = ["one turn", "two turns", "thoughts apart"]
    rows = [{"messages": CONVERSATIONS[kind]} for kind in kinds]
    rows[2] = json.loads(json.dumps(rows[2]).replace("reasoning_content", "thinking"))  # gpt-oss's name
    prompts = load_prompts(str(write_lines(tmp_path / "p.jsonl", rows)), columns=Columns("sft"))
    examples = sft_examples(prompts, family_encoders["qwen3"], 200, 100)
    assert len(examples) == len(examples.prompts) == 5
    assert [examples.prompts.where(number)[-1] for number in range(5)] == ["1", "2", "2", "3", "3"]
    assert "2 of 3 conversations become 4 examples" in examples.prompts.notes[-1]
    turns = [
        spelled(family_encoders["qwen3"].tokenizer, turn)
        for (sequence,) in examples
        for _, turn in trained_turns([sequence])
    ]
    assert len(turns) == 5 and turns[3:] == ["<think>\nhmm\n</think>\n\nso<|im_end|>"] * 2
    assert sorted(examples.prompts.order(1).take(5)) == [0, 1, 2, 3, 4]
    # Only the first sequences of lines 2 and 3 would fit; all of a line are dropped with it.
    longest = max(len(tokens) for ((tokens, _),) in examples)
    kept = sft_examples(prompts, family_encoders["qwen3"], longest - 1 - 40, 40, drops_long=True)
    assert len(kept.prompts) == len(kept) < 5 and "dropped 1 of 3 examples" in kept.prompts.notes[0]


def test_thoughts_that_a_template_leaves_out_are_said(family_encoders, tmp_path):
    rows = [{"messages": CONVERSATIONS[kind]} for kind in ("thoughts in contents", "two turns")]
    path = write_lines(tmp_path / "p.jsonl", [*rows, {"prompt": "a", "response": "<think>b</think>c"}])
    for name, count in {"llama": 0, "deepseek": 3}.items():
        prompts = sft_examples(load_prompts(str(path), columns=Columns("sft")), family_encoders[name], 200, 100).prompts
        notes = [note for note in prompts.notes if "leaves out the thoughts" in note]
        assert len(notes) == bool(count) and all(f"of {count} turns" in note for note in notes)
