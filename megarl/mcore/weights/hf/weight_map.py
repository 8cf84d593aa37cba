"""Where each weight of a model lies in a Hugging Face folder, and whether the folder holds exactly these tensors."""

import itertools
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from megarl.mcore.model.projections import HeadLayout
from megarl.mcore.model.weight_table import (
    EMBEDDING,
    HEAD,
    PREDICTED,
    PREDICTED_LAYER,
    stored_prediction,
    stored_weights,
)
from megarl.mcore.weights.hf import quantized
from megarl.mcore.weights.hf.family import LAYER, LM_HEAD, MODEL, SCALAR_HEAD
from megarl.mcore.weights.hf.folder import READABLE, FolderReader, slices_of
from megarl.mcore.weights.hf.folder_weights import read_rows, write_rows
from megarl.mcore.weights.hf.hf_model import HFModel
from megarl.mcore.weights.hf.mapping import Mapping, RowRange
from megarl.mcore.weights.reshard_plan import GlobalTensor, LocalWeights

COMPARED = 2**22  # elements at a time
NOT_STORED = (".expert_share",)  # buffers of training alone; they start anew


class WeightMap:
    """The tensors of a folder that a role's weights consist of, row by row."""

    def __init__(self, model: HFModel, args, value_head: bool = False, copies: Collection[str] = ()):
        """Describes the folder of a role; UsageError if it has a scalar head, and the role a vocabulary's.

        Args:
            args: the role's Megatron namespace.
            value_head: the role has a scalar head instead of the vocabulary's.
            copies: tensors of multi-token prediction that are written as copies of the model's.
        """
        if model.has_scalar_head and not value_head:
            raise model.folder.error("a sequence-classification model; a policy needs a language model")
        self.model, self.args, self.value_head = model, args, value_head
        self._heads, self._has_prediction = HeadLayout.of(args), True
        self._copies: dict[str, list[str]] = {EMBEDDING: [], HEAD: []}  # further tensors of a weight, by its key
        if self.has_tied_head:
            self._copies[EMBEDDING].append(model.naming.head)
        for name in sorted(copies):
            self._copies[self._copied_key(name)].append(name)

    def written(self, copies: Collection[str] = ()) -> "WeightMap":
        """The tensors of an export: it has a scalar head if the role has one. `copies`: as of the constructor."""
        model = self.model._replace(has_scalar_head=self.value_head)
        found = WeightMap(model, self.args, self.value_head, copies)
        found._has_prediction = self.keeps_prediction
        return found

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor."""
        return self.model.naming.stored(MODEL[EMBEDDING].names[0])

    def _copied(self, name: str) -> str | None:
        """The tensor whose copy one of multi-token prediction is."""
        plain = self.model.naming.plain(name)
        of = self.model.prediction.copied(plain) if plain is not None else None
        return self.model.naming.stored(of) if of is not None else None

    def _copied_key(self, name: str) -> str:
        is_head = self._copied(name) == self.model.naming.head
        return HEAD if is_head and self.args.untie_embeddings_and_output_weights else EMBEDDING

    def ranges(self, key: str, index: tuple[int, ...], rows: int) -> list[RowRange]:
        """The rows of the folder's tensors that a weight consists of; none for one that the folder does not have.
        KeyError if the family has no tensor for such a weight.

        Args:
            key: of a checkpoint.
            index: layer, if the key stacks layers, then expert, if it stacks experts.
            rows: of the weight, rows that pad the vocabulary included.
        """
        if key.endswith(NOT_STORED):
            return []
        naming, described = self.model.naming, self.model.prediction
        if match := LAYER.fullmatch(key):
            layer, rest = (int(match[1]), index) if match[1] else (index[0], index[1:])
            return self._of_layer(f"model.layers.{layer}.", match[2], rest, rows)
        if key.startswith(PREDICTED_LAYER):
            prefix = described.layer.format(layer=self.args.num_layers)
            return self._of_layer(prefix, key.removeprefix(PREDICTED_LAYER), index, rows)
        if key.startswith(PREDICTED):
            name = described.others[key.removeprefix(PREDICTED)].format(layer=self.args.num_layers)
            return [RowRange(naming.stored(name), 0, 0, rows)]
        mapping = self._outer(key)
        found = [] if mapping is None else mapping.ranges(rows, self._heads, None)
        found = [part._replace(name=naming.stored(part.name)) for part in found]
        found += [RowRange(name, 0, 0, rows) for name in self._copies.get(key, ())]
        return [part._replace(rows=self.model.vocab_size) for part in found] if self.is_vocabulary(key) else found

    def _of_layer(self, prefix: str, name: str, index: tuple[int, ...], rows: int) -> list[RowRange]:
        """As `ranges`, of a layer's weight; `prefix`: of the layer's tensors, `name`: in Megatron's layer."""
        prefix, expert = self.model.naming.stored(prefix), index[0] if index else None
        found = self.model.family.layers[name].ranges(rows, self._heads, expert)
        return [part._replace(name=prefix + part.name) for part in found]

    def _outer(self, key: str) -> Mapping | None:
        if key != HEAD:
            return MODEL[key]
        if not self.value_head:
            return LM_HEAD
        return SCALAR_HEAD if self.model.has_scalar_head else None

    def is_vocabulary(self, key: str) -> bool:
        """Whether a weight has a row for each token, with rows that pad the vocabulary after them."""
        return key == EMBEDDING or key == HEAD and not self.value_head

    @staticmethod
    def indices(key: str, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields the index of every tensor that a key of this shape stacks, over layers, experts or both."""
        match = LAYER.fullmatch(key)
        stacked = 0 if not match else (match[1] is None) + match[2].startswith("mlp.experts.")
        stacked += key.startswith(f"{PREDICTED_LAYER}mlp.experts.")
        return itertools.product(*map(range, shape[:stacked]))

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape by name of every tensor that the folder must have."""
        shapes: dict[str, tuple[int, ...]] = {}
        weights = stored_weights(self.args, self.model.vocab_size, self.value_head)
        for weight in itertools.chain(weights, stored_prediction(self.args) if self.predicts else ()):
            index = () if weight.expert is None else (weight.expert,)
            for part in self.ranges(weight.key, index, weight.shape[0]):
                shape = part.source_shape(weight.shape[1:], self.args.num_experts)
                shapes[part.name] = max(shapes.get(part.name, shape), shape)
        return shapes

    @property
    def predicts(self) -> bool:
        """Whether the role has a layer of multi-token prediction, and the folder its tensors."""
        return self.args.predicts and not self.value_head and self._has_prediction

    @property
    def has_tied_head(self) -> bool:
        """Whether the folder has the embedding a second time, as the head to which it is tied."""
        return self.model.stores_tied_head and not self.value_head

    def names_without_copies(self) -> list[set[str]]:
        """Names of the folder's tensors, in sets in which each weight occurs once."""
        copies = [set(names) - {None} for names in itertools.zip_longest(*self._copies.values())]
        return [set(self.expected()).difference(*copies), *copies]

    def differing_head_rows(self) -> list[str]:
        """The first row in which a stored head differs from the embedding to which it is tied, both of which it reads;
        empty: they are equal."""
        row = self._first_difference(self.embedding, self.model.naming.head) if self.has_tied_head else None
        return [] if row is None else [str(row)]

    def shared_copies(self) -> list[str]:
        """Tensors of multi-token prediction that equal the embedding or head in the folder, so that an export has them
        as copies of the trained one. Reads these tensors.
        """
        if not self.model.folder.has_weights or not self.keeps_prediction:
            return []
        tensors, found = self.model.folder.weights, []
        for name in tensors:
            of = self._copied(name)
            if of == self.model.naming.head and not self.args.untie_embeddings_and_output_weights:
                of = self.embedding
            if of not in tensors or tensors[name].shape != tensors[of].shape:
                continue
            if tensors[name].dtype == tensors[of].dtype and self._first_difference(of, name) is None:
                found.append(name)
        return found

    def keeps(self, name: str) -> bool:
        """Whether an export has a tensor of the folder that the model does not use."""
        return self.model.is_unused(name) and (self.keeps_prediction or not self.is_prediction(name))

    def is_prediction(self, name: str) -> bool:
        """Whether a tensor of the folder belongs to multi-token prediction."""
        plain = self.model.naming.plain(name)
        return plain is not None and self.model.prediction.has(plain)

    @property
    def keeps_prediction(self) -> bool:
        """Whether an export has the folder's tensors of multi-token prediction; one with another head has them not."""
        return self.model.prediction.is_kept and self.value_head == self.model.has_scalar_head

    def _first_difference(self, *names: str) -> int | None:
        """The first row in which two tensors of one shape differ; None: they are equal."""
        reader, shape = FolderReader(self.model.folder), self.model.folder.weights[names[0]].shape
        for part in slices_of(shape, COMPARED):
            one, other = (reader.read(name, part) for name in names)
            if not torch.equal(one, other):
                return part[0].start + int((one != other).any(1).nonzero()[0])
        return None

    def read(self, weights: LocalWeights) -> Iterator[tuple[Tensor, Tensor, str]]:
        """Yields (a view of this rank's weights, what the folder has for it, the tensor's name), box by box."""
        yield from read_rows(weights, self)

    def write(self, stages, weights: LocalWeights, wholes: dict[str, GlobalTensor], files, copies, group):
        """Writes an export's tensors into its files; a collective.

        Args:
            stages: the model's chunks on this rank, of which `weights` are the weights.
            wholes: the weights on all ranks.
            files: that this rank writes, by name.
            copies: as of the constructor.
            group: the ranks that have the model.
        """
        write_rows(self.written(copies), weights, wholes, files, group)

    def check(self):
        """UsageError for the first tensor that is missing, unknown, of another shape or of a type that is not read."""
        folder, expected = self.model.folder, self.expected()
        tensors = folder.weights
        for name, shape in expected.items():
            if name not in tensors:
                raise folder.error(f"{name} is missing, which config.json needs")
            if tensors[name].shape != shape:
                found = list(tensors[name].shape)
                raise folder.error(f"{name} has shape {found}; config.json describes {list(shape)}")
            if tensors[name].dtype not in READABLE:
                fp8 = f"{quantized.FP8_TYPE} with {quantized.CONFIG_ENTRY} in config.json"
                raise folder.error(f"{name} has type {tensors[name].dtype}; allowed are {', '.join(READABLE)}, {fp8}")
        ignored = {self.model.naming.head} if self.value_head else set()
        for name in sorted(tensors.keys() - expected.keys() - ignored):
            if not self.model.is_unused(name):
                raise folder.error(_unknown(name, self.model.naming.plain(name) or name, self.args.num_layers))


def _unknown(name: str, plain: str, layers: int) -> str:
    """Why a tensor that no weight needs is refused. `plain`: its name in a folder of text alone."""
    if plain.startswith("model.layers.") and plain.split(".")[2].isdigit() and int(plain.split(".")[2]) >= layers:
        return f"{name} belongs to a layer after those of config.json (num_hidden_layers, num_nextn_predict_layers)"
    if name.endswith(("_scale", "_scale_inv", "_scales", ".scales", ".qweight", ".qzeros", "_blocks")):
        return f"{name} belongs to quantized weights, which {quantized.CONFIG_ENTRY} of config.json does not describe"
    return f"{name} is a tensor that megarl does not know in this family"


def weight_map_of(model, args, value_head: bool = False):
    """The tensors of a role's weights in its folder: a `WeightMap`, or that of a folder whose module of transformers
    computes the model. Arguments as of `WeightMap`."""
    return WeightMap(model, args, value_head) if isinstance(model, HFModel) else model.weight_map(args, value_head)
