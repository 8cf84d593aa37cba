"""Rollout engines on tiny models: requests, completions, and their gap to the training forward."""

import functools

import torch

from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.worlds import run_world

NEVER = ()  # no token ends a response
LIMIT, COUNT = 12, 20


def make_requests(limit=LIMIT, count=COUNT):
    """Requests with ragged prompts of 1 to 24 tokens, each with its own random stream."""
    from megarl.algorithms.token_sampling import stream_keys
    from megarl.mcore.inference.generation import GenerationRequest

    generator = torch.Generator().manual_seed(1)
    lengths = [1, 24, 16, 17, 2] + torch.randint(1, 25, (count - 5,), generator=generator).tolist()
    keys = stream_keys(1, 0, torch.arange(count), torch.zeros(count, dtype=torch.int64)).tolist()
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [GenerationRequest(prompt, key, limit) for prompt, key in zip(prompts, keys, strict=True)]


def make_engine(flags="", shape="llama", buffer_gb=0.005, max_requests=32, **settings):
    """(engine, model, role groups) for a model of the given shape."""
    from megarl.mcore.inference.engine import RolloutEngine

    model, _, place = build(flags, shape)
    return RolloutEngine(model, place.pg_collection, VOCAB, 48, buffer_gb, max_requests, **settings), model, place


def settings_of(**kwargs):
    """`SamplingSettings`, imported late: worlds fork first."""
    from megarl.algorithms.token_sampling import SamplingSettings

    return SamplingSettings(**kwargs)


def largest_gap(model, requests, completions, temperature) -> float:
    """Largest difference of the engine's log-probs from those of the training forward."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    rows = [r.prompt + c.tokens for r, c in zip(requests, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    with inference_mode(model):
        scores = token_scores(model, torch.tensor(sum(rows, [])), lengths, temperature, VOCAB).logprobs
    gaps = [
        (row[len(r.prompt) :] - torch.tensor(c.logprobs)).abs().max()
        for row, r, c in zip(scores.split(lengths.tolist()), requests, completions, strict=True)
    ]
    return float(torch.stack(gaps).max())  # NaN when one is


def generate_standard(rank, flags="", shape="llama", end=NEVER, sampling=None, **engine_settings):
    """Completions of the standard requests and their gap to the training forward."""
    engine, model, _ = make_engine(flags, shape, **engine_settings)
    requests, settings = make_requests(), settings_of(**(sampling or {}))
    completions = engine.generate(requests, end, settings)
    return completions, largest_gap(model, requests, completions, settings.temperature)


@functools.cache
def standard(shape="llama"):
    """`generate_standard` on one rank."""
    return run_world(generate_standard, 1, "", shape)[0]


def texts(completions):
    """The tokens of each completion."""
    return [completion.tokens for completion in completions]


def on_device(rank, generate, flags, *args):
    """What `generate` returns with steps that the device plans; how many it planned, and how many the host did."""
    from megarl.mcore.inference.decode_loop import DecodeLoopEngine
    from megarl.mcore.inference.device_decode import DeviceDecode
    from tests.helpers.models import reference_kernels

    reference_kernels.use_them()
    counts = {}
    for owner, name in ((DeviceDecode, "run"), (DecodeLoopEngine, "_decode")):
        counts[name] = 0

        def counted(self, *args, name=name, real=getattr(owner, name)):
            counts[name] += 1
            return real(self, *args)

        setattr(owner, name, counted)
    return *generate(rank, f"--attention-backend varlen {flags}", *args), *counts.values()
