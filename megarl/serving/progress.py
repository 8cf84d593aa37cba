"""What the news of a leader mean for one answer: its text, where each token begins in it, and how it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving.dispatch import News
from megarl.serving.sampling import StopRules
from megarl.serving.text import StopStrings, Vocabulary


@dataclass
class AnswerProgress:
    """What news add to an answer.

    Attributes:
        text: characters that are certain now.
        tokens, logprobs, top, offsets: of each new token; `offsets` are characters of the whole text before it.
        finish: "stop", "length", "abort", or None while the answer is incomplete.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended it.
        fingerprint: label and policy version of the last token.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: Sequence[Any] | None = None
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    fingerprint: str | None = None


class AnswerText:
    """Turns the tokens of one answer into text, and cuts it at stop strings."""

    def __init__(self, vocabulary: Vocabulary, rules: StopRules):
        self._rules = rules
        self._detokenizer = vocabulary.detokenizer()
        self._stops = StopStrings(rules.strings, rules.include)
        self._length = 0

    def prompt(self, tokens: Sequence[int]) -> AnswerProgress:
        """The prompt in front of the answer, in which stop strings have no meaning."""
        progress = AnswerProgress(tokens=list(tokens))
        for token in tokens:
            progress.offsets.append(self._length)
            progress.text += self._piece(token)
        return progress

    def feed(self, news: News) -> AnswerProgress:
        """The progress that news of generated tokens make."""
        progress = AnswerProgress(finish=news.finish, fingerprint=fingerprint(news))
        for token in news.tokens:
            is_end = news.finish == "stop" and len(progress.tokens) == len(news.tokens) - 1
            progress.tokens.append(token)
            progress.offsets.append(self._length)
            if is_end and token in self._rules.tokens:
                progress.stop_reason = token
            if not is_end or self._rules.include:
                progress.text += self._stops.feed(self._piece(token))
            if self._stops.matched is not None:
                break
        if news.finish is not None and self._stops.matched is None:
            rest = self._detokenizer.finish()
            progress.text += self._stops.feed(rest) + self._stops.finish()
        if self._stops.matched is not None:
            progress.finish, progress.stop_reason = "stop", self._stops.matched
        count = len(progress.tokens)
        progress.logprobs = list(news.logprobs[:count])
        progress.top = news.top and news.top[:count]
        return progress

    def _piece(self, token: int) -> str:
        piece = self._detokenizer.feed(token)
        self._length += len(piece)
        return piece


def fingerprint(news: News) -> str:
    """Which weights generated the tokens of news, as `system_fingerprint`."""
    return f"{news.label}-v{news.version}"
