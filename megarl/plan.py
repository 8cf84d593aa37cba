"""Plans a run of any world size without a GPU: checks role map and models, prints layout, memory and traffic.

It takes the flags of train_rl. One process creates the real process groups on a fake backend, as each relevant rank.

    python -m megarl.plan --world-size 4096 --vocab-size 129280 --config my_run.yaml
"""

import argparse
import json
import sys
from pathlib import Path

from megarl import arguments
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import ArgumentParser, UsageError, warn


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags; all others are those of train_rl."""
    parser = ArgumentParser(prog="megarl.plan", allow_abbrev=False, epilog="Every other flag is one of train_rl.")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the run")
    parser.add_argument("--ranks-per-node", type=int, help="for a role map of nodes; default: all ranks on one node")
    parser.add_argument(
        "--vocab-size", type=int, help="size of the vocabulary; default: that of the folder or tokenizer"
    )
    parser.add_argument("--json", help="also write the plan to this file as JSON")
    return parser


def vocabulary(chosen, role: arguments.RoleSettings) -> int:
    """Size of a role's vocabulary: `--vocab-size`, or that of its Hugging Face folder or its tokenizer."""
    if chosen.vocab_size is not None:
        return chosen.vocab_size
    if role.hf_model is not None:
        return role.hf_model.vocab_size
    if not role.tokenizer_model:
        raise UsageError("--vocab-size is missing: it has no default without --hf-model or --tokenizer-model")
    return build_tokenizer(role.tokenizer_type, role.tokenizer_model).vocab_size


def main(argv: list[str]):
    """Prints the plan; UsageError for wrong input."""
    chosen, rest = build_parser().parse_known_args(argv)
    for flag in ("world_size", "ranks_per_node", "vocab_size"):
        value = getattr(chosen, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: allowed is a number above 0")
    # These import Megatron, so they come after the check of the program's own flags.
    from megarl.mcore.parallel import fake_world
    from megarl.planning import summary, table

    with fake_world.fake_world(chosen.world_size):
        program = arguments.parse(rest, chosen.world_size, ranks_per_node=chosen.ranks_per_node)
    warn(program.warnings)
    arguments.check_microbatches(program)
    sizes = [vocabulary(chosen, program.roles["actor"])]
    if program.roles["reward"].has_model:
        sizes.append(vocabulary(chosen, program.roles["reward"]))
    plan = summary.make_plan(program, chosen.world_size, *sizes)
    print(table.text(plan))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(table.data(plan), indent=2), encoding="utf-8")


def launch(argv: list[str]):
    """Runs the program; wrong input prints one line and exits with status 2."""
    try:
        main(argv)
    except UsageError as error:
        print(f"megarl: error: {arguments.with_sources(error, argv, 'rl')}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    launch(sys.argv[1:])
