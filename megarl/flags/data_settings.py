"""Flags of the prompt files: which files, which of their columns, and prompts that are too long."""

import dataclasses

from megarl.flags.fields import DATA, GENERATING, TRAINING, flag

_FILES = "JSON lines, Parquet, Arrow or Hugging Face dataset folders (FOLDER:SPLIT), several with commas or patterns"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where prompts come from."""

    prompts: str | None = flag(None, f"training prompts: {_FILES}", programs=TRAINING)
    eval_prompts: str | None = flag(None, f"held-out prompts: {_FILES}", programs=DATA, when="evaluates")
    prompt_column: str | None = flag(None, "column of the prompts, also inside another one (a.b); default: a name that"
                                      " is known", programs=DATA)  # fmt: skip
    answer_column: str | None = flag(None, "column of the reference answers; default: a name that is known",
                                      programs=GENERATING)  # fmt: skip
    response_column: str | None = flag(None, "column of the responses to train on; default: a name that is known",
                                        programs="sft")  # fmt: skip
    messages_column: str | None = flag(None, "column of whole conversations; default: a name that is known",
                                        programs="sft")  # fmt: skip
    chosen_column: str | None = flag(None, "column of the better responses; default: chosen", programs="reward")
    rejected_column: str | None = flag(None, "column of the worse responses; default: rejected", programs="reward")
    filter_long_prompts: bool = flag(False, "drop prompts of more than --max-prompt-length tokens, and say how many;"
                                      " default: they are an error", programs=GENERATING)  # fmt: skip
    load_changed_data: bool = flag(False, "resume although --prompts or --eval-prompts have changed: the new prompts"
                                    " are drawn from their start", programs=TRAINING, when="load")  # fmt: skip
