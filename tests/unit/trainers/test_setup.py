"""What every program checks before its process group exists."""

import pytest

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import rl_argv, sft_argv


@pytest.mark.parametrize("name, argv", [("rl", rl_argv), ("sft", sft_argv)])
def test_a_save_path_that_cannot_be_a_folder(name, argv, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        line = refusal(argv(path, "--train-iters 3"), name)
        assert f"--save {path}" in line
