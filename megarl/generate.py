"""A replica of a run's rollout as a program of its own, which may join, leave, stop and die while the run goes on.

Give it the flags of the run, and the address of its `--replica-port`. It has as many ranks as one replica of the run's
rollout, generates with the weights of the run, and ends with it, or after SIGTERM. When the run starts again it goes
on.

    python -m megarl.train_rl --config run.yaml --replica-port 29600
    python -m megarl.generate --join host:29600 --config run.yaml
"""

import argparse
import os
import sys
from functools import partial

from megarl import arguments
from megarl.errors import ArgumentParser, UsageError
from megarl.trainers.launch import launch, refuse

MEETING = 60.0  # seconds until a run answers


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and those of the run. UsageError for wrong ones."""
    own = ArgumentParser(prog="megarl.generate", allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    own.add_argument("--join", required=True, metavar="HOST:PORT", help="address of the run's --replica-port")
    return own.parse_known_args(argv)


def joined(address: str, found: dict, argv: list[str], size: int, program: str, ranks_per_node: int) -> tuple:
    """The settings of a replica, as of `launch.parse_or_resume`; `found` gets what the run has said.

    UsageError if no run answers there, or if it has other settings, versions, or replicas of other sizes.
    """
    from megarl.rollout import guest_ledger  # imports torch
    from megarl.trainers import guest

    store = guest_ledger.find(address, MEETING)
    if store is None:
        raise UsageError(f"{guest_ledger.FLAG} {address}: no run answers there; allowed is its --replica-port")
    found |= guest.read_facts(store, address)
    config = arguments.parse(argv, found["size"], program, found["ranks_per_node"])
    return guest.settings_of(config, found, size, address), False


def generate(address: str, found: dict, config, timers):
    """Generates for the run until it ends."""
    from megarl.trainers.guest import serve  # after the flags: it imports torch and Megatron

    serve(config, timers, address, found)


def main(argv: list[str]):
    """Runs the program with the flags of the run."""
    try:
        options, flags = read_flags(argv)
    except UsageError as error:
        refuse(int(os.environ.get("RANK", 0)), error)
        sys.exit(2)
    sys.argv, found = [sys.argv[0], *flags], {}
    launch(partial(generate, options.join, found), "rl", partial(joined, options.join, found))


if __name__ == "__main__":
    main(sys.argv[1:])
