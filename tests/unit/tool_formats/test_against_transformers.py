"""Turns that `transformers` has rendered by the families' published templates are read as what they were made of.

`references/tool_formats.py` says how they were recorded.
"""

import json
from pathlib import Path

import pytest

from megarl.tool_formats import FORMATS
from megarl.tool_formats.reader import joined
from tests.references.tool_formats import FAMILIES, TOOLS

FOUND = json.loads((Path(__file__).parents[2] / "references" / "tool_formats.json").read_text())["results"]


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_published_templates(name):
    family = FAMILIES[name]
    assert len(FOUND[name]) == 12
    for row in FOUND[name]:
        turn, reader = row["turn"], FORMATS[family.form].reader(TOOLS)
        found = joined([*reader.feed(row["text"]), *reader.finish()])
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]]
        assert [(call.name, call.arguments) for call in found.calls] == calls and found.errors == []
        assert found.content == turn["content"].strip()
        assert found.reasoning == turn.get(family.thoughts, "").strip()
        if name == "Mistral-Small-3.2":
            assert [call.id for call in found.calls] == [call["id"] for call in turn["tool_calls"]]


@pytest.mark.parametrize("fence", ["```json\n{}\n```", "\n```json\n{}\n```\n", "{}"])
def test_deepseek_v3_and_r1_have_a_fence(fence):
    """Their published templates lose calls, so theirs are put together here."""
    for row in FOUND["DeepSeek-V3.1"]:
        calls = [call["function"] for call in row["turn"]["tool_calls"]]
        written = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['name']}\n"
            f"{fence.replace('{}', json.dumps(call['arguments'], ensure_ascii=False))}<｜tool▁call▁end｜>"
            for call in calls
        )
        reader = FORMATS["deepseek"].reader(TOOLS)
        found = joined([*reader.feed(f"a<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"), *reader.finish()])
        assert [call._asdict() for call in found.calls] == [{**call, "id": None} for call in calls]
        assert found.content == "a" and found.errors == []
