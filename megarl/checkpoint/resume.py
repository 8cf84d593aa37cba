"""A run that resumes: from which checkpoint, whether its data, settings, schedules and optimizers are those of the
checkpoint, and which of them count; the roles' states and the random states are restored."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from megarl import bundled
from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.checkpoint import folders, pretrained
from megarl.checkpoint import manifest as manifests
from megarl.comm.role_mesh import RoleMesh
from megarl.data.chat import NO_OPTIONS
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError, flag_of
from megarl.flags.distillation import SIBLING
from megarl.mcore.config.optimizer_flags import frozen_patterns
from megarl.mcore.weights import dist_checkpoint
from megarl.plain_files import read_bytes

DATA = "data"  # the manifest's entry with the fingerprints of prompts, tokenizer and chat template
SETTINGS = "settings"  # the manifest's entry with the settings that decide the numbers
# Settings of files, layout, memory and the length of a run, and those that DATA fingerprints.
_NOT_NUMBERS = set(
    """
    role_map prompts eval_prompts evals prompt_column answer_column response_column messages_column chosen_column
    rejected_column filter_long_prompts hf_model tokenizer_type tokenizer_model chat_template chat_template_kwargs
    chat_template_date bos seed teacher_context_template reward_model reward_hf_model judge_config judge_hf_model
    judge_load judge_buffer_gb judge_max_requests judge_max_length reward_url reward_retries reward_concurrency
    reward_memory_mb reward_timeout reward_workers rollout_buffer_gb rollout_max_requests rollout_dispatch
    rollout_prefix_caching rollout_state_snapshots rollout_chunked_prefill speculative_rollout mtp_drafts decode_graphs
    verify_weights max_tokens_per_microbatch lora_adapter export_peft export_hf hf_mtp eval_interval evaluate_ema
    keep_best best_metric offload train_iters deterministic save overwrite save_interval async_save keep_last
    keep_every keep_responses on_save_failure load load_changed_data kernels replay_schedule save_rollouts load_rollouts
    debug_train_only debug_rollout_only profile_steps profile_memory trackers tracker_project tracker_run
    tracker_folder tracker_offline images_column images_folder image_cache_gb max_images save_memory
    replica_port min_replicas replica_timeout
    """.split()
)
_LEARNING = tuple(
    """
    lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad lr_decay_style lr_decay_iters lr_warmup_iters
    lr_warmup_fraction global_batch_size bf16 fp16 sgd_momentum
    """.split()
)
_MOMENTS, _BY_BYTES = ("exp_avg_dtype", "exp_avg_sq_dtype"), {4: "fp32", 2: "bf16"}
PROMPTS, EVAL_PROMPTS, EVALS = "prompts", "eval_prompts", "evals "  # sets in DATA; a name of --evals follows the last
IMAGES = "images"  # entry of the manifest, of a run whose prompts have images: its tower and what made the pixels
SCHEDULES, OPTIMIZERS = "schedules", "optimizers"  # entries of the manifest: role -> `schedule_flags`, `state_flags`
_MULTIPLIERS = ("lr_multipliers", "weight_decay_multipliers")
_WARMUP = ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init")
_ALWAYS = ("lr", "decoupled_lr", "lr_decay_style", *_WARMUP, "weight_decay_incr_style", *_MULTIPLIERS)
_OF_WEIGHT_DECAY = ("start_weight_decay", "end_weight_decay")  # --weight-decay if it is constant
_OF_A_DECAY = ("min_lr", "decoupled_min_lr", "lr_wsd_decay_iters", "lr_wsd_decay_style")
_KINDS = ("bf16", "fp16", "use_distributed_optimizer", "use_torch_fsdp2")


def data_fingerprints(encoder: Encoder, settings: Settings, prompts: dict[str, PromptSet]) -> dict[str, dict[str, str]]:
    """The manifest's entry about a run's data: {flag: {"value": …, "sha256": …}}; values are for messages only.

    `prompts`: the sets of `--prompts`, `--eval-prompts` and `--evals` by their names here, after their filter.
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


def _entry(value: str | None, content: bytes) -> dict[str, str]:
    return {"value": str(value or "(default)"), "sha256": hashlib.sha256(content).hexdigest()}


def settings_entry(config: RunConfig) -> dict[str, object]:
    """The manifest's entry about the settings that decide a run's numbers, by flag; roles' flags have their prefix."""
    settings = config.settings
    found = {flag_of(name): value for name, value in vars(settings).items() if name not in _NOT_NUMBERS}
    for name, decides in (("judge_config", True), ("teacher_context_template", settings.teacher_context == SIBLING)):
        if decides and (path := getattr(settings, name)):  # whose content decides
            digest = hashlib.sha256(read_bytes(bundled.find(path))).hexdigest()
            found[flag_of(name)] = f"of sha256 {digest[:12]}"
    for role in config.trained:
        args = config.roles[role].megatron
        found |= {flag_of(f"{role}-{name}"): getattr(args, name) for name in _LEARNING}
        found |= {flag_of(f"{role}-{name}"): _BY_BYTES[getattr(args, name).itemsize] for name in _MOMENTS}
    return found


def changed_settings(manifest: dict, settings: dict[str, object]) -> str | None:
    """A line about the settings that differ from a checkpoint's; None if none does."""
    return _changes(manifest.get(SETTINGS, settings), settings)


def holds_average(manifest: dict) -> bool:
    """Whether a checkpoint has a moving average of the trained weights (`--ema-decay`)."""
    return manifest.get(SETTINGS, {}).get(flag_of("ema_decay")) is not None


def holds_prediction(manifest: dict) -> bool:
    """Whether a checkpoint has a layer of multi-token prediction that was trained (`--mtp-train`)."""
    return bool(manifest.get(SETTINGS, {}).get(flag_of("mtp_train")))


def changed_versions(manifest: dict) -> str | None:
    """A line about libraries whose versions differ from those that wrote a checkpoint; None if none does."""
    now = manifests.versions()
    return _changes(manifest.get("versions", {}), {name: now[name] for name in manifests.LIBRARIES})


def _changes(stored: dict, now: dict) -> str | None:
    changed = [name for name in sorted(stored.keys() & now.keys()) if stored[name] != now[name]]
    return ", ".join(change(name, stored[name], now[name]) for name in changed) or None


def changed_data(manifest: dict, data: dict[str, dict[str, str]]) -> list[str]:
    """Names of the `data_fingerprints` that differ from a checkpoint's; a file that either lacks does not differ."""
    stored = manifest.get(DATA, {})
    return [name for name in sorted(stored.keys() & data.keys()) if stored[name]["sha256"] != data[name]["sha256"]]


def check_data(manifest: dict, settings: Settings, data: dict[str, dict[str, str]]):
    """UsageError for another seed, tokenizer or chat template than the checkpoint's, and, without
    `--load-changed-data`, for other prompts."""
    path, seed = settings.load, settings.seed
    if manifest.get("seed", seed) != seed:
        raise UsageError(f"--seed {seed}: the checkpoint of --load {path} was written with --seed {manifest['seed']}")
    for name in changed_data(manifest, data):
        may_change = name == PROMPTS or is_held_out(name)
        if not (may_change and settings.load_changed_data):
            advice = "; --load-changed-data resumes with other prompts" if may_change else ""
            raise UsageError(
                f"{flag_of(name)} {data[name]['value']}: has other content than the checkpoint of --load {path} "
                f"was written with ({manifest[DATA][name]['value']}){advice}"
            )


def check_resume(
    program: str, config: RunConfig, data: dict, roles: list[RoleSettings], tokens: int
) -> tuple[Path, dict]:
    """(the checkpoint of `--load` to resume from, its manifest), checked before any work starts. UsageError for no
    readable checkpoint of this program, these models, data and schedules, or no steps left to do.

    Args:
        program: module name of the program.
        data: `data_fingerprints` of the run.
        roles: those whose weights the checkpoint has.
        tokens: of the run's tokenizer.
    """
    path, train_iters = config.settings.load, config.settings.train_iters
    pretrained.check_factors(path, roles)
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
    for role in roles:
        held = folders.frozen_folder(folder, manifest, role.name, "--load")
        if held != folder:
            folders.check(held, "--load")
        folders.check_weights(held, "--load", role.name, pretrained.resume_shapes(role, tokens))
    check_schedules(manifest, config)
    return folder, manifest


def schedule_flags(args) -> dict[str, object]:
    """The flags of a role that decide the learning rate and weight decay of each step, by name in Megatron's namespace.

    The steps of a decay count only if anything decays: a run with constant rates may become longer.
    """
    has_decay, is_constant = args.lr_decay_style != "constant", args.weight_decay_incr_style == "constant"
    names = (*_ALWAYS, *_OF_A_DECAY * has_decay, *(("weight_decay",) if is_constant else _OF_WEIGHT_DECAY))
    found = {name: getattr(args, name) for name in names}
    if has_decay or args.lr_warmup_fraction is not None or not is_constant:
        found["lr_decay_iters"] = args.lr_decay_iters or args.train_iters
    return found


def state_flags(args) -> dict[str, object]:
    """The flags of a role that decide which states its optimizer has, by name in Megatron's namespace."""
    found: dict[str, object] = {"optimizer": args.optimizer, "freeze": sorted(frozen_patterns(args))}
    if args.optimizer == "sgd":
        found["sgd_momentum"] = "above 0" if args.sgd_momentum else "0"
    if frozen_patterns(args):  # other kinds name the fp32 weights of whole stacks of layers
        found |= {name: getattr(args, name) for name in _KINDS}
    return found


def manifest_entries(config: RunConfig) -> dict:
    """The entries of a checkpoint's manifest about the schedules and the optimizers of the trained roles."""
    args = {name: config.roles[name].megatron for name in config.trained}
    return {
        SCHEDULES: {name: schedule_flags(of_role) for name, of_role in args.items()},
        OPTIMIZERS: {name: state_flags(of_role) for name, of_role in args.items()},
    }


def _other_schedules(manifest: dict, config: RunConfig) -> Iterator[tuple[RoleSettings, dict, str]]:
    """(role, its flags in the checkpoint, what differs) of each role whose schedule is not the checkpoint's."""
    for role in map(config.roles.__getitem__, config.trained):
        found = schedule_flags(role.megatron)
        saved = manifest[SCHEDULES].get(role.name, found)
        # A flag that only one of them has goes with the style of the decay, which then differs, too.
        changed = [name for name in found.keys() & saved.keys() if found[name] != saved[name]]
        if changed:
            yield role, saved, ", ".join(change(flag_of(name), saved[name], found[name]) for name in sorted(changed))


def change(name: str, before: object, after: object) -> str:
    """What a warning or an error says about a value that is not the checkpoint's."""
    before, after = (" ".join(value) if isinstance(value, list) else value for value in (before, after))
    before, after = ("none" if value is None else value for value in (before, after))
    return f"{name} {after} (before: {before})"


def check_schedules(manifest: dict, config: RunConfig):
    """UsageError for a role with another schedule than in the checkpoint of `--load`, unless a flag says which of them
    counts, and for one with another optimizer, or other frozen parameters."""
    path = config.settings.load
    for role, _, changes in _other_schedules(manifest, config):
        if not role.megatron.override_opt_param_scheduler and not role.megatron.use_checkpoint_opt_param_scheduler:
            raise UsageError(
                f"{changes}: not the schedule of the {role.name} in the checkpoint of --load {path}; "
                "--override-opt-param-scheduler takes the new one, --use-checkpoint-opt-param-scheduler the old one"
            )
    for role in map(config.roles.__getitem__, config.trained):
        found = state_flags(role.megatron)
        saved = manifest[OPTIMIZERS].get(role.name, found)
        for name in (name for name in found if found[name] != saved.get(name, found[name])):
            raise UsageError(
                f"{flag_of(name)} {_text(getattr(role.megatron, name))}: the {role.name} in the checkpoint of --load "
                f"{path} has optimizer states of {flag_of(name)} {_text(saved[name])}; --pretrained-checkpoint "
                "starts a new run from its weights"
            )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) and value else str(value or "(none)")


def adopt_schedules(manifest: dict, config: RunConfig) -> list[str]:
    """Gives roles with `--use-checkpoint-opt-param-scheduler` the schedule of the checkpoint, before models are built.
    Returns a line for each about the flags that do not count."""
    lines = []
    for role, saved, changes in _other_schedules(manifest, config):
        if role.megatron.use_checkpoint_opt_param_scheduler:
            vars(role.megatron).update(dict.fromkeys(_OF_WEIGHT_DECAY) | saved)
            lines.append(f"--use-checkpoint-opt-param-scheduler: the {role.name} does not use {changes}")
    return lines


def load_states(folder: Path, mesh: RoleMesh, roles: dict) -> dict:
    """Loads the roles' states from a checkpoint and returns them by role; a collective of the world.

    Random states are restored only if the world size is the same. No result depends on them: megarl draws every random
    number from seed, step and position, so a run can resume in another layout with the same numbers.
    """
    loaded, manifest = {}, folders.read_manifest(folder, "--load")
    for name, role_groups in mesh.roles.items():
        if name in roles:
            held, groups = folders.frozen_folder(folder, manifest, name, "--load"), role_groups.pg_collection
            prediction = roles[name].pop(dist_checkpoint.PREDICTION, None)
            loaded[name] = dist_checkpoint.load_role(roles[name], held, groups)
            if prediction is not None:  # the run that wrote the checkpoint may have had none
                of_role = dist_checkpoint.prediction_of(name)
                found = dist_checkpoint.load_if_held(prediction, held, groups, of_role)
                loaded[name] |= {} if found is None else {dist_checkpoint.PREDICTION: found}
    if manifest["world_size"] == mesh.size:
        dist_checkpoint.restore_rank_state(dist_checkpoint.load(dist_checkpoint.rank_state(), folder)["rng"])
    return loaded
