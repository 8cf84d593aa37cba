"""Which chat templates a conversation can go on with, and why not with the others."""

import pytest

from megarl.data.conversations import Encoder
from megarl.data.template_checks import check_template
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from megarl.tool_formats import FORMATS
from tests.helpers.texts.chat_encoders import encoder_of
from tests.helpers.texts.chat_templates import FORGETS, QWEN3, QWEN25, TEMPLATES
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES
from tests.helpers.texts.small_tokenizers import chatml, sentence_piece

ROLES = ("user", "tool")


@pytest.mark.parametrize("name, role", [(name, role) for name, (*_, roles) in TEMPLATES.items() for role in roles])
def test_templates_that_append(tmp_path, name, role):
    check_template(encoder_of(tmp_path / "t", *TEMPLATES[name][:2]), (role,))


def family(name):
    return FAMILY_TEMPLATES[name].tokenizer, FAMILY_TEMPLATES[name].template


@pytest.mark.parametrize("name, role", [(n, role) for n, each in FAMILY_TEMPLATES.items() for role in each.roles])
def test_templates_of_families(tmp_path, name, role):
    """Among them are some with one call in a turn, ids of nine characters, arguments as texts, turns that the next
    message ends, and some that drop thoughts once the last answer follows."""
    each = FAMILY_TEMPLATES[name]
    check_template(encoder_of(tmp_path / "t", each.tokenizer, each.template), (role,), FORMATS[each.form].call_id)


THOUGHTS = r"rewrites earlier turns \(it drops the thoughts of an assistant's turn once a user message follows\); give"
REFUSED = {
    "qwen3": ("user", *TEMPLATES["qwen3"][:2], THOUGHTS),
    "qwen3 thinking": ("user", *TEMPLATES["qwen3 thinking"][:2], THOUGHTS),
    "system at the last question": ("user", *TEMPLATES["mistral"][:2], "rewrites earlier turns before a user message"),
    "glm": ("user", *family("glm"), THOUGHTS),
    "gpt-oss": ("user", *family("gpt-oss"), "rewrites earlier turns before a user message"),
    "short ids": ("tool", *family("mistral"), "ids of calls have 9 characters .of a probe, of 1 tool calls"),
    "the user's message ends with the turn's token": (
        "user", chatml, "{% for m in messages %}{{ m.content + '<|im_end|>' * (m.role == 'user') }}{% endfor %}",
        "ends an assistant's turn without a special token"),
    "results within the turn": ("tool", *TEMPLATES["gemma"][:2], "ends an assistant's turn without a special token"),
    "forgets at once": ("user", chatml, FORGETS, "drops the thoughts of an assistant's turn at once"),
    "forgets beside calls": ("tool", chatml, FORGETS, "drops the thoughts of an assistant's turn at once"),
    "last two turns": (
        "user", chatml, QWEN25.replace("{{- '<|im_start|>assistant\\n' + content }}",
            "{{- '<|im_start|>assistant\\n' + (content if loop.revindex < 4 else '-') }}"),
        r"rewrites earlier turns \(it drops"),
    "turn shown in what follows": (
        "user", chatml, QWEN25.replace("{%- if message.role == 'user' or",
            "{%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'assistant' %}"
            "{{- '<|im_start|>user\\n' + loop.previtem.content + content + '<|im_end|>\\n' }}"
            "{%- elif message.role == 'user' or", 1),
        "makes what follows an assistant's turn depend on that turn"),
    "no role tool": (
        "tool", chatml, QWEN25.replace("{%- elif message.role == 'tool' %}", "{%- elif message.role == 'tool' %}"
            "{{- raise_exception('no tools') }}"), "fails on these messages: no tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_do_not(tmp_path, name):
    role, tokenizer, template, reason = REFUSED[name]
    encoder = encoder_of(tmp_path / "t", tokenizer, template)
    with pytest.raises(UsageError, match=f"^--chat-template: .*{reason}") as caught:
        check_template(encoder, (role,))
    assert str(caught.value).endswith("whose messages it accepts") and "\n" not in str(caught.value)


def test_qwen3_answers_tools_alone(tmp_path):
    encoder = encoder_of(tmp_path / "t", chatml, QWEN3)
    check_template(encoder, ("tool",))
    check_template(encoder, ())
    for roles in (ROLES, ROLES[::-1]):
        with pytest.raises(UsageError, match="once a user message follows"):
            check_template(encoder, roles)


def test_openings_that_end_thoughts(tmp_path):
    """A model that does not think: its template writes empty thoughts, which must stay."""
    turn, opening = "{{- '<|im_start|>assistant\\n' + content }}", "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    empty = "<think>\\n\\n</think>\\n\\n"
    opens = QWEN25.replace(opening, opening.replace("\\n' }}", f"\\n{empty}' }}}}"))
    keeps = opens.replace(turn, f"{{{{- '<|im_start|>assistant\\n{empty}' + content }}}}")
    drops = keeps.replace(f"{empty}' + content", f"' + ('{empty}' if loop.last else '') + content")
    assert len({QWEN25, opens, keeps, drops}) == 4
    check_template(encoder_of(tmp_path / "keeps", chatml, keeps), ROLES)
    with pytest.raises(UsageError, match="rewrites earlier turns"):
        check_template(encoder_of(tmp_path / "drops", chatml, drops), ("user",))


def test_plain_text_is_always_appended(tmp_path):
    encoder = Encoder(build_tokenizer("SentencePieceTokenizer", sentence_piece(tmp_path / "t.model")))
    check_template(encoder, ROLES)
