"""Stand-ins on a CPU for the kernels of CUDA devices, in float64: what they compute, one sequence after another."""

import torch

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.algorithms.token_sampling import sample_tokens
from megarl.mcore.attention.backends import varlen


def flash(query, key, value, plan, scale):
    """[T, H, D] of the segments of a `CumulativePlan`."""
    ends = zip(plan.cu_queries[:-1], plan.cu_queries[1:], plan.cu_keys[:-1], plan.cu_keys[1:], strict=True)
    parts = [_attend(query[a:b], key[c:d], value[c:d], scale, plan.window) for a, b, c, d in ends]
    return torch.cat(parts).to(query.dtype)


def paged_decode(query, cache, table, lengths, scale, window=None, in_parts=True):
    """As `kernels.cuda.paged_decode`."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        keys = cache[table[row].long()].flatten(0, 1)[:length].double()
        if not length:
            continue
        scores = torch.einsum("grd,lgd->grl", query[row].double(), keys[:, :, 0]) * scale
        if window is not None:
            scores[..., : max(length - window, 0)] = -torch.inf
        out[row] = torch.einsum("grl,lgd->grd", scores.softmax(-1), keys[:, :, 1])
    return out.to(query.dtype)


def sample_rows(logits, numbers, temperatures, greedy, columns):
    """As `kernels.cuda.row_sampling.sample_rows`: (tokens, log-probs)."""
    logprobs = torch.log_softmax(logits[:, :columns].double() / temperatures.unsqueeze(1), -1)
    drawn, largest = (sample_tokens(logits[:, :columns], logprobs.exp(), numbers, SamplingSettings(greedy=is_greedy))
                      for is_greedy in (False, True))  # fmt: skip
    tokens = largest.where(greedy.bool(), drawn)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).float()


def head_sums(logits, temperatures, temperature, targets, count):
    """As `kernels.cuda.head_rows.head_sums`."""
    scaled = logits.double() / (temperature if temperatures is None else temperatures.unsqueeze(1))
    is_here = (targets >= 0) & (targets < count)
    chosen = scaled.gather(1, targets.clamp(0, scaled.shape[1] - 1).unsqueeze(1)).squeeze(1).where(is_here, 0.0)
    top = torch.full_like(chosen, -torch.inf) if count == 0 else scaled[:, :count].amax(1)
    distance = scaled[:, :count] - top.unsqueeze(1)
    weights = distance.exp()
    sums = [top, weights.sum(1), (weights * distance).sum(1), weights.square().sum(1), chosen]
    return torch.stack(sums).float()


def head_gradient(out, logits, temperatures, temperature, targets, count, statistics, grads):
    """As `kernels.cuda.head_rows.head_gradient`."""
    temperature = temperature if temperatures is None else temperatures.double().unsqueeze(1)
    top, total, entropy, square_sum = statistics.double().unsqueeze(2)
    to_logprob, to_entropy, to_square = grads.double().unsqueeze(2)
    distance = logits[:, :count].double() / temperature - top
    p = distance.exp() / total
    grad = p * (2 * to_square * (p - square_sum) - to_logprob - to_entropy * (distance - total.log() + entropy))
    rows = ((targets >= 0) & (targets < count)).nonzero().squeeze(1)
    grad[rows, targets[rows]] += to_logprob[rows, 0]
    out.zero_()[:, :count] = (grad / temperature).to(out.dtype)


def _attend(query, key, value, scale, window):
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    distance = torch.arange(query.shape[1]).unsqueeze(1) + key.shape[1] - query.shape[1] - torch.arange(key.shape[1])
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


def rotate_and_store(heads, cosines, sines, cache, slots):
    """As that of `kernels.cuda.rotate_and_store`, in single operators, which also rotate the keys of `heads`."""
    from megarl.mcore.model.decoder_layer import Rotation

    if cosines is not None:
        Rotation(cosines, sines).apply_(heads[:, :, :-1])
    cache.index_copy_(0, slots, heads[:, :, -2:])


def rotate_heads(query, key, cosines, sines, is_backward):
    """As that of `kernels.cuda.rotate_heads`, in single operators."""
    from megarl.mcore.model.decoder_layer import Rotation

    rotated = query.contiguous().clone(), key.contiguous().clone()
    for heads in rotated:
        Rotation(cosines, -sines if is_backward else sines).apply_(heads)
    return list(rotated)


def use_them():
    """Makes the backend, the sampler and the layers compute with them, in this process."""
    from megarl.mcore.config import megatron_flags
    from megarl.mcore.kernels.cuda import rotate_and_store as rotation
    from megarl.mcore.kernels.cuda import row_sampling, segment_attention

    megatron_flags._refused_varlen = lambda args: None
    varlen.flash_kernel = lambda: flash  # type: ignore[assignment]
    segment_attention.paged_decode = paged_decode  # type: ignore[assignment]
    rotation.rotate_and_store = rotate_and_store  # type: ignore[assignment]
    row_sampling.sample_rows = sample_rows  # type: ignore[assignment]
