"""Which kernels a role's model computes with, and which models and machines each of them is for.

`--attention-backend` names a module of `mcore/attention/backends`. `--exact-rollout` changes nothing on a CPU; on CUDA
a model is refused that its kernels do not compute, or of which it is not shown that rollout and training have the same
bits. `--transformer-impl transformer_engine` is refused where its layers cannot run, would be wrong or are untried;
`--model-source transformers`, whose modules take the place of Megatron's layers, beside flags that they do not read.
"""

import importlib.util

from megatron.core.transformer.enums import AttnBackend

from megarl.errors import Rule, UsageError
from megarl.mcore import device
from megarl.mcore.config import model_flags
from megarl.mcore.config.optimizer_flags import MUON
from megarl.mcore.config.rules import allow, only, require, when
from megarl.mcore.config.supported_flags import ARCHITECTURE, ATTENTION_BACKENDS
from megarl.mcore.kernels import native

EXACT_ROLLOUT = "--exact-rollout"
INVARIANT = "invariant"  # the attention backend of an exact rollout
MAX_CHANNELS, ALIGNED = 256, 8  # of a head in flash attention's backward; 16-bit elements of the loads of a kernel
TRANSFORMER_ENGINE = "transformer_engine"


def check(role: str, args):
    """Raises UsageError for the first rule on kernels that a role's parsed flags break, or if they cannot run here."""
    if is_exact(args):
        require(role, args, exact_rules(args), f"with {EXACT_ROLLOUT} on CUDA ")
    if args.transformer_impl == TRANSFORMER_ENGINE:
        if missing := _missing():
            raise UsageError(f"{role}: --transformer-impl {TRANSFORMER_ENGINE} needs {' and '.join(missing)}")
        require(role, args, transformer_engine_rules(args))


# -- attention ---------------------------------------------------------------------------------------------------


def choose_attention(role: str, args):
    """Sets `attention_kernel`, the module of `mcore/attention/backends` that `--attention-backend` names."""
    name, args.attention_backend = args.attention_backend, AttnBackend.auto
    args.attention_kernel = _automatic_attention(args) if name == "auto" else name
    if model_flags.has_score_options(args) and name in ATTENTION_BACKENDS and name not in model_flags.SCORE_BACKENDS:
        allowed = (
            f"with --attn-logit-softcapping or --softmax-type are {', '.join(('auto', *model_flags.SCORE_BACKENDS))}"
        )
        raise UsageError(f"{role}: --attention-backend {name}: allowed {allowed}")
    if name in ("varlen", INVARIANT) and (missing := _refused_varlen(args)):
        raise UsageError(f"{role}: --attention-backend {name} needs {missing}")
    if args.attention_kernel not in ATTENTION_BACKENDS:
        raise UsageError(f"{role}: --attention-backend {name}: allowed are auto, {', '.join(ATTENTION_BACKENDS)}")


def _automatic_attention(args) -> str:
    """The attention backend that `auto` stands for; `backends.load` says what `sdpa` stands for."""
    if model_flags.has_score_options(args):
        return "sdpa"
    if is_exact(args):
        return "sdpa" if args.multi_latent_attention else INVARIANT
    is_computed = (args.bf16 or args.fp16) and not args.multi_latent_attention and _channels(args) <= MAX_CHANNELS
    return "varlen" if device.has_cuda() and is_computed else "sdpa"


def _refused_varlen(args) -> str | None:
    """What keeps a model from `--attention-backend` varlen or invariant; None: nothing."""
    if not device.has_cuda():
        return "a CUDA device"
    if not args.bf16 and not args.fp16:
        return "--bf16 or --fp16"
    if args.multi_latent_attention:
        return "a model without --multi-latent-attention"
    return None if _channels(args) <= MAX_CHANNELS else f"heads of at most {MAX_CHANNELS} channels"


def _channels(args) -> int:
    return args.kv_channels or args.hidden_size // args.num_attention_heads


# -- keys that queries choose ------------------------------------------------------------------------------------


def check_choice(role: str, args, kernels: str):
    """UsageError for a model whose queries choose keys, where the kernels do not; `kernels`: value of `--kernels`."""
    if args.dsa_indexer_topk is None:
        return
    where = f"{role}: {model_flags.INDEXER} {args.dsa_indexer_topk} (sequences longer than that)"
    if args.fp16:
        raise UsageError(f"{where}: --fp16: allowed are fp32 and --bf16")
    if device.has_cuda():
        return
    if kernels not in ("auto", "compiled"):
        raise UsageError(f"{where}: --kernels {kernels}: allowed are auto, compiled")
    if absence := native.absence():
        raise UsageError(f"{where}: needs compiled kernels: {absence}")


# -- exact rollout -----------------------------------------------------------------------------------------------


def is_exact(args) -> bool:
    """Whether a role with this Megatron namespace computes as an exact rollout does on CUDA."""
    return args.exact_rollout and device.has_cuda()


def exact_rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    backend, channels, has_latents = args.attention_kernel, _channels(args), args.multi_latent_attention
    wanted = "sdpa" if has_latents else INVARIANT
    rotated = args.qk_pos_emb_head_dim if has_latents else 0
    latents = args.kv_lora_rank if has_latents else 0
    aligned = f"a multiple of {ALIGNED}"
    return [
        allow("--bf16", args.bf16 or args.fp16, "--bf16 or --fp16"),
        only(args, "--transformer-impl", "local"),
        only(args, "--tensor-model-parallel-size", 1),
        only(args, "--context-parallel-size", 1),
        only(args, "--experimental-attention-variant"),
        only(args, "--hybrid-layer-pattern"),
        only(args, "--attn-logit-softcapping"),
        only(args, "--softmax-type", "vanilla"),
        allow("--attention-backend", backend == wanted, f"auto or {wanted}", value=backend),
        allow("--hidden-size", args.hidden_size % ALIGNED == 0, aligned),
        allow("--kv-lora-rank", latents % ALIGNED == 0, aligned),
        allow("--qk-pos-emb-head-dim", rotated % ALIGNED == 0, aligned),
        allow(
            "--kv-channels",
            has_latents or channels % ALIGNED == 0 and channels <= MAX_CHANNELS,
            f"a multiple of {ALIGNED} up to {MAX_CHANNELS}",
            value=channels,
        ),
        *_exact_experts(args),
    ]


def _exact_experts(args) -> list[Rule]:
    """The experts' products run one by one, and the results of a token are added in a fixed order (`moe.layer`)."""
    is_plain = args.swiglu and not args.add_bias_linear and not args.glu_linear_offset
    is_plain = is_plain and args.activation_func_clamp_value is None and not args.moe_apply_probs_on_input
    tiles = "none: grouped products choose tiles by the number of rows"
    others = "0 unless experts are those of --swiglu, without biases, --moe-apply-probs-on-input and other options"
    return [
        allow("--moe-grouped-gemm", not args.moe_grouped_gemm, tiles),
        allow("--moe-router-dtype", args.moe_router_dtype != "fp64", "fp32, or none"),
        allow("--num-experts", not args.num_experts or is_plain, others),
        only(args, "--expert-tensor-parallel-size", 1),
        only(args, "--moe-shared-expert-overlap", False),
    ]


def check_lora(megatron: dict, lora: dict):
    """Raises UsageError for low-rank factors of experts in an exact rollout: with them Megatron adds a token's results,
    in no fixed order. `megatron`, `lora`: namespaces and factors of roles."""
    for role, args in megatron.items():
        if is_exact(args) and args.num_experts and lora.get(role) is not None:
            raise UsageError(
                f"--lora-rank {lora[role].rank}: with {EXACT_ROLLOUT} on CUDA allowed is none for a model with experts"
            )


# -- Transformer Engine ------------------------------------------------------------------------------------------


def _missing() -> list[str]:
    """What Transformer Engine's layers need and this machine does not have."""
    has_package = importlib.util.find_spec(TRANSFORMER_ENGINE) is not None
    lacks = {"a CUDA device": not device.has_cuda(), "the package transformer-engine[pytorch]": not has_package}
    return [name for name, is_missing in lacks.items() if is_missing]


def transformer_engine_rules(args) -> list[Rule]:
    """Returns all rules for a role with Transformer Engine's layers, as `exact_rules`."""
    experts, with_it = args.num_experts, f"with --transformer-impl {TRANSFORMER_ENGINE}"
    fused = f"none {with_it}, which fuses the norm of latents that the KV cache holds"
    grouped = f"none without --moe-grouped-gemm {with_it}: experts are grouped"
    plain = f"none without --disable-bias-linear {with_it}"
    return [
        allow("--multi-latent-attention", not args.multi_latent_attention, fused),
        allow("--use-torch-fsdp2", not args.use_torch_fsdp2, f"none {with_it}"),
        allow("--num-experts", not experts or args.moe_grouped_gemm, grouped),
        allow("--num-experts", not experts or not args.add_bias_linear, plain),
        allow("--moe-latent-size", args.moe_latent_size is None, f"none {with_it}"),
    ]


# -- modules of transformers -------------------------------------------------------------------------------------

MODULES = "--model-source transformers"
WHERE = f"with {MODULES} "
# Beginnings of attributes that Megatron's layers read, besides `ARCHITECTURE`: a module has none of these parts.
OF_LAYERS = (
    "moe_ mlp_chunks_ init_method_std embedding_init_method_std perform_initialization use_cpu_initialization "
    "clone_scatter_output_in_embedding account_for_ make_vocab_size_divisible_by apply_wd_to_qk_layernorm "
    "transformer_impl recompute_modules"
)


def is_of_layers(attribute: str) -> bool:
    """Whether a Megatron flag is about layers that transformers' modules take the place of."""
    return attribute in ARCHITECTURE or attribute.startswith(tuple(OF_LAYERS.split()))


def module_rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace; they hold for every model that is not of transformers."""
    folder, kernel, ranks = args.model_folder, args.attention_kernel, args.tensor_model_parallel_size
    recompute, method, count = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    is_module = folder is not None
    unsplit = folder.split_problem(ranks, args.use_torch_fsdp2) if is_module and ranks > 1 else None
    inexact = folder.inexact_part() if is_module and is_exact(args) else None  # whose numbers depend on the batch
    has_scores = kernel == "eager" or kernel == "sdpa" and native.is_used() and not args.bf16  # compiled kernels
    needs_scores = is_module and any(slot.has_score_options for slot in folder.reach().slots)
    found = [
        *(only(args, f"--{name}-parallel-size", 1) for name in ("pipeline-model", "expert-model")),
        allow("--tensor-model-parallel-size", unsplit is None, f"1: {unsplit}"),
        allow("--recompute-granularity", recompute in (None, "full"), "full: single parts of a layer are unknown"),
        only(args, "--recompute-activations", False),
        allow("--recompute-num-layers", method != "uniform" or count in (None, 1), "1: each layer has its own inputs"),
        only(args, "--sequence-parallel", False),
        only(args, "--fp16", False),
        allow("--mtp-train or --mtp-drafts", not args.predicts, "none: a module has no layer of it", value=True),
        allow("--optimizer", args.optimizer != MUON, "adam or sgd: matrices of experts are stacked in a module"),
        allow(EXACT_ROLLOUT, inexact is None, f"none on CUDA: {inexact}"),
        allow("--attention-backend", has_scores or not needs_scores, "eager, for softcaps and sinks", value=kernel),
    ]
    return when(is_module, found, WHERE)


def check_run(settings, hf_models: dict):
    """UsageError for settings that a run's exported model cannot have; `hf_models`: folders of roles."""
    exported = hf_models.get("actor", hf_models.get("reward"))
    if settings.hf_mtp == "drop" and exported is not None and exported.folder_of_module is not None:
        raise UsageError(f"--hf-mtp drop: {WHERE}allowed is keep: an export has all tensors of the folder")
