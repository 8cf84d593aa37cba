"""Speed and memory of a policy's update of a model with 1.7 billion parameters, of four layers with the experts of
Qwen3-30B-A3B, and of four with the recurrent states of Qwen3-Next; and what waits for the device in it.

MFU is model FLOPs over the device's bf16 peak, which is measured here by a large product. They are 6 per parameter and
token without the table of embeddings, and 6·L·H·context per token for causal attention (PaLM 2204.02311 appendix B,
halved for causality), of layers that have it.
"""

import argparse
import functools
import gc
from dataclasses import replace

import torch

from megarl.mcore.recurrence import fused_chunks
from tools.bench import common
from tools.gpu import profiles, report, run_all, sized
from tools.gpu.decode import EXPERTS_FLAGS, EXPERTS_SHAPE, RECURRENT_FLAGS, SHAPE, timed, used_parameters

LENGTH = sized(2048, 32)  # tokens of a sequence
STEPS = 4
FLAGS = "--bf16 --use-distributed-optimizer"
FOUR_LAYERS = replace(EXPERTS_SHAPE, layers=4)
RECURRENT_BY_FLA, HAS_FLA = "recurrent by flash-linear-attention, 8192 tokens", fused_chunks.version() is not None
CASES = {  # name -> (shape, tokens, more flags)
    "4096 tokens": (SHAPE, 4096, ""),
    "8192 tokens": (SHAPE, 8192, ""),
    "8192 tokens, exact": (SHAPE, 8192, "--exact-rollout"),
    "16384 tokens": (SHAPE, 16384, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "experts, 8192 tokens": (FOUR_LAYERS, 8192, EXPERTS_FLAGS),
    "recurrent, 8192 tokens": (FOUR_LAYERS, 8192, RECURRENT_FLAGS),
    **({RECURRENT_BY_FLA: (FOUR_LAYERS, 8192, f"{RECURRENT_FLAGS} --delta-rule-backend fla")} if HAS_FLA else {}),
}


def peak_flops() -> float:
    """FLOPs per second of a bf16 product of 8192 × 8192 matrices, the best of ten."""
    size = sized(8192, 64)
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / min(timed(lambda: left @ right) for _ in range(10))


def microbatch(tokens: int, vocab: int):
    """(packed tokens on the device, their lengths on the host)."""
    lengths = torch.full((tokens // LENGTH,), LENGTH)
    return torch.randint(3, vocab, (tokens,), device="cuda"), lengths


def update(name: str, peak: float):
    """Reports the time of forward and backward of a micro-batch and of the optimizer's step."""
    from megarl.mcore.model import forward_pass
    from megarl.mcore.model.pipeline_layout import recurrent_layer_pattern
    from megarl.mcore.training import optimizer

    shape, tokens, more = CASES[name]
    tokens = sized(tokens, 2 * LENGTH)
    gc.collect()  # what the case before left, in cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, pg_collection, args = common.build(shape, (LENGTH // 2, LENGTH // 2), f"{FLAGS} {more}", "rl")
    wrapped = optimizer.wrap_for_training([model], args, pg_collection)
    adam = optimizer.build_optimizer(wrapped, args, pg_collection)
    packed, lengths = microbatch(tokens, shape.vocab)

    def passes():
        scores = forward_pass.token_scores(wrapped[0], packed, lengths, 1.0, shape.vocab)
        (scores.logprobs.sum() / tokens).backward()

    seconds = [(timed(passes), timed(lambda: optimizer.update(adam))) for _ in range(STEPS)]
    best, step = (min(column) for column in zip(*seconds[1:], strict=True))
    attending = shape.layers - sum(recurrent_layer_pattern(model.config))
    flops = tokens * (6 * used_parameters(model, shape) + 6 * attending * shape.hidden * LENGTH)
    report(
        update=name, flags=f"{FLAGS} {more}", passes_s=round(best, 4), optimizer_s=round(step, 4),
        mfu=round(flops / best / peak, 3), peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1),
        waits=waits(passes), **profiled(passes),
    )  # fmt: skip


def waits(function) -> int:
    """How often the host waits for the device in a call."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchron" in str(warning.message) for warning in caught)


def profiled(function) -> dict:
    """Times of the kernels of a call."""
    profiler = profiles.start()
    function()
    torch.cuda.synchronize()
    profiler.stop()
    return profiles.kernels(profiler)


def main():
    """Runs all cases, or those of the command line; what fails does not stop the rest."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.update", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=CASES, metavar="CASE", help="; ".join(CASES))
    names = parser.parse_args().cases or CASES
    peak = peak_flops()
    report(peak_tflops=round(peak / 1e12))
    run_all({name: functools.partial(update, name, peak) for name in names})


if __name__ == "__main__":
    main()
