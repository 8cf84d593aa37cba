"""Rules on the flags of a role whose model is computed by transformers' modules (`--model-source transformers`)."""

from megarl.errors import Rule
from megarl.mcore.config.rules import allow, only

WHERE = "with --model-source transformers "


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace; they hold for every model that is not of transformers."""
    is_module = args.model_folder is not None
    recompute = args.recompute_granularity
    found = [
        *(only(args, f"--{name}-parallel-size", 1)
          for name in ("tensor-model", "pipeline-model", "context", "expert-model")),
        allow("--recompute-granularity", recompute in (None, "full"), "full: single parts of a layer are unknown"),
        only(args, "--sequence-parallel", False),
        only(args, "--fp16", False),
        only(args, "--mtp-num-layers"),
    ]  # fmt: skip
    return [rule._replace(is_broken=is_module and rule.is_broken, reason=WHERE + rule.reason) for rule in found]
