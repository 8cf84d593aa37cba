"""A token of each request in layers with a recurrent state: what it reads, and its state after it.

Two launches a layer: the convolution, one program per row and tile of channels; the rule, one per row, head and tile of
values. A row's results depend on its own state alone. States are fp32 and change in place. A row without a state,
padding of a decode step, touches none.
Shapes: T rows, C channels of the convolution, S states, G groups, H heads with a memory [K, V] each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNEL_TILE = 256
MEMORY_TILE = 4096  # numbers of a memory that a program changes, at most


@triton.jit
def _convolve_row(
    x, row_stride, weight, bias, numbers, inputs, out, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    number, is_channel = tl.load(numbers + row).to(tl.int64), channel < channels
    is_own = is_channel & (number >= 0)
    new = tl.load(x + row * row_stride + channel, mask=is_channel, other=0.0)
    before = inputs + number * (TAPS - 1) * channels + channel
    total = tl.zeros([TILE], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(before + tap * channels, mask=is_own, other=0.0)
        total += old * tl.load(weight + channel * TAPS + tap, mask=is_channel, other=0.0)
        if tap > 0:
            tl.store(before + (tap - 1) * channels, old, mask=is_own)
    if TAPS > 1:
        tl.store(before + (TAPS - 2) * channels, new, mask=is_own)
    total += new * tl.load(weight + channel * TAPS + TAPS - 1, mask=is_channel, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0)
    tl.store(out + row * channels + channel, total / (1 + tl.exp(-total)), mask=is_channel)


@triton.jit
def _softplus(x):
    """log(1 + eˣ), also where 1 + eˣ rounds to 1."""
    power = tl.exp(-tl.abs(x))
    sum_of_both = 1 + power
    # The error of rounding the sum cancels in the quotient.
    small = tl.where(
        sum_of_both == 1, power, tl.log(sum_of_both) * power / tl.where(sum_of_both == 1, 1.0, sum_of_both - 1)
    )
    return tl.maximum(x, 0.0) + small


@triton.jit
def _part_of_memory(
    numbers, memories, heads, KEYS: tl.constexpr, KEY_TILE: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr
):
    """(its row and head, its keys and values and which of these there are, places in the memory that are its own) of a
    program of a rule."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, KEY_TILE), tl.program_id(2) * TILE + tl.arange(0, TILE)
    number, is_key, is_value = tl.load(numbers + row).to(tl.int64), key < KEYS, value < VALUES
    place = memories + ((number * heads + head) * KEYS + key[:, None]) * VALUES + value[None, :]
    return row, head, key, value, is_key, is_value, place, is_key[:, None] & is_value[None, :] & (number >= 0)


@triton.jit
def _delta_row(
    mixed, a, b, gate_stride, decay_logs, biases, numbers, memories, out, channels, groups, heads, scale,
    epsilon, bound, DECAYS: tl.constexpr, IS_BOUNDED: tl.constexpr,
    KEYS: tl.constexpr, KEY_TILE: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head, key, value, is_key, is_value, place, is_own = _part_of_memory(
        numbers, memories, heads, KEYS, KEY_TILE, VALUES, TILE
    )
    own = mixed + row * channels
    queries = own + head // (heads // groups) * KEYS + key
    q = tl.load(queries, mask=is_key, other=0.0)
    k = tl.load(queries + groups * KEYS, mask=is_key, other=0.0)
    v = tl.load(own + 2 * groups * KEYS + head * VALUES + value, mask=is_value, other=0.0)
    q = q / tl.sqrt(tl.sum(q * q, 0) + epsilon) * scale
    k = k / tl.sqrt(tl.sum(k * k, 0) + epsilon)
    own_decay = head * DECAYS + (key if DECAYS > 1 else tl.zeros_like(key))
    before = tl.load(a + row * gate_stride + own_decay, mask=is_key, other=0.0)
    before += tl.load(biases + own_decay, mask=is_key, other=0.0)
    rate = tl.exp(tl.load(decay_logs + head))
    log_decay = bound / (1 + tl.exp(-rate * before)) if IS_BOUNDED else -rate * _softplus(before)
    strength = 1 / (1 + tl.exp(-tl.load(b + row * gate_stride + head)))
    memory = tl.load(place, mask=is_own, other=0.0) * tl.exp(log_decay)[:, None]
    change = (v - tl.sum(k[:, None] * memory, 0)) * strength
    memory += k[:, None] * change[None, :]
    tl.store(place, memory, mask=is_own)
    tl.store(out + (row * heads + head) * VALUES + value, tl.sum(q[:, None] * memory, 0), mask=is_value)


@triton.jit
def _space_row(
    mixed, steps, step_stride, decay_logs, biases, skips, numbers, memories, out, channels, groups, heads, min_step,
    KEYS: tl.constexpr, KEY_TILE: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head, key, value, is_key, is_value, place, is_own = _part_of_memory(
        numbers, memories, heads, KEYS, KEY_TILE, VALUES, TILE
    )
    own = mixed + row * channels
    x = tl.load(own + head * VALUES + value, mask=is_value, other=0.0)
    inputs = own + heads * VALUES + head // (heads // groups) * KEYS + key
    b = tl.load(inputs, mask=is_key, other=0.0)
    c = tl.load(inputs + groups * KEYS, mask=is_key, other=0.0)
    step = _softplus(tl.load(steps + row * step_stride + head) + tl.load(biases + head))
    step = tl.maximum(step, min_step)
    decay = tl.exp(-tl.exp(tl.load(decay_logs + head)) * step)
    memory = tl.load(place, mask=is_own, other=0.0) * decay + b[:, None] * (x * step)[None, :]
    tl.store(place, memory, mask=is_own)
    read = tl.sum(c[:, None] * memory, 0) + tl.load(skips + head) * x
    tl.store(out + (row * heads + head) * VALUES + value, read, mask=is_value)


@torch.library.custom_op("megarl::convolve_rows", mutates_args=("inputs", "out"))
def convolve_rows(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor, inputs: Tensor, out: Tensor) -> None:
    """The causal convolution and its SiLU; all fp32 but `numbers`.

    Args:
        x: [T, C], contiguous within a row.
        weight: [C, 1, taps]; bias: [C].
        numbers: [T] int32 state of each row, all different; negative: none, and zeros before the row.
        inputs: [S, taps − 1, C] of `States`.
        out: [T, C].
    """
    rows, channels = x.shape
    options = {"TAPS": weight.shape[2], "HAS_BIAS": bias is not None, "TILE": CHANNEL_TILE}
    grid = rows, triton.cdiv(channels, CHANNEL_TILE)
    _convolve_row[grid](x, x.stride(0), weight, bias, numbers, inputs, out, channels, **options)


@torch.library.custom_op("megarl::delta_rows", mutates_args=("memories", "out"))
def delta_rows(
    mixed: Tensor,
    gates: list[Tensor],
    numbers: Tensor,
    memories: Tensor,
    out: Tensor,
    groups: int,
    epsilon: float,
    bound: float | None,
) -> None:
    """The gated delta rule, with a decay of each head or of each channel of a key; all fp32 but `numbers`.

    Args:
        mixed: [T, C] queries, keys and values after the convolution.
        gates: a, b, decay_logs and biases of `recurrence.delta_rule.Inputs`.
        numbers: as of `convolve_rows`.
        memories: [S, H, K, V] of `States`.
        out: [T, H, V] what each row reads.
        epsilon: added to the squared length of queries and keys.
        bound: of logarithms of decays; None: none but 0.
    """
    (_, heads, keys, values), (a, b, decay_logs, biases) = memories.shape, gates
    _delta_row[_grid(mixed, memories)](
        mixed, a, b, a.stride(0), decay_logs, biases, numbers, memories, out, mixed.shape[1], groups, heads,
        keys**-0.5, epsilon, bound or 0.0, DECAYS=len(biases) // heads, IS_BOUNDED=bound is not None,
        **_tiles(keys, values),
    )  # fmt: skip


@torch.library.custom_op("megarl::space_rows", mutates_args=("memories", "out"))
def space_rows(
    mixed: Tensor, gates: list[Tensor], numbers: Tensor, memories: Tensor, out: Tensor, groups: int, min_step: float
) -> None:
    """Mamba-2's state space; arguments as of `delta_rows`, but these.

    Args:
        mixed: [T, C] x, B and C after the convolution.
        gates: steps, decay_logs, biases and skips of `recurrence.state_space.SpaceInputs`.
    """
    (_, heads, keys, values), (steps, decay_logs, biases, skips) = memories.shape, gates
    _space_row[_grid(mixed, memories)](
        mixed, steps, steps.stride(0), decay_logs, biases, skips, numbers, memories, out, mixed.shape[1], groups,
        heads, min_step, **_tiles(keys, values),
    )  # fmt: skip


def _tiles(keys: int, values: int) -> dict[str, int]:
    key_tile = triton.next_power_of_2(keys)
    tile = min(triton.next_power_of_2(values), max(MEMORY_TILE // key_tile, 1))
    return {"KEYS": keys, "KEY_TILE": key_tile, "VALUES": values, "TILE": tile}


def _grid(mixed: Tensor, memories: Tensor) -> tuple[int, int, int]:
    _, heads, keys, values = memories.shape
    return len(mixed), heads, triton.cdiv(values, _tiles(keys, values)["TILE"])
