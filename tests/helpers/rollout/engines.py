"""Rollout engines on tiny models: requests, completions, and their gap to the training forward."""

import functools

import torch

from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.worlds import run_world

NEVER = ()  # no token ends a response
LIMIT, COUNT = 12, 20


def make_requests(limit=LIMIT, count=COUNT, siblings=1):
    """Requests with ragged prompts of 1 to 24 tokens, the same for `siblings`, each with its own random stream."""
    from megarl.algorithms.token_sampling import stream_keys
    from megarl.mcore.inference.generation import GenerationRequest

    generator = torch.Generator().manual_seed(1)
    lengths = [1, 24, 16, 17, 2] + torch.randint(1, 25, (count - 5,), generator=generator).tolist()
    keys = stream_keys(1, 0, torch.arange(count), torch.zeros(count, dtype=torch.int64)).tolist()
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [GenerationRequest(prompts[i // siblings], key, limit) for i, key in enumerate(keys)]


def engine_on(model, place, max_length=48, buffer_gb=0.005, max_requests=32, always_drafts=False, **settings):
    """An engine on a model; `always_drafts`: as if looking for drafts and trying them took no time."""
    from megarl.mcore.inference.engine import RolloutEngine

    settings |= {"speculative": True} if always_drafts else {}
    engine = RolloutEngine(model, place.pg_collection, VOCAB, max_length, buffer_gb, max_requests, **settings)
    if always_drafts:
        engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
    return engine


def make_engine(flags="", shape="llama", **settings):
    """(engine, model, role groups) for a model of the given shape."""
    model, _, place = build(flags, shape)
    return engine_on(model, place, **settings), model, place


def take_long_steps(engine):
    """Has an engine take Megarl's short path in no step."""
    from megarl.mcore.inference.decode_loop import DecodeLoopEngine

    engine.engine.__class__ = type("LongSteps", (DecodeLoopEngine,), {"_only_decodes": False})


def assert_all_blocks_are_free(engine):
    """No block was lost; with prefix caching some are kept."""
    blocks = engine.context.kv_block_allocator
    assert blocks.total_avail == blocks.total_count - 1 or engine.context.enable_prefix_caching


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


def are_same(ones, others) -> bool:
    """Whether completions are equal, their routes included, which `==` leaves out."""
    pairs = zip(ones, others, strict=True)
    return ones == others and all(
        one.routes is other.routes is None or torch.equal(one.routes, other.routes) for one, other in pairs
    )


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
