"""Lets transformers answer prompts with several Hugging Face folders, greedily, and prints the answers side by side.

    python tools/compare_answers.py --models models/smollm2 runs/smollm2_grpo/run/hf/step_00000060 \\
        --prompts runs/smollm2_grpo/data/heldout.jsonl --count 6

The prompts are spread over the file. megarl is not involved: this shows that others can use an export.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", required=True, metavar="DIR", help="Hugging Face folders")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompt file (JSON lines)")
    parser.add_argument("--count", type=int, default=6, help="number of prompts; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of an answer; default: %(default)s")
    arguments = parser.parse_args(argv)
    for name in ("count", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    for folder in arguments.models:
        if not (Path(folder) / "config.json").is_file():
            raise UsageError(f"--models {folder}: no Hugging Face folder, it has no config.json")
    return arguments


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts at equal distances, or all if there are fewer."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def answers(folder: str, prompts: list[Prompt], max_tokens: int) -> list[str]:
    """The model's greedy answer to each prompt, without special tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    found = []
    for prompt in prompts:
        inputs: Any = tokenizer.apply_chat_template(
            prompt.conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(ids, skip_special_tokens=True))
    return found


@refuses_in_one_line("compare_answers")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    prompts = spread(list(load_prompts(arguments.prompts, "--prompts")), arguments.count)
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("transformers: not installed; run launch/setup_env.sh smollm2")
    columns = [answers(folder, prompts, arguments.max_tokens) for folder in arguments.models]
    width = max(map(len, arguments.models))
    for i, prompt in enumerate(prompts):
        print(f"\n{prompt.text}" + (f"  [{prompt.answer}]" if prompt.answer is not None else ""))
        for folder, column in zip(arguments.models, columns, strict=True):
            print(f"  {folder:{width}}  {' '.join(column[i].split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
