"""`python -m tests.helpers.models.compiled_kernels sizes|orders|fused`: kernels compiled for an H100 without one, JSON.

sizes: bytes of code and of shared memory of each. orders: in which order kernels of rollout and training add.
fused: products and sums of 16 bits without a rounding between them, or of 32 where a kernel forbids it.
"""

import json
import re
import sys

import triton
from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_kernel_persistent
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.mcore.kernels.cuda import (
    exact_rows,
    head_rows,
    key_choice,
    mlp_rows,
    recurrent_chunks,
    recurrent_rows,
    rotate_heads,
    segment_attention,
)

TENSORS = dict.fromkeys(("query", "key", "value", "out"), "*bf16") | {"log_sums": "*fp32"}
TENSORS |= {"table": "*i32", "segments": "*i32", "arrived": "*i32"}
PARTS = {"sums": "*fp32", "maxima": "*fp32", "parts": "*fp32"}
STRIDES = ("query_row", "query_head", "key_row", "key_group", "value_row", "value_group", "total")
READS = TENSORS | PARTS | dict.fromkeys(STRIDES, "i32") | {"scale": "fp32", "window": "i32"}
SIZES = dict(HEADS=2, HEAD_TILE=2, QUERIES=8, CHANNELS=128, CHANNEL_TILE=128, TILE=64)
PAGES = {64: dict(PAGE=64, TABLE_ROW=40), 1: dict(PAGE=1, TABLE_ROW=0)}  # of a cache in decode; rows of tokens
ROW = {"logits": "*bf16", "numbers": "*fp64", "temperatures": "*fp32", "greedy": "*i32", "tokens": "*i64"}
ROW |= {"logprobs": "*fp32", "row_stride": "i64", "temperature": "fp32", "columns": "i32"}
NORM = dict.fromkeys(("x", "out"), "*bf16") | dict.fromkeys(("weight", "bias", "means", "scales"), "*fp32")
NORM |= {"columns": "i32", "epsilon": "fp32"}
FP32 = dict.fromkeys(("x", "weight", "bias", "out"), "*fp32")
FP32 |= dict.fromkeys(
    ("rows", "columns", "inner", "x_row", "x_head", "weight_row", "weight_head", "weight_inner", "out_row"), "i32"
)
PRODUCT = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "bias_ptr"), "*bf16") | dict.fromkeys(
    ("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"), "i32"
)
PLACES = dict.fromkeys(("heads", "cosines", "sines", "cache"), "*bf16") | {"slots": "*i64"}
PLACES |= {"token_stride": "i64", "group_stride": "i64"}
HEADS = dict(QUERIES=4, HEAD_TILE=8, CHANNELS=128, CHANNEL_TILE=128)
LARGE = dict(A_LARGE=False, B_LARGE=False, C_LARGE=False)
cases = [
    (
        segment_attention._attend_part,
        READS,
        SIZES | PAGES[page] | dict(SPLIT=512 if splits > 1 else 2**30, SPLITS=splits) | dict(HAS_WINDOW=flag),
    )
    for page, splits, flag in ((64, 4, False), (1, 1, False), (64, 1, True))
]
cases += [
    (kernel, ROW, dict(TILE=head_rows.SAMPLED_TILE)) for kernel in (head_rows._sample_row, head_rows._logprob_row)
]
NUMBERS = {"keys": "*i64", "positions": "*i64", "numbers": "*fp64", "count": "i32"}
cases += [(head_rows._uniform_tile, NUMBERS, dict(TILE=head_rows.NUMBER_TILE))]
BEGUN = dict.fromkeys(("sent_tokens", "sent_positions", "blocks", "lengths"), "*i32")
BEGUN |= dict.fromkeys(("tokens", "positions", "slots"), "*i64") | dict.fromkeys(("count", "table_row", "size"), "i32")
cases += [(rotate_heads._begin_tile, BEGUN, dict(TILE=rotate_heads.STEP_TILE))]
cases += [(exact_rows._norm_row, NORM, dict(TILE=2048, HAS_MEAN=flag, HAS_BIAS=flag)) for flag in (False, True)]
cases += [(rotate_heads._rotate_and_store, PLACES, HEADS | dict(ROTATED=rotated)) for rotated in (0, 64, 128)]
TURNED = dict.fromkeys(("query", "key", "query_out", "key_out", "cosines", "sines"), "*bf16")
TURNED |= dict.fromkeys(("query_heads", "key_heads", "query_token", "query_head", "key_token", "key_head"), "i32")
cases += [
    (
        rotate_heads._rotate_heads,
        {name: kind.replace("bf16", dtype) for name, kind in TURNED.items()},
        dict(HEAD_TILE=rotate_heads.HEAD_TILE, CHANNELS=128, CHANNEL_TILE=128, ROTATED=64, IS_BACKWARD=flag),
    )
    for dtype, flag in (("bf16", False), ("bf16", True), ("fp32", True))
]
GROUPS = dict.fromkeys(("heads", "query", "key", "value", "cosines", "sines"), "*bf16")
GROUPS |= dict.fromkeys(("token_stride", "group_stride", "query_token", "query_head", "key_token"), "i32")
GROUPS |= dict.fromkeys(("key_group", "value_token", "value_group"), "i32")
cases += [
    (kernel, GROUPS, HEADS | dict(ROTATED=128)) for kernel in (rotate_heads._split_group, rotate_heads._join_group)
]
SUMS = dict.fromkeys(("x", "added", "weight", "total", "out", "grad_total", "grad", "grad_x"), "*bf16")
SUMS |= {"scales": "*fp32", "grad_weight": "*fp32", "epsilon": "fp32"} | dict.fromkeys(
    ("rows", "columns", "tiles"), "i32"
)
OF_ROWS = dict(TILE=2048, ROW_TILE=exact_rows.ROW_TILE, COLUMN_TILE=exact_rows.COLUMN_TILE)
cases += [(exact_rows._sum_norm_row, SUMS, dict(TILE=16384)), (exact_rows._sum_norm_gradients, SUMS, OF_ROWS)]
HALVES = dict.fromkeys(("x", "out", "grad", "grad_x"), "*bf16") | {"columns": "i32"}
cases += [(kernel, HALVES, dict(TILE=mlp_rows.TILE)) for kernel in (mlp_rows._swiglu, mlp_rows._swiglu_backward)]
GATED = HALVES | {"gates": "*fp32", "grad_gates": "*fp32", "gated": "*bf16", "places": "*i64"}
cases += [
    (kernel, GATED, dict(TILE=mlp_rows.TILE, HAS_PLACES=True))
    for kernel in (mlp_rows._swiglu_gated, mlp_rows._swiglu_gated_backward)
]
OPTIONS = {
    matmul_kernel_persistent: {"num_warps": 8, "num_stages": 3},
    rotate_heads._rotate_and_store: rotate_heads.OPTIONS,
    rotate_heads._rotate_heads: rotate_heads.OPTIONS,
    rotate_heads._split_group: rotate_heads.OPTIONS,
    rotate_heads._join_group: rotate_heads.OPTIONS,
}
HEAD_ROWS = dict.fromkeys(("logits", "temperatures", "sums", "statistics", "grads"), "*fp32")
HEAD_ROWS |= {"targets": "*i64", "out": "*bf16", "row_stride": "i64", "out_stride": "i64", "temperature": "fp32"}
HEAD_ROWS |= dict.fromkeys(("count", "columns", "rows", "sum_stride", "statistic_stride", "grad_stride"), "i32")
cases += [
    (kernel, HEAD_ROWS, dict(TILE=head_rows.TILE, HAS_TEMPERATURES=flag))
    for kernel, flag in ((head_rows._sum_row, False), (head_rows._grad_row, True))
]
SUM_KERNELS = exact_rows._sum_norm_row, exact_rows._sum_norm_gradients
OPTIONS |= {kernel: {"num_warps": exact_rows.WARPS} for kernel in SUM_KERNELS}
OPTIONS |= {kernel: {"num_warps": head_rows.WARPS} for kernel in (head_rows._sum_row, head_rows._grad_row)}
ROUTES = dict.fromkeys(("logits", "bias", "probs", "grad_probs", "grad_logits"), "*fp32")
ROUTES |= {"given": "*i64", "chosen_experts": "*i64", "routing_map": "*i1", "experts": "i32", "scale": "fp32"}
PAIRS = {"routing_map": "*i1", "ends": "*i32"} | dict.fromkeys(("counts", "gates", "tokens", "places", "order"), "*i64")
PAIRS |= dict.fromkeys(("count", "experts", "each", "columns"), "i32") | dict.fromkeys(("values", "out"), "*bf16")
cases += [
    (mlp_rows._route_token, ROUTES, dict(EACH=8, KIND=kind, EXPERT_TILE=128, HAS_BIAS=flag, HAS_GIVEN=not flag))
    for kind, flag in (("softmax", False), ("softmax_first", True), ("sigmoid", True))
]
cases += [
    (mlp_rows._route_gradient, ROUTES, dict(EACH=8, KIND=kind, EXPERT_TILE=128))
    for kind in ("softmax", "softmax_first", "sigmoid")
]
cases += [
    (mlp_rows._pairs_of_expert, PAIRS, dict(EXPERT_TILE=128, TOKEN_TILE=mlp_rows.PAIR_TILE // 128)),
    (mlp_rows._sum_of_token, PAIRS, dict(TILE=mlp_rows.CHANNEL_TILE)),
]
TOKENS = dict.fromkeys(("x", "weight", "bias", "inputs", "out", "mixed", "a", "b", "steps"), "*fp32")
TOKENS |= dict.fromkeys(("decay_logs", "biases", "skips", "memories"), "*fp32") | {"numbers": "*i32"}
TOKENS |= dict.fromkeys(("row_stride", "gate_stride", "step_stride", "channels", "groups", "heads"), "i32")
TOKENS |= dict.fromkeys(("scale", "epsilon", "bound", "min_step"), "fp32")
CONVOLVED = dict(TAPS=4, HAS_BIAS=True, TILE=recurrent_rows.CHANNEL_TILE)
cases += [(recurrent_rows._convolve_row, TOKENS, CONVOLVED)]
STATE = recurrent_rows._tiles(128, 128)
cases += [
    (recurrent_rows._delta_row, TOKENS, STATE | dict(DECAYS=decays, IS_BOUNDED=is_bounded))
    for decays, is_bounded in ((1, False), (128, False), (128, True))
]
cases += [(recurrent_rows._space_row, TOKENS, STATE)]
WALKED = dict.fromkeys(("starts", "old", "new", "keys", "decays", "added", "memories", "changes", "ends"), "*fp32")
WALKED |= dict.fromkeys(("old_stride", "new_stride", "key_stride", "decay_stride", "heads"), "i32") | {"way": "*i64"}
WALK = recurrent_chunks._tiles(128, 128) | dict(ROWS=64)
cases += [
    (recurrent_chunks._walk_run, WALKED, WALK | dict(DECAYS=decays, HAS_OLD=has_old, IS_BACKWARD=is_backward))
    for decays, has_old in ((1, True), (128, True), (1, False))
    for is_backward in (False, True)
]
CONVOLVED_ROWS = dict.fromkeys(("x", "inputs", "weight", "bias", "out", "grad", "of_total", "of_weight"), "*fp32")
CONVOLVED_ROWS |= dict.fromkeys(("row_stride", "count", "rows", "channels", "heads"), "i32")
CONVOLVED_ROWS |= dict.fromkeys(("read", "bounds", "readers"), "*i64") | {"epsilon": "fp32", "scale": "fp32"}
ROW_TILE = dict(TAPS=4, IS_ACTIVE=True, COUNT=recurrent_chunks.TILE // 128, TILE=128)
cases += [
    case
    for width, flag in ((128, False), (0, True))
    for case in (
        (recurrent_chunks._convolve_tile, CONVOLVED_ROWS, ROW_TILE | dict(WIDTH=width, HAS_BIAS=flag, HAS_INPUTS=flag)),
        (recurrent_chunks._convolve_tile_backward, CONVOLVED_ROWS, ROW_TILE | dict(WIDTH=width, HAS_BIAS=flag)),
    )
]
cases += [(recurrent_chunks._gather_tile, CONVOLVED_ROWS, dict(TAPS=4, TILE=recurrent_chunks.GATHERED))]
OPTIONS[recurrent_chunks._walk_run] = recurrent_chunks.WALK_OPTIONS
CHOICE = dict.fromkeys(("heads", "keys", "query", "latents", "out"), "*bf16")
CHOICE |= dict.fromkeys(("weights", "scores", "log_sums"), "*fp32") | dict.fromkeys(("rows", "first", "seen"), "*i64")
CHOICE |= dict.fromkeys(("key_row", "width", "words", "count", "latent_row"), "i32")
CHOICE |= {"bits": "*u8", "lists": "*i32", "scale": "fp32"}
INDEX = dict(HEADS=64, HEAD_TILE=64, CHANNELS=128, CHANNEL_TILE=128, TILE=key_choice.KEY_TILE)
LISTED = dict(HEADS=128, HEAD_TILE=key_choice.HEAD_TILE, TILE=key_choice.LIST_TILE)
LISTED |= dict(LATENT=512, LATENT_TILE=512, TURNED=64, TURNED_TILE=64)
cases += [  # sizes of DeepSeek-V3.2
    (key_choice._score_keys, CHOICE, INDEX),
    (key_choice._choose_keys, CHOICE, dict(TILE=key_choice.CHOICE_TILE, DIGIT=key_choice.DIGIT, WORD=8)),
    (key_choice._list_rows, CHOICE, dict(TILE=key_choice.CHOICE_TILE)),
    (key_choice._attend_rows, CHOICE, LISTED),
    (key_choice._attend_rows, CHOICE | {"rows": "*i32"}, LISTED),
]
TILES = dict(ROWS=exact_rows.ROWS, COLUMNS=exact_rows.COLUMNS, INNER=exact_rows.INNER)
cases += [(exact_rows._product_tile, FP32, TILES | dict(HAS_BIAS=True))]
cases += [
    (exact_rows._product_tile, FP32 | dict.fromkeys(("x", "weight", "out"), "*bf16"), TILES | dict(HAS_BIAS=False))
]
cases += [
    (
        matmul_kernel_persistent,
        PRODUCT,
        LARGE | dict(BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, GROUP_SIZE_M=8, NUM_SMS=132, HAS_BIAS=True),
    )
]


def compiled(function, signature, constants, aligned=()):
    """`aligned`: arguments that Triton knows to be multiples of 16, as those of a real launch."""
    names = function.arg_names
    types = {name: kind for name, kind in signature.items() if name in names} | dict.fromkeys(constants, "constexpr")
    known = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in types}
    options = OPTIONS.get(function, {})
    source = ASTSource(function, types, constants, known)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def orders(kernel):
    """The type and layout of each product, and of each sum or maximum of fp32 numbers over threads, as in the code."""
    text = kernel.asm["ttgir"]
    layouts, found, lines = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE)), [], text.split("\n")
    for number, line in enumerate(lines):
        if re.search(r'"tt.reduce"|tt.dot |warp_group_dot ', line):
            types = next(row for row in lines[number:] if "->" in row).split("->")[0]
            operand = re.findall(r"tensor<[^<>]*(?:<[^<>]*(?:<[^<>]*>)?[^<>]*>)?[^<>]*>", types)[0]
            found += [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operand)] * ("xi32" not in operand)
    return found


def sizes() -> list:
    """[bytes of code, bytes of shared memory] of each kernel."""
    kernels = [compiled(*case) for case in cases]
    return [[len(kernel.asm["cubin"]), kernel.metadata.shared] for kernel in kernels]


def sums() -> list:
    """`orders` of attention by pages of a cache and by rows, of sampled and known tokens, and of attention to latents,
    aligned or not."""
    whole = [name for name, kind in READS.items() if kind != "fp32" and name != "segments"]
    attention = [
        orders(
            compiled(
                segment_attention._attend_part,
                READS,
                SIZES | PAGES[page] | dict(SPLIT=2**30, SPLITS=1) | dict(HAS_WINDOW=False),
                aligned,
            )
        )
        for page in PAGES
        for aligned in (whole, [])
    ]
    rows = [
        [
            orders(compiled(function, ROW, dict(TILE=head_rows.SAMPLED_TILE), aligned))
            for function in (head_rows._sample_row, head_rows._logprob_row)
        ]
        for aligned in (["logits", "row_stride"], [])
    ]
    whole = [name for name, kind in CHOICE.items() if kind != "fp32"]
    latents = [
        orders(compiled(key_choice._attend_rows, CHOICE | {"rows": kind}, LISTED, aligned))
        for kind in ("*i64", "*i32")  # all that a query sees, or chosen ones
        for aligned in (whole, [])
    ]
    return [attention, rows, latents]


def fused() -> list:
    """[kernel, instructions that multiply and add with one rounding] of each kernel: of numbers of 16 bits, and of 32
    where a kernel forbids it."""
    return [[case[0].__name__, re.findall(_fused(case[0]), compiled(*case).asm["ptx"])] for case in cases]


def _fused(kernel) -> str:
    return r"\bfma\.rn\.b?f16\S*" if OPTIONS.get(kernel, {}).get("enable_fp_fusion", True) else r"\bfma\.\S*"


if __name__ == "__main__":
    print(json.dumps({"sizes": sizes, "orders": sums, "fused": fused}[sys.argv[1]]()))
