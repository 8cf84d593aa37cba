"""Groups that wait in a checkpoint: what its manifest says about them, and whether a run can continue them."""

from megarl.arguments import Settings
from megarl.batch import GENERATED_FIELDS
from megarl.errors import UsageError

ENTRY = "waiting_groups"
VERSIONS = "versions"  # the field of a batch that partial rollouts add


def extra_fields(settings: Settings) -> tuple[str, ...]:
    """Names of the fields that complete groups have besides `GENERATED_FIELDS` and routes."""
    return (*settings.sampled_fields, *([VERSIONS] if settings.partial_rollouts else []))


def batch_fields(extra: tuple[str, ...], has_routes: bool) -> set[str]:
    """Names of all fields that complete groups have while they wait."""
    return {*GENERATED_FIELDS, *extra, *(["routes"] if has_routes else [])}


def _fields_of(settings: Settings) -> set[str]:
    return batch_fields(extra_fields(settings), settings.router_replay == "rollout")


def manifest_entry(settings: Settings, complete: int, unfinished: int) -> dict:
    """The entry of a checkpoint's manifest about its groups.

    Args:
        complete: groups in the group buffer, of all replicas.
        unfinished: groups among the partial rollouts.
    """
    facts = {"complete": complete, "unfinished": unfinished, "samples_per_prompt": settings.samples_per_prompt}
    return {ENTRY: facts | {"fields": sorted(_fields_of(settings)), "is_ahead": settings.one_step_off}}


def check(manifest: dict, settings: Settings, has_new_prompts: bool):
    """Checks that a run can continue the groups of a checkpoint. Raises UsageError.

    `has_new_prompts`: other `--prompts` than the checkpoint's; groups name their prompts by line.
    """
    if ENTRY not in manifest:
        return
    found, s = manifest[ENTRY], settings
    complete, unfinished, samples = found["complete"], found["unfinished"], found["samples_per_prompt"]
    if has_new_prompts and (complete or unfinished):
        raise UsageError(
            f"--load-changed-data: the checkpoint of --load {s.load} holds responses to the old "
            "prompts that wait for their batch; resume with the old --prompts, or from a step without them"
        )
    if complete:
        check_complete((samples, set(found["fields"])), (s.samples_per_prompt, _fields_of(s)))
        _check_batch_size(complete, found["is_ahead"], s)
    check_unfinished(unfinished, samples, s)


def check_complete(saved: tuple[int, set[str]], wanted: tuple[int, set[str]]):
    """UsageError if complete groups have another size, or other fields, than those of the run."""
    if saved != wanted:
        raise UsageError(
            f"--load: the checkpoint holds groups of {saved[0]} responses that wait for their batch to be full; "
            "--samples-per-prompt, --group-filter, --greedy-baseline, --partial-rollouts, --router-replay and "
            "--environment must be those that they were sampled with"
        )


def check_unfinished(groups: int, samples: int, settings: Settings):
    """UsageError unless a run can continue that many unfinished groups of `samples` responses."""
    if groups and (not settings.partial_rollouts or samples != settings.samples_per_prompt):
        raise UsageError(
            f"--load: the checkpoint holds {groups} unfinished groups of {samples} responses; add "
            f"--partial-rollouts --samples-per-prompt {samples}"
        )


def _check_batch_size(complete: int, is_ahead: bool, s: Settings):
    if is_ahead and (not s.one_step_off or complete != s.prompts_per_step):
        raise UsageError(
            f"--load: a batch of {complete} groups was generated ahead; allowed are --one-step-off and "
            f"--prompts-per-step {complete}"
        )
    if not is_ahead and complete >= s.prompts_per_step:
        raise UsageError(
            f"--prompts-per-step {s.prompts_per_step}: the checkpoint of --load {s.load} holds {complete} groups that "
            f"wait for their batch to be full; allowed is more than {complete}"
        )
