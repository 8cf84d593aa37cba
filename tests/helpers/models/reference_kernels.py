"""Stand-ins on a CPU for the kernels of CUDA devices, in float64: what they compute, one sequence after another."""

import torch

from megarl.algorithms.token_sampling import SamplingSettings, sample_tokens, uniforms
from megarl.mcore.attention.backends import varlen


def flash(query, key, value, plan, scale):
    """[T, H, D] of the segments of a `CumulativePlan`."""
    ends = zip(plan.cu_queries[:-1], plan.cu_queries[1:], plan.cu_keys[:-1], plan.cu_keys[1:], strict=True)
    parts = [_attend(query[a:b], key[c:d], value[c:d], scale, plan.window) for a, b, c, d in ends]
    return torch.cat(parts).to(query.dtype)


def paged_decode(query, cache, table, lengths, scale, window=None, arrived=None):
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
    """As `kernels.cuda.head_rows.sample_rows`: (tokens, log-probs)."""
    logprobs = torch.log_softmax(logits[:, :columns].double() / temperatures.unsqueeze(1), -1)
    drawn, largest = (sample_tokens(logits[:, :columns], logprobs.exp(), numbers, SamplingSettings(greedy=is_greedy))
                      for is_greedy in (False, True))  # fmt: skip
    tokens = largest.where(greedy.bool(), drawn)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).float()


def uniform_rows(keys, positions):
    """As `kernels.cuda.head_rows.uniform_rows`."""
    return uniforms(keys, positions)


def head_sums(sums, logits, temperatures, temperature, targets, count):
    """As `kernels.cuda.head_rows.head_sums`."""
    scaled = logits.double() / (temperature if temperatures is None else temperatures.unsqueeze(1))
    is_here = (targets >= 0) & (targets < count)
    chosen = scaled.gather(1, targets.clamp(0, scaled.shape[1] - 1).unsqueeze(1)).squeeze(1).where(is_here, 0.0)
    top = torch.full_like(chosen, -torch.inf) if count == 0 else scaled[:, :count].amax(1)
    distance = scaled[:, :count] - top.unsqueeze(1)
    weights = distance.exp()
    found = [top, weights.sum(1), (weights * distance).sum(1), weights.square().sum(1), chosen]
    sums.copy_(torch.stack(found))


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


def begin_rows(tokens, positions, lengths, slots, sent_tokens, sent_positions, blocks, size):
    """As that of `kernels.cuda.rotate_heads`."""
    tokens.copy_(sent_tokens)
    positions.copy_(sent_positions.clamp(min=0))
    lengths.copy_(sent_positions + 1)
    block = blocks.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
    slots.copy_(block.long() * size + positions % size)


def rotate_and_store(heads, cosines, sines, cache, slots):
    """As that of `kernels.cuda.rotate_heads`, in single operators, which also rotate the keys of `heads`."""
    from megarl.mcore.attention.rotary_embeddings import Rotation

    if cosines is not None:
        Rotation(cosines, sines).apply_(heads[:, :, :-1])
    cache.index_copy_(0, slots, heads[:, :, -2:])


def rotate_heads(query, key, cosines, sines, is_backward):
    """As that of `kernels.cuda.rotate_heads`, in single operators."""
    from megarl.mcore.attention.rotary_embeddings import Rotation

    rotated = query.contiguous().clone(), key.contiguous().clone()
    for heads in rotated:
        Rotation(cosines, -sines if is_backward else sines).apply_(heads)
    return list(rotated)


def split_heads(heads, cosines, sines):
    """As that of `kernels.cuda.rotate_heads`, in single operators."""
    query, key = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2]
    return (
        [query.contiguous(), key.contiguous()] if cosines is None else rotate_heads(query, key, cosines, sines, False)
    )


def join_heads(query, key, value, cosines, sines):
    """As that of `kernels.cuda.rotate_heads`, in single operators."""
    query, key = (query, key) if cosines is None else rotate_heads(query, key, cosines, sines, True)
    return torch.cat([query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2), value.unsqueeze(2)], 2)


def sum_norm(x, added, weight, eps):
    """As that of `kernels.cuda.exact_rows`, in fp32."""
    total = x + added
    scales = (total.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return [total, (total.float() * scales * weight.float()).to(x.dtype), scales]


def sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales):
    """As that of `kernels.cuda.exact_rows`, in fp32."""
    grad, normed = grad.float(), total.float() * scales
    scaled = grad * weight.float()
    grad_weight += (grad * normed).flatten(0, -2).sum(0)
    own = scales * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_x.copy_(own.to(total.dtype) + grad_total)


def expert_pairs(routing_map, each):
    """As that of `kernels.cuda.mlp_rows`."""
    pairs = routing_map.t().nonzero()  # expert, token
    tokens = pairs[:, 1]
    places = tokens * routing_map.shape[1] + pairs[:, 0]
    return [places, tokens.clone(), tokens.argsort(stable=True), routing_map.sum(0).cumsum(0).int()]


def swiglu_gated(x, gates, places):
    """As that of `kernels.cuda.mlp_rows`."""
    gate, up = x.float().chunk(2, -1)
    activated = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    own = gates if places is None else gates[places]
    return (activated.float() * own.float().unsqueeze(1)).to(x.dtype)


def swiglu_gated_backward(grad, x, gates, places):
    """As that of `kernels.cuda.mlp_rows`."""
    places = torch.arange(len(x)) if places is None else places
    (gate, up), column, wide = x.float().chunk(2, -1), gates[places].float().unsqueeze(1), grad.float()
    sigmoid, scaled = gate.sigmoid(), wide * column
    grads = scaled * up * sigmoid * (1 + gate * (1 - sigmoid)), scaled * gate * sigmoid
    grad_gates = torch.zeros_like(gates)
    grad_gates[places] = (wide * gate * sigmoid * up).sum(1).to(gates.dtype)
    return [torch.cat(grads, -1).to(x.dtype), grad_gates, swiglu_gated(x, gates, places)]


def route(logits, bias, given, each, kind, scale):
    """As that of `kernels.cuda.mlp_rows`."""
    wide = logits.float()
    scores = {"softmax": wide, "softmax_first": wide.softmax(-1), "sigmoid": wide.sigmoid()}[kind]
    keys = scores if bias is None else scores + bias
    experts = keys.sort(dim=-1, descending=True, stable=True).indices[:, :each] if given is None else given
    experts = experts.sort(-1).values
    probs = torch.zeros_like(logits).scatter(1, experts, (gates_of(wide, experts, kind) * scale).to(logits.dtype))
    return [probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True), experts]


def gates_of(logits, experts, kind):
    """The gates [T, k] of a token's experts, as `route` has them, without a scale; differentiable."""
    if kind == "softmax":
        return logits.gather(1, experts).softmax(-1)
    scores = (logits.softmax(-1) if kind == "softmax_first" else logits.sigmoid()).gather(1, experts)
    is_shared = kind == "sigmoid" and experts.shape[1] > 1
    return scores / (scores.sum(-1, keepdim=True) + 1e-20) if is_shared else scores


def route_backward(grad, logits, routing_map, each, kind, scale):
    """As that of `kernels.cuda.mlp_rows`."""
    experts = routing_map.nonzero()[:, 1].view(-1, each)
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        wide = logits.detach().float().requires_grad_()
        gates = gates_of(wide, experts, kind) * scale
        return torch.autograd.grad(gates, wide, grad.float().gather(1, experts))[0].to(logits.dtype)


def sum_pairs(values, order, tokens):
    """As that of `kernels.cuda.mlp_rows`, by PyTorch's operators."""
    terms = values.index_select(0, order).view(tokens, -1, values.shape[1]).unbind(1)
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def convolve_rows(x, weight, bias, numbers, inputs, out):
    """As that of `kernels.cuda.recurrent_rows`."""
    rows = (numbers >= 0).nonzero().squeeze(1)
    states, before = numbers[rows].long(), x.new_zeros(len(x), *inputs.shape[1:])
    before[rows] = inputs[states]
    read = torch.cat([before, x.unsqueeze(1)], 1).double()
    total = (read * weight.squeeze(1).t()).sum(1) + (0 if bias is None else bias)
    out.copy_(torch.nn.functional.silu(total))
    inputs[states] = read[rows, 1:].float()


def delta_rows(mixed, gates, numbers, memories, out, groups, epsilon, bound):
    """As that of `kernels.cuda.recurrent_rows`: the rule of 2412.06464, a token of each row."""
    (_, heads, keys, values), (a, b, decay_logs, biases) = memories.shape, gates
    rows, out = (numbers >= 0).nonzero().squeeze(1), out.zero_()
    q, k, v = mixed[rows].double().split((groups * keys, groups * keys, heads * values), 1)
    q, k = (x.unflatten(1, (groups, keys)).repeat_interleave(heads // groups, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt() for x in (q, k))
    before, rates = (a[rows] + biases).unflatten(1, (heads, -1)).double(), decay_logs.exp()[:, None]
    of_bound = None if bound is None else bound * (rates * before).sigmoid()
    log_decays = -rates * torch.nn.functional.softplus(before) if of_bound is None else of_bound
    memory = memories[numbers[rows].long()] * log_decays.exp().unsqueeze(-1)
    change = (v.unflatten(1, (heads, values)) - torch.einsum("thk,thkv->thv", k, memory)) * b[rows].sigmoid()[..., None]
    memory = memory + k.unsqueeze(-1) * change.unsqueeze(-2)
    memories[numbers[rows].long()] = memory.float()
    out[rows] = torch.einsum("thk,thkv->thv", q * keys**-0.5, memory).float()


def space_rows(mixed, gates, numbers, memories, out, groups, min_step):
    """As that of `kernels.cuda.recurrent_rows`: the rule of 2405.21060, a token of each row."""
    (_, heads, keys, values), (steps, decay_logs, biases, skips) = memories.shape, gates
    rows, out = (numbers >= 0).nonzero().squeeze(1), out.zero_()
    x, b, c = mixed[rows].double().split((heads * values, groups * keys, groups * keys), 1)
    x = x.unflatten(1, (heads, values))
    b, c = (each.unflatten(1, (groups, keys)).repeat_interleave(heads // groups, 1) for each in (b, c))
    step = torch.nn.functional.softplus((steps[rows] + biases).double()).clamp_min(min_step)
    memory = memories[numbers[rows].long()] * (-decay_logs.exp() * step).exp()[..., None, None]
    memory = memory + b.unsqueeze(-1) * (x * step.unsqueeze(-1)).unsqueeze(-2)
    memories[numbers[rows].long()] = memory.float()
    out[rows] = (torch.einsum("thk,thkv->thv", c, memory) + x * skips[:, None]).float()


def convolve_runs(x, weight, bias, read, inputs, heads, epsilon, activates):
    """As that of `kernels.cuda.recurrent_chunks`."""
    rows = torch.cat([x, x.new_zeros(1, x.shape[1]), *([] if inputs is None else [inputs.flatten(0, 1)])]).double()
    total = (rows[read] * weight.permute(2, 1, 0)).sum(0) + (0 if bias is None else bias)
    total = torch.nn.functional.silu(total) if activates else total
    count, width = heads
    if not count:
        return total.float()
    own = total[:, : count * width].unflatten(1, (2, count // 2, width))
    own = own / (own.square().sum(-1, keepdim=True) + epsilon).sqrt()
    own[:, 0] /= width**0.5
    return torch.cat([own.flatten(1), total[:, count * width :]], 1).float()


def convolve_runs_backward(grad, x, weight, bias, rows, heads, epsilon, activates):
    """As that of `kernels.cuda.recurrent_chunks`."""
    (read, *_), (count, width), of_total = rows, heads, grad.double().clone()
    taken, taps = torch.cat([x, x.new_zeros(1, x.shape[1])]).double()[read], weight.permute(2, 1, 0).double()
    total = (taken * taps).sum(0) + (0 if bias is None else bias)
    share = total.sigmoid() if activates else torch.ones_like(total)
    if count:
        own, of_own = (
            (each[:, : count * width].unflatten(1, (2, count // 2, width))) for each in (total * share, of_total)
        )
        norm = (own.square().sum(-1, keepdim=True) + epsilon).rsqrt()
        of_own[:] = norm * (of_own - own * norm.square() * (of_own * own).sum(-1, keepdim=True))
        of_own[:, 0] /= width**0.5
    of_total *= share * (1 + total * (1 - share)) if activates else 1
    of_x = total.new_zeros(len(x) + 1, x.shape[1])
    of_x.index_add_(0, read.flatten(), (of_total * taps).flatten(0, 1))
    of_weight = (taken * of_total).sum(1).t()
    wide = of_weight if bias is None else torch.cat([of_weight, of_total.sum(0).unsqueeze(1)], 1)
    return [of_x[:-1].float(), wide.float()]


def walk_chunks(way, starts, old, new, keys, decays, added, results):
    """As that of `kernels.cuda.recurrent_chunks`: a chunk after the other."""
    from megarl.mcore.recurrence.runs import NONE

    (memories, changes, ends), shape = results, results[1].shape[:3]
    old, new, keys = (None if x is None else x.unflatten(0, shape).double() for x in (old, new, keys))
    decays = decays.unflatten(0, shape[:2]).unsqueeze(-1).double()
    for first, last, begin, end, to in way.tolist():
        memory = starts[begin:end].double().sum(0)
        for i in range(first, last) if added is None else range(last - 1, first - 1, -1):
            memories[i] = memory
            change = new[i] if added is None else new[i] + keys[i] @ memory
            if added is None:
                change = change if old is None else change - old[i] @ memory
                memory = memory * decays[i] + keys[i].mT @ change
            else:
                memory = memory * decays[i] + added[i]
                memory = memory if old is None else memory - old[i].mT @ change
            changes[i] = change
        if to != NONE:
            ends[to] = memory


def use_them():
    """Makes the backend, the sampler and the layers compute with them, in this process."""
    from megarl.mcore.config import kernel_rules
    from megarl.mcore.kernels.cuda import head_rows, recurrent_rows, segment_attention
    from megarl.mcore.kernels.cuda import rotate_heads as rotation

    kernel_rules._refused_varlen = lambda args: None
    varlen.flash_kernel = lambda: flash  # type: ignore[assignment]
    segment_attention.paged_decode = paged_decode  # type: ignore[assignment]
    rotation.rotate_and_store = rotate_and_store  # type: ignore[assignment]
    rotation.begin_rows = begin_rows  # type: ignore[assignment]
    head_rows.sample_rows = sample_rows  # type: ignore[assignment]
    head_rows.uniform_rows = uniform_rows  # type: ignore[assignment]
    for own in (convolve_rows, delta_rows, space_rows):
        setattr(recurrent_rows, own.__name__, own)


def choose_key_bits(heads, weights, keys, rows, first, seen, count, width):
    """As that of `kernels.cuda.key_choice`."""
    rows, is_seen = _keys_of(rows, first, seen, width)
    products = torch.einsum("qhc,qkc->qhk", heads.double(), keys.double()[rows]).relu() * heads.shape[2] ** -0.5
    scores = torch.einsum("qh,qhk->qk", weights.double(), products).float()
    scores.masked_fill_(~is_seen, -torch.inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return pack_bits(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True) & is_seen)


def _keys_of(rows, first, seen, width):
    """(rows [n, K] of the keys that queries see, then any; which are seen)."""
    position = torch.arange(width)
    is_seen = position < seen.unsqueeze(1)
    return rows[torch.where(is_seen, first.unsqueeze(1) + position, 0)].long(), is_seen


def pack_bits(is_chosen):
    """[q, K] bool -> [q, ⌈K/8⌉] uint8, as kernels of a choice write them."""
    padded = torch.nn.functional.pad(is_chosen, (0, -is_chosen.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)


def list_key_rows(bits, rows, first, seen, count):
    """As that of `kernels.cuda.key_choice`."""
    position = torch.arange(8 * bits.shape[1])
    is_chosen = ((bits[:, position // 8] >> (position % 8)) & 1).bool()
    found = torch.zeros(len(bits), count, dtype=torch.int32)
    for own, start, chosen in zip(found, first.tolist(), is_chosen, strict=True):
        own[: int(chosen.sum())] = rows[start + chosen.nonzero().flatten()].int()
    return found


def attend_rows(query, latents, rows, first, seen, width, scale):
    """As that of `kernels.cuda.key_choice`."""
    own, is_seen = _keys_of(rows, first, seen, max(1, int(seen.max())) if len(seen) else 1)
    listed = latents[own].double()
    scores = torch.einsum("nad,nkd->nak", query.double(), listed) * scale
    scores.masked_fill_(~is_seen.unsqueeze(1), -torch.inf)
    out = torch.einsum("nak,nkd->nad", scores.softmax(-1).nan_to_num(), listed[..., :width])
    return out.to(query.dtype), scores.logsumexp(-1).float()
