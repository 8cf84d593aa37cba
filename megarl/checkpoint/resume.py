"""Which checkpoint a run resumes from, and whether the run's data are still those that it was written with."""

import hashlib
from pathlib import Path

from megarl import bundled
from megarl.arguments import RunConfig, Settings
from megarl.checkpoint import folders, resumed_flags
from megarl.checkpoint import manifest as manifests
from megarl.data.chat import NO_OPTIONS
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError, flag_of
from megarl.flags.distillation import SIBLING
from megarl.plain_files import read_bytes

DATA = "data"  # the manifest's entry with the fingerprints of prompts, tokenizer and chat template
SETTINGS = "settings"  # the manifest's entry with the settings that decide the numbers
# Settings of files, layout, memory and the length of a run, and those that DATA fingerprints.
_NOT_NUMBERS = {
    "role_map", "prompts", "eval_prompts", "evals", "prompt_column", "answer_column", "response_column",
    "messages_column", "chosen_column", "rejected_column", "filter_long_prompts",
    "hf_model", "tokenizer_type", "tokenizer_model", "chat_template", "chat_template_kwargs",
    "chat_template_date", "bos", "seed", "teacher_context_template",
    "reward_model", "reward_hf_model", "judge_config", "judge_hf_model", "judge_load", "judge_buffer_gb",
    "judge_max_requests", "judge_max_length", "reward_url", "reward_retries", "reward_concurrency", "reward_memory_mb",
    "reward_timeout", "reward_workers", "rollout_buffer_gb", "rollout_max_requests", "rollout_dispatch",
    "rollout_prefix_caching", "rollout_state_snapshots", "rollout_chunked_prefill", "speculative_rollout",
    "mtp_drafts", "decode_graphs", "verify_weights",
    "max_tokens_per_microbatch", "lora_adapter", "export_peft", "export_hf", "hf_mtp", "eval_interval", "evaluate_ema",
    "keep_best", "best_metric", "offload",
    "train_iters", "deterministic", "save", "overwrite", "save_interval", "async_save", "keep_last", "keep_every",
    "on_save_failure", "load", "load_changed_data",
    "kernels", "replay_schedule", "save_rollouts", "load_rollouts", "debug_train_only", "debug_rollout_only",
    "profile_steps", "profile_memory", "trackers", "tracker_project", "tracker_run", "tracker_folder",
    "tracker_offline",
}  # fmt: skip
_LEARNING = (
    "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "lr_decay_style",
    "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "global_batch_size", "bf16", "fp16", "sgd_momentum",
)  # fmt: skip
_MOMENTS, _BY_BYTES = ("exp_avg_dtype", "exp_avg_sq_dtype"), {4: "fp32", 2: "bf16"}
PROMPTS, EVAL_PROMPTS, EVALS = "prompts", "eval_prompts", "evals "  # sets in DATA; a name of --evals follows the last


def data_fingerprints(encoder: Encoder, settings: Settings, prompts: dict[str, PromptSet]) -> dict[str, dict[str, str]]:
    """The manifest's entry about a run's data: {flag: {"value": …, "sha256": …}}; values are for messages only.

    Args:
        encoder: the policy's tokenizer and chat template.
        prompts: the sets of `--prompts`, `--eval-prompts` and `--evals` by their names here, after their filter.
    """
    found = {name: {"value": prompts[name].path, "sha256": prompts[name].sha256()} for name in prompts}
    tokenizer, template, options = encoder.tokenizer, "", NO_OPTIONS
    if encoder.template is not None:
        template, options = encoder.template.source, encoder.template.options
    ids = repr((tokenizer.bos_id, tokenizer.pad_id, tokenizer.end_ids, sorted(tokenizer.special.items())))
    prefix = repr(encoder.prefix_ids) if encoder.prefix_ids else ""
    found["tokenizer_model"] = _entry(settings.tokenizer_model, (tokenizer.fingerprint + ids + prefix).encode())
    others = repr(options) if options != NO_OPTIONS else ""
    content = (template + others).encode("utf-8", errors="backslashreplace")
    found["chat_template"] = _entry(settings.chat_template, content)
    return found


def is_held_out(name: str) -> bool:
    """Whether an entry of DATA is a set of held-out prompts."""
    return name == EVAL_PROMPTS or name.startswith(EVALS)


def _may_change(name: str) -> bool:
    """Whether the data of an entry may change with --load-changed-data."""
    return name == PROMPTS or is_held_out(name)


def _entry(value: str | None, content: bytes) -> dict[str, str]:
    return {"value": str(value or "(default)"), "sha256": hashlib.sha256(content).hexdigest()}


def settings_entry(config: RunConfig) -> dict[str, object]:
    """The manifest's entry about the settings that decide a run's numbers, by flag; roles' flags have their prefix."""
    settings = config.settings
    found = {flag_of(name): value for name, value in vars(settings).items() if name not in _NOT_NUMBERS}
    if settings.judge_config:  # whose content decides
        content = read_bytes(bundled.find(settings.judge_config))
        found["--judge-config"] = f"of sha256 {hashlib.sha256(content).hexdigest()[:12]}"
    if settings.teacher_context == SIBLING:
        content = read_bytes(bundled.find(settings.teacher_context_template))
        found[flag_of("teacher_context_template")] = f"of sha256 {hashlib.sha256(content).hexdigest()[:12]}"
    for role in config.trained:
        args = config.roles[role].megatron
        found |= {flag_of(f"{role}-{name}"): getattr(args, name) for name in _LEARNING}
        found |= {flag_of(f"{role}-{name}"): _BY_BYTES[getattr(args, name).itemsize] for name in _MOMENTS}
    return found


def changed_settings(manifest: dict, settings: dict[str, object]) -> str | None:
    """A line about the settings that differ from a checkpoint's; None if none does."""
    stored = manifest.get(SETTINGS, settings)
    changed = [name for name in sorted(stored.keys() & settings.keys()) if stored[name] != settings[name]]
    return ", ".join(f"{name} {settings[name]} (before: {stored[name]})" for name in changed) or None


def holds_average(manifest: dict) -> bool:
    """Whether a checkpoint has a moving average of the trained weights (`--ema-decay`)."""
    return manifest.get(SETTINGS, {}).get(flag_of("ema_decay")) is not None


def holds_prediction(manifest: dict) -> bool:
    """Whether a checkpoint has a layer of multi-token prediction that was trained (`--mtp-train`)."""
    return bool(manifest.get(SETTINGS, {}).get(flag_of("mtp_train")))


def changed_versions(manifest: dict) -> str | None:
    """A line about libraries whose versions differ from those that wrote a checkpoint; None if none does."""
    stored, now = manifest.get("versions", {}), manifests.versions()
    changed = [name for name in manifests.LIBRARIES if name in stored and stored[name] != now[name]]
    return ", ".join(f"{name} {now[name]} (before: {stored[name]})" for name in changed) or None


def changed_data(manifest: dict, data: dict[str, dict[str, str]]) -> list[str]:
    """Names of the `data_fingerprints` that differ from a checkpoint's; a file that either lacks does not differ."""
    stored = manifest.get(DATA, {})
    return [name for name in sorted(stored.keys() & data.keys()) if stored[name]["sha256"] != data[name]["sha256"]]


def check_data(manifest: dict, settings: Settings, data: dict[str, dict[str, str]]):
    """Checks that a run to resume has the data of its checkpoint.

    Raises:
        UsageError: another seed, tokenizer or chat template, or, without `--load-changed-data`, other prompts.
    """
    path, seed = settings.load, settings.seed
    stored = manifest.get(DATA, {})
    if manifest.get("seed", seed) != seed:
        raise UsageError(f"--seed {seed}: the checkpoint of --load {path} was written with --seed {manifest['seed']}")
    for name in changed_data(manifest, data):
        if _may_change(name) and settings.load_changed_data:
            continue
        advice = "; --load-changed-data resumes with other prompts" if _may_change(name) else ""
        raise UsageError(
            f"{flag_of(name)} {data[name]['value']}: has other content than the checkpoint of --load {path} "
            f"was written with ({stored[name]['value']}){advice}"
        )


def check_resume(program: str, config: RunConfig, data: dict, expected: dict[str, dict]) -> tuple[Path, dict]:
    """(the checkpoint of `--load` to resume from, its manifest), checked before any work starts.

    Args:
        program: module name of the program; checkpoints of other programs are rejected.
        data: `data_fingerprints` of the run.
        expected: role -> global shapes of its weights according to the flags, as for `folders.check_weights`.

    Raises:
        UsageError: no readable checkpoint of this program, these models, data and schedules, or no steps left to do.
    """
    path, train_iters = config.settings.load, config.settings.train_iters
    folder = folders.find(path, "--load")
    manifest = folders.read_manifest(folder, "--load")
    if manifest["program"] != program:
        raise UsageError(f"--load {path}: was written by {manifest['program']}; {program} resumes only its own runs")
    if missing := sorted({"prompt_order", "steps_skipped"} - manifest.keys()):
        raise UsageError(f"--load {folder}: manifest.json is damaged ({missing[0]} is missing)")
    if manifest["step"] >= train_iters:
        raise UsageError(
            f"--train-iters {train_iters}: the checkpoint of --load {path} is at step {manifest['step']}; "
            "allowed is more"
        )
    check_data(manifest, config.settings, data)
    for role, shapes in expected.items():
        held = folders.frozen_folder(folder, manifest, role, "--load")
        if held != folder:
            folders.check(held, "--load")
        folders.check_weights(held, "--load", role, shapes)
    resumed_flags.check(manifest, config)
    return folder, manifest
