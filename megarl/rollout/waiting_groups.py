"""What a checkpoint keeps of the rollout: a log for each of its replicas, and what the manifest says of it; whether a
run can continue that."""

from collections.abc import Iterable
from pathlib import Path

from megarl.arguments import Settings
from megarl.batch import GENERATED, HEADER, SCORED, fields_sent
from megarl.data.order import DifficultyPools
from megarl.errors import UsageError
from megarl.rollout import response_log
from megarl.rollout.response_log import Record, Records

ENTRY = "waiting_groups"
QUEUE = "generated_ahead"
VERSIONS = "versions"  # the field of a batch that partial rollouts add
# Kinds of records.
GROUPS = "groups"  # of an incomplete batch, that wait
BATCH = "batch"  # of a later step, generated ahead
UNFINISHED = "unfinished"  # groups with unfinished responses
POOLS = "pools"  # of difficulty; the first replica's
FILES = f"rollout_*{response_log.SUFFIX}"
FIRST = FILES.replace("*", "00000")


def batch_fields(settings: Settings) -> set[str]:
    """Names of all fields that complete groups have while they wait."""
    s = settings
    versions = [VERSIONS] if s.partial_rollouts or s.is_scheduled else []
    routes = ["routes"] if s.router_replay == "rollout" else []
    return {*HEADER, *fields_sent(s, [GENERATED, SCORED]), *versions, *routes}


def manifest_entry(settings: Settings, complete: int, unfinished: int) -> dict:
    """The entry of a checkpoint's manifest about its groups, of all replicas: in the group buffer, and unfinished."""
    facts = {"complete": complete, "unfinished": unfinished, "samples_per_prompt": settings.samples_per_prompt}
    return {ENTRY: facts | {"fields": sorted(batch_fields(settings))}}


def queued(manifest: dict) -> dict:
    """What a checkpoint says of the batches that were generated ahead: `lag`, `--generation-lag`; `through`, the last
    step for which the rollout has generated; `steps`, the later ones that have a batch; `version` of the policy."""
    return manifest.get(QUEUE, {"lag": 0, "through": manifest["step"], "steps": [], "version": 0})


def check(manifest: dict, settings: Settings, has_new_prompts: bool):
    """Checks that a run can continue the groups of a checkpoint. Raises UsageError.

    `has_new_prompts`: other `--prompts` than the checkpoint's; groups name their prompts by line.
    """
    if ENTRY not in manifest:
        return
    found, s, queue = manifest[ENTRY], settings, queued(manifest)
    complete, unfinished, samples = found["complete"], found["unfinished"], found["samples_per_prompt"]
    if queue["through"] > manifest["step"] and queue["lag"] != s.generation_lag:
        raise UsageError(
            f"--generation-lag {s.generation_lag}: the checkpoint of --load {s.load} holds batches that were generated "
            f"ahead; allowed is --generation-lag {queue['lag']}"
        )
    if has_new_prompts and (complete or unfinished or queue["steps"]):
        raise UsageError(
            f"--load-changed-data: the checkpoint of --load {s.load} holds responses to the old "
            "prompts that wait for their batch; resume with the old --prompts, or from a step without them"
        )
    is_other = samples != s.samples_per_prompt or {*found["fields"]} != batch_fields(s)
    if is_other and (complete or queue["steps"]):
        raise UsageError(
            f"--load: the checkpoint holds groups of {samples} responses that wait for their batch to be full; "
            "--samples-per-prompt, --group-filter, --pool-bounds, --greedy-baseline, --partial-rollouts, "
            "--router-replay, --generation-schedule, --thinking-budget and --environment must be those that they were"
            " sampled with"
        )
    if complete >= s.prompts_per_step:
        raise UsageError(
            f"--prompts-per-step {s.prompts_per_step}: the checkpoint of --load {s.load} holds {complete} groups that "
            f"wait for their batch to be full; allowed is more than {complete}"
        )
    if unfinished:
        _check_unfinished(unfinished, found, manifest, s)


def _check_unfinished(unfinished: int, found: dict, manifest: dict, s: Settings):
    """As `check`, of that many unfinished groups; `found`: the entry of the manifest."""
    samples, are_episodes = found["samples_per_prompt"], "turn_rewards" in found["fields"]
    if not s.partial_rollouts or samples != s.samples_per_prompt:
        raise UsageError(
            f"--load: the checkpoint holds {unfinished} unfinished groups of {samples} responses; add "
            f"--partial-rollouts --samples-per-prompt {samples}"
        )
    if are_episodes != (s.environment is not None):
        raise UsageError(
            f"--load: the checkpoint holds {unfinished} unfinished groups that were generated with"
            f"{'' if are_episodes else 'out'} --environment; resume like that"
        )
    had_budget = "forced" in found["fields"]
    if had_budget != ("forced" in batch_fields(s)):
        raise UsageError(
            f"--thinking-budget {s.thinking_budget}: the checkpoint of --load {s.load} holds {unfinished} unfinished "
            f"groups that were generated with{'' if had_budget else 'out'} it; resume like that"
        )
    environment = manifest.get("settings", {}).get("--environment", s.environment)
    if environment != s.environment:  # each answers otherwise, and an agent's turns are no environment's
        raise UsageError(
            f"--environment {s.environment}: the checkpoint of --load {s.load} holds {unfinished} unfinished groups of "
            f"--environment {environment}; resume with it, or from a step without them"
        )


def packed(kind: str, record: Record, step: int | None = None) -> bytes:
    """A record as it is in the log. `step`: of a `BATCH`."""
    own = {"kind": kind} if step is None else {"kind": kind, "step": step}
    return response_log.packed({**own, **record.facts}, record.fields)


def kept_records(folder: Path) -> Records:
    """The records of all replicas in a checkpoint, by kind and, of a `BATCH`, step. UsageError if a log is damaged."""
    return Records(folder.glob(FILES), "--load", "kind", "step")


def load_pools(pools: DifficultyPools, records: Iterable[Record], where: str):
    """Restores the state of the pools, if there is one. UsageError, which begins with `where`, for a damaged one."""
    for record in records:
        if not record.fields.keys() >= pools.state_dict().keys():
            raise UsageError(f"{where}: holds no pools")
        pools.load_state_dict({name: record.fields[name].numpy() for name in pools.state_dict()}, where)
