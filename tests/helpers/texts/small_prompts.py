"""Small prompt files made by tools/make_prompts.py."""

from tests.helpers.tools import load_tool

make_prompts = load_tool("make_prompts")

SUMS = ["--task", "chain_sum", "--task-option", "max_terms=2", "--task-option", "max_digits=2"]
SHORT = ["--prompt-template", "{metadata[expression]} ="]


def make(folder, *arguments, train=300, heldout=60):
    """Exit status of the tool; train.jsonl, heldout.jsonl and prompts.json are in the folder."""
    return make_prompts.main(["--train", str(train), "--heldout", str(heldout), "--out", str(folder), *arguments])
