"""Rules on a role's flags that Megatron checks late, in other words, or not at all: sizes that must divide, ranges."""

import math

from megarl.errors import UsageError


def check(role: str, args):
    """Raises UsageError with the first rule that a role's parsed flags break; `args.world_size` is the role's."""
    _check_sizes(role, args)
    _check_ranges(role, args)
    _check_divisible(role, args)


def _check_sizes(role: str, args):
    size = args.tensor_model_parallel_size
    _refuse_first(role, [("--tensor-model-parallel-size", size, size > 0, "1 or more")])


def _check_divisible(role: str, args):
    tensor, ranks = args.tensor_model_parallel_size, args.world_size
    heads, groups, divisor = args.num_attention_heads, _groups(args), args.make_vocab_size_divisible_by
    rules = [
        ("--tensor-model-parallel-size", tensor, tensor > 0 and ranks % tensor == 0,
         f"a divisor of the role's {ranks} rank(s) in --role-map"),
        ("--num-attention-heads", heads, heads % tensor == 0, f"a multiple of --tensor-model-parallel-size {tensor}"),
        ("--num-query-groups", groups, not groups or groups % tensor == 0,
         f"a multiple of --tensor-model-parallel-size {tensor}"),
        ("--num-query-groups", groups, not groups or heads % groups == 0,
         f"a divisor of --num-attention-heads {heads}"),
        ("--hidden-size", args.hidden_size, args.kv_channels or args.hidden_size % heads == 0,
         f"a multiple of --num-attention-heads {heads}, or --kv-channels beside it"),
        ("--make-vocab-size-divisible-by", divisor, divisor % tensor == 0,
         f"a multiple of --tensor-model-parallel-size {tensor}"),
    ]  # fmt: skip
    _refuse_first(role, rules)


def _check_ranges(role: str, args):
    lr, floor, divisor = args.lr, args.min_lr, args.make_vocab_size_divisible_by
    decay = args.lr_decay_iters or args.train_iters
    rules = [
        ("--num-layers", args.num_layers, args.num_layers > 0, "1 or more"),
        ("--hidden-size", args.hidden_size, args.hidden_size > 0, "1 or more"),
        ("--num-attention-heads", args.num_attention_heads, args.num_attention_heads > 0, "1 or more"),
        ("--lr", lr, lr is not None and 0 <= lr < math.inf, "0 or more"),
        ("--min-lr", floor, 0 <= floor <= lr, f"from 0 to --lr {lr}"),
        ("--clip-grad", args.clip_grad, args.clip_grad >= 0, "0 (off) or more"),
        ("--weight-decay", args.weight_decay, args.weight_decay >= 0, "0 or more"),
        ("--adam-beta1", args.adam_beta1, 0 <= args.adam_beta1 < 1, "from 0 to below 1"),
        ("--adam-beta2", args.adam_beta2, 0 <= args.adam_beta2 < 1, "from 0 to below 1"),
        ("--adam-eps", args.adam_eps, args.adam_eps > 0, "above 0"),
        ("--make-vocab-size-divisible-by", divisor, divisor > 0, "1 or more"),
        ("--max-position-embeddings", args.max_position_embeddings, args.max_position_embeddings >= args.seq_length,
         f"--max-prompt-length + --max-response-length = {args.seq_length} or more"),
        ("--lr-warmup-iters", args.lr_warmup_iters, args.lr_warmup_iters < decay,
         f"below --lr-decay-iters, or else --train-iters, {decay}"),
    ]  # fmt: skip
    _refuse_first(role, rules)


def _refuse_first(role: str, rules: list[tuple[str, object, bool, str]]):
    for flag, value, fine, allowed in rules:
        if not fine:
            raise UsageError(f"{role}: {flag} {value}: allowed is {allowed}")


def _groups(args):
    return args.num_query_groups if args.group_query_attention else None
