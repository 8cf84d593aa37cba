"""Flags of multi-turn rollouts: environments, tools, budgets and credit."""

import dataclasses
from collections.abc import Iterator

from megarl.flags.conditions import ENVIRONMENT, TOOL_CALLS, Broken, FlagContext, on
from megarl.flags.fields import GENERATING, ROLLOUT, flag, fraction, not_negative, one_of, positive
from megarl.tool_formats import FORMATS

SESSIONS = "agent-sessions"  # name of the environment of --agent-sessions
CREDITS = ("episode", "turns")

BRANCHES = on(lambda s: s.branch_turns > 0, "needs --branch-turns")
WORKERS = on(
    lambda s: s.environment is not None and not s.agent_sessions,
    "needs --environment: --agent-sessions has no worker processes",
)


@dataclasses.dataclass(frozen=True)
class Environments:
    """Environments and tools."""

    environment: str | None = flag(None, programs=GENERATING)
    """environment that answers the policy's turns: a built-in name, file.py:factory or package.module:factory; a
    prompt's field environment names another for its line; default: one turn, no environment"""
    agent_sessions: bool = flag(False)
    """episodes are sessions that drivers outside of the run take, and end with a reward, over HTTP at --host and
    --port"""
    max_turns: int = positive(8, programs=GENERATING, when=ENVIRONMENT)
    """turns of an episode"""
    branch_turns: int = not_negative(0, when=ENVIRONMENT)
    """first turns of an episode that --branch-samples samples of a group share; further turns are their own"""
    branch_samples: int = positive(2, when=BRANCHES)
    """consecutive samples of a group that share their first turns, fewer than the group has"""
    max_turn_length: int | None = positive(None, programs=GENERATING, when=ENVIRONMENT)
    """tokens of a turn; --max-response-length holds all turns and observations; default: only that"""
    max_observation_length: int = positive(1024, programs=GENERATING, when=ENVIRONMENT)
    """tokens of a message that the environment adds; of a longer one the middle is cut out and marked"""
    tool_call_parser: str = flag("auto", programs=ROLLOUT, names=FORMATS, when=TOOL_CALLS)
    """format of tool calls and thoughts in the policy's text: {names}; auto (the one in which the chat template writes
    calls), file.py:function or package.module:function"""
    environment_workers: int = positive(1, programs=GENERATING, when=WORKERS)
    """worker processes with environments beside each replica of the rollout"""
    environment_timeout: float = positive(120.0, programs=GENERATING, when=ENVIRONMENT)
    """seconds that reset and each step of an environment may take"""
    environment_retries: int = not_negative(1, programs=GENERATING, when=ENVIRONMENT)
    """how often an episode is repeated in a new environment after a crash or a time-out"""
    environment_max_failures: float = fraction(0.05, programs=GENERATING, when=ENVIRONMENT)
    """share of the latest 1,000 episodes that may fail before the run stops; failed ones are excluded from training"""
    credit: str = one_of("episode", CREDITS, when=ENVIRONMENT)
    """what a turn is rewarded with: episode (one advantage for all turns), or turns (its return-to-go against that of
    the other samples at the same turn); see --advantage rloo"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of episodes."""
    s, has_turns = run.settings, run.settings.environment is not None
    in_sessions = {
        "--serve-policy": s.serve_policy,
        "--over-sampling": s.over_sampling > 1,
        "--credit turns": s.credit == "turns",
        "--branch-turns": s.branch_turns > 0,
    }
    others = [flag for flag, is_set in in_sessions.items() if is_set]
    if s.agent_sessions and s.environment != SESSIONS:
        yield "--agent-sessions", "drivers outside of the run are the environment; leave --environment out"
    if s.agent_sessions and others:
        yield "--agent-sessions", f"not allowed with {', '.join(others)}"
    if s.branch_turns and s.branch_samples >= s.samples_per_prompt:
        yield (
            "--branch-samples",
            f"allowed is less than --samples-per-prompt {s.samples_per_prompt}: no baseline of a group says "
            "what turns are worth that all of its samples share",
        )
    if has_turns and s.branch_turns >= s.max_turns:
        yield "--branch-turns", f"leaves an episode no turn of its own; allowed is less than --max-turns {s.max_turns}"
    if has_turns and s.is_scheduled and s.over_sampling > 1:
        yield (
            "--environment",
            "not allowed with --over-sampling where the clock decides (--generation-schedule recorded, "
            "--replay-schedule)",
        )
    if s.thinking_budget is not None and s.credit == "turns":
        why = "not allowed with --credit turns, which tells turns apart by what the policy has chosen"
        yield "--thinking-budget", why
    if (s.max_turn_length or 0) > s.max_response_length:
        yield (
            "--max-turn-length",
            f"allowed is at most --max-response-length {s.max_response_length}, which holds all turns and observations",
        )
