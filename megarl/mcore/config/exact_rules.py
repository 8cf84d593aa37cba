"""Rules on the flags of a role whose forward passes are those of an exact rollout: `--exact-rollout` on CUDA.

A model that these kernels do not compute, or of which it is not shown that rollout and training have the same bits, is
refused. On a CPU the flag changes nothing, and every model is allowed.
"""

from megarl.errors import Rule, UsageError
from megarl.mcore import device
from megarl.mcore.config.rules import allow, only, require

FLAG = "--exact-rollout"
BACKEND = "invariant"  # the attention backend
MAX_CHANNELS, ALIGNED = 256, 8  # of a head in flash attention's backward; 16-bit elements of the loads of a kernel


def applies(args) -> bool:
    """Whether a role with this Megatron namespace computes as an exact rollout does on CUDA."""
    return args.exact_rollout and device.has_cuda()


def check(role: str, args):
    """Raises UsageError for the first rule that a role's parsed flags break."""
    if applies(args):
        require(role, args, rules(args), f"with {FLAG} on CUDA ")


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    backend, channels = args.attention_kernel, args.kv_channels or args.hidden_size // args.num_attention_heads
    return [
        allow("--bf16", args.bf16 or args.fp16, "--bf16 or --fp16"),
        only(args, "--transformer-impl", "local"),
        only(args, "--tensor-model-parallel-size", 1),
        only(args, "--context-parallel-size", 1),
        only(args, "--multi-latent-attention", False),
        only(args, "--experimental-attention-variant"),
        only(args, "--hybrid-layer-pattern"),
        only(args, "--attn-logit-softcapping"),
        only(args, "--softmax-type", "vanilla"),
        allow("--attention-backend", backend == BACKEND, f"auto or {BACKEND}", value=backend),
        allow("--hidden-size", args.hidden_size % ALIGNED == 0, f"a multiple of {ALIGNED}"),
        allow("--kv-channels", channels % ALIGNED == 0 and channels <= MAX_CHANNELS,
              f"a multiple of {ALIGNED} up to {MAX_CHANNELS}", value=channels),
        *_experts(args),
    ]  # fmt: skip


def _experts(args) -> list[Rule]:
    """The experts' products run one by one, and the results of a token are added in a fixed order (`moe.layer`)."""
    is_plain = args.swiglu and not args.add_bias_linear and not args.glu_linear_offset
    is_plain = is_plain and args.activation_func_clamp_value is None and not args.moe_apply_probs_on_input
    return [
        allow("--moe-grouped-gemm", not args.moe_grouped_gemm,
              "none: grouped products choose tiles by the number of rows"),
        allow("--moe-router-dtype", args.moe_router_dtype != "fp64", "fp32, or none"),
        allow("--num-experts", not args.num_experts or is_plain,
              "0 unless experts are those of --swiglu, without biases, --moe-apply-probs-on-input and other options"),
        only(args, "--expert-tensor-parallel-size", 1),
        only(args, "--moe-shared-expert-overlap", False),
    ]  # fmt: skip


def check_lora(megatron: dict, lora: dict):
    """Raises UsageError for low-rank factors of experts: with them Megatron adds a token's results, in no fixed order.

    `megatron`, `lora`: namespaces and factors of roles.
    """
    for role, args in megatron.items():
        if applies(args) and args.num_experts and lora.get(role) is not None:
            raise UsageError(
                f"--lora-rank {lora[role].rank}: with {FLAG} on CUDA allowed is none for a model with experts"
            )
