"""Flags of the judge, the language model that the term `judge` of `--reward` asks; its role is the reward's."""

import dataclasses
from typing import Any

from megarl.errors import UsageError
from megarl.flags.fields import GENERATING, flag, positive

JUDGE: dict[str, Any] = {"programs": GENERATING, "when": "judge"}


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """The judge."""

    judge_config: str | None = flag(None, "YAML file: the messages that the judge reads, how it answers, and how a"
                                     " number is read from its answer", **JUDGE)  # fmt: skip
    judge_hf_model: str | None = flag(None, "Hugging Face folder of the judge, a language model; with --judge-load it"
                                       " gives all but the weights", **JUDGE)  # fmt: skip
    judge_load: str | None = flag(None, "run folder or checkpoint of train_sft or train_rl that is the judge; the flags"
                                   " with the prefix --reward- describe its model", **JUDGE)  # fmt: skip
    judge_max_length: int = positive(2048, "tokens of the judge's prompt and judgement together", **JUDGE)
    judge_buffer_gb: float = positive(0.25, "KV cache of each rank of the judge, GiB", **JUDGE)
    judge_max_requests: int = positive(64, "maximum judgements that a replica of the judge writes together, at least 4",
                                        **JUDGE)  # fmt: skip


def check_layout(args):
    """UsageError for a layout of the reward role in which no judge can generate. `args`: its Megatron namespace."""
    if args.context_parallel_size > 1:
        raise UsageError(
            f"--context-parallel-size {args.context_parallel_size}: the judge generates without it; give "
            "--reward-context-parallel-size 1"
        )
    if args.virtual_pipeline_model_parallel_size is not None:
        raise UsageError("--reward judge: not allowed with virtual pipeline stages of the reward role; leave them out")
    if args.use_torch_fsdp2:
        raise UsageError("--reward judge: not allowed with --use-torch-fsdp2, whose sharded weights cannot generate")
