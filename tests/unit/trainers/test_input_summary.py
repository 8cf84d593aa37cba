"""What `--check` prints of a command line that is valid."""

import re

import pytest

from tests.helpers import hf_folders
from tests.helpers.forked_programs import accepted
from tests.helpers.hf_damage import argv as folder_argv
from tests.helpers.programs import reward_argv, rl_argv, sft_argv

# Program, command line, lines that it must have, without the columns' spaces.
CASES = {
    "rl": (rl_argv, "--role-map actor=0;critic=1;reward=1;reference=1 --lr-warmup-iters 0 --train-iters 7"
           " --ema-decay 0.9 --reference-update-interval 2", [
        "actor rank 0; one replica; 2 layers, hidden size 32, .* parameters from .*; trained; moving average with decay"
        " 0.9", "reference rank 1; .*; gets the actor's weights every 2 steps",
        "critic rank 1; one replica; .*; trained", "reward rank 1; exact-match", "rollout rank 0; the actor's model",
        r"tokenizer \d+ tokens from .*tokenizer.model, end '</s>'; no chat template",
        "prompts .* from .*jsonl", r"first \d+ tokens: .*=",
        "algorithm --advantage gae, --policy-loss ppo-clip, --loss-aggregation token-mean",
        r"step \d+ prompts, \d+ responses of at most \d+ tokens, mini-batches of \d+", "run 7 steps, .*"]),
    "sft": (sft_argv, "", ["actor ranks 0-1; DP 2; .*; trained", r"first \d+ tokens: .*=⟦.*</s>⟧",
                           "step --global-batch-size 12"]),
    "reward": (reward_argv, "", ["reward ranks 0-1; DP 2; .*; trained", "chosen .*⟦</s>⟧", "rejected .*⟦</s>⟧"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_check_says_what_it_understood(name, tmp_path):
    argv, flags, wanted = CASES[name]
    found = [" ".join(row.split()) for row in accepted(argv(tmp_path / "run", flags), name, 2)]
    for line in wanted:
        assert any(re.fullmatch(line, row) for row in found), (line, found)
    assert not (tmp_path / "run").exists()


def test_a_check_says_which_chat_template_is_used(tmp_path):
    folder, file = hf_folders.write_folder("qwen2", tmp_path / "model"), tmp_path / "my.jinja"
    (folder / "chat_template.jinja").rename(file)

    def said(flags: str = "") -> str:
        (row,) = (row for row in accepted(folder_argv(tmp_path, folder, flags=flags), "sft") if "tokenizer  " in row)
        return row.split("; ")[-1]

    assert (said(), said(f"--chat-template {file}")) == ("no chat template", f"chat template {file}")
    file.rename(folder / "chat_template.jinja")
    assert (said(), said("--chat-template none")) == ("its chat template", "no chat template")
