"""Generation in a parallel layout, and its gap to that layout's training forward."""

import torch
import torch.distributed as dist

from tests.helpers.models.tiny_models import VOCAB, build_stages, one_microbatch
from tests.helpers.rollout.engines import make_requests, settings_of

EXPERTS = "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 32"


def generate_in_layout(
    rank, flags: str, sampling: dict, end_ids: tuple[int, ...], count: int = 20, shape: str = "llama"
):
    """({request: completion}, gap to the training forward) of the requests of this rank's replica."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model import forward_pass
    from megarl.roles.passes import forward_only

    stages, args, place = build_stages(flags, shape)
    # Context ranks hold the same weights: in generation each is a replica.
    replicas = len(place.replicas) * args.context_parallel_size
    dp_rank = place.dp_rank * args.context_parallel_size + dist.get_rank(place.pg_collection.cp)
    engine = RolloutEngine(stages[0], place.pg_collection, VOCAB, 48, 0.005, 32)
    numbers = list(range(count))[dp_rank::replicas]
    requests = [make_requests()[i] for i in numbers]
    settings = settings_of(**sampling)
    done = engine.generate(requests, end_ids, settings)

    everyone = [None] * args.context_parallel_size
    dist.all_gather_object(everyone, list(zip(requests, done, strict=True)), group=place.pg_collection.cp)
    pairs = [pair for part in everyone for pair in part]
    rows = [request.prompt + completion.tokens for request, completion in pairs]
    forward = lambda chunk, part: forward_pass.token_scores(  # noqa: E731
        chunk, part.tokens, part.lengths, settings.temperature, VOCAB
    )
    ((scores, _),) = forward_only(stages, one_microbatch(rows), forward, place.pg_collection)
    recomputed = scores.logprobs.split([len(row) for row in rows])
    gaps = [
        (row[len(r.prompt) :] - torch.tensor(c.logprobs)).abs().max()
        for row, (r, c) in zip(recomputed, pairs, strict=True)
    ]
    return dict(zip(numbers, done, strict=True)), float(torch.stack(gaps).max())
