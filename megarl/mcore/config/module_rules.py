"""Rules on the flags of a role whose model is computed by transformers' modules (`--model-source transformers`)."""

import torch

from megarl.errors import Rule
from megarl.mcore.config.rules import allow, only

WHERE = "with --model-source transformers "


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace; they hold for every model that is not of transformers."""
    is_module = args.model_folder is not None
    recompute = args.recompute_granularity
    found = [
        *(only(args, f"--{name}-parallel-size", 1) for name in ("pipeline-model", "expert-model")),
        _tensor_parallel(args),
        allow("--recompute-granularity", recompute in (None, "full"), "full: single parts of a layer are unknown"),
        only(args, "--sequence-parallel", False),
        only(args, "--fp16", False),
        only(args, "--mtp-num-layers"),
    ]  # fmt: skip
    return [rule._replace(is_broken=is_module and rule.is_broken, reason=WHERE + rule.reason) for rule in found]


def _tensor_parallel(args) -> Rule:
    """The module's plan can split it over the ranks."""
    ranks, problem = args.tensor_model_parallel_size, None
    if args.model_folder is not None and ranks > 1:
        from megarl.mcore.any_model import source, tensor_parallel  # needs transformers
        from megarl.mcore.any_model.attention import Unsupported

        try:
            splits = tensor_parallel.splits_of(source.of_path(args.model_folder).module(torch.float32), ranks)
        except Unsupported as error:
            problem, splits = str(error), {}
        packed = [name for name, split in splits.items() if split.parts > 1 and split.axis > 0]
        if packed and args.use_torch_fsdp2:
            problem = f"--use-torch-fsdp2 shards {packed[0]} along another axis than that of its packed parts"
    return allow("--tensor-model-parallel-size", problem is None, f"1: {problem}")
