"""Flags of generation: sampling, what ends a response, the engine, how far it is ahead, expert routes."""

import dataclasses
import json
from collections.abc import Iterator

from megarl.flags.conditions import ENGINE, THINKS, TRAINED, Broken, Condition, FlagContext, on
from megarl.flags.fields import GENERATING, ROLLOUT, address, flag, not_negative, one_of, parse_ints, parses, positive
from megarl.plain_values import is_unicode

SCHEDULES = ("fixed", "recorded")
MAX_LAG = 32  # of `--generation-lag`; ranks may be that many steps apart
REPLAYS = ("none", "old-logprob", "rollout")  # source of the expert routes that the actor's training replays

SAMPLED = Condition(
    lambda run: run.program != "evaluate" or run.settings.eval_temperature > 0, "--eval-temperature 0 is greedy"
)
PREFIXES = on(lambda s: s.rollout_prefix_caching and not s.debug_train_only, "needs --rollout-prefix-caching")
AHEAD = on(
    lambda s: not s.debug_train_only and not s.debug_rollout_only,
    "--debug-train-only and --debug-rollout-only do not generate ahead",
)
ROLLOUT_SERVER = on(lambda s: s.rollout_server is not None, "needs --rollout-server")
GUESTS = on(lambda s: s.replica_port is not None, "needs --replica-port")
ROUTES = on(lambda s: s.router_replay == "rollout", "needs --router-replay rollout")


def can_keep_responses(settings) -> bool:
    """Whether a run can keep responses of a step on disk until it has its checkpoint."""
    trains = not (settings.debug_train_only or settings.debug_rollout_only)
    return settings.save is not None and trains and not (settings.agent_sessions or settings.is_scheduled)


KEPT = on(
    can_keep_responses,
    "needs --save; not with --debug-train-only, --debug-rollout-only, --agent-sessions, --generation-schedule recorded "
    "and --replay-schedule",
)


def parse_stops(text: str) -> tuple[str, ...]:
    """`"</answer>"` -> ("</answer>",); `'["a", "b"]'` -> ("a", "b"). ValueError unless each has some Unicode text."""
    found = json.loads(text) if text.lstrip().startswith("[") else [text]
    if not found or not all(isinstance(each, str) and each and is_unicode(each) for each in found):
        raise ValueError(f"{text!r} is no list of strings with some text")
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Generation:
    """Generation."""

    prompts_per_step: int = positive(16)
    """prompts per step"""
    samples_per_prompt: int = positive(4)
    """responses sampled per prompt (the group size)"""
    temperature: float = positive(1.0)
    """softmax temperature of the rollout and of all log-probs"""
    top_k: int = not_negative(0, programs=GENERATING, when=SAMPLED)
    """sample from the k most likely tokens; 0: all tokens"""
    top_p: float = flag(1.0, lambda v: 0 < v <= 1, "above 0, at most 1", programs=GENERATING, when=SAMPLED)
    """nucleus sampling: probability mass to sample from (1904.09751); 1: all"""
    min_p: float = flag(0.0, lambda v: 0 <= v <= 1, "from 0 to 1", programs=GENERATING, when=SAMPLED)
    """sample from tokens with at least this share of the most likely one's probability (2407.01082); 0: all"""
    # What ends a response, and its thoughts.
    stop: str | None = flag(None, parses(parse_stops), "strings with some text", programs="rl evaluate", when=ENGINE)
    """a string that ends a response, or several as '["a", "b"]'; its tokens are part of the response and trained on"""
    stop_token_ids: str | None = flag(
        None, parses(parse_ints), "whole numbers with commas", programs="rl evaluate", when=ENGINE
    )
    """tokens that end a response like the tokenizer's end tokens, as '7,9'"""
    thinking_budget: int | None = positive(None, programs="rl evaluate")
    """tokens of a response, or of a turn, after which thoughts that are still open are ended by tokens that the policy
    does not choose and is not trained on; default: none"""
    thinking_budget_text: str | None = flag(None, bool, "a text", programs="rl evaluate serve", when=THINKS)
    """the text of these tokens, with the mark that ends thoughts; default: a sentence and the mark"""
    # The engine.
    rollout_buffer_gb: float = positive(0.25, programs=ROLLOUT, when=ENGINE)
    """KV cache of each rollout rank, GiB"""
    rollout_max_requests: int = positive(256, programs=ROLLOUT, when=ENGINE)
    """maximum requests that a rollout replica decodes together, at least 4"""
    rollout_dispatch: str = one_of("dynamic", ("static", "dynamic"), programs=GENERATING, when=ENGINE)
    """static: requests are assigned to replicas up front; dynamic: each replica takes the next when it has room"""
    rollout_prefix_caching: bool = flag(False, programs=ROLLOUT, when=ENGINE)
    """prefill a prefix that requests share only once, and in each turn of an episode only what is new"""
    rollout_state_snapshots: int | None = flag(
        None, lambda v: v is None or v > 0, "a number above 0", programs=ROLLOUT, when=PREFIXES
    )
    """recurrent states at ends of prompts that --rollout-prefix-caching keeps on each replica; default:
    --rollout-max-requests"""
    rollout_chunked_prefill: bool = flag(False, programs=ROLLOUT, when=ENGINE)
    """prefill a long prompt in chunks over several engine steps"""
    speculative_rollout: bool = flag(False, when=ENGINE)
    """decode steps also read drafted tokens, taken from siblings and earlier responses, and read what siblings share
    once; text and log-probs stay the same to the bit"""
    exact_rollout: bool = flag(False, programs=ROLLOUT, when=ENGINE)
    """on CUDA, run kernels that make rollout log-probs equal those of training to the last bit, at some cost in speed
    (docs/exactness.md); on a CPU all kernels do, so that this changes nothing"""
    decode_graphs: str = one_of("auto", ("auto", "off"), programs=ROLLOUT, when=ENGINE)
    """on CUDA, decode steps as CUDA graphs where they can be (auto), or kernel by kernel; on a CPU this changes
    nothing"""
    verify_weights: bool = flag(False, programs=ROLLOUT, when=ENGINE)
    """compare checksums after each weight sync to the rollout"""
    keep_responses: bool = flag(True, when=KEPT)
    """keep the finished responses of steps without a checkpoint in --save, so that a run that was killed generates only
    the rest"""
    rollout_server: str | None = address(programs="evaluate")
    """address of a generation server (megarl.serve) that writes the responses"""
    rollout_server_key_file: str | None = flag(None, programs="evaluate", when=ROLLOUT_SERVER)
    """file with the server's API key"""
    # Replicas that are programs of their own.
    replica_port: int | None = flag(None, lambda v: 0 < v < 65536, "1 to 65535")
    """port on which replicas of the rollout join as programs of their own (megarl.generate), and generate in place of
    this run's ranks; they may stop, die and join while it goes on"""
    min_replicas: int = positive(1, when=GUESTS)
    """replicas that have to be there before a round begins"""
    replica_timeout: float = positive(30.0, when=GUESTS)
    """seconds without progress after which the requests of a replica go to others"""
    # Generation ahead of training.
    generation_lag: int = flag(0, lambda v: 0 <= v <= MAX_LAG, f"0 to {MAX_LAG}", when=TRAINED)
    """batches that generation may be ahead of training; responses are as many updates old"""
    generation_schedule: str = one_of("fixed", SCHEDULES, when=AHEAD)
    """which weights, at most --generation-lag steps old, draw a token: those of its round (fixed), or the newest there
    are (recorded), which is written to schedule/ in --save; over-sampling then takes the first groups"""
    replay_schedule: str | None = flag(None, when=AHEAD)
    """follow the schedule of another run, whose folder this is; needs its settings, in any layout"""
    # Router replay (mixture of experts).
    router_replay: str = one_of("none", REPLAYS)
    """replay expert routes in the actor's training: those of the old log-probs (R2) or of the rollout (R3); none: no
    replay (2510.11370)"""
    router_replay_reference: bool = flag(False, when=ROUTES)
    """the reference also replays the rollout's routes"""
    router_probe_interval: int = not_negative(0, when=ROUTES)
    """steps between probes of the log-prob gap with and without router replay; 0: none"""

    @property
    def sequences_per_step(self) -> int:
        """Responses in a step's batch."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def is_scheduled(self) -> bool:
        """Whether weights may change within a round, as the clock decides or as another run's schedule says."""
        return self.generation_schedule == "recorded" or self.replay_schedule is not None


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of weights that change while a batch is generated, of replicas that join, and of expert routes."""
    s = run.settings
    refused = {
        "--debug-train-only": s.debug_train_only,
        "--debug-rollout-only": s.debug_rollout_only,
        "--generation-schedule recorded": s.generation_schedule == "recorded",
        "--replay-schedule": s.replay_schedule is not None,
        "--router-replay rollout": s.router_replay == "rollout",
        "--agent-sessions": s.agent_sessions,
        "--serve-policy": s.serve_policy,
        "--mtp-drafts": s.mtp_drafts,
    }
    for flag_, is_set in refused.items() if s.replica_port is not None else ():
        if is_set:
            yield "--replica-port", f"not allowed with {flag_}: replicas that join have no part in it"
    records, replays = s.generation_schedule == "recorded", s.replay_schedule is not None
    if records and not s.generation_lag:
        why = "needs --generation-lag 1 or more: without it a round has no choice of weights to record"
        yield "--generation-schedule", why
    if records and s.save is None:
        yield "--generation-schedule", "needs --save, where the schedule is written"
    if records and replays:
        why = "not allowed with --replay-schedule, which decides everything; leave one of them out"
        yield "--generation-schedule", why
    if replays and not s.generation_lag:
        yield "--replay-schedule", "needs the --generation-lag of the recorded run"
    if s.rollout_server is not None and s.load is not None:
        yield "--load", "the server of --rollout-server has the weights; leave it out"
    if s.router_replay_reference and "reference" not in run.roles and not s.debug_rollout_only:
        yield "--router-replay-reference", "the run has no reference: --kl-coefficient is 0 and --role-map names none"
