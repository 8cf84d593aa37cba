"""Layers with a recurrent state in training and prompts: convolutions of runs, and the way through their chunks.

A convolution has one program per tile of rows and of channels, which also computes its SiLU and norms of heads. The
way has one launch for all runs that wait for none of each other, forwards and backwards: a program per run, head and
tile of values holds its part of the memory from the first chunk to the last. Its products are sums of three of TF32,
which differ from those of fp32 in the last bits. Nothing depends on other runs, or on the order of programs.
Shapes: T rows, C channels of the convolution, S states, H heads with a memory [K, V] each; M chunks of N rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.cuda import operator

TILE = 4096  # numbers of a tile, of rows and channels or of keys and values
GATHERED, MIN_CHANNELS = 256, 128  # channels of a tile of a row; of a tile of several rows, at least
MIN_PRODUCT = 16  # numbers of a side of a product's tile, at least
WALK_OPTIONS = {"num_warps": 8, "num_stages": 1}


@triton.jit
def _tile_of_rows(channels, heads, WIDTH: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr):
    """(rows, channels, which of these there are) of a program: those of a normed head, or a tile of what follows."""
    row, offset = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT), tl.arange(0, TILE)
    part = tl.program_id(1)
    channel = tl.where(part < heads, part * WIDTH, heads * WIDTH + (part - heads) * TILE) + offset
    return row, channel, (channel < channels) & ((offset < WIDTH) | (part >= heads))


@triton.jit
def _read_rows(
    x, row_stride, read, inputs, row, channel, is_channel, tap, count, rows, channels, HAS_INPUTS: tl.constexpr
):
    """[COUNT, TILE] what rows read at a tap: rows of x, zeros, or inputs of states, numbered in this order."""
    source = tl.load(read + tap * count + row, mask=row < count, other=rows)[:, None]
    own = tl.load(x + source * row_stride + channel, mask=(source < rows) & is_channel, other=0.0)
    if HAS_INPUTS:
        kept = inputs + (source - rows - 1) * channels + channel
        own += tl.load(kept, mask=(source > rows) & is_channel, other=0.0)
    return own


@triton.jit
def _convolve_tile(
    x,
    row_stride,
    read,
    inputs,
    weight,
    bias,
    out,
    count,
    rows,
    channels,
    heads,
    epsilon,
    scale,
    TAPS: tl.constexpr,
    HAS_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ACTIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    row, channel, is_channel = _tile_of_rows(channels, heads, WIDTH, COUNT, TILE)
    c, is_c = channel[None, :], is_channel[None, :]
    total = tl.zeros([COUNT, TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        own = _read_rows(x, row_stride, read, inputs, row, c, is_c, tap, count, rows, channels, HAS_INPUTS)
        total += own * tl.load(weight + c * TAPS + tap, mask=is_c, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=is_c, other=0.0)
    if IS_ACTIVE:
        total = total / (1 + tl.exp(-total))
    if tl.program_id(1) < heads:
        norm = 1 / tl.sqrt(tl.sum(total * total, 1) + epsilon)
        total *= (tl.where(tl.program_id(1) < heads // 2, scale, 1.0) * norm)[:, None]
    tl.store(out + row[:, None] * channels + c, total, mask=(row < count)[:, None] & is_c)


@triton.jit
def _convolve_tile_backward(
    grad,
    x,
    row_stride,
    read,
    weight,
    bias,
    of_total,
    of_weight,
    rows,
    channels,
    heads,
    epsilon,
    scale,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ACTIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    row, channel, is_channel = _tile_of_rows(channels, heads, WIDTH, COUNT, TILE)
    c, is_c = channel[None, :], is_channel[None, :]
    place, is_own = row[:, None] * channels + c, (row < rows)[:, None] & is_c
    total = tl.zeros([COUNT, TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        own = _read_rows(x, row_stride, read, x, row, c, is_c, tap, rows, rows, channels, False)
        total += own * tl.load(weight + c * TAPS + tap, mask=is_c, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=is_c, other=0.0)
    found = tl.load(grad + place, mask=is_own, other=0.0)
    share = 1 / (1 + tl.exp(-total)) if IS_ACTIVE else tl.full([COUNT, TILE], 1.0, tl.float32)
    if tl.program_id(1) < heads:
        active = total * share
        norm = 1 / tl.sqrt(tl.sum(active * active, 1) + epsilon)
        found -= active * (norm * norm * tl.sum(found * active, 1))[:, None]
        found *= (tl.where(tl.program_id(1) < heads // 2, scale, 1.0) * norm)[:, None]
    if IS_ACTIVE:
        found *= share * (1 + total * (1 - share))
    tl.store(of_total + place, found, mask=is_own)
    sums = of_weight + (tl.program_id(0) * channels + channel) * (TAPS + HAS_BIAS)
    for tap in tl.static_range(TAPS):
        own = _read_rows(x, row_stride, read, x, row, c, is_c, tap, rows, rows, channels, False)
        tl.store(sums + tap, tl.sum(own * found, 0), mask=is_channel)
    if HAS_BIAS:
        tl.store(sums + TAPS, tl.sum(found, 0), mask=is_channel)


@triton.jit
def _gather_tile(of_total, weight, bounds, readers, out, rows, channels, TAPS: tl.constexpr, TILE: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    begin, total = tl.load(bounds + row), tl.zeros([TILE], tl.float32)
    for i in range((tl.load(bounds + row + 1) - begin).to(tl.int32)):
        reader = tl.load(readers + begin + i)
        own = tl.load(of_total + reader % rows * channels + channel, mask=channel < channels, other=0.0)
        total += own * tl.load(weight + channel * TAPS + reader // rows, mask=channel < channels, other=0.0)
    tl.store(out + row * channels + channel, total, mask=channel < channels)


@triton.jit
def _walk_run(
    way,
    starts,
    old,
    old_stride,
    new,
    new_stride,
    keys,
    key_stride,
    decays,
    decay_stride,
    added,
    memories,
    changes,
    ends,
    heads,
    IS_BACKWARD: tl.constexpr,
    HAS_OLD: tl.constexpr,
    DECAYS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    head, way = tl.program_id(1), way + tl.program_id(0) * 5
    key, value, row = tl.arange(0, KEY_TILE), tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
    is_key, is_value = key < KEYS, value < VALUES
    own, is_own = key[:, None] * VALUES + value[None, :], is_key[:, None] & is_value[None, :]
    first, last, begin, end = tl.load(way), tl.load(way + 1), tl.load(way + 2), tl.load(way + 3)
    memory = tl.zeros([KEY_TILE, TILE], tl.float32)
    for i in range((end - begin).to(tl.int32)):
        memory += tl.load(starts + ((begin + i) * heads + head) * KEYS * VALUES + own, mask=is_own, other=0.0)
    for step in range((last - first).to(tl.int32)):
        place = (last - 1 - step if IS_BACKWARD else first + step) * heads + head
        tl.store(memories + place * KEYS * VALUES + own, memory, mask=is_own)
        rows = place * ROWS + row[:, None]
        change = tl.load(new + rows * new_stride + value[None, :], mask=is_value[None, :], other=0.0)
        left = tl.load(keys + rows * key_stride + key[None, :], mask=is_key[None, :], other=0.0)
        if HAS_OLD:
            lost = -tl.load(old + rows * old_stride + key[None, :], mask=is_key[None, :], other=0.0)
        if IS_BACKWARD:
            change = tl.dot(left, memory, change, input_precision="tf32x3")
        elif HAS_OLD:
            change = tl.dot(lost, memory, change, input_precision="tf32x3")
        tl.store(changes + rows * VALUES + value[None, :], change, mask=is_value[None, :])
        decay = tl.load(
            decays + place * decay_stride + (key if DECAYS > 1 else tl.zeros_like(key)), mask=is_key, other=0.0
        )
        memory *= decay[:, None]
        if IS_BACKWARD:
            memory += tl.load(added + place * KEYS * VALUES + own, mask=is_own, other=0.0)
            if HAS_OLD:
                memory = tl.dot(tl.trans(lost), change, memory, input_precision="tf32x3")
        else:
            memory = tl.dot(tl.trans(left), change, memory, input_precision="tf32x3")
    to = tl.load(way + 4)
    tl.store(ends + (to * heads + head) * KEYS * VALUES + own, memory, mask=is_own & (to >= 0))


def _empty_gradients(grad, x, weight, bias, *_) -> list[Tensor]:
    return [x.new_empty(x.shape), x.new_empty(len(weight), weight.shape[2] + (bias is not None))]


def _convolution(weight: Tensor, heads: list[int], epsilon: float, activates: bool) -> tuple[dict, int]:
    """(arguments of kernels of convolutions by name, tiles of channels)."""
    (channels, _, taps), (count, width) = weight.shape, heads
    tile = max(triton.next_power_of_2(width), MIN_CHANNELS)
    options = {"TAPS": taps, "IS_ACTIVE": activates, "WIDTH": width, "COUNT": TILE // tile, "TILE": tile}
    parts = count + triton.cdiv(channels - count * width, tile)
    return options | {"heads": count, "epsilon": epsilon, "scale": width**-0.5 if width else 1.0}, parts


@operator("convolve_runs", lambda x, weight, bias, read, *_: x.new_empty(read.shape[1], x.shape[1]))
def convolve_runs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    read: Tensor,
    inputs: Tensor | None,
    heads: list[int],
    epsilon: float,
    activates: bool,
) -> Tensor:
    """[R, C] rows after the causal convolution, fp32, then SiLU if it `activates`, then norms of heads.

    Args:
        x: [T, C], contiguous within a row.
        weight: [C, 1, taps]; bias: [C].
        read: [taps, R] what each row reads, as of `recurrence.runs.ConvolutionRows`.
        inputs: [S, taps − 1, C] of `States`.
        heads: how many of the first channels' heads get the length 1, and of how many channels each is. The first half
            of them, queries, then is divided by the root of their channels.
        epsilon: added to squared lengths.
    """
    out = x.new_empty(read.shape[1], x.shape[1])
    options, parts = _convolution(weight, heads, epsilon, activates)
    _convolve_tile[triton.cdiv(len(out), options["COUNT"]), parts](
        x,
        x.stride(0),
        read,
        inputs,
        weight,
        bias,
        out,
        len(out),
        len(x),
        x.shape[1],
        HAS_INPUTS=inputs is not None,
        HAS_BIAS=bias is not None,
        **options,
    )
    return out


@operator("convolve_runs_backward", _empty_gradients)
def convolve_runs_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: list[Tensor],
    heads: list[int],
    epsilon: float,
    activates: bool,
) -> list[Tensor]:
    """Gradients of `convolve_runs` without inputs of states: of x [T, C]; of the weight, and then the bias,
    [C, taps or taps + 1]. `grad`: [T, C]; `rows`: read, and bounds and readers of `recurrence.runs.Runs`."""
    (options, parts), (read, bounds, readers) = _convolution(weight, heads, epsilon, activates), rows
    grad, (count, channels), taps = grad.contiguous(), x.shape, weight.shape[2]
    of_x, of_total, tiles = grad.new_empty(x.shape), torch.empty_like(grad), triton.cdiv(count, options["COUNT"])
    of_weight = grad.new_empty(tiles, channels, taps + (bias is not None))
    _convolve_tile_backward[tiles, parts](
        grad,
        x,
        x.stride(0),
        read,
        weight,
        bias,
        of_total,
        of_weight,
        count,
        channels,
        HAS_BIAS=bias is not None,
        **options,
    )
    _gather_tile[count, triton.cdiv(channels, GATHERED)](
        of_total, weight, bounds, readers, of_x, count, channels, TAPS=taps, TILE=GATHERED
    )
    return [of_x, of_weight.sum(0)]


def _convolved_gradient(ctx, grad: Tensor):
    x, weight, bias = ctx.saved_tensors
    rows, taps = [ctx.runs.convolution.read, *ctx.runs.readers], weight.shape[2]
    of_x, of_weight = convolve_runs_backward(grad, x, weight, bias, rows, *ctx.options)
    of_bias = None if bias is None else of_weight[:, taps]
    return of_x, of_weight[:, :taps].unsqueeze(1), of_bias, None, None, None


@with_gradient(_convolved_gradient)
def convolved(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, runs, states, options: tuple) -> Tensor:
    """`convolve_runs` for `recurrence.runs.Runs`, whose last arguments are the options; `states`, without which there
    are gradients, get the last inputs of the runs."""
    ctx.save_for_backward(x, weight, bias)
    ctx.runs, ctx.options = runs, options
    plan, inputs = runs.convolution, None if states is None else states.inputs
    heads, epsilon, activates = options
    mixed = convolve_runs(x, weight, bias, plan.read, inputs, heads, epsilon, activates)
    if inputs is not None and len(plan.states):  # a tap of 1 copies rows
        ones, rows = torch.ones_like(weight[..., :1]), plan.last.view(1, -1)
        last = convolve_runs(x, ones, None, rows, inputs, [0, 0], 0.0, False)
        inputs.index_copy_(0, plan.states, last.view(-1, *inputs.shape[1:]))
    return mixed


@torch.library.custom_op("megarl::walk_chunks", mutates_args=("results",))
def walk_chunks(
    way: Tensor,
    starts: Tensor,
    old: Tensor | None,
    new: Tensor,
    keys: Tensor,
    decays: Tensor,
    added: Tensor | None,
    results: list[Tensor],
) -> None:
    """Goes through chunks of runs; all fp32 but `way`, with contiguous rows.

    Args:
        way: [n, 5] of `recurrence.runs.Chunks`.
        starts: [S, H, K, V].
        old, new, keys: [M·H·N, K], [M·H·N, V], [M·H·N, K].
        decays: [M·H, D].
        added: [M, H, K, V].
        results: [M, H, K, V], [M, H, N, V], [W, H, K, V], contiguous.
    """
    (memories, changes, ends), (_, heads, rows, values) = results, results[1].shape
    assert all(x is None or x.stride(1) == 1 or x.shape[1] == 1 for x in (old, new, keys, decays))
    tiles, old_stride = _tiles(keys.shape[1], values), 0 if old is None else old.stride(0)
    _walk_run[len(way), heads, triton.cdiv(values, tiles["TILE"])](
        way,
        starts,
        old,
        old_stride,
        new,
        new.stride(0),
        keys,
        keys.stride(0),
        decays,
        decays.stride(0),
        added,
        memories,
        changes,
        ends,
        heads,
        IS_BACKWARD=added is not None,
        HAS_OLD=old is not None,
        DECAYS=decays.shape[1],
        ROWS=rows,
        **tiles,
        **WALK_OPTIONS,
    )


def _tiles(keys: int, values: int) -> dict[str, int]:
    key_tile = max(triton.next_power_of_2(keys), MIN_PRODUCT)
    tile = max(min(triton.next_power_of_2(values), TILE // key_tile), MIN_PRODUCT)
    return {"KEYS": keys, "KEY_TILE": key_tile, "VALUES": values, "TILE": tile}
