"""The examples of a file, token sequences that are made of its lines: supervised ones, pairs, and labelled responses.

Responses end with EOS, as in a rollout. One rank of a node tokenizes the lines for all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet, TooLong, prompt_tokens
from megarl.data.ragged import Ragged
from megarl.errors import UsageError

TokenSequence = tuple[list[int], list[bool]]  # tokens, and which of them are trained on or scored


class TokenLimits(NamedTuple):
    """Tokens of prompt and response, its EOS counted; `drops_long`: lines above are left out, and a note says so."""

    prompt: int
    response: int
    drops_long: bool = False


LineReader = Callable[[Prompt, Encoder, TokenLimits], list[list[TokenSequence]]]  # the examples of a line
Arrays = dict[str, np.ndarray]


class Examples(Sequence):
    """Examples of k token sequences each, made when they are read; a slice is a plain list."""

    def __init__(self, prompts: PromptSet, arrays: Arrays, sequences: int = 1):
        """`prompts`: a set with the line of each example, which is there once for each of its examples. `arrays`: of
        `_arrays`; the sequences of example i are the rows i·k … i·k + k − 1. `sequences`: k.
        """
        self.prompts, self.margins = prompts, arrays["margins"]  # [lines] float64
        self._tokens, self._mask = Ragged.of_arrays(arrays), Ragged(arrays["mask"], arrays["offsets"])
        self._sequences = sequences
        assert len(self) == len(prompts), "a run draws examples by the set's order"

    def __len__(self) -> int:
        return len(self._tokens) // self._sequences

    def __getitem__(self, index):
        lines = range(len(self))[index]
        return [self._example(line) for line in lines] if isinstance(index, slice) else self._example(lines)

    def _example(self, line: int) -> list[TokenSequence]:
        rows = range(line * self._sequences, (line + 1) * self._sequences)
        return [(self._tokens[row], self._mask[row]) for row in rows]

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), k] int64: tokens of each sequence of these examples, which are not read."""
        return self._tokens.lengths(np.array(lines)[:, None] * self._sequences + np.arange(self._sequences))


def _arrays(examples: Iterable[tuple[Prompt, list[TokenSequence]]]) -> Arrays:
    """Tokens and mask of all sequences; margins and lines of the examples."""
    mask, margins, kept = bytearray(), [], []

    def rows() -> Iterator[list[int]]:
        for prompt, sequences in examples:
            for ids, is_trained in sequences:
                mask.extend(is_trained)
                yield ids
            margins.append(float(prompt.margin or 0))
            kept.append(prompt.index)

    found = Ragged.of_rows(rows()).arrays() | {"mask": np.frombuffer(mask, np.bool_)}
    return found | {"margins": np.array(margins), "kept": np.array(kept, np.int64)}


def _within_limits(
    read: LineReader, prompts: PromptSet, encoder: Encoder, unit: str, limits: TokenLimits, more=lambda kept: {}
) -> tuple[PromptSet, Arrays]:
    """(the set of the lines that are kept, the arrays of `Examples`). `unit`: what a line is, for messages. `more`:
    makes further arrays of the numbers of the lines that are kept. UsageError: with file and line, for a wrong line or
    one that is too long; if all are.
    """

    def examples() -> Iterator[tuple[Prompt, list[TokenSequence]]]:
        for prompt in prompts:
            with prompts.named_errors(prompt.index):
                try:
                    found = read(prompt, encoder, limits)
                except TooLong:
                    if not limits.drops_long:
                        raise
                    continue
            yield from ((prompt, example) for example in found)

    def compute() -> Arrays:
        before = encoder.unshown_thoughts
        found = _arrays(examples())
        return found | {"unshown": np.array([encoder.unshown_thoughts - before])} | more(found["kept"])

    arrays = prompts.on_node(compute, unit, encoder, limits)
    flags = f"--max-prompt-length {limits.prompt} --max-response-length {limits.response}"
    prompts = prompts.without_long(arrays["kept"], unit, flags, f"{limits.prompt} + {limits.response}")
    if turns := int(arrays["unshown"][0]):
        prompts = prompts.noted(
            f"the chat template leaves out the thoughts of {turns:,} turns, which are not trained on; some templates "
            "show them with --chat-template-kwargs"
        )
    return prompts, arrays


def _sequence(
    prompt: Prompt, text: str | None, encoder: Encoder, limits: TokenLimits, may_be_empty: bool
) -> TokenSequence:
    """The sequence of a prompt and its response, which is masked. `may_be_empty`: the response may be EOS alone."""
    if text is None:
        raise UsageError("supervised training needs a response (or an answer), or messages, on each line")
    prompt_ids = prompt_tokens(prompt, encoder, limits.prompt)
    response_ids = encoder.trained_response(prompt, text)
    if len(response_ids) < 2 and not may_be_empty:
        raise UsageError("the response is empty")
    if len(response_ids) > limits.response:
        raise TooLong(
            f"the response has {len(response_ids)} tokens with EOS; --max-response-length allows {limits.response}"
            f"{TooLong.CURE}"
        )
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


# -- supervised ----------------------------------------------------------------------------------------------------


def sft_examples(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool = False
) -> Examples:
    """One sequence of each line; the mask covers the responses, each with its EOS.

    A line's response is its `response`, else its `answer`; in a line with `messages` every assistant message is one,
    and the conversation may be as long as both limits together. It becomes several examples where the chat template
    shows an earlier turn otherwise once later messages follow (`Encoder.conversation`); a note in the set says how
    many. UsageError as of `_within_limits`.
    """
    limits = TokenLimits(max_prompt_length, max_response_length, drops_long)
    prompts, arrays = _within_limits(_supervised, prompts, encoder, "examples", limits)
    examples = np.unique(arrays["kept"], return_counts=True)[1]  # of each line
    if len(divided := examples[examples > 1]):
        prompts = prompts.noted(
            f"{len(divided):,} of {len(examples):,} conversations become {divided.sum():,} examples, since the chat "
            "template shows earlier turns otherwise once later messages follow"
        )
    return Examples(prompts, arrays)


def _supervised(prompt: Prompt, encoder: Encoder, limits: TokenLimits) -> list[list[TokenSequence]]:
    if prompt.messages is None:
        text = prompt.response if prompt.response is not None else prompt.answer
        return [[_sequence(prompt, text, encoder, limits, may_be_empty=False)]]
    found = encoder.conversation(prompt.messages, prompt.tools)
    longest, max_length = max(len(tokens) for tokens, _ in found), limits.prompt + limits.response
    if longest > max_length:
        raise TooLong(
            f"the conversation has {longest} tokens; --max-prompt-length and --max-response-length allow "
            f"{max_length} together{TooLong.CURE}"
        )
    return [[sequence] for sequence in found]


# -- pairs: the sequences of the chosen and of the rejected response to one prompt, in this order -------------------


def preference_pairs(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool = False) -> Examples:
    """The reward model's inputs of every line, at most `max_length` tokens long (cut by `Encoder.reward_model_inputs`).

    Their last tokens are masked, where the score is read. `drops_long`: leave out pairs with a longer text instead. A
    note in the set says how many were cut or left out. UsageError with file and line if chosen or rejected is missing,
    or if both are the same text or the same tokens.
    """

    def compute() -> Arrays:
        return _scored_arrays(prompts, encoder, max_length, drops_long)

    arrays = prompts.on_node(compute, "preferences", encoder, max_length, drops_long)
    limits = f"--max-prompt-length and --max-response-length of {max_length} together"
    found = prompts.without_long(arrays["kept"], "pairs", limits, str(max_length))
    if count := int(arrays["cut"].sum()):
        found = found.noted(
            f"cut prompts at their start in {count:,} of {len(found):,} pairs longer than {max_length} tokens; "
            "--filter-long-prompts drops them"
        )
    return Examples(found, arrays, 2)


def _scored_arrays(prompts: PromptSet, encoder: Encoder, max_length: int, drops_long: bool) -> Arrays:
    samples = []
    for prompt in prompts:
        with prompts.named_errors(prompt.index):
            _check_pair(prompt)
        samples += [(prompt, prompt.chosen), (prompt, prompt.rejected)]
    prompts.encode(encoder)
    inputs, pairs, cut = encoder.reward_model_inputs(samples, max_length), [], []
    for (prompt, _), (chosen, of_chosen), (rejected, of_rejected) in zip(
        samples[::2], inputs[::2], inputs[1::2], strict=True
    ):
        is_cut = of_chosen + of_rejected > 0
        if drops_long and is_cut:
            continue
        with prompts.named_errors(prompt.index):
            _check_tokens(chosen, rejected)
        pairs.append((prompt, [(tokens, [False] * (len(tokens) - 1) + [True]) for tokens in (chosen, rejected)]))
        cut.append(is_cut)
    return _arrays(pairs) | {"cut": np.array(cut, np.bool_)}


def response_pairs(
    prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long: bool = False
) -> Examples:
    """The sequences of every line for a policy; responses are masked. UsageError as of `_within_limits`, and for a line
    without two different responses or with an empty chosen one.
    """
    limits = TokenLimits(max_prompt_length, max_response_length, drops_long)
    found, arrays = _within_limits(_pairs, prompts, encoder, "pairs", limits)
    return Examples(found, arrays, 2)


def _pairs(prompt: Prompt, encoder: Encoder, limits: TokenLimits) -> list[list[TokenSequence]]:
    """One example. The rejected response may be empty, as a policy's responses are now and then."""
    _check_pair(prompt)
    found = []
    for name in ("chosen", "rejected"):
        try:
            found.append(_sequence(prompt, getattr(prompt, name), encoder, limits, may_be_empty=name == "rejected"))
        except UsageError as error:
            raise type(error)(f"{name}: {error}") from None
    _check_tokens(found[0][0], found[1][0])
    return [found]


def _check_pair(prompt: Prompt):
    for name in ("chosen", "rejected"):
        if getattr(prompt, name) is None:
            raise UsageError(f"a preference needs chosen and rejected on each line; {name} is missing")
    if prompt.chosen == prompt.rejected:
        raise UsageError("chosen and rejected are the same text")


def _check_tokens(chosen: list[int], rejected: list[int]):
    if chosen == rejected:
        raise UsageError("chosen and rejected become the same tokens")


# -- single responses with a label, for KTO: desirable or not -------------------------------------------------------


class LabelledResponses(Examples):
    """The responses of all lines: one with `desirable`, or both of a pair.

    An example has two sequences: the prompt with its own response, and with one to another prompt, which says nothing
    of this one. Responses are masked.
    """

    def __init__(
        self, prompts: PromptSet, encoder: Encoder, max_prompt_length: int, max_response_length: int, drops_long=False
    ):
        """Arguments as of `response_pairs`. UsageError as of `_within_limits`, for a line without a response and its
        label, and of a single prompt.
        """
        whole, limits = prompts, TokenLimits(max_prompt_length, max_response_length, drops_long)

        def labels(kept: np.ndarray) -> Arrays:
            found, numbers = [], {}
            for index in np.unique(kept).tolist():
                prompt = whole[index]
                found += [(label, numbers.setdefault(prompt.key, len(numbers))) for _, label in _texts(prompt)]
            prompt_ids = np.array([number for _, number in found], np.int64)
            return {"labels": np.array([label for label, _ in found], np.bool_), "prompt_ids": prompt_ids}

        prompts, arrays = _within_limits(_labelled, whole, encoder, "lines", limits, labels)
        super().__init__(prompts, arrays)
        self.labels = arrays["labels"]  # [N] bool
        if len(set(arrays["prompt_ids"].tolist())) == 1:
            raise UsageError(
                f"{prompts.flag} {prompts.path}: all responses are to one prompt; kto compares them with responses to "
                "other prompts"
            )
        self._others = next_of_other_prompt(arrays["prompt_ids"])
        self._responses = np.add.reduceat(arrays["mask"], arrays["offsets"][:-1], dtype=np.int64)  # [N] their tokens

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), 2] int64: tokens of both sequences of these examples."""
        rows, own = np.array(lines), super().lengths(lines)[:, 0]
        return np.stack([own, own - self._responses[rows] + self._responses[self._others[rows]]], 1)

    def _example(self, line: int) -> list[TokenSequence]:
        own, mask = self._tokens[line], self._mask[line]
        other = int(self._others[line])
        prompt, response = len(own) - int(self._responses[line]), int(self._responses[other])
        mismatched = own[:prompt] + self._tokens[other][-response:]
        return [(own, mask), (mismatched, [False] * prompt + [True] * response)]


def next_of_other_prompt(prompt_ids: np.ndarray) -> np.ndarray:
    """[N] number of the next example, cyclically, whose prompt differs; there are two prompts or more."""
    count = len(prompt_ids)
    others = np.zeros(count, np.int64)
    for number in [*range(count - 1, -1, -1)] * 2:  # in the second round the first examples are known to the last
        following = (number + 1) % count
        others[number] = following if prompt_ids[following] != prompt_ids[number] else others[following]
    return others


def _labelled(prompt: Prompt, encoder: Encoder, limits: TokenLimits) -> list[list[TokenSequence]]:
    return [[_sequence(prompt, text, encoder, limits, may_be_empty=True)] for text, _ in _texts(prompt)]


def _texts(prompt: Prompt) -> list[tuple[str, bool]]:
    """The responses of a line with their labels. UsageError if it has none."""
    if prompt.chosen is not None or prompt.rejected is not None:
        _check_pair(prompt)
        return [(prompt.chosen or "", True), (prompt.rejected or "", False)]
    if prompt.response is None or prompt.desirable is None:
        raise UsageError("kto needs response and desirable on each line, or chosen and rejected")
    return [(prompt.response, prompt.desirable)]
