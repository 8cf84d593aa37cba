"""Flags of the data: prompt files and their columns, lengths, tokenizer and chat template, evaluation on held-out
prompts, and the best checkpoint.
"""

import dataclasses
import functools
from collections.abc import Iterator

from megarl.data import TOKENIZERS
from megarl.flags.conditions import EVALUATES, EVALUATION, Broken, FlagContext, on
from megarl.flags.fields import (
    ALL,
    DATA,
    GENERATING,
    PAIRS,
    SUPERVISED,
    TRAINING,
    flag,
    not_negative,
    one_of,
    parse_ints,
    parses,
    positive,
)
from megarl.flags.preferences import LABELS
from megarl.plain_files import ALLOWED, parse_named_paths

LOADED = on(lambda s: s.load is not None, "needs --load")
BEST = on(lambda s: s.evaluates and s.eval_interval and s.save, "needs --eval-prompts, --eval-interval and --save")


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
    """column of the images of each line, also inside another one (a.b); default: images, image, or image_1 and on"""
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
    # Evaluation.
    eval_interval: int = not_negative(0, programs=TRAINING, when=EVALUATES)
    """steps between evaluations; 0: none"""
    eval_samples: int = positive(256, programs=DATA, when=EVALUATION)
    """number of held-out prompts to evaluate"""
    eval_responses: int = positive(1, programs=GENERATING, when=EVALUATION)
    """responses per held-out prompt"""
    eval_temperature: float = not_negative(0.0, programs=GENERATING, when=EVALUATION)
    """sampling temperature of the evaluation; 0: greedy"""
    eval_k: str | None = flag(
        None,
        parses(functools.partial(parse_ints, least=1)),
        "whole numbers above 0 with commas",
        programs=GENERATING,
        when=EVALUATION,
    )
    """k of pass@k, mean@k and maj@k, as '1,4,8' (2107.03374); default: 1 and --eval-responses, if that is above 1"""
    keep_best: bool = flag(True, programs=TRAINING, when=BEST)
    """also save a checkpoint after the best evaluation: the highest eval/accuracy, in train_sft the lowest eval/loss"""
    best_metric: str | None = flag(None, when=BEST)
    """metric of --keep-best without eval/, of which the highest is the best, as NAME/accuracy; default: accuracy"""
    target_eval_loss: float | None = positive(None, programs=SUPERVISED)
    """stop the run when the evaluation loss is at most this; default: never"""

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out prompts."""
        return self.eval_prompts is not None or self.evals is not None


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of the columns of conversations, of several responses to a held-out prompt, of names of metrics, and of
    limits that end a run."""
    s, most = run.settings, max(parse_ints(run.settings.eval_k)) if run.settings.eval_k else 1
    why = "not allowed with --messages-column, which holds whole conversations"
    if s.messages_column is not None and s.prompt_column is not None:
        yield "--prompt-column", why
    if s.messages_column is not None and s.response_column is not None:
        yield "--response-column", why
    if s.evals is not None and "reward" in parse_named_paths(s.evals):
        yield "--evals", "metrics eval/reward/… are those of the terms; give another name", "reward"
    if s.target_eval_loss and not s.eval_interval:
        yield "--target-eval-loss", "needs --eval-interval"
    if s.target_eval_accuracy is not None and not s.eval_interval:
        yield "--target-eval-accuracy", "needs --eval-interval"
    if s.eval_responses > 1 and s.eval_temperature == 0:
        yield "--eval-responses", "needs --eval-temperature above 0: greedy responses are all equal"
    if most > s.eval_responses:
        yield "--eval-k", f"allowed is at most --eval-responses {s.eval_responses}"
