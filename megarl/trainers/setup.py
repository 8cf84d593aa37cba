"""Set-up shared by the programs before their roles exist: flag checks, tokenizers and process groups."""

import functools
import gc
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist

from megarl import arguments
from megarl.checkpoint import earlier_run, folders, host_memory
from megarl.comm import role_mesh
from megarl.data import node_files
from megarl.data.chat import TemplateOptions
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.images.book import Images
from megarl.data.images.processor import read_processor
from megarl.data.tokenizers import Tokenizer, build_tokenizer
from megarl.errors import CHECKS_FIRST, UsageError, warn_as_first
from megarl.faults import heartbeat, run_lock
from megarl.flags import role_flags
from megarl.flags.run import parse_step_range
from megarl.mcore import device, kernel_choice
from megarl.mcore.config import kernel_rules, optimizer_flags, recurrent_rules
from megarl.mcore.kernels import native
from megarl.mcore.weights.hf.folder import HFFolder
from megarl.observe.profiler import StepProfiler
from megarl.observe.timers import Timers
from megarl.observe.trackers import check_installed
from megarl.planning.parameters import check_patterns
from megarl.trainers.events import check_exports
from megarl.trainers.prompt_inputs import print_notes

Inputs = TypeVar("Inputs")


def check_training_flags(config: arguments.RunConfig, sequences: int = 1):
    """Checks flags that all training programs share. `sequences`: of an example. Raises UsageError."""
    s = config.settings
    check_required({"--prompts": s.prompts})
    role_flags.check_microbatches(config, sequences)
    check_patterns(config)
    if s.eval_interval and not s.evaluates:
        raise UsageError(f"--eval-interval {s.eval_interval}: needs --eval-prompts")
    if s.save_interval and not s.save:
        raise UsageError(f"--save-interval {s.save_interval}: needs --save")
    if s.save_memory:
        host_memory.attach(str(s.save), only_whole=config.check)
    check_exports(s, config.roles["actor" if "actor" in config.roles else "reward"])
    check_save(s)
    earlier_run.check(config)
    _check_profile_ranks(config)
    if s.save:
        check_installed(s.trackers)


def _check_profile_ranks(config: arguments.RunConfig):
    steps, roles = config.settings.profile_steps, list(config.roles.values())
    size = max(role.ranks.stop for role in roles)
    for role in roles:
        ranks = role.megatron.profile_ranks
        if ranks != roles[0].megatron.profile_ranks and role.name != "rollout":
            raise UsageError(f"--{role.name}-profile-ranks: the ranks are those of the world; leave the prefix out")
        if ranks and steps is None:
            raise UsageError(f"--profile-ranks {_text(ranks)}: needs --profile-steps")
        if ranks and not 0 <= min(ranks) <= max(ranks) < size:
            raise UsageError(f"--profile-ranks {_text(ranks)}: allowed are ranks of the run, 0 to {size - 1}")


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def build_role_encoder(role: arguments.RoleSettings, settings: arguments.Settings) -> Encoder:
    """A role's tokenizer with its chat template. Errors name the role's prefixed flags or folder, if any."""
    own = (role.tokenizer_type, role.tokenizer_model) != (settings.tokenizer_type, settings.tokenizer_model)
    folder = role.hf_model.folder if role.hf_model is not None else None
    flag = folder.flag if own and folder is not None and role.tokenizer_model == str(folder.path) else None
    tokenizer = build_tokenizer(role.tokenizer_type, role.tokenizer_model, f"{role.name}-" if own else "", flag)
    _warn_once(getattr(tokenizer, "notice", None))
    where = None if folder is None else f"{flag or '--tokenizer-model'} {role.tokenizer_model}"

    def prefix(name: str) -> str:
        return "" if getattr(role, name) == getattr(settings, name) else f"{role.name}-"

    values, date = role.chat_template_kwargs, role.chat_template_date
    own_options = prefix("chat_template_kwargs") or prefix("chat_template_date")
    options = TemplateOptions.of_flags(values, date, own_options)
    images = images_of(folder, tokenizer, settings)
    return build_encoder(tokenizer, role.chat_template, prefix("chat_template"), where, options, role.bos, images)


def images_of(folder: HFFolder | None, tokenizer: Tokenizer, settings: arguments.Settings) -> Images | None:
    """The images that prompts of a model may have; None: it has no vision tower, so columns of images are not read."""
    s = settings
    if folder is None or "vision_config" not in folder.config:
        return None
    where = f"{folder.flag} {folder.path}"
    return Images(read_processor(folder.path, folder.config, tokenizer, where, s.image_max_pixels), s.max_images)


@functools.cache
def _warn_once(notice: str | None):
    if notice is not None:
        warn_as_first([notice])


def check_vocabulary(role: arguments.RoleSettings, tokens: int):
    """UsageError if a role's Hugging Face folder describes a model of fewer than `tokens` tokens."""
    if role.hf_model is not None and role.hf_model.vocab_size < tokens:
        raise role.hf_model.folder.error(
            f"config.json: vocab_size {role.hf_model.vocab_size}: the {role.name} reads ids up to {tokens - 1}"
        )


def check_required(flags: dict[str, object]):
    """UsageError for the first of these flags that has no value."""
    for flag, value in flags.items():
        if not value:
            raise UsageError(f"{flag} is missing: it has no default")


def check_save(settings: arguments.Settings):
    """UsageError if a folder that the run writes to cannot be created or written to."""
    s = settings
    folders_of = {"--save": s.save, "--tracker-folder": s.tracker_folder}
    for flag, folder in folders_of.items():
        path = Path(folder or ".").absolute()
        existing = next(p for p in (path, *path.parents) if p.exists())
        if folder and not _is_writable(existing):
            raise UsageError(f"{flag} {folder}: {existing} is not a writable folder")


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made in a folder. Permissions alone do not say it of every file system, nor for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def read_inputs(
    config: arguments.RunConfig,
    timers: Timers,
    read: Callable[[], Inputs],
    notes: TextIO | None = None,
    folder: str | None = None,
) -> tuple[Inputs, role_mesh.RoleMesh, list[Path]]:
    """Reads a program's inputs, joins the process group, and reads every checkpoint among the inputs for damage.

    If the latest checkpoint of a run is damaged, the inputs are read again with the newest intact one. With `--check`
    the program ends here, before the process group.

    Args:
        read: reads and checks the inputs, `prompt_sets` among them if there are prompts; raises UsageError.
        notes: where lines about the kernels and the inputs go; None: standard output.
        folder: of a training run, which gets a lock and a status.json; what it holds of an earlier one moves aside.

    Returns:
        The inputs, the role mesh, and the checkpoints among the inputs.
    """
    check_kernels(config)
    check_device(config)
    with folders.recorded() as found:
        inputs = read()
    if config.check:
        from megarl.trainers import input_summary

        if os.environ.get("RANK", "0") == "0" and not os.environ.get(CHECKS_FIRST):  # set before a run
            print("\n".join(input_summary.summary(config, inputs)), flush=True)
        raise SystemExit(0)
    gc.freeze()  # collecting garbage skips what imports and inputs have made
    gc.enable()
    run_lock.take(folder)
    earlier_run.begin(config, folder)
    mesh, intact = create_role_mesh(config, timers, Path(folder) if folder else None), set()
    choose_kernels(config, mesh.rank, notes)
    _say_random_weights(config, mesh.rank, notes)
    print_notes(getattr(inputs, "prompt_sets", {}), mesh.rank, notes)  # a server has none
    while damaged := folders.find_damage([folder for folder in dict.fromkeys(found) if folder not in intact]):
        intact |= set(found) - damaged.keys()
        for checkpoint, problem in damaged.items():
            folders.mark_damaged(checkpoint, problem)
        with folders.recorded() as found:
            inputs = read()
    if mesh.size > 1:
        dist.barrier()  # all ranks have read their inputs
    node_files.remove()
    return inputs, mesh, found


def check_kernels(config: arguments.RunConfig):
    """UsageError if `--kernels` names some that this machine does not have."""
    wanted, allowed = config.settings.kernels, [kernel_choice.AUTO, *kernel_choice.available()]
    if wanted not in allowed and not device.has_cuda():
        raise UsageError(f"--kernels {wanted}: not on this machine; allowed here: {', '.join(allowed)}")
    for role in config.with_models():
        kernel_rules.check_choice(role.name, role.megatron, wanted)
    if absence := native.absence():
        for role in config.with_models():
            if recurrent_rules.keeps_states(role.megatron):
                raise UsageError(
                    f"{role.name}: {recurrent_rules.flag_of(role.megatron)}: needs compiled kernels on a CPU: {absence}"
                )


def check_device(config: arguments.RunConfig):
    """UsageError if a role keeps optimizer states on the host and there is no device beside it, or names kernels of a
    device that are not here."""
    for role in config.with_models():
        recurrent_rules.check_backend(role.name, role.megatron)
    for role in (config.roles[name] for name in config.trained):
        if role.megatron.optimizer_cpu_offload and not device.has_cuda():
            raise UsageError(
                f"{role.name}: {optimizer_flags.OFFLOAD}: needs a CUDA device; on a CPU nothing would move"
            )


def choose_kernels(config: arguments.RunConfig, rank: int, notes: TextIO | None = None):
    """Makes all ranks compute with the same kernels, which the first rank names in one line; with CUDA it only names
    those of gated delta nets.

    A collective of the world.
    """
    if device.has_cuda():
        line = recurrent_rules.load_backends([role.megatron for role in config.with_models()])
        if rank == 0 and line:
            print(f"megarl: kernels of gated delta nets: {line}", file=notes, flush=True)
        return
    sizes = {size for role in config.with_models() for size in kernel_choice.product_sizes(role.megatron)}
    kernels = kernel_choice.choose(config.settings.kernels, sizes)
    kernel_choice.use(kernels)
    if rank == 0:
        absence = native.absence()
        print(f"megarl: kernels: {kernels}" + f" ({absence})" * bool(absence), file=notes, flush=True)


def _say_random_weights(config: arguments.RunConfig, rank: int, notes: TextIO | None):
    """A line of the first rank if the model that is trained begins with random weights, which a user may not intend."""
    role = config.roles[config.trained[0]] if config.trained else None
    if rank != 0 or role is None or config.settings.load or role.lora_adapter:
        return
    if role.hf_model is None and role.megatron.pretrained_checkpoint is None:
        line = f"megarl: {role.name}: begins with random weights: no --hf-model, --pretrained-checkpoint or --load"
        print(line, file=notes, flush=True)


def create_role_mesh(config: arguments.RunConfig, timers: Timers, folder: Path | None = None) -> role_mesh.RoleMesh:
    """Joins the process group, starts the heartbeat, which reports to `folder`, and creates all roles' groups."""
    if config.settings.deterministic:
        torch.use_deterministic_algorithms(True)  # operations without a deterministic kernel raise an error
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    limit = progress_limit(config)
    role_mesh.join_process_group(limit, role_mesh.NO_LIMIT)
    heartbeat.start(limit, timers, folder)
    return role_mesh.create_mesh(config.roles, role_mesh.NO_LIMIT)


def step_profiler(config: arguments.RunConfig, mesh: role_mesh.RoleMesh, timers: Timers) -> StepProfiler | None:
    """The profiler of `--profile-steps` on the ranks of `--profile-ranks`, by default all; None elsewhere."""
    s, ranks = config.settings, next(iter(config.roles.values())).megatron.profile_ranks
    if s.profile_steps is None or (ranks and mesh.rank not in ranks):
        return None
    steps, roles = parse_step_range(s.profile_steps), mesh.roles_of(mesh.rank)
    return StepProfiler(Path(s.save), steps, mesh.rank, roles, timers, s.profile_memory)


def progress_limit(config: arguments.RunConfig) -> timedelta:
    """The longest time without progress before a run counts as hung, `--distributed-timeout-minutes`."""
    return timedelta(minutes=next(iter(config.roles.values())).megatron.distributed_timeout_minutes)
