"""The rewards of a run on the ranks of the reward role: which responses each of them scores."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.data.prompts import PromptSet
from megarl.rewards.base import Score
from megarl.rewards.composition import parse_cosine, shaping_scores
from megarl.rewards.expression import Term, expressions_of


class RewardExpression(NamedTuple):
    """The terms of --reward, or of a file of a mixture."""

    terms: tuple[Term, ...]
    names: frozenset[str]
    shaping: Callable[..., dict[str, list[Score]]]  # `shaping_scores` of these terms

    @classmethod
    def of(cls, terms: tuple[Term, ...], settings: Settings) -> "RewardExpression":
        """Of these terms and the flags of shaping terms."""
        shaping = partial(shaping_scores, terms, parse_cosine(settings.reward_cosine), settings.reward_ngram)
        return cls(terms, frozenset(term.name for term in terms), shaping)


class Part(NamedTuple):
    """The responses that one expression scores."""

    expression: RewardExpression
    positions: Tensor  # [n] int64 in this replica's batch
    total: int  # on all replicas


class RewardExpressions:
    """The rewards of a run, the same in the same order on all ranks."""

    def __init__(self, settings: Settings, role_groups: RoleGroups):
        self.settings, self.role_groups = settings, role_groups
        found = expressions_of(settings)
        self._by_text = {text: RewardExpression.of(terms, settings) for text, terms in found.items()}

    def has(self, name: str) -> bool:
        """Whether any of them has a term of this name."""
        return any(name in expression.names for expression in self._by_text.values())

    def of_line(self, prompts: PromptSet, line: int) -> RewardExpression:
        """The reward of the responses to a prompt."""
        return self._by_text[self._text(prompts, line)]

    def _text(self, prompts: PromptSet, line: int) -> str:
        return prompts.entry_of(line).reward or self.settings.reward

    def parts(self, batch: Batch, prompts: PromptSet, count: int) -> list[Part]:
        """A replica's batch by reward; without rewards that score no response. A collective of the role.

        `count`: sequences on all replicas, of which some may have failed.
        """
        whole, device = torch.arange(len(batch), device=batch.tokens.device), batch.tokens.device
        texts = list(self._by_text) if prompts.entries else [self.settings.reward]
        if len(texts) == 1 and self.settings.environment is None:
            return [Part(self._by_text[texts[0]], whole, count)]
        own = [texts.index(self._text(prompts, line)) for line in batch.prompt_ids.tolist()]
        numbers = torch.tensor(own, dtype=torch.int64, device=device)
        counts = self.role_groups.dp_all_reduce(torch.bincount(numbers, minlength=len(texts))).tolist()
        expressions = [self._by_text[text] for text in texts]
        found = [
            Part(expression, (numbers == number).nonzero().flatten(), n)
            for number, (expression, n) in enumerate(zip(expressions, counts, strict=True))
            if n
        ]
        return found or [Part(expressions[0], whole, 0)]
