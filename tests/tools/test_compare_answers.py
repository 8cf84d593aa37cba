"""tools/compare_answers.py: transformers answers with each folder, and wrong use is one line."""

import json

import pytest

from tools import compare_answers, smollm2_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model's folder, its copy with other weights, and a prompt file."""
    pytest.importorskip("gguf")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tests.helpers import small_gguf

    folder = tmp_path_factory.mktemp("answers")
    small_gguf.write(folder / "m.gguf")
    assert smollm2_folder.main([str(folder / "a"), "--gguf", str(folder / "m.gguf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "a")
    transformers.AutoTokenizer.from_pretrained(folder / "a").save_pretrained(folder / "b")
    with torch.no_grad():
        model.model.norm.weight.neg_()
    model.save_pretrained(folder / "b")
    lines = [{"prompt": f"hello {number}", "answer": str(number)} for number in range(5)]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_answers_are_those_of_each_model(models, capsys):
    names = [str(models / name) for name in "aba"]
    options = ["--prompts", str(models / "p.jsonl"), "--count", "2", "--max-tokens", "5"]
    assert compare_answers.main(["--models", *names, *options]) == 0
    blocks = capsys.readouterr().out.strip("\n").split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["hello 0  [0]", "hello 2  [2]"]
    for block in blocks:
        rows = [row.partition("  ")[2].strip() if not row.startswith("hello") else "" for row in block.splitlines()]
        assert rows[1] == rows[3] != rows[2] and len(rows) == 4


def test_wrong_use_is_one_line(models, capsys):
    good = {"--models": str(models / "a"), "--prompts": str(models / "p.jsonl")}
    for change, message in [
        ({"--models": str(models)}, f"--models {models}: no Hugging Face folder, it has no config.json"),
        ({"--prompts": "gone.jsonl"}, "--prompts gone.jsonl: no such file"),
        ({"--count": "0"}, "--count 0: must be at least 1"),
        ({"--max-tokens": "-1"}, "--max-tokens -1: must be at least 1"),
    ]:
        assert compare_answers.main([word for pair in (good | change).items() for word in pair]) == 2
        error = capsys.readouterr().err
        assert error.startswith("compare_answers: ") and message in error and error.count("\n") == 1
