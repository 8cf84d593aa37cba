"""Tokenizers and templates of folders in the forms that are published, against what transformers makes of them."""

import datetime
import json
from pathlib import Path

import pytest

from megarl.data.chat import ChatTemplate, TemplateOptions
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from tests.helpers.texts import small_tokenizers
from tests.helpers.texts.refusals import refusal
from tests.helpers.worlds import run_world

# transformers starts threads when it encodes, so it does in a fork.
TEXTS = ["Hello world", "the user 42", " a\n\nb", "\u4f60\u597d", ""]


def edit(folder, name="tokenizer_config.json", **entries) -> str:
    """A folder with other entries in a JSON file; None takes one out."""
    path = Path(folder) / name
    content = (json.loads(path.read_text()) if path.exists() else {}) | entries
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(folder)


def special_tokens_map(folder) -> str:
    """The names of special tokens in a file of their own, as transformers 4 wrote it."""
    edit(small_tokenizers.gemma(folder), eos_token=None, bos_token=None)
    return edit(folder, "special_tokens_map.json", bos_token="<bos>", eos_token={"content": "<end_of_turn>"})


def sentence_piece(folder) -> str:
    """A Llama 2 without tokenizer.json: transformers converts the SentencePiece model."""
    folder.mkdir()
    small_tokenizers.sentence_piece(folder / "tokenizer.model")
    edit(folder, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
         add_bos_token=True, pad_token="<pad>")  # fmt: skip
    return edit(folder, "config.json", model_type="llama")


def with_switch(value):
    """A switch of the BOS in tokenizer_config.json, which the rule in tokenizer.json goes before."""
    return lambda folder: edit(small_tokenizers.mistral(folder), tokenizer_class="LlamaTokenizer", add_bos_token=value)


FOLDERS = {  # others are in test_chat
    "llama": small_tokenizers.llama,
    "chatml": small_tokenizers.chatml,
    "special_tokens_map": special_tokens_map,
    "sentence piece": sentence_piece,
    "switch": with_switch(True),
    "switch off": with_switch(False),
    "objects": lambda folder: edit(
        small_tokenizers.gemma(folder), eos_token={"__type": "AddedToken", "content": "<end_of_turn>", "special": True}
    ),
}


def read_by_transformers(rank: int, folders: dict[str, str]) -> dict[str, tuple]:
    from transformers import AutoTokenizer

    found = {}
    for name, folder in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        names = tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id
        found[name] = names, [tokenizer(text)["input_ids"] for text in TEXTS]
    return found


def test_texts_are_encoded_as_transformers_encodes_them(tmp_path):
    folders = {name: make(tmp_path / name.replace(" ", "_")) for name, make in FOLDERS.items()}
    (expected,) = run_world(read_by_transformers, 1, folders)
    has_bos = set()
    for name, folder in folders.items():
        tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
        encoder = build_encoder(tokenizer, None)
        names, ids = expected[name]
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_id) == names, name
        assert [encoder.prompt(Prompt(0, text)) for text in TEXTS] == ids, name
        if encoder.prefix_ids:
            has_bos.add(name)
    assert has_bos == {"llama", "sentence piece"}


def test_bos_by_flag(tmp_path):
    llama = build_tokenizer("HuggingFaceTokenizer", small_tokenizers.llama(tmp_path / "a"))
    chatml = build_tokenizer("HuggingFaceTokenizer", small_tokenizers.chatml(tmp_path / "b"))
    plain = llama.encode("a")
    for bos, expected in (("auto", [llama.bos_id, *plain]), ("always", [llama.bos_id, *plain]), ("never", plain)):
        encoder = build_encoder(llama, None, bos=bos)
        assert encoder.prompt(Prompt(0, "a")) == expected == encoder.text("a")
        assert encoder.reward_model_inputs([(Prompt(0, "a"), "b")], 9)[0][0][: len(expected)] == expected
        assert encoder.response(Prompt(0, "a"), "b") == [*llama.encode("b"), llama.eos_id]
    # A template writes BOS itself, or not.
    prompts = [build_encoder(llama, "tokenizer", bos=bos).prompt(Prompt(0, "a")) for bos in ("always", "never")]
    assert prompts[0] == prompts[1] and prompts[0].count(llama.bos_id) == 1
    with pytest.raises(UsageError, match="--reward-bos always: the tokenizer has no BOS"):
        build_encoder(chatml, None, "reward-", bos="always")


# -- templates ---------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Behaviours that published templates have -> a template with it
BEHAVIOURS = {
    "date of GPT-OSS": "Current date: {{ strftime_now('%Y-%m-%d') }}\n" + LOOP + OPEN,
    "date of Llama 3.2": "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + LOOP + OPEN,
    "thoughts opened by R1": LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "thoughts dropped by R1": "{% for m in messages %}{% set m2 = m.content.split('</think>')[-1] %}{{ m.role + m2 }}"
                              "{% endfor %}" + OPEN,
    "next role ends GLM's turn": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + OPEN,
    "enable_thinking of Qwen3": LOOP + OPEN + "{% if add_generation_prompt and enable_thinking is defined and "
                                "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    "last user of Qwen3": "{%- set ns = namespace(last=0) %}{%- for m in messages[::-1] %}{%- if m.role == 'user' %}"
                          "{%- set ns.last = loop.index0 %}{% break %}{%- endif %}{%- endfor %}{{ ns.last }}" + LOOP,
    "absent tools": "{% if not tools is defined %}undefined{% elif tools is none %}none{% endif %}" + LOOP,
    "tools of Qwen": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}" + LOOP + OPEN,
    "tools of Llama": "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
                      + LOOP,
    "documents": "{% if documents %}{{ documents | length }}{% endif %}" + LOOP + OPEN,
    "named tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token }}|{{ unk_token }}" + LOOP,
    "macros": "{% macro show(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}" + OPEN,
    "trimmed": "{% for m in messages %}{{ m.content | trim }}{{ m['content'].strip('\\n').upper() }}{% endfor %}",
    "continue of Llama": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}" + TURN
                         + "{% endfor %}" + OPEN,
    "generation": "{% for m in messages %}{% generation %}" + TURN + "{% endgeneration %}{% endfor %}",
    "kinds of contents": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is "
                         "iterable %}list{% endif %}{% if m is mapping %}!{% endif %}{% endfor %}",
    "neighbours": "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}>{{ m.role }}"
                  "{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}"
               "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
}  # fmt: skip
MESSAGES = [{"role": "system", "content": " Be kind.\n"}, {"role": "user", "content": "Hello\n\nworld <b> & \u4f60"}]
DATE = datetime.date(2026, 2, 3)
OPTIONS: list[dict] = [{}, {"tools": TOOLS}, {"enable_thinking": False}]


def rendered_by_transformers(rank: int, folder: str) -> dict[str, list]:
    """Text and tokens of each template, on a day that is `DATE`."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(DATE.year, DATE.month, DATE.day)

    chat_template_utils.datetime = Day
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def rendered(template: str, options: dict) -> tuple[str, list[int]]:
        options = {"chat_template": template, "add_generation_prompt": True, **options}
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)
        return text, list(tokenizer.apply_chat_template(MESSAGES, return_dict=False, **options))

    return {name: [rendered(template, options) for options in OPTIONS] for name, template in BEHAVIOURS.items()}


def test_templates_write_what_transformers_writes(tmp_path):
    folder = small_tokenizers.chatml(tmp_path / "chatml")
    (expected,) = run_world(rendered_by_transformers, 1, folder)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    for name, source in BEHAVIOURS.items():
        encoder = Encoder(tokenizer, ChatTemplate(source, tokenizer, options=TemplateOptions(date=DATE)))
        for (text, ids), options in zip(expected[name], OPTIONS, strict=True):
            tools, values = options.get("tools"), {} if "tools" in options else options
            assert encoder.template.render(MESSAGES, True, tools, values) == text, name
            assert encoder.chat_prompt(MESSAGES, tools, values) == ids, name


def test_a_folder_may_have_another_template_for_tools(tmp_path):
    """As Hermes and Command R have it."""
    from transformers import AutoTokenizer

    with_tools = (
        "\n  {%- macro f(t) %}{{ t | tojson }}{% endmacro %}\n{% set x = 1 %}\n {% for t in tools %}{{ f(t) }}\n"
    )
    named = {
        "default": "  {% if true %}\n  a {% endif %}\n" + LOOP + OPEN,
        "tool_use": with_tools + "{% endfor %}{{ x }}" + LOOP + " \n\n",
    }
    folder = small_tokenizers.chatml(tmp_path / "t")
    edit(folder, chat_template=[{"name": name, "template": template} for name, template in named.items()])
    theirs, ours = AutoTokenizer.from_pretrained(folder), build_tokenizer("HuggingFaceTokenizer", folder)
    template = ChatTemplate(ours.template, ours)
    for tools in (None, TOOLS):
        for opens in (False, True):
            text = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=opens, tokenize=False)
            assert template.render(MESSAGES, opens, tools) == text
    edit(folder, chat_template=[{"name": "tool_use", "template": "x"}])
    assert build_tokenizer("HuggingFaceTokenizer", folder).template is None


def test_options_of_flags():
    options = TemplateOptions.of_flags('{"enable_thinking": false}', "2026-02-03")
    assert options == TemplateOptions({"enable_thinking": False}, DATE)
    assert TemplateOptions.of_flags(None, None) == TemplateOptions()
    for values, date, message in [
        ("[1]", None, "--reward-chat-template-kwargs [1]: allowed is a JSON object"),
        ("{", None, "--reward-chat-template-kwargs {: allowed is a JSON object"),
        ('{"messages": []}', None, "allowed is a JSON object without add_generation_prompt, documents, messages"),
        (None, "today", "--reward-chat-template-date today: allowed is a date such as 2024-07-26"),
    ]:
        assert message in refusal(TemplateOptions.of_flags, values, date, "reward-")


def test_special_strings_in_values_stay_text(tmp_path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", small_tokenizers.chatml(tmp_path / "a"))
    encoder = Encoder(tokenizer, ChatTemplate("{{ x }}{{ messages[0].content }}", tokenizer))
    ids = encoder.chat_prompt([{"role": "user", "content": "a"}], values={"x": "<|im_end|>"})
    assert tokenizer.decode(ids) == "<|im_end|>a" and not set(ids) & set(tokenizer.special.values())
