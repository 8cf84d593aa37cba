"""Rules on models with a layer of multi-token prediction (`--mtp-train`, `--mtp-drafts`)."""

import re

from megarl.errors import Rule, UsageError
from megarl.mcore.config.rules import allow, only, require


def flag_of(settings) -> str:
    """The flag that gives the policy its layer, for messages."""
    return "--mtp-train" if settings.mtp_train else "--mtp-drafts"


def check_run(settings, megatron: dict, lora: dict, hf_models: dict):
    """Raises UsageError for what policy and rollout cannot have beside the layer.

    `megatron`, `lora`, `hf_models`: namespaces, factors and folders of roles.
    """
    if not settings.predicts:
        return
    flag = flag_of(settings)
    for role in (role for role in ("actor", "rollout") if role in megatron):
        require(role, megatron[role], _rules(megatron[role]), f"with {flag} ")
    if settings.debug_rollout_only:
        raise UsageError(f"{flag}: not with --debug-rollout-only")
    if lora.get("actor") is not None:
        raise UsageError(f"{flag}: not yet with --lora-rank {lora['actor'].rank}, which trains factors alone")
    if (folder := hf_models.get("actor")) is not None:
        _check_folder(flag, folder)
    elif not (settings.mtp_train or settings.load or megatron["actor"].pretrained_checkpoint):
        raise UsageError("--mtp-drafts: nothing has trained the layer; give --mtp-train, or a model that has it")


def _rules(args) -> list[Rule]:
    return [
        allow("--pipeline-model-parallel-size", args.pipeline_model_parallel_size == 1,
              "1: the layer reads the embedding and the last hidden states"),
        only(args, "--use-torch-fsdp2", False),
        only(args, "--transformer-impl", "local"),
        only(args, "--layernorm-position", "pre"),
        only(args, "--window-size"),
        only(args, "--hybrid-layer-pattern"),
        allow("--no-rope-freq", not args.no_rope_freq, "none"),
    ]  # fmt: skip


def _check_folder(flag: str, model):
    """UsageError unless a folder, an `HFModel`, has one layer."""
    prediction, folder = model.prediction, model.folder
    names = filter(None, map(model.naming.plain, folder.weights)) if folder.has_weights else ()
    layers = {re.search(r"layers\.(\d+)\.|$", name)[1] for name in names if prediction.has(name)} - {None}
    if not layers:
        raise folder.error(f"has no tensors of multi-token prediction, which {flag} needs")
    if not prediction.described.layer:
        raise folder.error(f"has a layer of multi-token prediction that exports keep and {flag} does not compute")
    if len(layers) > 1:
        raise folder.error(f"has {len(layers)} layers of multi-token prediction; {flag} allows 1")
