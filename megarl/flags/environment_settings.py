"""Flags of multi-turn rollouts: environments, tools, budgets and credit."""

import dataclasses
from typing import Any

from megarl.flags.fields import GENERATING, ROLLOUT, flag, fraction, not_negative, one_of, positive
from megarl.tool_formats.table import FORMATS

SESSIONS = "agent-sessions"  # name of the environment of --agent-sessions
CREDITS = ("episode", "turns")
EPISODES: dict[str, Any] = {"programs": GENERATING, "when": "environment"}


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings:
    """Environments and tools."""

    environment: str | None = flag(None, "environment that answers the policy's turns: a built-in name or"
                                    " package.module:factory; a prompt's field environment names another for its"
                                    " line; default: one turn, no environment", programs=GENERATING)  # fmt: skip
    agent_sessions: bool = flag(False, "episodes are sessions that drivers outside of the run take, and end with a"
                                " reward, over HTTP at --host and --port")  # fmt: skip
    max_turns: int = positive(8, "turns of an episode", **EPISODES)
    branch_turns: int = not_negative(0, "first turns of an episode that --branch-samples samples of a group share;"
                                      " further turns are their own", when="environment")  # fmt: skip
    branch_samples: int = positive(2, "consecutive samples of a group that share their first turns, fewer than the"
                                    " group has", when="branches")  # fmt: skip
    max_turn_length: int | None = positive(None, "tokens of a turn; --max-response-length holds all turns and"
                                            " observations; default: only that", **EPISODES)  # fmt: skip
    max_observation_length: int = positive(1024, "tokens of a message that the environment adds; of a longer one the"
                                            " middle is cut out and marked", **EPISODES)  # fmt: skip
    tool_call_parser: str = flag("auto", "format of tool calls and thoughts in the policy's text: " + ", ".join(FORMATS)
                                  + "; auto (the one in which the chat template writes calls), or"
                                  " package.module:function", programs=ROLLOUT, when="tool_calls")  # fmt: skip
    environment_workers: int = positive(1, "worker processes with environments beside each replica of the rollout",
                                         programs=GENERATING, when="workers")  # fmt: skip
    environment_timeout: float = positive(120.0, "seconds that reset and each step of an environment may take",
                                           **EPISODES)  # fmt: skip
    environment_retries: int = not_negative(1, "how often an episode is repeated in a new environment after a crash or"
                                             " a time-out", **EPISODES)  # fmt: skip
    environment_max_failures: float = fraction(0.05, "share of the latest 1,000 episodes that may fail before the run"
                                                " stops; failed ones are excluded from training",
                                                **EPISODES)  # fmt: skip
    credit: str = one_of("episode", CREDITS, "what a turn is rewarded with: episode (one advantage for all turns), or"
                          " turns (its return-to-go against that of the other samples at the same turn); see"
                          " --advantage rloo", when="environment")  # fmt: skip
