"""YAML files that a user names: mappings without a key twice, of bounded size."""

import pytest

from megarl import yaml_files
from megarl.errors import UsageError

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize("text, says", [
    ("a: 1\nb: 2\na: 3", "a: appears twice"), ("a:\n  b: {c: 1, c: 2}", "a: c: appears twice"), ("a: [", "not YAML"),
    ("- a", "allowed is a mapping"), ("", "allowed is a mapping"), (BOMB, "more than 100,000 values"),
    ("a: &x [*x]", "inside what it names"), (f"a: {'1' * 400}", "a number has 400 digits"),
    ("a: !!python/object:os.system x", "not YAML"),
])  # fmt: skip
def test_wrong_files_are_one_line(text, says, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        yaml_files.read_mapping(str(tmp_path / "a.yaml"), "--config a.yaml", "flags")
    assert str(caught.value).startswith("--config a.yaml: ") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_keep_how_they_were_written(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-6\nname: 007\nlist: [1, 2]\n")
    found, written = yaml_files.read_mapping(str(tmp_path / "a.yaml"), "--config a.yaml", "flags")
    assert found["list"] == [1, 2] and written["lr"] == "1e-6" and written["name"] == "007"
    assert yaml_files.parse("a: {b: 1}\n") == {"a": {"b": 1}} and yaml_files.parse("") is None
