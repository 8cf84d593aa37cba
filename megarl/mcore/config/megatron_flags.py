"""Megatron's flags: its own parser and checks, one validated namespace a role, every flag used or refused."""

import argparse
import contextlib
import functools
import io
import itertools
import math
import traceback
import warnings

import torch
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.training import arguments
from megatron.training.arguments import add_megatron_arguments, core_transformer_config_from_args, validate_args
from torch.nn import functional

from megarl.errors import ArgumentParser, UsageError
from megarl.mcore import cuda_environment, device
from megarl.mcore.config import kernel_rules, layout_rules, model_flags, optimizer_flags, recurrent_rules
from megarl.mcore.config.rules import require
from megarl.mcore.config.supported_flags import ARCHITECTURE, DEFAULTS, ONLY, used
from megarl.mcore.kernels.batch_invariance import gelu, gelu_tanh, quick_gelu, silu
from megarl.mcore.parallel.process_groups import ParallelSizes

BATCH_INVARIANT = {functional.silu: silu, fused_bias_geglu.quick_gelu: quick_gelu}  # Megatron's activations -> megarl's
BY_MEGATRON = ", which Megatron sets for these flags"
ANY, MOMENTS = {"choices": None, "type": str}, {"choices": optimizer_flags.MOMENT_TYPES}
PRECISE = {"help": "Keep Adam's moments in the types of --exp-avg-dtype and --exp-avg-sq-dtype"}
FIRST_RATE = {"help": "Learning rate of the first update of a warm-up; by default the first of equal rises from 0"}
# What megarl changes of Megatron's flags, by attribute: it has modules of its own, and torch has no "low" precision.
CHANGED = {
    "transformer_impl": ANY, "attention_backend": ANY, "exp_avg_dtype": MOMENTS, "exp_avg_sq_dtype": MOMENTS,
    "use_precision_aware_optimizer": PRECISE, "lr_warmup_init": FIRST_RATE,
    "muon_fp32_matmul_prec": {"choices": optimizer_flags.PRECISIONS},
}  # fmt: skip


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="megatron", allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    model_flags.add_to(parser)
    recurrent_rules.add_to(parser)
    optimizer_flags.add_to(parser)
    # Gradients are reduced while backward runs unless that is switched off, where there is something to reduce. A rate
    # at the begin of a warm-up is above 0: `optimizer.build_scheduler`. `exact_rollout`, `predicts` and `model_folder`
    # are megarl's own.
    length_flags = "--max-prompt-length + --max-response-length"  # those that set seq_length
    parser.set_defaults(overlap_grad_reduce=None, exact_rollout=False, length_flags=length_flags, lr_warmup_init=None)
    parser.set_defaults(model_folder=None, predicts=False)
    for action in parser._actions:
        vars(action).update(CHANGED.get(action.dest, {}))
    parser.add_argument("--no-overlap-grad-reduce", dest="overlap_grad_reduce", action="store_false", default=None)
    return parser


@functools.cache
def destinations() -> dict[str, str]:
    """Every option string of Megatron's parser -> the attribute it sets."""
    return {option: action.dest for action in _parser()._actions for option in action.option_strings}


def accepted_options() -> list[str]:
    """Megatron's option strings that megarl accepts with more than one value."""
    return [option for option, dest in destinations().items() if dest in used() and dest not in ONLY]


def _refuse_unused(role: str, argv: list[str], extra: frozenset[str]):
    for token in argv:
        option = token.split("=", 1)[0]
        dest = destinations().get(option)
        if dest is not None and dest not in used() | extra:
            raise UsageError(f"{role}: {option} is a Megatron flag that megarl does not use; remove it")


def _check_only(role: str, values, cause: str = ""):
    """Raises UsageError for the first value that `ONLY` does not allow; `cause`: who set it, if not the user."""
    for dest, (allowed, reason) in ONLY.items():
        value = getattr(values, dest, None)
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        if value not in choices and value is not None:
            flag = next(option for option, name in destinations().items() if name == dest)
            raise UsageError(f"{role}: {flag} {value}{cause}: {reason} (allowed: {', '.join(map(str, choices))})")


def parse_tokens(role: str, argv: list[str]) -> argparse.Namespace:
    """Megatron's namespace of tokens after megarl's defaults, not validated. UsageError for a wrong token."""
    try:
        found = vars(_parsed(tuple(argv)))
    except UsageError as error:
        raise UsageError(f"{role}: {_switch_with_value(argv) or error}") from None
    return argparse.Namespace(**{name: list(x) if isinstance(x, list) else x for name, x in found.items()})


def _switch_with_value(argv: list[str]) -> str | None:
    """What is wrong with the first word that follows a switch; None if no word does."""
    actions = {option: action for action in _parser()._actions for option in action.option_strings}
    for option, word in itertools.pairwise(argv):
        if option in actions and actions[option].nargs == 0 and not word.startswith("--"):
            return f"{option} {word}: is a switch, which has no value: give it alone, or leave it out"
    return None


@functools.lru_cache(maxsize=8)  # the roles of a run mostly have the same tokens
def _parsed(argv: tuple[str, ...]) -> argparse.Namespace:
    return _parser().parse_args([*DEFAULTS, *argv])


def with_folder(role: str, described: list[str], folder: str, tokens: list[str], is_module: bool) -> list[str]:
    """A role's Megatron tokens after those that describe its folder's model; UsageError if one contradicts the folder.

    Args:
        described: tokens of the folder's config.json.
        folder: flag and path, for messages.
        is_module: transformers computes the model, so that no flag of Megatron's layers is read.
    """
    of_folder, given = parse_tokens(role, described), parse_tokens(role, tokens)
    options = (token.split("=", 1)[0] for token in tokens)
    for option, dest in ((option, destinations()[option]) for option in options if option in destinations()):
        if is_module and kernel_rules.is_of_layers(dest):
            raise UsageError(
                f"{role}: {option}: the modules of transformers that compute {folder} do not read it; leave the flag "
                "out, or give it with another role's prefix"
            )
        if (dest in ARCHITECTURE or is_module and option in described) and getattr(given, dest) != getattr(
            of_folder, dest
        ):
            raise UsageError(
                f"{role}: {option} {getattr(given, dest)}: config.json of {folder} describes "
                f"{getattr(of_folder, dest)}; leave the flag out"
            )
    return described + tokens


def with_source(error: UsageError, described: list[str], folder: str) -> UsageError:
    """An error about a role's flags that says which of them a folder gave. `described`, `folder`: as above."""
    words = str(error).replace(":", " ").replace(",", " ").split()
    named = [token for token in dict.fromkeys(described) if token.startswith("--") and token in words]
    return UsageError(f"{error} ({', '.join(named)}: from config.json of {folder})") if named else error


def parse(role: str, argv: list[str], ranks: int, own: dict, extra: frozenset[str] = frozenset()):
    """Megatron's namespace of one role, validated for that many ranks. UsageError for an unknown, unused or wrong flag.

    Args:
        argv: the role's Megatron flags, common ones first, then its own.
        own: attributes that megarl decides (train_iters, seed, seq_length …); they win.
        extra: attributes that the calling program reads besides those in `used()`.
    """
    _refuse_unused(role, argv, extra)
    args = parse_tokens(role, argv)
    batch, args.global_batch_size = args.global_batch_size, None  # megarl's batches need no divisibility
    if batch is not None and batch < 1:
        raise UsageError(f"{role}: --global-batch-size {batch}: allowed is 1 or more")
    vars(args).update({"rank": 0, "world_size": ranks} | own)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    kernel_rules.choose_attention(role, args)
    _check_only(role, args)
    for flag in ("num_layers", "hidden_size", "num_attention_heads"):
        if not getattr(args, flag):
            raise UsageError(f"{role}: --{flag.replace('_', '-')} is missing: the model's shape has no default")
    if args.multi_latent_attention:  # its output has the channels of its values
        if args.kv_channels is not None:
            raise UsageError(f"{role}: --kv-channels {args.kv_channels}: allowed is none with --multi-latent-attention")
        args.kv_channels = args.v_head_dim
    require(role, args, kernel_rules.module_rules(args))  # first: others would advise flags of layers
    require(role, args, layout_rules.rules(role, args))
    require(role, args, model_flags.rules(args))
    require(role, args, recurrent_rules.rules(args))
    optimizer_flags.check(role, args)
    kernel_rules.check(role, args)
    if args.overlap_grad_reduce is None:  # where several ranks hold whole gradients to be added
        of_model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        args.overlap_grad_reduce = ranks > of_model and not args.use_torch_fsdp2
    # Megatron wants a sequence length that context parallelism divides; megarl's cut of the packed stream does not.
    args.seq_length, args.encoder_seq_length = None, args.seq_length
    args = _validated(role, args)
    args.global_batch_size = batch if "global_batch_size" in extra else None
    return args


@contextlib.contextmanager
def _without_own_parts(args):
    """Hides from Megatron what megarl has parts of its own for, since Megatron's rules do not hold for them.

    For sharded parameters (`mcore/parallel/fsdp.py`; `layout_rules`) it wants untied embeddings. For grouped products
    of experts (`moe/layer.py`) it wants a GPU; on a CPU they run one after another. For tensor parallelism it wants
    CUDA_DEVICE_MAX_CONNECTIONS=1 except on the newest devices, and would start CUDA to know which this is;
    `cuda_environment` chooses afterwards. For an optimizer on the host (`training/adam.py`) it wants
    --use-precision-aware-optimizer. A pattern of layers means another class of models, which is divided among
    pipeline stages by marks in the pattern. The list of a thousand values that it would print is not composed.
    """
    own = dict.fromkeys(("use_torch_fsdp2", "moe_grouped_gemm", "optimizer_cpu_offload"), False)
    own["hybrid_layer_pattern"] = None
    version, print_args = arguments.get_device_arch_version, arguments._print_args
    hidden = {name: getattr(args, name) for name in own}
    vars(args).update(own)
    arguments.get_device_arch_version = lambda: cuda_environment.NEEDS_NONE
    arguments._print_args = lambda *_: None
    try:
        yield
    finally:
        arguments.get_device_arch_version, arguments._print_args = version, print_args
        vars(args).update(hidden)


def _validated(role: str, args):
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _without_own_parts(args):
            warnings.simplefilter("ignore")
            validate_args(args)
            # Before the config, whose assertions would say less.
            _check_only(role, args, BY_MEGATRON)
            args.use_cpu_initialization = args.use_cpu_initialization or not device.has_cuda()
            _check_only(role, transformer_config(args), BY_MEGATRON)
    except (AssertionError, ValueError, TypeError, RuntimeError, SystemExit) as error:
        # A bare assertion says nothing: quote the condition that failed.
        condition = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
        reason = " ".join(str(error).split()) or condition
        raise UsageError(f"{role}: Megatron refuses these flags: {reason}") from None
    if not args.bf16 and not args.fp16:
        args.params_dtype = torch.float32
    return args


def transformer_config(args) -> TransformerConfig:
    """Megatron's model config; weights start the same for every tensor-parallel size on the CPU path.

    One of multi-latent attention is an `MLATransformerConfig` that says that it is not: Megatron then treats rotary
    embeddings as those of any model, and the layer spec builds `LatentAttention`. It also denies its norms, because
    Megatron would sum the gradients of `q_layernorm` over tensor-parallel ranks, as of norms of a rank's heads, and its
    gates of outputs, which Megatron lacks.
    """
    if args.multi_latent_attention:
        hidden = dict.fromkeys(("multi_latent_attention", "qk_layernorm", "attention_output_gate"), False)
        others = argparse.Namespace(**vars(args) | hidden)
        config = core_transformer_config_from_args(others, MLATransformerConfig)
        config.attention_output_gate = args.attention_output_gate
        config.softmax_scale = _latent_softmax_scale(args)
    else:
        config = core_transformer_config_from_args(args)
    config.hybrid_layer_pattern, config.delta_rule_backend = args.hybrid_layer_pattern, args.delta_rule_backend
    config.attention_kernel, config.exact_rollout = args.attention_kernel, kernel_rules.is_exact(args)
    # No stacks of unlike layers.
    config.hetereogenous_dist_checkpoint |= args.hybrid_layer_pattern is not None or args.dsa_indexer_layers is not None
    config.freezes_by_name = bool(optimizer_flags.frozen_patterns(args))
    # Those of a model of transformers, which says them itself, and the shapes of a sequence's states.
    config.attention_slots, config.state_shapes = None, ()
    model_flags.copy_to(config, args)
    if args.query_pre_attn_scalar is not None:
        config.softmax_scale = args.query_pre_attn_scalar**-0.5
    if model_flags.has_gelu(args):
        config.activation_func = gelu if model_flags.is_gelu_exact(args) else gelu_tanh
        config.gated_linear_unit |= args.geglu
    config.activation_func = BATCH_INVARIANT.get(config.activation_func, config.activation_func)
    return config


def _latent_softmax_scale(args) -> float:
    """1/√D for queries of D channels, times the square of what `--mscale-all-dim` makes of YaRN's factor."""
    factor, mscale = args.rotary_scaling_factor, 1.0
    if args.position_embedding_type == "yarn" and factor > 1:
        mscale = 0.1 * args.mscale_all_dim * math.log(factor) + 1.0
    return (args.qk_head_dim + args.qk_pos_emb_head_dim) ** -0.5 * mscale * mscale


def parallel_sizes(args) -> ParallelSizes:
    """The role's parallel sizes, for `create_groups`."""
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size or 1
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return ParallelSizes(tensor, pipeline, args.context_parallel_size, expert, expert_tensor)
