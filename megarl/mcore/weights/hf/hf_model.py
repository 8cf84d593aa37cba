"""A model in a Hugging Face folder: its family, the Megatron flags that it needs, and its tensors."""

import re
from typing import NamedTuple

from megarl.errors import UsageError
from megarl.mcore.weights.hf.families import families
from megarl.mcore.weights.hf.family import Family, Naming, Prediction, is_kept, naming_of
from megarl.mcore.weights.hf.folder import INDEX, HFFolder
from megarl.mcore.weights.hf.mapping import Heads, Mapping, Rows, StackedExperts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.quantized import StoredTensor, method_of

LANGUAGE_MODEL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
TEXT, MULTIMODAL = "text_config", "ForConditionalGeneration"
ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old folders of Llama have it
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# As transformers 5 keeps experts in memory, and stores them with `save_original_format=False`.
FUSED_EXPERTS: dict[str, Mapping] = {
    "mlp.router.weight": rows("mlp.gate.weight"),
    "mlp.experts.experts.linear_fc1.weight": StackedExperts((GATE_UP,)),
    "mlp.experts.experts.linear_fc2.weight": StackedExperts((DOWN,)),
}
# As it stores the dense layers of families whose authors have another name for those with experts.
SPARSE_MLP: dict[str, Mapping] = {
    "mlp.linear_fc1.weight": rows("block_sparse_moe.gate_proj.weight", "block_sparse_moe.up_proj.weight"),
    "mlp.linear_fc2.weight": rows("block_sparse_moe.down_proj.weight"),
}


class HFModel(NamedTuple):
    """A folder whose config.json was understood."""

    folder: HFFolder
    family: Family
    flags: dict[str, object]  # Megatron's, without dashes; True for a switch
    vocab_size: int  # rows of the embedding; a tokenizer may have fewer tokens
    has_scalar_head: bool  # a reward model or critic
    prediction: Prediction
    naming: Naming  # of the folder's tensors
    notes: tuple[str, ...] = ()  # for the user: tensors that are not used

    folder_of_module = None  # the model is computed by Megatron's layers

    @property
    def stores_tied_head(self) -> bool:
        """Whether the folder has the tensor of a head that is the embedding."""
        is_tied = "untie-embeddings-and-output-weights" not in self.flags
        return is_tied and self.folder.has_weights and self.naming.head in self.folder.weights

    def other(self, path: str, flag: str, longest: int) -> "HFModel":
        """A folder with the same model, and other weights. UsageError if config.json describes another one.

        Arguments as of `read_model`.
        """
        found = read_model(path, flag, longest)
        if found.flags != self.flags or found.vocab_size != self.vocab_size:
            raise UsageError(f"{flag} {path}: config.json describes another model than the server has")
        return found

    def check_exportable(self, value_head: bool):
        """UsageError if no folder like this one can be written. `value_head`: of a model with a scalar head."""
        if self.family.multimodal and value_head:
            raise self.folder.error("a multimodal folder; exports with a scalar head are those of language models")
        if self.family.multimodal and not self.folder.has_weights:
            raise self.folder.error("a multimodal folder without weights; an export takes its other parts from there")

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the folder is known and has no part in the model: an export keeps it as it is."""
        plain = self.naming.plain(name)
        is_other = plain is not None and (bool(ROTARY_BUFFER.fullmatch(plain)) or self.prediction.has(plain))
        return is_other or is_kept(self.family, name)


def check_adapters(model, flag: str):
    """UsageError if PEFT's adapters of a model cannot be read and written. `flag`: that asks for one."""
    if any(isinstance(mapping, Heads) and len(mapping.names) > 3 for mapping in model.family.layers.values()):
        raise model.folder.error(f"gates of attention in tensors of their own; {flag} needs them beside the queries")


def command_line(flags: dict[str, object]) -> list[str]:
    """A folder's flags, without dashes and True for a switch, as a command line."""
    pairs = ((f"--{name}", value) for name, value in flags.items())
    return [token for name, value in pairs for token in ([name] if value is True else [name, str(value)])]


def read_model(
    path: str, flag: str, longest: int, keeps_prediction: bool = True, trains_prediction: bool = False
) -> HFModel:
    """Reads a folder's config.json and, if it has weights, their headers. UsageError for another folder, and for a
    model that megarl's layers do not compute.

    Args:
        flag: that gave the path, for messages.
        longest: maximum length of prompt and response together, in tokens.
        keeps_prediction: whether exports have the folder's tensors of multi-token prediction.
        trains_prediction: whether the policy trains them.
    """
    folder = HFFolder(path, flag)
    family = _family(folder)
    if family.multimodal:
        config, is_classifier = _text_config(folder, family, longest), False
    else:
        config = ModelConfig(folder.config, family.config_type or family.model_type, longest, folder.error)
        is_classifier = _is_classifier(config)
    method_of(folder.config, folder.error)
    flags, naming = family.flags(config), naming_of(family, folder.weights if folder.has_weights else ())
    if family.multimodal:
        is_tied = _ties_head(folder, family, longest, naming)
    else:
        is_tied = not is_classifier and config.switch("tie_word_embeddings")
    if "dsa-indexer-topk" in flags:  # the policy computes with what is kept otherwise
        family = family._replace(kept=None)
    if not is_tied:
        flags["untie-embeddings-and-output-weights"] = True
    prediction = family.prediction.of_folder(config, keeps_prediction, trains_prediction)
    model = HFModel(folder, family, flags, config.whole("vocab_size"), is_classifier, prediction, naming)
    if not folder.has_weights:
        return model
    return model._replace(family=family._replace(layers=_stored_layers(model)), notes=_notes(model))


def _stored_layers(model: HFModel) -> dict[str, Mapping]:
    """The family's layers; where transformers stored the experts of a layer in two tensors, these. It stores them as it
    has them in memory also in families whose authors transposed them."""
    layers, stored = model.family.layers, {}
    for name, tensor in model.folder.weights.items():
        if match := LAYER_TENSOR.fullmatch(model.naming.plain(name) or ""):
            stored[match[2]] = tensor.shape
    if any(name.startswith("block_sparse_moe.gate_proj.") for name in stored):
        layers = layers | SPARSE_MLP
    experts = layers.get("mlp.experts.experts.linear_fc1.weight")
    if isinstance(experts, Rows):  # of single experts
        fused = {key: mapping for key, mapping in FUSED_EXPERTS.items() if mapping.names[0] in stored}
        return layers | fused if GATE_UP in stored else layers
    if not isinstance(experts, StackedExperts) or experts.projections > 1:
        return layers
    hidden, ffn = model.flags["hidden-size"], model.flags["moe-ffn-hidden-size"]
    # Both together: one of them may be square.
    is_plain = [stored.get(name, ())[1:] for name in (GATE_UP, DOWN)] == [(2 * ffn, hidden), (hidden, ffn)]
    return layers | FUSED_EXPERTS if is_plain else layers


def _notes(model: HFModel) -> tuple[str, ...]:
    folder = model.folder
    quantized = [tensor for tensor in folder.weights.values() if not isinstance(tensor, StoredTensor)]
    note, unnamed = model.prediction.note(filter(None, map(model.naming.plain, folder.weights))), sorted(folder.unnamed)
    found = [note] if note else []
    if others := sum(is_kept(model.family, name) for name in folder.weights):
        found.append(f"{others} tensors of parts that the policy does not have are not trained; exports have them")
    if quantized:
        method, dtype = method_of(folder.config, folder.error), quantized[0].dtype
        found.append(f"{len(quantized)} tensors are quantized ({method}): exports have them as {dtype}, not quantized")
    if unnamed:
        found.append(f"{len(unnamed)} tensors that {INDEX} does not name are not used; the first is {unnamed[0]}")
    return tuple(str(folder.error(text)) for text in found)


def _family(folder: HFFolder) -> Family:
    kind = folder.config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        raise folder.error(
            f"config.json: model_type {kind!r}: allowed are {', '.join(families())}; "
            "--model-source transformers computes others by transformers' modules"
        )
    family, text = families()[kind], folder.config.get(TEXT)
    if family.multimodal and isinstance(text, dict) and text.get("model_type") in family.multimodal.texts:
        own = families()[text["model_type"]]
        return own._replace(model_type=kind, config_type=own.model_type, multimodal=family.multimodal)
    return family


def _is_classifier(config: ModelConfig) -> bool:
    """Whether the head is scalar. UsageError for other heads, and for several labels."""
    names = config.items("architectures", str, "names") or [LANGUAGE_MODEL]
    if any(name.endswith(LANGUAGE_MODEL) for name in names):
        return False
    if not any(name.endswith(CLASSIFIER) for name in names):
        raise config.error("architectures", f"…{LANGUAGE_MODEL} and …{CLASSIFIER}")
    if config.get("num_labels") != 1:
        raise config.error("num_labels", "one, the score of a reward model or critic")
    return True


def _text_config(folder: HFFolder, family: Family, longest: int) -> ModelConfig:
    """The language model's part of a folder's config.json. UsageError for another kind of language model."""
    values, kind = folder.config.get(TEXT), family.config_type
    if values is None and family.multimodal is not None and family.multimodal.is_flat:
        values = ModelConfig(folder.config, family.model_type, longest, folder.error).get(TEXT).to_dict()
    if not isinstance(values, dict):
        raise folder.error(f"config.json: {TEXT} {values!r}: allowed is an object")
    if values.get("model_type", kind) != kind:
        kinds = ", ".join(map(repr, (kind, *(family.multimodal.texts if family.multimodal else ()))))
        raise folder.error(f"config.json: {TEXT}: model_type {values['model_type']!r}: allowed is {kinds}")
    names = folder.config.get("architectures") or [MULTIMODAL]
    if not isinstance(names, list) or not any(str(name).endswith(MULTIMODAL) for name in names):
        raise folder.error(f"config.json: architectures {names!r}: allowed is …{MULTIMODAL}")
    return ModelConfig(values, str(kind), longest, folder.error)


def _ties_head(folder: HFFolder, family: Family, longest: int, naming: Naming) -> bool:
    """If the folder has no head, or as transformers reads it from outside the text's part."""
    if folder.has_weights and naming.head not in folder.weights:
        return True
    whole = ModelConfig(folder.config, family.model_type, longest, folder.error)
    return whole.switch("tie_word_embeddings")
