"""What ends a response of the policy: the tokenizer's end tokens, `--stop-token-ids` and `--stop`."""

from megarl.data.stop_strings import StopMatcher
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.flags.stop_settings import parse_ids, parse_stops


class ResponseEnds:
    """What ends a response besides its length."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.own_ids = () if settings.stop_token_ids is None else parse_ids(settings.stop_token_ids)
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
