"""`python -m tests.cuda_walk.environment PROGRAM FLAG …`: parses flags as a program does, on a device without hardware;
prints what of CUDA was used before its environment was chosen, and the choice, as a line of JSON."""

import json
import os
import sys

import torch

from tests.cuda_walk import device

STARTS = ("_lazy_init", "current_device", "set_device", "get_device_properties", "get_device_capability",
          "get_device_name", "mem_get_info", "synchronize", "memory_stats", "is_bf16_supported")  # fmt: skip

device.pretend()
used = []
for name in STARTS:
    setattr(torch.cuda, name, lambda *_, name=name, **__: used.append(name))

from megarl.mcore import cuda_environment  # noqa: E402
from megarl.trainers.launch import launch  # noqa: E402


def report(config, timers):
    """The program."""
    chosen = [os.environ.get(name) for name in (cuda_environment.QUEUES, cuda_environment.REGISTRATION)]
    print(json.dumps({"used": used, "chosen": chosen}))


sys.argv[1:], program = sys.argv[2:], sys.argv[1]
launch(report, program)
