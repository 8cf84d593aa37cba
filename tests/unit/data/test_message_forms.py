"""Conversations with the templates of published models, which TRL's package has, as supervised examples."""

import importlib.util
import re
from pathlib import Path

import pytest

from megarl.errors import UsageError
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.family_templates import tokenizer
from tests.helpers.texts.template_conversations import CONVERSATIONS, TOOLS, check_conversation, trained_turns

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC else Path()
ENDS = {  # of a family, by the beginning of its name
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|> <|tool_response>",
    "gemma4": "<turn|> <|tool_response>", "gemma": "<end_of_turn>", "glm4moe": "<|endoftext|> <|user|> <|observation|>",
    "gptoss": "<|return|> <|call|> <|endoftext|>", "idefics3": "<end_of_utterance>", "smolvlm": "<end_of_utterance>",
    "lfm2": "<|im_end|>", "llama3": "<|eot_id|> <|eom_id|>", "muse": "<|eot|>", "nemotron": "<|im_end|>",
    "phi3": "<|end|>", "qwen": "<|im_end|>",
}  # fmt: skip
NO_CALLS = {"cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "phi3", "phi3_5",
            "qwen2_5_vl", "smolvlm"}  # fmt: skip
# Templates that open turns without thoughts, and one that does not end a turn with a single call.
REFUSED = {
    ("qwen3_5_nothink", "thoughts"): "an opening that ends them",
    ("deepseek_r1_distill", "a call"): "ends without",
    ("llama3_1", "two calls"): "single tool-calls",
    ("llama3_2", "two calls"): "single tool-calls",
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "training" not in path.stem
               and any(path.stem.startswith(name) for name in ENDS))  # fmt: skip
SPECIAL = re.compile(r"<[|｜]?[A-Za-z][\w▁ ]*[|｜]?>|<[a-z_]+>|<\|[a-z_]+>|<[a-z_]+\|>")
ORDINARY = re.compile(r"</?(think|tool|function|parameter|arg|tools|IMPORTANT|value)")

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(SPEC is None, reason="TRL is not installed")]


def encoder(folder, name: str):
    source = (FOLDER / f"{name}.jinja").read_text()
    ends = next(ends.split() for start, ends in ENDS.items() if name.startswith(start))
    special = {found for found in SPECIAL.findall(source) if not ORDINARY.match(found)} - {*ends}
    marks = ("<|bos|>", *sorted(special)), ("<think>", "</think>"), tuple(ends)
    return encoder_of(folder / name, lambda place: tokenizer(*marks, place), source)


def reason(name: str, kind: str) -> str | None:
    """Why a template has no example of a conversation; None: it must have them."""
    if "call" in kind and name in NO_CALLS:
        return "leaves out the assistant's call"
    return next((text for (one, of), text in REFUSED.items() if one == name and of in kind), None)


def test_there_are_templates():
    assert len(NAMES) > 35 and {*NO_CALLS, *(name for name, _ in REFUSED)} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_follows_what_the_policy_reads(name, tmp_path):
    of = encoder(tmp_path, name)
    for kind, messages in CONVERSATIONS.items():
        tools = TOOLS if "call" in kind else None
        if (text := reason(name, kind)) is None:
            check_conversation(of, messages, tools)
        else:
            with pytest.raises(UsageError, match=text):
                of.conversation(messages, tools)


# TRL trains earlier turns of these as they are shown later: without thoughts, or with another end.
ONE_TURN = ("deepseek", "diffusion_gemma", "idefics3", "smolvlm", "gptoss", "glm4moe", "nemotron_3")
WITHOUT_CONTENTS = ("idefics3", "smolvlm")  # TRL needs them in parts


@pytest.mark.parametrize("name", [name for name in NAMES if (FOLDER / f"{name}_training.jinja").exists()])
def test_trl_trains_on_the_same_turns(name, tmp_path):
    """What it marks has the opening of a turn, too, and the template's text after the end token."""
    from transformers.utils.chat_template_utils import render_jinja_template

    of = encoder(tmp_path, name)
    names = {"bos_token": of.tokenizer.bos_token, "eos_token": of.tokenizer.end_tokens[0]}
    for kind in ("one turn", "two turns", "thoughts in contents", "thoughts apart"):
        if reason(name, kind) or name.startswith(ONE_TURN) and kind != "one turn":
            continue
        (text,), (spans,) = render_jinja_template(
            [CONVERSATIONS[kind]], chat_template=(FOLDER / f"{name}_training.jinja").read_text(),
            return_assistant_tokens_mask=True, **names,
        )  # fmt: skip
        theirs = "".join(text[start:end] for start, end in spans)
        for _, turn in trained_turns(of.conversation(CONVERSATIONS[kind])):
            ours = spelled(of.tokenizer, turn).strip()
            if name.startswith("deepseek"):  # without empty thoughts
                ours = ours.removeprefix("</think>").strip()
            _, found, theirs = theirs.partition(ours.removeprefix("so") if name in WITHOUT_CONTENTS else ours)
            assert found, (kind, ours)
