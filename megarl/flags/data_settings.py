"""Flags of the data: prompt files and their columns, prompts that are too long, tokenizer and chat template."""

import dataclasses

from megarl.flags.fields import ALL, DATA, GENERATING, TRAINING, flag, one_of, parses
from megarl.named_paths import ALLOWED, parse_named_paths

_FILES = "JSON lines, Parquet, Arrow or Hugging Face dataset folders (FOLDER:SPLIT), several with commas or patterns"

TOKENIZERS = ("SentencePieceTokenizer", "HuggingFaceTokenizer")


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Prompts and tokenizers."""

    prompts: str | None = flag(None, f"training prompts: {_FILES}; or a mixture, FILE.yaml", programs=TRAINING)
    eval_prompts: str | None = flag(None, f"held-out prompts: {_FILES}", programs=DATA, when="evaluates")
    evals: str | None = flag(None, "held-out prompts by name, NAME=FILES …, with metrics eval/NAME/…",
                              parses(parse_named_paths), f"NAME=FILES …, {ALLOWED}", programs=GENERATING,
                              when="evaluates", several=True)  # fmt: skip
    prompt_column: str | None = flag(None, "column of the prompts, also inside another one (a.b); default: a name that"
                                      " is known", programs=DATA)  # fmt: skip
    answer_column: str | None = flag(None, "column of the reference answers; default: a name that is known",
                                      programs=GENERATING)  # fmt: skip
    response_column: str | None = flag(None, "column of the responses to train on; default: a name that is known",
                                        programs="sft preference")  # fmt: skip
    messages_column: str | None = flag(None, "column of whole conversations; default: a name that is known",
                                        programs="sft")  # fmt: skip
    filter_long_prompts: bool = flag(False, "drop lines that are too long, and say how many: prompts of more than"
                                      " --max-prompt-length tokens, in sft and preference also responses of more"
                                      " than --max-response-length, in reward pairs of more than both; default: an"
                                      " error, in reward the prompt loses its start", programs=DATA)  # fmt: skip
    load_changed_data: bool = flag(False, "resume although --prompts or --eval-prompts have changed: the new prompts"
                                    " are drawn from their start", programs=TRAINING, when="load")  # fmt: skip
    tokenizer_type: str = one_of("SentencePieceTokenizer", TOKENIZERS, "tokenizer class: " + " or ".join(TOKENIZERS),
                                  programs=ALL, roles=("reward", "teacher"))  # fmt: skip
    tokenizer_model: str | None = flag(None, "tokenizer file (SentencePiece) or folder (Hugging Face)",
                                        programs=ALL, roles=("reward", "teacher"))  # fmt: skip
    chat_template: str | None = flag(None, "Jinja file of the chat template, 'tokenizer' (the tokenizer's own) or"
                                      " 'none' (plain text, the default)", programs=ALL, roles=("reward",))  # fmt: skip
    chat_template_kwargs: str | None = flag(None, "JSON object of variables that the chat template reads, such as"
                                             " '{\"enable_thinking\": false}'", programs=ALL,
                                             roles=("reward",))  # fmt: skip
    chat_template_date: str | None = flag(None, "date that the chat template's strftime_now writes, YYYY-MM-DD;"
                                           " default: 2024-07-26", programs=ALL, roles=("reward",))  # fmt: skip
    bos: str = one_of("auto", ("auto", "always", "never"), "BOS before a prompt without a chat template: auto (as the"
                       " tokenizer's own rules say), always or never", programs=ALL, roles=("reward",))  # fmt: skip

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out prompts."""
        return self.eval_prompts is not None or self.evals is not None
