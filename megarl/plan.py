"""Checks a role map and a model at any world size without a GPU: layout, memory, traffic; and suggests role maps.

It takes the flags of train_rl. One process pretends to be every rank that matters: the groups are really created.

    python -m megarl.plan --world-size 4096 --vocab-size 129280 --config my_run.yaml
    python -m megarl.plan --world-size 64 --vocab-size 32000 --suggest --gpu-memory-gb 80 --config my_run.yaml
"""

import argparse
import json
import sys
from pathlib import Path

from megarl import arguments
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import ArgumentParser, UsageError


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags; all others are those of train_rl."""
    parser = ArgumentParser(prog="megarl.plan", allow_abbrev=False, epilog="Every other flag is one of train_rl.")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the run")
    parser.add_argument("--vocab-size", type=int, help="tokens of the vocabulary; default: --tokenizer-model's")
    parser.add_argument("--json", help="file that the plan is written to as JSON, too")
    parser.add_argument("--suggest", action="store_true", help="search role maps and layouts that fit")
    parser.add_argument("--gpu-memory-gb", type=float, help="with --suggest: memory of a GPU, GB (default 80)")
    parser.add_argument("--gpus-per-node", type=int, help="with --suggest: GPUs that fast links join (default 8)")
    return parser


def vocabulary(chosen, settings) -> int:
    """Tokens of the vocabulary, from `--vocab-size` or the tokenizer of the settings or of a role."""
    if chosen.vocab_size is None and not settings.tokenizer_model:
        raise UsageError("--vocab-size is missing: it has no default without --tokenizer-model")
    return chosen.vocab_size or build_tokenizer(settings.tokenizer_type, settings.tokenizer_model).vocab_size


def check(chosen, program):
    """What the flags must be beyond their single values. Raises UsageError."""
    for flag in ("world_size", "vocab_size", "gpu_memory_gb", "gpus_per_node"):
        value = getattr(chosen, flag)
        if value is not None and value <= 0:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: allowed is a number above 0")
        if value is not None and flag.startswith("gpu") and not chosen.suggest:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: only with --suggest")
    if chosen.suggest and chosen.json:
        raise UsageError(f"--json {chosen.json}: none with --suggest")
    arguments.check_microbatches(program)


def main(argv: list[str]):
    """Prints the plan, or suggestions; UsageError for wrong input."""
    chosen, rest = build_parser().parse_known_args(argv)
    if chosen.world_size < 1:
        raise UsageError(f"--world-size {chosen.world_size}: allowed is a number above 0")
    from megarl.mcore import fake  # imports Megatron: only once the program's own flags are known to be right
    from megarl.planning import suggest, summary, table

    if chosen.suggest:
        print(suggest.report(rest, chosen, vocabulary, check))
        return
    with fake.world(chosen.world_size):
        program = arguments.parse(rest, chosen.world_size)
    check(chosen, program)
    sizes = [vocabulary(chosen, program.settings)]
    if program.roles["reward"].has_model:
        sizes.append(vocabulary(chosen, program.roles["reward"]))
    plan = summary.make_plan(program, chosen.world_size, *sizes)
    print(table.text(plan))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(table.data(plan), indent=2), encoding="utf-8")


def launch(argv: list[str]):
    """Runs the program: one line and exit status 2 for wrong input."""
    try:
        main(argv)
    except UsageError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    launch(sys.argv[1:])
