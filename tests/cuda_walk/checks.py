"""Walks stages of tools/gpu_check.sh, with a small model: that they run to their end, and what they count."""

import json
import types

import torch

from tests.cuda_walk.device import Walk
from tools.bench import common
from tools.gpu import decode, profiles, update

SHAPE = common.Shape(layers=4, hidden=64, ffn=128, vocab=96)


def _findings(stage, run, *args) -> list[dict]:
    """What a stage reports."""
    found = []
    stage.report = lambda **row: found.append(json.loads(json.dumps(row)))
    run(*args)
    return found


def decoding(walk: Walk) -> list[dict]:
    """Speed of decode steps, with graphs and without."""
    decode.CONTEXT, decode.NEW_TOKENS, decode.BATCHES, decode.PROFILED = 40, 16, (1, 3), range(6, 8)
    profiles.start = lambda: types.SimpleNamespace(stop=lambda: None)
    profiles.kernels = lambda *_: {"launches": 0}
    dense = _findings(decode, decode.ours, "small", SHAPE, "", 1e12)
    others = {"experts": decode.EXPERTS_FLAGS, "recurrent": decode.RECURRENT_FLAGS}
    return dense + [
        row for name, flags in others.items() for row in _findings(decode, decode.ours, name, SHAPE, flags, 1e12)
    ]


def updating(walk: Walk) -> list[dict]:
    """Speed of updates. torch's count of waits and its profiler want a real device."""
    flags = {"64 tokens": "", "experts": update.EXPERTS_FLAGS, "recurrent": update.RECURRENT_FLAGS}
    update.LENGTH, update.CASES = 32, {name: (SHAPE, 64, more) for name, more in flags.items()}
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.cuda.set_sync_debug_mode, update.profiled = lambda mode: None, lambda _: {}
    return [row for name in update.CASES for row in _findings(update, update.update, name, 1e15)]


SCENARIOS = {"check decode": (decoding, 1), "check update": (updating, 1)}  # name -> (what walks, ranks)
