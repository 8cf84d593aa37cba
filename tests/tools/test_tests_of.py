"""`tools/tests_of.py`: the tests that reach a file, nearest first, on a small tree."""

import pytest

from tools import planted_faults, tests_of

FILES = {
    "megarl/a.py": "", "megarl/b.py": "def f():\n    from megarl import a\n", "megarl/page.js": "",
    "megarl/c.py": "import megarl.b as b\nPAGE = 'page.js'\n", "tools/t.py": "from megarl.c import b\n",
    "tests/helpers/plug.py": "import megarl.a\n", "tests/unit/test_a.py": "", "tests/unit/test_b.py": "import megarl.c",
    "tests/unit/test_other.py": "",
    "tests/programs/test_p.py": "FLAGS = '--reward tests.helpers.plug:reward'",
    "tests/tools/test_t.py": "from tools import t\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The tree, with a planted fault in a.py that test_other.py finds."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tests_of, "ROOT", tmp_path)
    fault = {"file": "megarl/a.py", "tests": "tests/unit/test_other.py"}
    monkeypatch.setattr(planted_faults, "faults", lambda: [fault])
    tests_of.importers.cache_clear()
    yield tmp_path
    tests_of.importers.cache_clear()


@pytest.mark.parametrize("file, wanted", [
    ("megarl/a.py", ["0 tests/unit/test_a.py", "0 tests/unit/test_other.py", "2 tests/programs/test_p.py",
                     "3 tests/unit/test_b.py", "4 tests/tools/test_t.py"]),
    ("tools/t.py", ["0 tests/tools/test_t.py"]), ("tests/helpers/plug.py", ["1 tests/programs/test_p.py"]),
    ("megarl/page.js", ["2 tests/unit/test_b.py", "3 tests/tools/test_t.py"]),
])  # fmt: skip
def test_tests_come_by_their_path_by_planted_faults_by_imports_and_by_names_in_strings(file, wanted, tree, capsys):
    assert tests_of.main([str(tree / file), "--within", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == wanted
    assert tests_of.main([str(tree / file), "--within", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in wanted if line[0] == "0"]


def test_a_file_that_is_none_is_refused(tree, refusal):
    assert refusal(tests_of.main, [str(tree / "none.py")]).startswith("tests_of: error: ")
