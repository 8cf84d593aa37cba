"""The file of `--judge-config`: the messages that a judge reads, how it answers, and how its number is read; and which
responses it reads together: one, the two of a pair in both orders, or a group in several orders.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from megarl.data.places import names_in
from megarl.errors import UsageError
from megarl.measurements import MAX_VALUE
from megarl.plain_values import is_plain_number, is_whole
from megarl.rewards.judge.numbers import NumbersRule, numbers_rule
from megarl.yaml_files import read_mapping

# Mode -> the places of the responses that are judged together: one, two, or a group.
PLACES = {"single": ("response",), "pair": ("first", "second"), "group": ("responses",)}
PAIRS = ("all", "anchor")  # all pairs of a group, or each response with the first one
MAX_TRIES = 1000  # samples of a judgement, and retries of a sample
_MESSAGE_ROLES = ("system", "user", "assistant")


class JudgeConfig(NamedTuple):
    """What a file says. `where`: flag and path, for messages.

    A number outside `low` to `high` is none; from `correct_from` on a response counts as correct. Without
    `response_tokens`, the judge reads as many tokens of a response as the policy may write.
    """

    where: str
    mode: str
    pairs: str
    messages: tuple[dict[str, str], ...]
    read: NumbersRule  # of a judgement of a group several numbers, else one
    low: float
    high: float
    correct_from: float
    temperature: float  # 0: greedy
    max_tokens: int  # of a judgement
    response_tokens: int | None
    samples: int  # judgements of a response, whose mean counts
    retries: int  # of a judgement without a number

    @property
    def compares(self) -> bool:
        """Whether responses to a prompt are judged together."""
        return self.mode != "single"

    def numbers(self, text: str, count: int) -> list[float] | None:
        """The numbers of the `count` responses that a judgement is about, in the order in which the judge read them. Of
        a pair: the share of the win of each. None if the judgement has none, others, or one outside the range.
        """
        found = self.read(text)
        if found is None or not all(self.low <= number <= self.high for number in found):
            return None
        if self.mode == "pair":
            share = (found[0] - self.low) / (self.high - self.low)
            return [share, 1 - share]
        return found if len(found) == count else None

    @property
    def places(self) -> tuple[str, ...]:
        """Names of the places in the messages, each once."""
        return tuple(dict.fromkeys(name for message in self.messages for name in names_in(message["content"])))


_Key = tuple[Callable[[Any], bool], str, Any]  # whether a value is valid, what is allowed, the default


def _whole(what: str, low: int, high: int, default: int | None) -> _Key:
    return lambda value: is_whole(value, low, high), f"a whole number{what}", default


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(is_plain_number, value))
    return is_pair and -MAX_VALUE <= value[0] < value[1] <= MAX_VALUE


def _one_of(names: Sequence[str]) -> _Key:
    return lambda value: value in names, " or ".join(names), names[0]


_REQUIRED = ("messages", "number", "range")
_KEYS: dict[str, _Key] = {
    "mode": _one_of(list(PLACES)),
    "pairs": _one_of(PAIRS),
    "messages": (lambda value: isinstance(value, list) and bool(value), "a list of messages", None),
    "number": (lambda value: True, "", None),  # see `numbers_rule`
    "range": (
        _is_range,
        f"the lowest and the highest number, as [1, 10], within -{MAX_VALUE:g} and {MAX_VALUE:g}",
        None,
    ),
    "correct-from": (is_plain_number, "a number", None),
    "temperature": (lambda value: is_plain_number(value) and value >= 0, "a number of 0 or more", 0),
    "max-tokens": _whole(" above 0", 1, 2**31, 256),
    "response-tokens": _whole(" above 0", 1, 2**31, None),
    "samples": _whole(f", 1 to {MAX_TRIES}", 1, MAX_TRIES, 1),
    "retries": _whole(f", 0 to {MAX_TRIES}", 0, MAX_TRIES, 0),
}


def read_config(path: str) -> JudgeConfig:
    """Reads and checks the file. UsageError names flag, file, key, value and what is allowed."""
    where = f"--judge-config {path}"
    content, _ = read_mapping(path, where, "keys to values")
    for key, value in content.items():
        if key not in _KEYS:
            raise UsageError(f"{where}: {key}: unknown; allowed: {', '.join(_KEYS)}")
        is_valid, allowed, _ = _KEYS[key]
        if not is_valid(value):
            raise UsageError(f"{where}: {key} {value!r}: allowed is {allowed}")
    for key in _REQUIRED:
        if key not in content:
            raise UsageError(f"{where}: {key} is missing: it has no default")
    if "pairs" in content and content.get("mode") != "pair":
        raise UsageError(f"{where}: pairs {content['pairs']}: needs mode: pair")
    values = {key: content.get(key, default) for key, (_, _, default) in _KEYS.items()}
    low, high = map(float, values["range"])
    mode, correct_from = values["mode"], values["correct-from"]
    if correct_from is None:
        correct_from = 1 if mode == "pair" else high
    texts, temperature = _messages(values["messages"], where), float(values["temperature"])
    read = numbers_rule(values["number"], where, of_several=mode == "group", highest=high)
    counts = {key.replace("-", "_"): values[key] for key in ("max-tokens", "response-tokens", "samples", "retries")}
    pairs, correct_from = values["pairs"], float(correct_from)
    config = JudgeConfig(where, mode, pairs, texts, read, low, high, correct_from, temperature, **counts)
    _check(config)
    return config


def _messages(values: list, where: str) -> tuple[dict[str, str], ...]:
    for number, message in enumerate(values, start=1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UsageError(f"{where}: message {number}: allowed is a mapping with role and content, nothing else")
        if message["role"] not in _MESSAGE_ROLES or not isinstance(message["content"], str):
            raise UsageError(
                f"{where}: message {number}: allowed is a role of {', '.join(_MESSAGE_ROLES)} and a text as content"
            )
    if values[-1]["role"] != "user":
        raise UsageError(f"{where}: the last message must be the user's: the judge's answer follows")
    return tuple(values)


def _check(config: JudgeConfig):
    """UsageError for keys that do not go together."""
    found = [name for message in config.messages for name in names_in(message["content"])]
    for name in PLACES[config.mode]:
        if (count := found.count(name)) != 1:
            raise UsageError(
                f"{config.where}: messages: have the place {{{name}}} {count} times; allowed is once in the mode "
                f"{config.mode}: it is judged"
            )
    # Each sample of a group shows the responses in another order.
    for name in ("retries",) if config.mode == "group" else ("samples", "retries"):
        if getattr(config, name) > _KEYS[name][2] and config.temperature == 0:
            raise UsageError(
                f"{config.where}: {name} {getattr(config, name)}: needs a temperature above 0: greedy judgements of "
                "a response are all equal"
            )
    low, high = (0, 1) if config.mode == "pair" else (config.low, config.high)
    if not low <= config.correct_from <= high:
        kind = "a share of wins" if config.mode == "pair" else "a number of the range"
        raise UsageError(
            f"{config.where}: correct-from {config.correct_from:g}: allowed is {kind}, {low:g} to {high:g}"
        )


class JudgeQuestion(NamedTuple):
    """One thing to judge. `members`: positions of its responses, in the order in which the judge reads them.

    `stream`: the same number for the same question in every layout; `sample`: which of its judgements.
    """

    members: tuple[int, ...]
    stream: int
    sample: int


def questions_of(
    config: JudgeConfig, sequence_ids: Sequence[int], groups: Sequence[Sequence[int]]
) -> list[JudgeQuestion]:
    """The questions about a replica's responses. `sequence_ids`: ascending numbers of the responses in the step.
    `groups`: positions of the responses to each prompt, in order; read where responses are judged together.
    """
    samples = range(config.samples)
    if config.mode == "group":
        return [JudgeQuestion(_rotated(group, n), sequence_ids[group[0]], n) for group in groups for n in samples]
    if config.mode == "single":
        return [JudgeQuestion((i,), number, n) for i, number in enumerate(sequence_ids) for n in samples]
    pairs = [pair for group in groups for pair in _pairs(group, config.pairs)]
    ordered = [order for one, other in pairs for order in ((one, other), (other, one))]
    streams = [sequence_ids[one] << 21 | sequence_ids[other] for one, other in ordered]
    return [JudgeQuestion(order, stream, n) for order, stream in zip(ordered, streams, strict=True) for n in samples]


def judgements_of_group(config: JudgeConfig, size: int) -> int:
    """The most judgements of a group of so many responses, with all retries."""
    return len(questions_of(config, range(size), [range(size)])) * (1 + config.retries)


def _pairs(group: Sequence[int], pairs: str) -> list[tuple[int, int]]:
    return list(combinations(group, 2)) if pairs == "all" else [(group[0], other) for other in group[1:]]


def _rotated(group: Sequence[int], count: int) -> tuple[int, ...]:
    """The group from another member on, so that no response is always the first."""
    start = count % len(group)
    return (*group[start:], *group[:start])


def order_agreement(questions: Sequence[JudgeQuestion], numbers: Sequence[Sequence[float] | None]) -> tuple[int, int]:
    """(pairs that have the same winner, or none, in both orders; pairs with numbers in both), samples apart. `numbers`:
    those of the members of each question; None: it has none.
    """
    shares = {
        (*question.members, question.sample): found[0]
        for question, found in zip(questions, numbers, strict=True)
        if found is not None
    }
    both = [
        (share, 1 - shares[other, one, sample])
        for (one, other, sample), share in shares.items()
        if one < other and (other, one, sample) in shares
    ]
    return sum(_winner(one) == _winner(other) for one, other in both), len(both)


def _winner(share: float) -> int:
    return (share > 0.5) - (share < 0.5)
