"""Rules on the flags of a role whose model is computed by transformers' modules (`--model-source transformers`)."""

from megarl.errors import Rule, UsageError
from megarl.mcore.config.kernel_rules import EXACT_ROLLOUT, is_exact
from megarl.mcore.config.optimizer_flags import MUON
from megarl.mcore.config.rules import allow, only
from megarl.mcore.config.supported_flags import ARCHITECTURE
from megarl.mcore.kernels import native

FLAG = "--model-source transformers"
WHERE = f"with {FLAG} "
# Beginnings of attributes that Megatron's layers read, besides `ARCHITECTURE`: a module has none of these parts.
OF_LAYERS = (
    "moe_ mlp_chunks_ init_method_std embedding_init_method_std perform_initialization use_cpu_initialization "
    "clone_scatter_output_in_embedding account_for_ make_vocab_size_divisible_by apply_wd_to_qk_layernorm "
    "transformer_impl recompute_modules"
)


def is_of_layers(attribute: str) -> bool:
    """Whether a Megatron flag is about layers that transformers' modules take the place of."""
    return attribute in ARCHITECTURE or attribute.startswith(tuple(OF_LAYERS.split()))


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace; they hold for every model that is not of transformers."""
    is_module = args.model_folder is not None
    recompute, method, count = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    found = [
        *(only(args, f"--{name}-parallel-size", 1) for name in ("pipeline-model", "expert-model")),
        _tensor_parallel(args),
        allow("--recompute-granularity", recompute in (None, "full"), "full: single parts of a layer are unknown"),
        only(args, "--recompute-activations", False),
        allow("--recompute-num-layers", method != "uniform" or count in (None, 1), "1: each layer has its own inputs"),
        only(args, "--sequence-parallel", False),
        only(args, "--fp16", False),
        allow("--mtp-train or --mtp-drafts", not args.predicts, "none: a module has no layer of it", value=True),
        allow("--optimizer", args.optimizer != MUON, "adam or sgd: matrices of experts are stacked in a module"),
        _exact(args),
        _scores(args),
    ]
    return [rule._replace(is_broken=is_module and rule.is_broken, reason=WHERE + rule.reason) for rule in found]


def check_run(settings, hf_models: dict):
    """UsageError for settings that a run's exported model cannot have; `hf_models`: folders of roles."""
    exported = hf_models.get("actor", hf_models.get("reward"))
    if settings.hf_mtp == "drop" and exported is not None and exported.folder_of_module is not None:
        raise UsageError(f"--hf-mtp drop: {WHERE}allowed is keep: an export has all tensors of the folder")


def _exact(args) -> Rule:
    """No number of an exact rollout on CUDA depends on what else is in the batch."""
    problem = None
    if args.model_folder is not None and is_exact(args):
        problem = args.model_folder.inexact_part()
    return allow(EXACT_ROLLOUT, problem is None, f"none on CUDA: {problem}")


def _scores(args) -> Rule:
    """The attention backend computes softcaps and sinks, if the module asks for them."""
    has_options, kernel = False, args.attention_kernel
    if args.model_folder is not None:
        has_options = any(slot.has_score_options for slot in args.model_folder.slots())
    has_kernels = kernel == "sdpa" and native.is_used() and not args.bf16  # compiled ones
    allowed = "eager, for softcaps and sinks"
    return allow("--attention-backend", not has_options or has_kernels or kernel == "eager", allowed, value=kernel)


def _tensor_parallel(args) -> Rule:
    """The module's plan can split it over the ranks."""
    ranks, problem = args.tensor_model_parallel_size, None
    if args.model_folder is not None and ranks > 1:
        problem = args.model_folder.split_problem(ranks, args.use_torch_fsdp2)
    return allow("--tensor-model-parallel-size", problem is None, f"1: {problem}")
