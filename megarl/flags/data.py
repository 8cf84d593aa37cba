"""Flags of the data: prompt files and their columns, lengths, tokenizer and chat template."""

import dataclasses
from collections.abc import Iterator

from megarl.data import TOKENIZERS
from megarl.flags.conditions import EVALUATES, Broken, FlagContext, on
from megarl.flags.fields import ALL, DATA, GENERATING, PAIRS, TRAINING, flag, not_negative, one_of, parses, positive
from megarl.flags.preferences import LABELS
from megarl.plain_files import ALLOWED, parse_named_paths

LOADED = on(lambda s: s.load is not None, "needs --load")


@dataclasses.dataclass(frozen=True)
class Data:
    """Data."""

    prompts: str | None = flag(None, programs=TRAINING)
    """training prompts: JSON lines, Parquet, Arrow or Hugging Face dataset folders (FOLDER:SPLIT), several with commas
    or patterns; or a mixture, FILE.yaml"""
    eval_prompts: str | None = flag(None, programs=DATA, when=EVALUATES)
    """held-out prompts: JSON lines, Parquet, Arrow or Hugging Face dataset folders (FOLDER:SPLIT), several with commas
    or patterns"""
    evals: str | None = flag(
        None, parses(parse_named_paths), f"NAME=FILES …, {ALLOWED}", programs=GENERATING, several=True, when=EVALUATES
    )
    """held-out prompts by name, NAME=FILES …, with metrics eval/NAME/…"""
    filter_long_prompts: bool = flag(False, programs=DATA)
    """drop lines that are too long, and say how many: prompts of more than --max-prompt-length tokens, in sft and
    preference also responses of more than --max-response-length, in reward pairs of more than both; default: an error,
    in reward the prompt loses its start"""
    load_changed_data: bool = flag(False, programs=TRAINING, when=LOADED)
    """resume although --prompts or --eval-prompts have changed: the new prompts are drawn from their start"""
    max_prompt_length: int = positive(512, programs=ALL)
    """maximum prompt length, tokens"""
    max_response_length: int = positive(512, programs=ALL)
    """maximum response length, tokens"""
    # Columns.
    prompt_column: str | None = flag(None, programs=DATA)
    """column of the prompts, also inside another one (a.b); default: a name that is known"""
    answer_column: str | None = flag(None, programs=GENERATING)
    """column of the reference answers; default: a name that is known"""
    response_column: str | None = flag(None, programs="sft preference")
    """column of the responses to train on; default: a name that is known"""
    messages_column: str | None = flag(None, programs="sft")
    """column of whole conversations; default: a name that is known"""
    chosen_column: str | None = flag(None, programs=PAIRS)
    """column of the better responses; default: chosen"""
    rejected_column: str | None = flag(None, programs=PAIRS)
    """column of the worse responses; default: rejected"""
    desirable_column: str | None = flag(None, programs="preference", when=LABELS)
    """column that says whether a response is desirable; default: desirable or label"""
    # Images.
    images_column: str | None = flag(None, programs=DATA)
    """column of the images of each line, also inside another one (a.b); default: images or image"""
    images_folder: str | None = flag(None, programs=DATA)
    """folder in which paths of images begin, and outside of which no image is read; default: that of each data file"""
    image_max_pixels: int | None = positive(None, programs=ALL)
    """pixels of an image after its processor has made it smaller, so a bound of its tokens; default: what the model's
    folder says"""
    max_images: int = positive(8, programs=ALL)
    """maximum number of images of a prompt"""
    image_cache_gb: float = not_negative(4.0, programs=ALL)
    """host memory for embeddings of images that later steps may need, GB"""
    # Tokenizer and chat template.
    tokenizer_type: str = one_of("SentencePieceTokenizer", tuple(TOKENIZERS), programs=ALL, roles=("reward", "teacher"))
    """tokenizer class: SentencePieceTokenizer or HuggingFaceTokenizer"""
    tokenizer_model: str | None = flag(None, programs=ALL, roles=("reward", "teacher"))
    """tokenizer file (SentencePiece) or folder (Hugging Face)"""
    chat_template: str | None = flag(None, programs=ALL, roles=("reward",))
    """Jinja file of the chat template, 'tokenizer' (the tokenizer's own) or 'none' (plain text, the default)"""
    chat_template_kwargs: str | None = flag(None, programs=ALL, roles=("reward",))
    """JSON object of variables that the chat template reads, such as '{"enable_thinking": false}'"""
    chat_template_date: str | None = flag(None, programs=ALL, roles=("reward",))
    """date that the chat template's strftime_now writes, YYYY-MM-DD; default: 2024-07-26"""
    bos: str = one_of("auto", ("auto", "always", "never"), programs=ALL, roles=("reward",))
    """BOS before a prompt without a chat template: auto (as the tokenizer's own rules say), always or never"""

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out prompts."""
        return self.eval_prompts is not None or self.evals is not None


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of the columns of conversations."""
    s, why = run.settings, "not allowed with --messages-column, which holds whole conversations"
    if s.messages_column is not None and s.prompt_column is not None:
        yield "--prompt-column", why
    if s.messages_column is not None and s.response_column is not None:
        yield "--response-column", why
