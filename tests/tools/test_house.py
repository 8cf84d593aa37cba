"""The counts of tools/house.py, on a small tree whose counts are known, and the limits of the project's own."""

from pathlib import Path

import pytest

from tools import house

pytestmark = pytest.mark.usefixtures("without_collection")


def test_no_count_is_above_its_limit(capsys):
    assert house.main(["--limits"]) == 0, capsys.readouterr().err


def test_what_is_counted(monkeypatch, tmp_path):
    for name, text in {
        "megarl/__init__.py": "",
        "megarl/a.py": "class A:\n    def f(self, a, b, c, d, e, f, g, h, *, i):\n        g(*a)  # fmt: skip\n",
        "megarl/k.py": "@triton.jit(debug=True)\ndef k(a, b, c, d, e, f, g, h, i):\n    pass\n",
        "megarl/b/a.py": "x = 1\n" * 60, "megarl/b/c.py": "x = 1\n" * 60, "megarl/b/d.cpp": "\n\n",
        "tests/unit/b/test_c.py": "y = 1\n",
        "docs/one.md": "# Head\n\n" + "word " * 47 + "end. Short.\n\n| " + "cell " * 60 + "|\n",
        "README.md": "", "CONTRIBUTING.md": "```\n" + "code " * 60 + "\n```\n",
    }.items():  # fmt: skip
        Path(tmp_path, name).parent.mkdir(parents=True, exist_ok=True)
        Path(tmp_path, name).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    found = house.counts()
    assert {name: count for name, count in found.items() if name not in ("median of lines", "words of pages")} == {
        "files": 5, "files below 60 lines": 3, "classes": 1, "fmt: skip": 1, "star-passed local tuples": 1,
        "functions with 9 and more parameters": 1, "file names that occur twice": 1,
        "modules of 60 lines and more without a test of their name": 1, "pages": 3,
        "sentences of 48 words and more": 1, "lines of megarl/, with C++ and JavaScript": 128, "lines of tests/": 1,
    }  # fmt: skip
    monkeypatch.setattr(house, "LIMITS", {"classes": 0})
    assert house.main(["--limits"]) == 1 and house.main([]) == 0


@pytest.mark.parametrize("text, count", [
    ("One. Two.\n", 2), ("A list:\n\n* one item. Two\n* three\n", 4), ("```bash\nrun this. That\n```\nText.\n", 1),
])  # fmt: skip
def test_sentences_are_told_apart(text, count):
    assert len(house.sentences(text)) == count
