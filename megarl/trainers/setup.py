"""What a program does before its roles exist: checks of its flags, tokenizers, and the process groups of its roles."""

import os
from datetime import timedelta
from pathlib import Path

import torch

from megarl import arguments
from megarl.comm import role_mesh
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError


def check_training_flags(config: arguments.RunConfig):
    """Checks that all training programs share, beyond those of single flags. Raises UsageError."""
    s = config.settings
    check_required({"--prompts": s.prompts})
    arguments.check_microbatches(config)
    if s.eval_interval and not s.eval_prompts:
        raise UsageError(f"--eval-interval {s.eval_interval}: needs --eval-prompts")
    if s.save_interval and not s.save:
        raise UsageError(f"--save-interval {s.save_interval}: needs --save")
    check_save(s)


def build_role_encoder(role: arguments.RoleSettings, settings: arguments.Settings) -> Encoder:
    """A role's tokenizer with its chat template; errors name the role's own flags where it has such."""
    own = (role.tokenizer_type, role.tokenizer_model) != (settings.tokenizer_type, settings.tokenizer_model)
    tokenizer = build_tokenizer(role.tokenizer_type, role.tokenizer_model, f"{role.name}-" if own else "")
    prefix = "" if role.chat_template == settings.chat_template else f"{role.name}-"
    return build_encoder(tokenizer, None if role.chat_template == "none" else role.chat_template, prefix)


def check_required(flags: dict[str, object]):
    """UsageError for the first of these flags that has no value."""
    for flag, value in flags.items():
        if not value:
            raise UsageError(f"{flag} is missing: it has no default")


def check_save(settings: arguments.Settings):
    """UsageError unless `--save`, where it is given, can be made or written to."""
    if settings.save:
        path = Path(settings.save).absolute()
        there = next(p for p in (path, *path.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"--save {settings.save}: {there} is not a folder that can be written to")


def make_deterministic():
    """Kernels that give the same bits each time, or an error where there is none."""
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def create_role_mesh(config: arguments.RunConfig) -> role_mesh.RoleMesh:
    """Joins the process group and creates all roles' groups, with the time-out `--distributed-timeout-minutes`."""
    if config.settings.deterministic:
        make_deterministic()
    minutes = next(iter(config.roles.values())).megatron.distributed_timeout_minutes
    return role_mesh.create_mesh(config.roles, timedelta(minutes=minutes))
