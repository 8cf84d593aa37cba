"""tools/compare_answers.py: transformers answers with each folder, and wrong use is one line."""

import contextlib
import importlib.util
import io
import json

import pytest

from tests.helpers.worlds import run_world
from tools import compare_answers, smollm2_folder

small_gguf = pytest.importorskip("tests.helpers.folders.small_gguf")  # imports gguf


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model's folder and a prompt file."""
    folder = tmp_path_factory.mktemp("answers")
    small_gguf.write(folder / "m.gguf")
    assert smollm2_folder.main([str(folder / "a"), "--gguf", str(folder / "m.gguf")]) == 0
    lines = [{"prompt": f"hello {number}", "answer": str(number)} for number in range(5)]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def answers(rank: int, folder) -> str:
    """The output for a model, its copy with other weights, and the model again, in a process of its own."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "a")
    transformers.AutoTokenizer.from_pretrained(folder / "a").save_pretrained(folder / "b")
    with torch.no_grad():
        model.model.norm.weight.neg_()
    model.save_pretrained(folder / "b")
    options = ["--prompts", str(folder / "p.jsonl"), "--count", "2", "--max-tokens", "5"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert compare_answers.main(["--models", *(str(folder / name) for name in "aba"), *options]) == 0
    return printed.getvalue()


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_the_answers_are_those_of_each_model(models):
    (printed,) = run_world(answers, 1, models)
    blocks = [block.splitlines() for block in printed.strip("\n").split("\n\n")]
    assert [block[0] for block in blocks] == ["hello 0  [0]", "hello 2  [2]"]
    for _, *rows in blocks:
        assert [row.split()[0] for row in rows] == [str(models / name) for name in "aba"]
        first, second, again = (row.split(maxsplit=1)[1] for row in rows)
        assert first == again != second


def test_wrong_use_is_one_line(models, refusal):
    good = {"--models": str(models / "a"), "--prompts": str(models / "p.jsonl")}
    for change, message in [
        ({"--models": str(models)}, f"--models {models}: no Hugging Face folder, it has no config.json"),
        ({"--prompts": "gone.jsonl"}, "--prompts gone.jsonl: no such file"),
        ({"--count": "0"}, "--count 0: must be at least 1"),
        ({"--max-tokens": "-1"}, "--max-tokens -1: must be at least 1"),
    ]:
        assert message in refusal(compare_answers.main, [word for pair in (good | change).items() for word in pair])
