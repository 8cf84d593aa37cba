"""Speed of decode steps of a model with 1.7 billion parameters, and of Hugging Face's `generate` beside it; of twelve
layers with the experts of Qwen3-30B-A3B, or with the recurrent states of Qwen3-Next.

A decode step reads each weight, except for the table of embeddings, and each cached key and value once; of experts the
expected number that its tokens choose. What it would take at the device's memory bandwidth, which is measured here by a
copy, is the bound; the share of it is what a step reaches. Recurrent states are read and written.
"""

import argparse
import functools
import gc
import statistics
import time

import torch

from tools.bench import common
from tools.gpu import profiles, report, run_all, sized

SMALL = common.Shape(layers=4, hidden=64, ffn=128, vocab=96)
SHAPE = sized(common.Shape(layers=28, hidden=2048, ffn=6144, vocab=151_936, heads=16, groups=8), SMALL)
EXPERTS, CHOSEN = 128, 8
EXPERTS_SHAPE = sized(common.Shape(layers=12, hidden=2048, ffn=6144, vocab=151_936, heads=16, groups=4), SMALL)
EXPERTS_FLAGS = (
    f"--num-experts {EXPERTS} --moe-router-topk {CHOSEN} --moe-ffn-hidden-size 768 --moe-router-dtype fp32"
    " --moe-router-load-balancing-type none --moe-grouped-gemm"
)
RECURRENT_FLAGS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 16"
    " --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 --attention-output-gate"
)
CONTEXT, NEW_TOKENS = sized((1536, 64), (40, 16))
BATCHES = sized((1, 32, 256), (1, 3))
PROFILED = sized(range(20, 28), range(6, 8))  # decode steps
MODELS = {  # name -> (shape, flags)
    "1.7 B": (SHAPE, ""), "1.7 B, exact": (SHAPE, "--exact-rollout"), "experts": (EXPERTS_SHAPE, EXPERTS_FLAGS),
    "recurrent": (EXPERTS_SHAPE, RECURRENT_FLAGS),
}  # fmt: skip
PEER = "Hugging Face"


def bandwidth() -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.empty(sized(2**31, 2**20), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source)) for _ in range(5)]
    return 2 * source.numel() / min(seconds)


def timed(function) -> float:
    """Seconds of a call, its work on the device included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bytes_of(config) -> tuple[int, int]:
    """Bytes of a token's keys and values, and of a request's recurrent states."""
    from megarl.mcore.inference.cache_size import state_bytes
    from megarl.mcore.model.pipeline_layout import recurrent_layer_pattern

    recurrent = sum(recurrent_layer_pattern(config))
    token = 4 * config.num_query_groups * config.kv_channels * (config.num_layers - recurrent)
    return token, state_bytes(config, recurrent, 1) if recurrent else 0


def used_parameters(model, shape: common.Shape, tokens: int = 1) -> float:
    """Parameters that one of so many tokens at least is multiplied by, if the router's choices are uniform."""
    of_experts = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
    return common.multiplied_parameters(model, shape) - of_experts * (1 - CHOSEN / EXPERTS) ** tokens


def build_engine(model, pg_collection, shape: common.Shape, requests: int):
    """An engine for so many requests."""
    from megarl.mcore.inference.engine import RolloutEngine

    token, state = bytes_of(model.config)
    gib = 1.1 * requests * ((CONTEXT + NEW_TOKENS + 64) * token + state) / 2**30
    return RolloutEngine(
        model, pg_collection, shape.vocab, CONTEXT + NEW_TOKENS, gib + 0.5, requests, step_tokens=16384
    )


def step_seconds(engine, count: int) -> tuple[list[float], dict]:
    """Seconds of each step that only decodes, for requests with a full context; and times of a step's kernels."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.generation import GenerationRequest

    prompts = common.random_prompts([CONTEXT] * count, SHAPE.vocab)
    requests = [GenerationRequest(prompt, key, NEW_TOKENS) for key, prompt in enumerate(prompts)]
    real, seconds = engine.engine.step_modern, []
    profiler, found = None, {}

    def step():
        nonlocal profiler, found
        is_decode = engine.context.only_decodes and not engine.engine.waiting_request_ids  # which join in this step
        if is_decode and len(seconds) == PROFILED.start:
            profiler = profiles.start()
        if is_decode and len(seconds) == PROFILED.stop:
            profiler.stop()
            found = profiles.kernels(profiler, len(PROFILED))
        start = time.perf_counter()
        result = real()  # it reads the tokens, so the device is done
        if is_decode:
            seconds.append(time.perf_counter() - start)
        return result

    engine.engine.step_modern = step
    try:
        engine.generate(requests, (), SamplingSettings())
    finally:
        engine.engine.step_modern = real
    return seconds[5 : PROFILED.start] + seconds[PROFILED.stop :], found


def ours(name: str, shape: common.Shape, flags: str, bytes_per_second: float, forms: tuple[bool, ...] = (True, False)):
    """Reports steps of each batch, with graphs and without. `forms`: of these the ones to measure."""
    model, pg_collection, _ = common.build(shape, (CONTEXT, NEW_TOKENS), f"--bf16 {flags}", "rl")
    for count in BATCHES:
        engine = build_engine(model, pg_collection, shape, count)
        for has_graphs in forms:
            engine.engine.device_decode.has_graphs = has_graphs
            times, kernels = step_seconds(engine, count)
            seconds = statistics.median(times)
            token, state = bytes_of(model.config)
            moved = 2 * used_parameters(model, shape, count) + count * (CONTEXT * token + 2 * state)
            share = moved / bytes_per_second / seconds
            report(
                decode=count, model=name, graphs=has_graphs, step_ms=round(1e3 * seconds, 3),
                tokens_per_s=round(count / seconds), share_of_bandwidth=round(share, 3), **kernels,
            )  # fmt: skip
        del engine
        gc.collect()  # it is part of cycles
        torch.cuda.empty_cache()


def hugging_face(counts: tuple[int, ...]):
    """Reports `generate` of transformers on a model of the same shape, at the first batch whose prefill has room."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=SHAPE.hidden, intermediate_size=SHAPE.ffn, num_hidden_layers=SHAPE.layers, vocab_size=SHAPE.vocab,
        num_attention_heads=SHAPE.heads, num_key_value_heads=SHAPE.groups, max_position_embeddings=CONTEXT + NEW_TOKENS,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()

    def seconds(count: int, tokens: int) -> float:
        prompts = torch.randint(3, SHAPE.vocab, (count, CONTEXT), device="cuda")
        options = {"do_sample": True, "top_k": 0, "min_new_tokens": tokens, "max_new_tokens": tokens,
                   "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}  # fmt: skip
        with torch.inference_mode():
            return timed(lambda: model.generate(prompts, **options))

    seconds(1, 2)
    for count in counts:
        try:
            decoding = seconds(count, NEW_TOKENS) - seconds(count, 1)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        report(hugging_face=count, tokens_per_s=round(count * (NEW_TOKENS - 1) / decoding))
        return


def main():
    """Runs all cases, or those of the command line; what fails does not stop the rest."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.decode", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*MODELS, PEER], metavar="CASE", help=", ".join([*MODELS, PEER]))
    parser.add_argument("--graphs-only", action="store_true", help="no steps kernel by kernel")
    args = parser.parse_args()
    bytes_per_second = bandwidth()
    report(copy_gb_per_s=round(bytes_per_second / 1e9))
    torch.cuda.empty_cache()
    forms = (True,) if args.graphs_only else (True, False)
    cases = {name: functools.partial(ours, name, *model, bytes_per_second, forms) for name, model in MODELS.items()}
    cases[PEER] = functools.partial(hugging_face, (256, 128, 64))
    run_all({name: run for name, run in cases.items() if name in (args.cases or cases)})


if __name__ == "__main__":
    main()
