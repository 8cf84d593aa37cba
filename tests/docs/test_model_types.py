"""docs/model_types.md is what its generator finds with the installed transformers."""

import importlib.metadata

import pytest

from tests.helpers.folders import any_types
from tools import model_types


@pytest.mark.long
def test_the_committed_page_is_what_the_generator_writes():
    assert any_types.PAGE.read_text() == model_types.page([model_types.judge(kind) for kind in any_types.types()])


def test_the_page_names_every_type_of_this_version_once():
    text = any_types.PAGE.read_text()
    text, _, images = text.partition("## With images")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(rows) == any_types.types() and f"transformers {importlib.metadata.version('transformers')}." in text
    run = any_types.running()
    assert f"{len(run)} run" in text and run["llama"] and not run["granite"] and "jamba" not in run
    assert "| `llava` | transformers |" in images


@pytest.mark.long
def test_the_part_about_images_is_what_the_generator_writes():
    part = any_types.PAGE.read_text().partition("## With images")
    assert part[1] + part[2] == model_types.image_part(set(any_types.running())) + "\n"


def test_images_are_judged_by_the_table_and_the_class():
    running = set(any_types.running())
    assert model_types.judge_images("mistral3", running).text == "Megatron's layers and transformers"
    assert model_types.judge_images("llava", running).text == "transformers"
    assert model_types.judge_images("gemma3", running) == ("gemma3", "refused", "its images attend within themselves")
    assert "three positions" in model_types.judge_images("glm4v", running).text


def test_a_type_is_judged_by_the_self_check(monkeypatch):
    monkeypatch.setattr(model_types, "image_part", lambda running: "")

    assert model_types.judge("gemma2") == ("gemma2", "runs", "windows, sinks or a softcap")
    assert model_types.judge("lfm2") == ("lfm2", "runs", "recurrent states")
    refused = model_types.judge("jamba")
    assert refused.status == "refused" and "computes other logits" in refused.text
    page = model_types.page([refused])
    assert "0 run; 1 are refused" in page and "| `jamba` | JambaForCausalLM computes" in page
