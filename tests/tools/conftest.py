"""Fixtures of the tests of tools."""

import pytest

from tests.helpers.texts.small_prompts import SHORT, SUMS, make


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Folder with the prompt files of 360 small sums."""
    folder = tmp_path_factory.mktemp("sums")
    assert make(folder, *SUMS, *SHORT) == 0
    return folder


@pytest.fixture
def refusal(request, capsys):
    """The one line with which the tool of a test file refuses its arguments."""

    def said(main, *arguments, **options) -> str:
        try:
            status = main(*arguments, **options)
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        *usage, line = printed.err.splitlines()
        assert (status, printed.out) == (2, "") and line.isprintable()
        name = request.path.stem.removeprefix("test_")
        assert usage[0].startswith("usage: ") if usage else line.startswith(f"{name}: ")
        return line

    return said
