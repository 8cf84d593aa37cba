"""Policies that write calls in the form of their family, in special tokens: they learn some calls and their results."""

import json

import pytest

from tests.helpers.programs import metrics, samples, train, write_lines
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --make-vocab-size-divisible-by 32 --max-prompt-length 64 --max-tokens-per-microbatch 1000"
    " --position-embedding-type rope --tokenizer-type HuggingFaceTokenizer --seed 5"
)
SFT = (
    " --global-batch-size 8 --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 5 --lr-warmup-init 0 --train-iters 120"
    " --max-response-length 300"
)
RL = (
    " --environment calculator --environment-max-failures 0 --max-turns 3 --max-turn-length 150 --train-iters 2"
    " --max-response-length 400 --max-observation-length 30 --advantage rloo --kl-coefficient 0 --lr 1e-6"
    " --prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 16 --rollout-buffer-gb 0.02"
)
TOOLS = [{"type": "function", "function": {"name": "calculate", "description": "c", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string", "description": "e"}}}}}]  # fmt: skip
PRODUCTS = ((12, 34), (7, 81), (33, 5), (64, 23))


def conversation(form: str, first: int, second: int) -> dict:
    question, result = f"{first}*{second}", str(first * second)
    name = "functions.calculate:0" if form == "kimi" else "abcdefgh0"
    call = {"id": name, "type": "function", "function": {"name": "calculate", "arguments": {"expression": question}}}
    return {"tools": TOOLS, "messages": [
        {"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "name": "calculate", "content": result},
        {"role": "assistant", "content": result},
    ]}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt-oss", "kimi", "mistral"])
def test_a_policy_calls_tools_in_the_form_of_its_template(name, tmp_path):
    """Calls that it writes wrong are answered, too: no episode fails. The form is found by the template."""
    family = FAMILY_TEMPLATES[name]
    (tmp_path / "template.jinja").write_text(family.template)
    files = ["--tokenizer-model", family.tokenizer(tmp_path / "tokenizer"), "--chat-template",
             str(tmp_path / "template.jinja")]  # fmt: skip
    talks = write_lines(tmp_path / "talks.jsonl", [conversation(family.form, *each) for each in PRODUCTS * 6])
    lines = [{"prompt": f"{first}*{second}", "answer": str(first * second)} for first, second in PRODUCTS]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    train("sft", [*(SHAPE + SFT).split(), *files, "--prompts", str(talks), "--save", str(tmp_path / "sft")])
    train("rl", [*(SHAPE + RL).split(), *files, "--prompts", str(prompts), "--pretrained-checkpoint",
                 str(tmp_path / "sft"), "--save", str(tmp_path / "rl")])  # fmt: skip
    for row in metrics(tmp_path / "rl").values():
        assert row["environment/tool_calls"] >= 4 and row["reward/mean"] > 0.1 and row["rollout/logprob_gap_max"] == 0
    rows = map(json.loads, samples(tmp_path / "rl", 2).splitlines())
    right = next(row for row in rows if row["correct"])
    assert [turn["observation"] != "" for turn in right["turns"]][-2:] == [True, False]
    if name == "kimi":
        assert "## Return of functions.calculate:0" in right["response"]
