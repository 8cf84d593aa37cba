"""Walks a run and prints its table, in the process that `tests.cuda_walk.cost` starts."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from tests.cuda_walk import device

device.pretend()

from megarl import plan
from megarl.errors import UsageError
from tests.cuda_walk.cost import cases, phases, table
from tests.cuda_walk.cost.__main__ import build_parser


def main(argv: list[str]):
    """Prints what each phase does and takes; UsageError for wrong flags, and for those that cannot be predicted."""
    chosen, flags = build_parser().parse_known_args(argv)
    if chosen.launches:
        return _print_launches(argv)
    if chosen.world_size < 1:
        raise UsageError(f"--world-size {chosen.world_size}: allowed is 1 or more")
    question, _ = plan.question_of(chosen, flags)
    price = question.price()
    phases.check(price.program)
    device.stand_alone()
    with device.on_device() as walk:
        found = list(phases.walk_all(walk, price, chosen.world_size))
    print(table.text(found, chosen.operators))


def _print_launches(argv: list[str]):
    if argv != ["--launches"]:
        raise UsageError("--launches: has models of its own; leave out the other flags")
    device.stand_alone()
    with device.on_device() as walk:
        found = cases.launches(walk)
    rows = [(f"{c.layers} layers, {c.kind}", c.phase, kernels, c.kernels) for c, kernels in found]
    print(table.aligned([("model", "phase", "kernels", "ceiling"), *rows], 2))


try:
    main(sys.argv[1:])
except UsageError as error:
    print(f"tests.cuda_walk.cost: error: {error}", file=sys.stderr)
    sys.exit(2)
