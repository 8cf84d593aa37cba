"""Flags of learning: updates, the critic, LoRA, multi-token prediction, moving average and refreshed reference; and the
low-rank factors of each role.
"""

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.errors import UsageError
from megarl.flags.conditions import CRITIC, ENGINE, REFERENCE, TRAINED, Broken, FlagContext, on
from megarl.flags.fields import TRAINING, flag, not_negative, positive

if TYPE_CHECKING:
    from megarl.mcore.lora.targets import LoRASettings

MODELS = ("actor", "critic", "reward", "reference", "teacher")  # roles that run a model over packed sequences
TRAINED_ROLES = ("actor", "critic")

REFRESHES = on(lambda s: s.reference_update_interval > 0, "needs --reference-update-interval")
AVERAGES = on(lambda s: s.ema_decay is not None and s.evaluates, "needs --ema-decay and --eval-prompts")
ALL_LINEAR = "all-linear"
# Those of `megarl.mcore.lora.targets`, whose import takes seconds: it imports Megatron.
TARGETS = tuple(
    """
    q_proj k_proj v_proj o_proj gate_proj up_proj down_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj g_proj
    in_proj_q in_proj_k in_proj_v in_proj_z in_proj_b in_proj_a g_a_proj g_b_proj f_a_proj f_b_proj in_proj out_proj
    """.split()
)
NAMES = f"{ALL_LINEAR}, or names with commas among {', '.join(TARGETS)}"
FLAGS = ("lora_rank", "lora_alpha", "lora_rslora", "lora_targets", "lora_adapter")
QUERY_LATENT = ("q_a_proj", "q_b_proj")
OF_HIDDEN = ("in_proj_z", "in_proj_a")  # which layers with latents of gates and decays do not have
OF_ADAPTER = ("lora_alpha", "lora_rslora", "lora_targets")  # an adapter's folder gives them


def are_targets(text: str) -> bool:
    """Whether the text has the form of names of layers; which names there are depends on the model."""
    return text == ALL_LINEAR or all(re.fullmatch(r"\w+(\.\w+)*", name.strip()) for name in text.split(","))


@dataclasses.dataclass(frozen=True)
class Learning:
    """Learning."""

    train_iters: int = positive(100, programs=TRAINING)
    """number of training steps"""
    ppo_epochs: int = positive(1)
    """epochs over a step's batch (1707.06347)"""
    minibatch_size: int | None = positive(None)
    """sequences per optimizer update, in whole groups if --samples-per-prompt divides it; default: the whole batch"""
    max_tokens_per_microbatch: int = positive(16384, programs=TRAINING, roles=MODELS)
    """maximum tokens of a micro-batch; may differ per role"""
    value_clip_range: float = positive(0.2, when=CRITIC)
    """clip range of the value loss"""
    critic_warmup_steps: int = not_negative(0, when=CRITIC)
    """first steps in which only the critic is trained"""
    offload: bool = flag(False, roles=MODELS)
    """keep a role's memory on the host while the role is idle; may differ per role"""
    # LoRA.
    lora_rank: int | None = flag(
        None,
        lambda v: v > 0,
        "a number above 0; leave it out to train all weights",
        programs=TRAINING,
        roles=TRAINED_ROLES,
    )
    """train low-rank factors of this rank instead of the weights (2106.09685); may differ per role; default: all
    weights"""
    lora_alpha: float | None = positive(None, programs=TRAINING, roles=TRAINED_ROLES)
    """α of the factors' scale α/rank; default: --lora-rank"""
    lora_rslora: bool = flag(False, programs=TRAINING, roles=TRAINED_ROLES)
    """scale the factors by α/√rank (2312.03732)"""
    lora_targets: str | None = flag(
        None,
        are_targets,
        f"{NAMES}; with --model-source transformers names of the module's linear layers",
        programs=TRAINING,
        roles=TRAINED_ROLES,
        names=TARGETS,
    )
    """layers with factors, with commas: {names} (of experts, too), or all-linear for all of them, the default"""
    lora_adapter: str | None = flag(None, programs=TRAINING, roles=TRAINED_ROLES)
    """folder of a PEFT adapter: the factors to start from, with their rank, scale and targets; needs --hf-model; a
    larger --lora-rank adds to theirs"""
    # Multi-token prediction.
    mtp_train: bool = flag(False, programs="rl sft", when=TRAINED)
    """train the layer of multi-token prediction on the policy's responses, by its own loss, gradient norm and
    optimizer: the policy's own numbers stay the same to the bit (2412.19437)"""
    mtp_drafts: bool = flag(False, when=ENGINE)
    """decode steps also read what the layer of multi-token prediction drafts; text and log-probs stay the same to the
    bit"""
    # Moving average and refreshed reference.
    ema_decay: float | None = flag(None, lambda v: 0 < v < 1, "above 0, below 1", programs=TRAINING, when=TRAINED)
    """keep an exponential moving average of the trained weights with this decay D: e ← D·e + (1 − D)·w after each step;
    default: none"""
    evaluate_ema: bool = flag(False, programs=TRAINING, when=AVERAGES)
    """evaluate the moving average instead of the weights that are trained"""
    reference_update_interval: int = not_negative(0, when=REFERENCE)
    """steps after which the reference gets the actor's weights, each time (2505.24864); 0: never"""
    reference_mixup: float = flag(1.0, lambda v: 0 < v <= 1, "above 0, at most 1", when=REFRESHES)
    """α of that: w_ref ← α·w + (1 − α)·w_ref (2404.09656)"""

    @property
    def predicts(self) -> bool:
        """Whether policy and rollout have the layer that predicts the token after the next one."""
        return self.mtp_train or self.mtp_drafts


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of updates."""
    s = run.settings
    if s.minibatch_size is not None and s.minibatch_size > s.sequences_per_step:
        why = f"allowed is at most --prompts-per-step × --samples-per-prompt = {s.sequences_per_step}"
        yield "--minibatch-size", why


def lora_of_roles(
    own: dict[str, dict], megatron: dict, hf_models: dict, trained: tuple[str, ...]
) -> "dict[str, LoRASettings | None]":
    """The factors of each role; None for a role that trains all of its weights, or none.

    `own`, `megatron`, `hf_models`: values of own flags, namespaces and Hugging Face folders by role. UsageError
    for factors that the role's model cannot have, or a flag that needs another one.
    """
    found: dict[str, LoRASettings | None] = dict.fromkeys(own)
    given = {}
    for role in (role for role in own if role in trained):
        flags = {name: own[role][name] for name in FLAGS}
        given |= {"--" + name.replace("_", "-"): value for name, value in flags.items() if value}
        found[role] = factors = _settings_of(role, types.SimpleNamespace(**flags), megatron[role], hf_models[role])
        if factors is not None:
            _check_stages(role, factors.targets, megatron[role])
    if given and not any(found.values()):
        flag, value = next(iter(given.items()))
        raise UsageError(f"{flag} {value}: needs --lora-rank or --lora-adapter")
    return found


def _settings_of(role: str, role_settings, args, hf_model) -> "LoRASettings | None":
    from megarl.mcore.lora.targets import LoRASettings  # imports Megatron

    if role_settings.lora_rank is None and role_settings.lora_adapter is None:
        return None
    if args.transformer_impl != "local":  # the layers that have factors
        raise UsageError(
            f"{role}: --transformer-impl {args.transformer_impl}: allowed is local with --lora-rank or --lora-adapter"
        )
    if role_settings.lora_adapter is not None:
        return _of_adapter(role, role_settings, args, hf_model)
    alpha = role_settings.lora_rank if role_settings.lora_alpha is None else role_settings.lora_alpha
    targets = _targets(role, role_settings.lora_targets, args)
    return LoRASettings(
        rank=role_settings.lora_rank, alpha=float(alpha), rslora=role_settings.lora_rslora, targets=targets
    )


def _of_adapter(role: str, role_settings, args, hf_model) -> "LoRASettings":
    """The factors of a PEFT adapter; a larger `--lora-rank` keeps their scale."""
    from megarl.mcore.lora.peft_files import read_adapter  # imports Megatron
    from megarl.mcore.weights.hf.hf_model import check_adapters

    path, rank = role_settings.lora_adapter, role_settings.lora_rank
    if hf_model is None:
        raise UsageError(f"--lora-adapter {path}: the {role} needs --hf-model, whose modules it names")
    check_adapters(hf_model, f"--lora-adapter {path}")
    for name in (name for name in OF_ADAPTER if getattr(role_settings, name)):
        raise UsageError(f"--{name.replace('_', '-')}: --lora-adapter {path} gives it; leave it out")
    adapter = read_adapter(path, args, hf_model.family)
    if adapter.head is not None and role == "actor":
        raise UsageError(
            f"--lora-adapter {path}: has a scalar head (score.weight), which the actor has not; allowed "
            "is an adapter of a causal language model"
        )
    stored = adapter.lora
    if rank is None:
        return stored
    if rank < stored.rank:
        raise UsageError(f"--lora-rank {rank}: the factors of --lora-adapter {path} need {stored.rank} or more")
    return stored.with_rank(rank)


def _targets(role: str, text: str | None, args) -> tuple[str, ...]:
    from megarl.mcore.lora.targets import parse_targets  # imports Megatron

    if args.model_folder is not None:
        return args.model_folder.parse_targets(text or ALL_LINEAR)
    if text not in (None, ALL_LINEAR) and not {name.strip() for name in text.split(",")} <= {*TARGETS}:
        raise UsageError(f"--lora-targets {text}: allowed is {NAMES}")
    targets, missing = parse_targets(text or ALL_LINEAR), _missing(args)
    if text not in (None, ALL_LINEAR):
        for name in (name for name in targets if name in missing):
            raise UsageError(f"--lora-targets {text}: the {role} has no {name}, which needs {missing[name]}")
    return tuple(name for name in targets if name not in missing)


def _missing(args) -> dict[str, str]:
    """The targets that a model does not have, and what they need."""
    from megarl.mcore.config.model_flags import is_gated  # imports Megatron
    from megarl.mcore.config.recurrent_rules import FLAG, PATTERN, has_states
    from megarl.mcore.lora.targets import (
        ATTENTION_TARGETS,
        GATE_LATENT_TARGETS,
        GATE_TARGETS,
        IN_PROJ_TARGETS,
        LATENT_TARGETS,
        MLP_TARGETS,
    )

    found = {} if is_gated(args) else {"gate_proj": "a gated MLP, as of --swiglu"}
    pattern, gate_rank = args.hybrid_layer_pattern, "--linear-gate-rank"
    if args.experimental_attention_variant is None:
        found |= dict.fromkeys(IN_PROJ_TARGETS, FLAG)
    has_rank = args.linear_gate_rank is not None
    found |= dict.fromkeys(OF_HIDDEN, f"no {gate_rank}") if has_rank else dict.fromkeys(GATE_LATENT_TARGETS, gate_rank)
    if not args.multi_latent_attention or not args.attention_output_gate:
        found |= dict.fromkeys(GATE_TARGETS, "--multi-latent-attention and --attention-output-gate")
    found |= {"in_proj": PATTERN} if pattern is None else {}
    found |= {} if has_states(args) else {"out_proj": f"{FLAG} or {PATTERN}"}
    if pattern is not None and "*" not in pattern:
        found |= dict.fromkeys(ATTENTION_TARGETS, f"a * in {PATTERN}")
    if pattern is not None and not {*pattern} & {"-", "E"}:
        found |= dict.fromkeys(MLP_TARGETS, f"a - or E in {PATTERN}")
    if not args.multi_latent_attention:
        return found | dict.fromkeys(LATENT_TARGETS, "--multi-latent-attention")
    found |= dict.fromkeys(("k_proj", "v_proj"), "no --multi-latent-attention")
    has_latent = args.q_lora_rank is not None
    return found | ({"q_proj": "no --q-lora-rank"} if has_latent else dict.fromkeys(QUERY_LATENT, "--q-lora-rank"))


def _check_stages(role: str, targets: tuple[str, ...], args):
    """UsageError for a pipeline stage, or a virtual one, whose layers have none of the targets.

    Without recurrent states all layers have the same ones.
    """
    from megarl.mcore.config.recurrent_rules import has_states  # imports Megatron
    from megarl.mcore.lora.targets import MLP_TARGETS, RECURRENT_TARGETS
    from megarl.mcore.model.pipeline_layout import layer_kinds, stage_layers

    if not has_states(args):
        return
    of_mlps, of_states = {*targets} & {*MLP_TARGETS}, {*targets} & {*RECURRENT_TARGETS}
    of_attention = {*targets} - of_mlps - of_states
    has_any = [
        bool(kind.has_mlp and of_mlps or kind.has_mixer and (of_states if kind.is_recurrent else of_attention))
        for kind in layer_kinds(args)
    ]
    if not all(any(has_any[layer] for layer in layers) for chunks in stage_layers(args) for layers in chunks):
        raise UsageError(f"--lora-targets {','.join(targets)}: a pipeline stage of the {role} has none of these")
