"""tools/make_number_pictures.py: the same seed gives the same pictures; wrong flags are one line."""

import json

import pytest

from tools import make_number_pictures as numbers


def test_pictures_and_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "write_model", lambda folder, seed: None)
    for name, more in {"a": [], "b": [], "c": ["--seed", "2"], "d": ["--shuffle"]}.items():
        flags = ["--train", "20", "--heldout", "3", "--out", str(tmp_path / name), *more]
        assert numbers.main(flags) == 0
    files = {name: sorted((tmp_path / name).rglob("*.*")) for name in "abcd"}
    contents = {name: [path.read_bytes() for path in paths] for name, paths in files.items()}
    assert len(files["a"]) == 25 and contents["a"] == contents["b"] != contents["c"]
    lines = {name: list(map(json.loads, (tmp_path / name / "train.jsonl").read_text().splitlines())) for name in "ad"}
    answers = {name: [line["answer"] for line in each] for name, each in lines.items()}
    images = {name: [line["images"] for line in each] for name, each in lines.items()}
    assert answers["a"] == answers["d"] and images["a"] != images["d"] and sorted(images["a"]) == sorted(images["d"])


def test_digits_differ():
    assert len({numbers.points(digit).tobytes() for digit in "0123456789"}) == 10


@pytest.mark.parametrize(
    "flags, says", [("--noise 200", "--noise 200: allowed is 0 to 128"), ("--train 1", "--train 1")]
)
def test_wrong_flags(flags, says, tmp_path, capsys):
    assert numbers.main([*flags.split(), "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
