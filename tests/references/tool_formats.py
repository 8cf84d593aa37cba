"""Renders turns with tool calls with `transformers` by the templates that the families' models were published with:
writes tool_formats.json for tests/unit/tool_formats/test_against_transformers.py.

    python -m venv scratch && scratch/bin/pip install transformers==5.24.0
    PYTHONPATH=. scratch/bin/python tests/references/tool_formats.py FOLDER tests/references/tool_formats.json

FOLDER has the templates as `models/templates` of llama.cpp names them. Only the turns are recorded, not the templates.
"""

import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": {
        "type": "object", "required": [], "properties": {
            "text": {"type": "string", "description": "a"}, "count": {"type": "integer", "description": "b"},
            "share": {"type": "number", "description": "c"}, "is_on": {"type": "boolean", "description": "d"},
            "items": {"type": "array", "items": {"type": "object"}, "description": "e"},
            "options": {"type": "object", "description": "f"},
        }}}}
    for name in ("look", "get_weather_2", "Sütün")
]  # fmt: skip
PIECES = ["the user", " ", "\n", "12", " <b> & \"q\"", "\u4f60\u597d", "\U0001f642", "e\u0301", "{\"a\": 1}", "\t",
          "</x>", "\\n", "'", ";", "null", "true", "to=functions.x", "```json\n", "\n```"]  # fmt: skip
TURNS = 12


class Family(NamedTuple):
    """A published template, and what it can write."""

    template: str
    form: str  # of `--tool-call-parser`
    ends: tuple[str, ...]  # strings that end a turn
    thoughts: str | None = None  # field of a message that has them
    most_calls: int = 3
    has_text: bool = True  # before calls
    has_json: bool = True  # arguments that are lists or objects


FAMILIES = {
    "Qwen2.5": Family("Qwen-Qwen2.5-7B-Instruct", "hermes", ("<|im_end|>",)),
    "Qwen3": Family("Qwen-Qwen3-0.6B", "hermes", ("<|im_end|>",), "reasoning_content"),
    "Hermes 3": Family("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", ("<|im_end|>",), has_text=False),
    "Qwen3-Coder": Family("Qwen3-Coder", "qwen3-coder", ("<|im_end|>",), has_json=False),
    "DeepSeek-V3.1": Family("deepseek-ai-DeepSeek-V3.1", "deepseek", ("<｜end▁of▁sentence｜>",)),
    "GLM-4.5": Family("glm_4_5", "glm", ("<|observation|>",), "reasoning_content"),
    "Kimi-K2": Family("moonshotai-Kimi-K2", "kimi", ("<|im_end|>",)),
    "gpt-oss": Family("openai-gpt-oss-120b", "gpt-oss", ("<|call|>",), "thinking", 1, has_text=False),
    "Mistral-Nemo": Family("mistralai-Mistral-Nemo-Instruct-2407", "mistral", ("</s>",), has_text=False),
    "Mistral-Small-3.2": Family("Mistral-Small-3.2-24B-Instruct-2506", "mistral", ("</s>",), has_text=False),
    "Devstral": Family("unsloth-mistral-Devstral-Small-2507", "mistral", ("</s>",), has_text=False),
    "Llama-3.1": Family("meta-llama-Llama-3.1-8B-Instruct", "llama", ("<|eot_id|>",), None, 1, has_text=False),
    "Llama-3.2": Family("meta-llama-Llama-3.2-3B-Instruct", "llama", ("<|eot_id|>",), None, 1, has_text=False),
}


def turns(family: Family) -> list[dict]:
    """Messages of the assistant with calls; always the same."""
    draw = random.Random(41)
    return [_turn(draw, family) for _ in range(TURNS)]


def _turn(draw: random.Random, family: Family) -> dict:
    def text() -> str:
        return "".join(draw.choices(PIECES, k=draw.randint(0, 4)))

    values = {
        "text": text, "count": lambda: draw.randint(-5, 10**12), "share": lambda: draw.choice([0.5, -1e-7, 2e300]),
        "is_on": lambda: draw.choice([True, False]),
    }  # fmt: skip
    if family.has_json:
        values["items"] = lambda: [{text(): [text(), None]}] * draw.randint(0, 2)
        values["options"] = lambda: {text(): {text(): draw.choice([1, 2.5, True, None, text(), []])}}
    calls = []
    for number in range(draw.randint(1, family.most_calls)):
        names = draw.sample(sorted(values), draw.randint(0, len(values)))
        arguments = {name: values[name]() for name in names}
        call = {"name": draw.choice(TOOLS)["function"]["name"], "arguments": arguments}
        calls.append({"id": f"abcdefg{number:02}", "type": "function", "function": call})
    said = f"a{text()}z" if family.has_text and draw.random() < 0.5 else ""
    thought = {family.thoughts: f"b{text()}y"} if family.thoughts and draw.random() < 0.7 else {}
    return {"role": "assistant", "content": said, "tool_calls": calls} | thought


def rendered(template: str, turn: dict, family: Family) -> str:
    """The turn as the template writes it after a question, without the token that ends it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    options = {"chat_template": template, "tools": TOOLS, "tokenize": False}
    question = {"role": "user", "content": "q"}
    turn = json.loads(json.dumps(turn))
    if "DeepSeek" in family.template:  # it needs the arguments as texts
        for call in turn["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "look", "content": "r"}
               for call in turn["tool_calls"]]  # fmt: skip
    opened = tokenizer.apply_chat_template([question], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template([question, turn, *results], **options)
    same = next((i for i, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
    written = whole[same:]
    ends = [written.find(end) for end in family.ends]
    return written[: min(end for end in ends if end >= 0)]


def main(folder: str, path: str) -> None:
    import transformers

    found = {}
    for name, family in FAMILIES.items():
        template = (Path(folder) / f"{family.template}.jinja").read_text()
        found[name] = [{"turn": turn, "text": rendered(template, turn, family)} for turn in turns(family)]
    content = {"transformers": transformers.__version__, "results": found}
    Path(path).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
