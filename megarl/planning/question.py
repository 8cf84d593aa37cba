"""A run that is to be planned, with the flags that a plan may add, and its price without process groups."""

import argparse
from dataclasses import dataclass, replace
from typing import NamedTuple

from megarl import arguments
from megarl.flags import role_flags
from megarl.mcore.parallel.process_groups import fake_world
from megarl.planning import parameters, summary


class Price(NamedTuple):
    """A parsed run with the plan of each role and the memory of every set of ranks."""

    program: arguments.RunConfig
    roles: dict[str, summary.RolePlan]
    rank_sets: list[summary.RankSet]

    @property
    def fullest(self) -> summary.RankSet:
        """The set with the fullest rank."""
        return max(self.rank_sets, key=lambda rank_set: rank_set.bytes)


@dataclass(frozen=True)
class Question:
    """Flags of train_rl and the ranks that they are for; a later flag wins."""

    flags: list[str]
    world_size: int
    ranks_per_node: int | None  # None: role maps name no nodes
    vocab_size: int = 0
    reward_vocab_size: int | None = None  # of a reward model with another tokenizer
    image_tokens: int | None = None  # of the images of a prompt; None: prompts have none

    def program(self, more: tuple[str, ...] = ()) -> arguments.RunConfig:
        """The run with further flags, parsed and checked as the run itself does. UsageError for wrong ones."""
        with fake_world(self.world_size):
            program = arguments.parse([*self.flags, *more], self.world_size, ranks_per_node=self.ranks_per_node)
        role_flags.check_microbatches(program)
        parameters.check_patterns(program)
        return program

    def price(self, more: tuple[str, ...] = ()) -> Price:
        """What the run with further flags needs. UsageError for flags that the run refuses."""
        return self._price(self.program(more))

    def with_cache(self, price: Price, size: float) -> Price:
        """What a run that is priced needs with `--rollout-buffer-gb size`, which nothing else depends on."""
        settings = replace(price.program.settings, rollout_buffer_gb=size)
        program = replace(price.program, settings=settings)
        roles = price.roles | {"rollout": summary.rollout_plan(program, self.vocab_size)}
        return Price(program, roles, summary.sets_of(roles, self.world_size))

    def with_recompute(self, price: Price, granularity: str | None) -> Price:
        """What a run that is priced needs with another `--recompute-granularity`, not full."""
        values = {"recompute_granularity": granularity, "recompute_method": None, "recompute_num_layers": None}
        roles = {
            name: replace(role, megatron=argparse.Namespace(**vars(role.megatron) | values))
            for name, role in price.program.roles.items()
        }
        return self._price(replace(price.program, roles=roles))

    def _price(self, program: arguments.RunConfig) -> Price:
        roles = summary.role_plans(program, self.vocab_size, self.reward_vocab_size)
        return Price(program, roles, summary.sets_of(roles, self.world_size))
