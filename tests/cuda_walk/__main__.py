"""`python -m tests.cuda_walk NAME …`: walks scenarios, each in a fork; prints what was counted as one line of JSON
each, or where it broke. Started by `tests/cuda_walk/start.py`."""

import json
import os
import sys
import traceback

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from tests.cuda_walk import device

device.pretend()

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def walked(name: str):
    """What a scenario counted."""
    from tests.cuda_walk import algorithms, checks, exact, moves, parallel, rollout, training
    from tests.cuda_walk.cost import cases

    modules = algorithms, checks, exact, moves, parallel, rollout, cases, training
    ((walks, ranks),) = [module.SCENARIOS[name] for module in modules if name in module.SCENARIOS]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    device.stand_alone()
    with device.on_device() as walk:
        return walks(walk)


def main():
    from tests.cuda_walk import rollout  # noqa: F401  imported once, before the forks

    for name in sys.argv[1:]:
        if os.fork():
            os.wait()
            continue
        try:
            found = {"name": name, "counts": walked(name)}
        except BaseException as error:
            calls = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
            place = [f"{call.filename.split('/megarl/')[-1]}:{call.lineno} {call.line}" for call in calls[-5:]]
            found = {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}", "place": place}
        print(json.dumps(found), flush=True)
        os._exit(0)


main()
