"""What a model family is: the tensors of its folders, their names in one folder, and the meaning of its config.json.

The language model of a folder that also reads images is trained, all else stays as it is.
"""

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from megarl.mcore.model.weight_table import EMBEDDING
from megarl.mcore.weights.hf.config_flags import Flags
from megarl.mcore.weights.hf.mapping import Heads, Mapping, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")

QKV_NAMES = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
# Megatron's key, without `decoder.layers.N.`, -> tensors of the folder, without `model.layers.N.`
ATTENTION: dict[str, Mapping] = {
    "self_attention.linear_qkv.layer_norm_weight": rows("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": Heads(QKV_NAMES),
    "self_attention.linear_qkv.bias": Heads(tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": rows("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": rows("self_attn.o_proj.bias"),
    "self_attention.q_layernorm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rows("self_attn.k_norm.weight"),
    "self_attention.core_attention.softmax_offset": rows("self_attn.sinks"),
}
MLP: dict[str, Mapping] = {
    "mlp.linear_fc1.layer_norm_weight": rows("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": rows("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": rows("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": rows("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": rows("mlp.down_proj.bias"),
}
LAYERS = ATTENTION | MLP
# With norms after attention and MLP, after those before them.
SANDWICH: dict[str, Mapping] = {
    **LAYERS,
    "post_self_attn_layernorm.weight": rows("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": rows("pre_feedforward_layernorm.weight"),
    "post_mlp_layernorm.weight": rows("post_feedforward_layernorm.weight"),
}
# With norms after attention and MLP alone.
POST_NORM = {key: value for key, value in SANDWICH.items() if "layer_norm_weight" not in key}
# With norms of queries and keys over all heads.
ALL_HEADS_NORMS: dict[str, Mapping] = {
    "self_attention.q_norm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_norm.weight": rows("self_attn.k_norm.weight"),
}
# Multi-latent attention.
LATENT = MLP | {
    "input_layernorm.weight": rows("input_layernorm.weight"),
    "self_attention.linear_q_proj.weight": rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": rows("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": rows("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": rows("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": rows("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": rows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": rows("self_attn.o_proj.weight"),
}
MODEL = {EMBEDDING: rows("model.embed_tokens.weight"), "decoder.final_layernorm.weight": rows("model.norm.weight")}
LM_HEAD, SCALAR_HEAD = rows("lm_head.weight"), rows("score.weight")


def expert_layers(
    router: str = "mlp.gate",
    experts: str = "mlp.experts",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "mlp.shared_experts",
) -> dict[str, Mapping]:
    """The weights of layers with experts, by the names of the modules and of an expert's projections (gate, up, down);
    the defaults are those of most families."""
    gate, up, down = (f"{experts}.{{expert}}.{name}.weight" for name in projections)
    return {
        "mlp.router.weight": rows(f"{router}.weight"),
        "mlp.router.expert_bias": rows(f"{router}.e_score_correction_bias"),
        "mlp.experts.experts.linear_fc1.weight": rows(gate, up),
        "mlp.experts.experts.linear_fc2.weight": rows(down),
        "mlp.shared_experts.linear_fc1.weight": rows(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight": rows(f"{shared}.down_proj.weight"),
        "mlp.shared_experts.gate_weight": rows("mlp.shared_expert_gate.weight"),
    }


EXPERT_LAYERS = expert_layers()
NO_TENSORS: dict[str, str] = {}


class Prediction(NamedTuple):
    """Tensors of multi-token prediction (MTP, 2404.19737): of a family, and with `of_folder` those of one folder.

    Unless they are trained, an export has those of the folder. Patterns match whole names; `{layer}` in them is the
    number of a prediction layer, which follow the model's layers.
    """

    pattern: str
    copies: dict[str, str]  # pattern of tensors that are copies -> the model's tensor
    counts: tuple[str, ...]  # entries of config.json with the number of prediction layers; the first that is there
    layer: str = ""  # prefix of the tensors that a layer of the model has, too; "": the policy cannot have this layer
    others: dict[str, str] = NO_TENSORS  # Megatron's key without `mtp.layers.0.` -> tensor
    numbers: range = range(0)  # of the prediction layers
    is_kept: bool = False  # by exports (`--hf-mtp`)
    is_trained: bool = False  # `--mtp-train`

    def of_folder(self, config: ModelConfig, is_kept: bool, is_trained: bool) -> "Prediction":
        """Those of a folder with this config.json."""
        layers = config.whole("num_hidden_layers")
        count = next((value for value in map(config.get, self.counts) if value is not None), 0)  # classes lack some
        return self._replace(numbers=range(layers, layers + count), is_kept=is_kept, is_trained=is_trained)

    def has(self, name: str) -> bool:
        """Whether a tensor is one of them."""
        return self._matches(self.pattern, name)

    def copied(self, name: str) -> str | None:
        """The model's tensor whose copy a tensor is, if the folder has it for both."""
        return next((of for pattern, of in self.copies.items() if self._matches(pattern, name)), None)

    def _matches(self, pattern: str, name: str) -> bool:
        match = re.fullmatch(pattern.replace("{layer}", r"(\d+)"), name)
        return match is not None and all(int(layer) in self.numbers for layer in match.groups())

    def note(self, names: Iterable[str]) -> str | None:
        """What the user should know about the tensors of a folder; None: nothing."""
        if self.is_trained and self.is_kept:
            return None
        if not (count := sum(map(self.has, names))):
            return None if self.is_kept else "has no tensors of multi-token prediction: --hf-mtp drop changes nothing"
        kept = "exports of a language model have them (--hf-mtp drop: none)" if self.is_kept else "exports drop them"
        return f"{count} MTP tensors are those of the source folder, not trained; {kept}"

    def without(self, config: dict) -> dict:
        """config.json of a folder without these tensors."""
        counts = [name for name in self.counts if name in config] or self.counts[-1:]
        return config | dict.fromkeys(counts, 0)


NO_PREDICTION = Prediction("", {}, ())
# Those of DeepSeek-V3 (2412.19437 §2.2) and of the families that follow it.
PREDICTION_LAYERS = Prediction(
    r"model\.layers\.{layer}\..+",
    {
        r"model\.layers\.{layer}\.embed_tokens\.weight": "model.embed_tokens.weight",
        r"model\.layers\.{layer}\.shared_head\.head\.weight": "lm_head.weight",
    },
    ("num_mtp_layers", "num_nextn_predict_layers"),
    "model.layers.{layer}.",
    {name: f"model.layers.{{layer}}.{name}" for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    | {"final_layernorm.weight": "model.layers.{layer}.shared_head.norm.weight"},
)
# Those of Qwen3-Next and Qwen3.5, which are a module of their own.
PREDICTION_MODULE = Prediction(
    r"mtp\..+", {}, ("mtp_num_hidden_layers",), "mtp.layers.0.",
    {"enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
     "eh_proj.weight": "mtp.fc.weight", "final_layernorm.weight": "mtp.norm.weight"},
)  # fmt: skip


class Multimodal(NamedTuple):
    """Folders in which the language model is one part among others, such as a vision tower."""

    # Prefix of the language model's tensors, instead of `model.`, and name of its head; the first that a folder has
    names: tuple[tuple[str, str], ...]
    kept: str  # pattern of the other parts' tensors
    is_flat: bool = False  # config.json may have the language model's entries at its top, without `text_config`
    texts: tuple[str, ...] = ()  # `model_type` of further language models, families of their own


# Names of transformers since 4.52, and those before, which it still writes for some classes.
LLAVA = Multimodal(
    (("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")),
    r"(model\.)?(vision_tower|multi_modal_projector)\..+",
)
QWEN_VL = Multimodal((("model.language_model.", "lm_head.weight"),), r"model\.visual\..+")
# With the names and the config.json of the published folders of Qwen2-VL and Qwen2.5-VL, too.
QWEN2_VL = Multimodal((*QWEN_VL.names, ("model.", "lm_head.weight")), r"(model\.)?visual\..+", is_flat=True)


class Family(NamedTuple):
    """A `model_type` of config.json."""

    model_type: str
    # Layer weights: key without `decoder.layers.N.` -> tensors without `model.layers.N.`
    layers: dict[str, Mapping]
    flags: Callable[[ModelConfig], Flags]
    # Another type whose class of transformers reads its config.json.
    config_type: str | None = None
    prediction: Prediction = NO_PREDICTION
    # The language model is described by `text_config`, of the type `config_type`.
    multimodal: Multimodal | None = None
    # Of the tensors in folders of a language model alone: the first prefix that a folder has; and tensors outside the
    # layers with other names, with `model.` -> their names after the prefix.
    prefixes: tuple[str, ...] = ("model.",)
    outer: dict[str, str] = NO_TENSORS
    experts: str = "mlp.experts"  # module of all experts in transformers
    kept: str | None = None  # pattern of tensors that the policy does not compute with: exports have the folder's
    modules: dict[str, Mapping] | None = None  # `layers` by transformers' modules, where the folder has other names

    @property
    def module_prefixes(self) -> tuple[str, ...]:
        """Prefixes that modules of the language model may have in code; the first is that of transformers."""
        if self.multimodal is not None:
            return tuple(prefix for prefix, _ in self.multimodal.names)
        return tuple(dict.fromkeys(("model.", *self.prefixes)))


# -- names in one folder -----------------------------------------------------------------------------------------

MODEL_PREFIX, HEAD_NAME = "model.", "lm_head.weight"
PREDICTION_PREFIX = "mtp."  # of a module of multi-token prediction beside the language model


class Naming(NamedTuple):
    """Names of the language model's tensors in a folder: those of a folder of text alone are the defaults."""

    prefix: str = MODEL_PREFIX
    head: str = HEAD_NAME
    # (name with `model.`, name in the folder) of tensors with names of their own
    outer: tuple[tuple[str, str], ...] = ()

    def stored(self, name: str) -> str:
        """The name in the folder of a tensor of the language model."""
        if name in (own := dict(self.outer)):
            return own[name]
        if name.startswith(MODEL_PREFIX):
            return self.prefix + name.removeprefix(MODEL_PREFIX)
        return self.head if name == HEAD_NAME else name

    def plain(self, name: str) -> str | None:
        """The opposite; None for a tensor that is not the language model's."""
        for plain, own in self.outer:
            if name == own:
                return plain
        if name.startswith(self.prefix):
            return MODEL_PREFIX + name.removeprefix(self.prefix)
        has_own_name = self.prefix == MODEL_PREFIX or name.startswith(PREDICTION_PREFIX)
        return HEAD_NAME if name == self.head else name if has_own_name else None


def naming_of(family: Family, tensors: Collection[str]) -> Naming:
    """How a folder names its tensors."""
    if family.multimodal is None:
        found = (each for each in family.prefixes if any(name.startswith(each) for name in tensors))
        prefix = next(found, family.prefixes[0])
        return Naming(prefix, outer=tuple((plain, prefix + own) for plain, own in family.outer.items()))
    names = family.multimodal.names
    prefix, head = next((each for each in names if f"{each[0]}embed_tokens.weight" in tensors), names[0])
    return Naming(prefix, HEAD_NAME if HEAD_NAME in tensors else head)


def is_kept(family: Family, name: str) -> bool:
    """Whether a tensor belongs to parts that the policy does not have."""
    patterns = family.kept, family.multimodal and family.multimodal.kept
    return any(re.fullmatch(pattern, name) for pattern in patterns if pattern)
