"""Kernels of CUDA devices against fp64 on the same device."""

import dataclasses

import torch

from megarl.mcore.recurrence import fused_chunks
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import NONE, Runs
from tests.helpers.models import reference_kernels
from tools.gpu import report, run_all, sized
from tools.gpu.decode import timed

DEVICE = "cuda"
ROWS, VOCAB, PADDED = sized((64, 151_936, 152_064), (6, 250, 256))  # of logits
HIDDEN, FFN, EXPERT_FFN = sized((2048, 6144, 768), (32, 40, 16))
DELTA_HEADS, DELTA_TOKENS = sized(((16, 32, 128, 128), 8192), ((1, 2, 16, 16), 70))  # of Qwen3-Next; of a sequence
BOUNDS = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of errors relative to the largest number: about eight roundings


def drawn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def paged_decode() -> bool:
    """Decode over pages; also whether a request's bits depend on the batch."""
    from megarl.mcore.kernels.cuda.segment_attention import paged_decode

    is_right = True
    for dtype, bound in BOUNDS.items():
        count, groups, heads, channels, block, pages = 7, 8, 2, 128, 64, 40
        cache = drawn(count * pages, block, groups, 2, channels, dtype=dtype)
        table = torch.randperm(count * pages, device=DEVICE).view(count, pages).int()
        lengths = torch.tensor([0, 1, 63, 64, 700, 1500, 2560], dtype=torch.int32, device=DEVICE)
        query = drawn(count, groups, heads, channels, dtype=dtype)
        arrived = torch.zeros(count * groups, dtype=torch.int32, device=DEVICE)
        found = paged_decode(query, cache, table, lengths, channels**-0.5, arrived=arrived)
        wide = query.cpu().double(), cache.cpu().double(), table.cpu(), lengths.cpu()
        expected = reference_kernels.paged_decode(*wide, channels**-0.5)
        # Many times, as programs end in another order each time.
        alone = [paged_decode(query[4:5], cache, table[4:5], lengths[4:5], channels**-0.5, arrived=arrived)
                 for _ in range(50)]  # fmt: skip
        again = [paged_decode(query, cache, table, lengths, channels**-0.5, arrived=arrived) for _ in range(50)]
        is_same = all(torch.equal(each, found[4:5]) for each in alone) and all(torch.equal(x, found) for x in again)
        error, is_same = largest_error(found.cpu(), expected), is_same and not arrived.any()
        report(kernel="paged_decode", dtype=str(dtype), error=error, same_alone=is_same)
        is_right = is_right and error < bound and is_same
    return is_right


def varlen() -> bool:
    """Packed attention of ragged segments with fewer queries than keys, forward and backward."""
    from megarl.mcore.attention.backends.varlen import CumulativePlan, flash_kernel

    queries, keys = [1, 130, 300, 64], [17, 130, 700, 64]
    ends = [torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in (queries, keys)]
    plan = CumulativePlan(ends[0], ends[1], None, max(queries), max(keys), None)
    shapes = (sum(queries), 16, 128), (sum(keys), 8, 128), (sum(keys), 8, 128)
    inputs = tuple(drawn(*shape).requires_grad_() for shape in shapes)
    weight = drawn(sum(queries), 16, 128)
    out = flash_kernel()(*inputs, plan, 128**-0.5)
    grads = torch.autograd.grad((out * weight).sum(), inputs)
    query, key, value = wide = tuple(x.detach().cpu().double().requires_grad_() for x in inputs)
    host = dataclasses.replace(plan, cu_queries=ends[0].cpu(), cu_keys=ends[1].cpu())
    expected = reference_kernels.flash(query, key, value, host, 128**-0.5)
    exact = torch.autograd.grad((expected * weight.cpu().double()).sum(), wide)
    errors = [
        largest_error(a.detach().cpu(), b.detach()) for a, b in zip((out, *grads), (expected, *exact), strict=True)
    ]
    report(kernel="varlen", errors=dict(zip(("out", "query", "key", "value"), errors, strict=True)))
    return max(errors) < BOUNDS[torch.bfloat16]


def sampling() -> bool:
    """Sampling of rows, over the vocabulary of a real model."""
    from megarl.mcore.kernels.cuda.head_rows import sample_rows

    logits, numbers = 3 * drawn(ROWS, PADDED), torch.rand(ROWS, dtype=torch.float64, device=DEVICE)
    temperatures, greedy = numbers.new_full((ROWS,), 0.8).float(), numbers.new_zeros(ROWS).int()
    tokens, found = sample_rows(logits, numbers, temperatures, greedy, VOCAB)
    exact = torch.log_softmax(logits[:, :VOCAB].double() / 0.8, -1)
    above = exact.exp().cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    below = above - exact.exp().gather(1, tokens.unsqueeze(1)).squeeze(1)
    outside = ((numbers < below - 1e-6) | (numbers > above + 1e-6)).sum()
    logprobs = exact.gather(1, tokens.unsqueeze(1)).squeeze(1)
    _, alone = sample_rows(*(x[5:6] for x in (logits, numbers, temperatures, greedy)), VOCAB)
    error, is_same = float((found - logprobs).abs().max()), torch.equal(alone, found[5:6])
    report(kernel="sample_rows", outside=int(outside), error=error, same_alone=is_same)
    return not outside and is_same and error < BOUNDS[torch.float32]


def swiglu() -> bool:
    """SwiGLU and its gradient."""
    from megarl.mcore.kernels.cuda.mlp_rows import swiglu_rows, swiglu_rows_backward

    x, grad = 3 * drawn(300, 2 * FFN), drawn(300, FFN)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    exact = torch.autograd.grad(expected, wide, grad.double())[0]
    errors = largest_error(swiglu_rows(x), expected.detach()), largest_error(swiglu_rows_backward(grad, x), exact)
    report(kernel="swiglu_rows", errors=errors)
    return max(errors) < BOUNDS[torch.bfloat16]


def rotation() -> bool:
    """Rotation of training, forward and backward: the bits of single operators."""
    from megarl.mcore.kernels.cuda import rotate_heads as own

    is_equal = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        query, key, angles = drawn(300, 16, 128, dtype=dtype), drawn(300, 8, 128, dtype=dtype), drawn(300, 1, 64)
        cosines, sines = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
        for is_backward in (False, True):
            found = own.rotate_heads(query, key, cosines, sines, is_backward)
            expected = reference_kernels.rotate_heads(query, key, cosines, sines, is_backward)
            is_equal &= all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        calls = (("join_heads", (query, key, key)), ("split_heads", (query.unflatten(1, (4, 4)),)))
        for name, given in calls:
            found, expected = (getattr(kernels, name)(*given, cosines, sines) for kernels in (own, reference_kernels))
            is_equal &= all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    report(kernel="rotate_heads", is_equal=is_equal)
    return is_equal


def sums() -> bool:
    """Sums with their norms, forward and backward."""
    from megarl.mcore.kernels.cuda.exact_rows import sum_norm, sum_norm_backward

    x, added, grad_total, grad = (drawn(300, 1, HIDDEN) for _ in range(4))
    weight, grad_x, grad_weight = 1 + drawn(HIDDEN) / 8, torch.empty_like(x), torch.zeros(HIDDEN, device=DEVICE)
    total, out, scales = sum_norm(x, added, weight, 1e-5)
    wide = [each.double().requires_grad_() for each in (total, weight)]
    exact = torch.nn.functional.rms_norm(wide[0], (HIDDEN,), wide[1], 1e-5)
    of_total, of_weight = torch.autograd.grad(exact, wide, grad.double())
    sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales)
    found, expected = (out, grad_x, grad_weight), (exact.detach(), of_total + grad_total, of_weight)
    errors, is_equal = [*map(largest_error, found, expected)], torch.equal(total, x + added)
    report(kernel="sum_norm", errors=errors, is_equal=is_equal)
    return max(errors) < BOUNDS[torch.bfloat16] and is_equal


def routes() -> bool:
    """Experts of tokens and their gates, with gradients; the order of the pairs."""
    from megarl.mcore.kernels.cuda import mlp_rows as own

    logits, grad, bias = (drawn(*shape, dtype=torch.float32) for shape in ((300, 128), (300, 128), (128,)))
    errors, is_equal = [], True
    for kind in ("softmax", "softmax_first", "sigmoid"):
        options, results = (8, kind, 2.5), []
        for kernels in (own, reference_kernels):
            probs, routing_map, experts = kernels.route(logits, bias / 8, None, *options)
            gradient = kernels.route_backward(grad, logits, routing_map, *options)
            results.append((probs, gradient, routing_map, experts, *kernels.expert_pairs(routing_map, 8)))
        errors += [largest_error(one, other) for one, other in zip(results[0][:2], results[1][:2], strict=True)]
        is_equal &= all(torch.equal(one, other) for one, other in zip(results[0][2:], results[1][2:], strict=True))
    report(kernel="route", errors=errors, is_equal=is_equal)
    return max(errors) < BOUNDS[torch.float32] and is_equal


def experts() -> bool:
    """Grouped products of experts against one after another."""
    from megarl.mcore.kernels.swiglu import grouped_swiglu, stack_, stacked_swiglu

    counts = torch.tensor([5, 0, 700, 1, 64, 33, 8, 200], device=DEVICE)
    first = [torch.nn.Parameter(0.05 * drawn(2 * EXPERT_FFN, HIDDEN)) for _ in counts]
    second = [torch.nn.Parameter(0.05 * drawn(HIDDEN, EXPERT_FFN)) for _ in counts]
    stack_(first), stack_(second)
    rows, gates = (
        drawn(int(counts.sum()), HIDDEN).requires_grad_(),
        torch.rand(int(counts.sum()), device=DEVICE).bfloat16(),
    )
    wanted, results = [rows, *first, *second], []
    for out in (
        stacked_swiglu(rows, gates, counts.cumsum(0).int(), first, second),
        grouped_swiglu(rows, gates, counts.tolist(), first, second),
    ):
        results.append((out, *torch.autograd.grad(out.float().square().sum(), wanted)))
    errors = [largest_error(a.detach(), b.detach()) for a, b in zip(*results, strict=True) if b.abs().max() > 0]
    report(kernel="stacked_swiglu", error=max(errors))
    return max(errors) < BOUNDS[torch.bfloat16]


def delta_rule() -> bool:
    """The gated delta rule by chunks, its gradients and its times, by all kernels that are here."""
    lengths, is_right = [300, 64, 65, 1, 700], True
    values, long = delta_rule_inputs(sum(lengths)), delta_rule_inputs(DELTA_TOKENS)
    grad = drawn(sum(lengths), DELTA_HEADS[1], DELTA_HEADS[3])
    exact = delta_rule_passes([x.double() for x in values], lengths, None, grad)
    kinds = {"triton": (None, 1e-3)} | ({"fla": (torch.bfloat16, 0.05)} if fused_chunks.version() else {})
    for name, (kind, bound) in kinds.items():
        found = delta_rule_passes(values, lengths, kind, grad)
        errors = [largest_error(one, other) for one, other in zip(found, exact, strict=True)]
        times = [timed(lambda kind=kind: delta_rule_passes(long, [DELTA_TOKENS], kind, None)) for _ in range(4)]
        report(kernel="delta_rule", by=name, errors=errors, tokens=DELTA_TOKENS, passes_s=round(min(times), 5))
        is_right = is_right and max(errors) < bound
    return is_right


def delta_rule_inputs(rows: int) -> list[torch.Tensor]:
    """Fields of `recurrence.delta_rule.Inputs` of a layer like those of Qwen3-Next."""
    sizes = HeadSizes(*DELTA_HEADS)
    shapes = (rows, sizes.channels), (rows, sizes.heads), (rows, sizes.heads), (sizes.channels, 1, 4), (sizes.heads,)
    return [*(drawn(*shape, dtype=torch.float32) for shape in shapes), drawn(sizes.heads, dtype=torch.float32) - 2]


def delta_rule_passes(values, lengths: list[int], kind, grad) -> list[torch.Tensor]:
    """Results of sequences of these lengths, and gradients of all inputs; `kind` as of `HeadSizes.fused_type`."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    table = [[start, rows, NONE, NONE] for start, rows in zip(starts, lengths, strict=True)]
    inputs = Inputs(*(x.detach().requires_grad_() for x in values))
    out = inputs.by_chunks(HeadSizes(*DELTA_HEADS, kind), Runs(torch.tensor(table), 0, 4))
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) if grad is None else grad.to(out))]


if __name__ == "__main__":
    checks = paged_decode, varlen, sampling, swiglu, rotation, sums, routes, experts, delta_rule
    run_all({check.__name__: check for check in checks})
