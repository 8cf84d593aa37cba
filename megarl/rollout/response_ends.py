"""What ends a response of the policy: the tokenizer's end tokens, `--stop-token-ids` and `--stop`. What ends its
thoughts: `--thinking-budget`."""

from megarl.data.conversations import Encoder
from megarl.data.detokenizer import StopMatcher, Vocabulary
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.flags.fields import parse_ints
from megarl.flags.generation_flags import parse_stops
from megarl.flags.settings import Settings
from megarl.tool_formats.chosen_format import load_format, name_of
from megarl.tool_formats.thinking_budget import ThinkingBudget, ThoughtReader


class ResponseEnds:
    """What ends a response besides its length."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.own_ids = () if settings.stop_token_ids is None else parse_ints(settings.stop_token_ids)
        self.ids = tuple(dict.fromkeys((*tokenizer.end_ids, *self.own_ids)))
        self.stops = () if settings.stop is None else parse_stops(settings.stop)
        self.matcher = StopMatcher(tokenizer, self.stops) if self.stops else None
        self.identity = self.ids, self.stops  # of responses that a bank keeps


def check_ends(settings: Settings, tokenizer: Tokenizer):
    """UsageError for tokens that the tokenizer does not have."""
    unknown = [number for number in ResponseEnds(settings, tokenizer).own_ids if number >= tokenizer.vocab_size]
    if unknown:
        raise UsageError(
            f"--stop-token-ids {settings.stop_token_ids}: allowed are ids below {tokenizer.vocab_size}, the size of the"
            " tokenizer's vocabulary"
        )


def thinking_budget_of(settings: Settings, encoder: Encoder) -> ThinkingBudget | None:
    """The budget of the flags; None without one. `encoder`: the policy's.

    UsageError for a text that does not end its thoughts, or a budget that leaves no room for an answer.
    """
    s, limit = settings, settings.thinking_budget
    if limit is None:
        return None
    reader = ThoughtReader(Vocabulary(encoder.tokenizer), load_format(name_of(s.tool_call_parser, encoder.template)))
    given = s.thinking_budget_text
    text = reader.default_text if given is None else given
    try:
        tokens = reader.encode(text)
    except ValueError as error:
        where = f"--thinking-budget {limit}: " if given is None else "--thinking-budget-text: "
        raise UsageError(f"{where}{error}") from None
    longest, flag = s.max_response_length, "--max-response-length"
    if s.environment is not None and s.max_turn_length is not None:
        longest, flag = s.max_turn_length, "--max-turn-length"
    if limit + len(tokens) >= longest:
        raise UsageError(
            f"--thinking-budget {limit}: with the {len(tokens)} tokens that end thoughts, {flag} {longest} leaves no"
            " room for an answer"
        )
    return ThinkingBudget(limit, text, tokens, reader)
