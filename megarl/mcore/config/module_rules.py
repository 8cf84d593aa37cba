"""Rules on the flags of a role whose model is computed by transformers' modules (`--model-source transformers`)."""

import torch

from megarl.errors import Rule
from megarl.mcore.config.kernel_rules import EXACT_ROLLOUT, is_exact
from megarl.mcore.config.rules import allow, only
from megarl.mcore.kernels import native

WHERE = "with --model-source transformers "


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace; they hold for every model that is not of transformers."""
    is_module = args.model_folder is not None
    recompute = args.recompute_granularity
    found = [
        *(only(args, f"--{name}-parallel-size", 1) for name in ("pipeline-model", "context", "expert-model")),
        _tensor_parallel(args),
        allow("--recompute-granularity", recompute in (None, "full"), "full: single parts of a layer are unknown"),
        only(args, "--sequence-parallel", False),
        only(args, "--fp16", False),
        only(args, "--mtp-num-layers"),
        _exact(args),
        _scores(args),
    ]  # fmt: skip
    return [rule._replace(is_broken=is_module and rule.is_broken, reason=WHERE + rule.reason) for rule in found]


def _exact(args) -> Rule:
    """No number of an exact rollout on CUDA depends on what else is in the batch."""
    problem = None
    if args.model_folder is not None and is_exact(args):
        from megarl.mcore.any_model import source, walk  # need transformers

        problem = walk.inexact_part(source.of_path(args.model_folder))
    return allow(EXACT_ROLLOUT, problem is None, f"none on CUDA: {problem}")


def _scores(args) -> Rule:
    """The attention backend computes softcaps and sinks, if the module asks for them."""
    has_options, kernel = False, args.attention_kernel
    if args.model_folder is not None:
        from megarl.mcore.any_model.module_map import checked_slots  # needs transformers

        has_options = any(slot.has_score_options for slot in checked_slots(args.model_folder))
    has_kernels = kernel == "sdpa" and native.is_used() and not args.bf16  # compiled ones
    allowed = "eager, for softcaps and sinks"
    return allow("--attention-backend", not has_options or has_kernels or kernel == "eager", allowed, value=kernel)


def _tensor_parallel(args) -> Rule:
    """The module's plan can split it over the ranks."""
    ranks, problem = args.tensor_model_parallel_size, None
    if args.model_folder is not None and ranks > 1:
        from megarl.mcore.any_model import source, tensor_parallel  # needs transformers
        from megarl.mcore.any_model.attention import Unsupported

        try:
            tensor_parallel.splits_of(source.of_path(args.model_folder).module(torch.float32), ranks)
        except Unsupported as error:
            problem = str(error)
        problem = "no --use-torch-fsdp2 beside it" if problem is None and args.use_torch_fsdp2 else problem
    return allow("--tensor-model-parallel-size", problem is None, f"1: {problem}")
