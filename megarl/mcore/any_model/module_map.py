"""A Hugging Face folder that stays a model of transformers: what it describes, and where its weights lie.

`AnyModel` and `ModuleMap` are to a folder of any type what `HFModel` and `WeightMap` are to a mapped family's.
"""

import functools
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.data import node_files
from megarl.errors import UsageError, one_line
from megarl.mcore.any_model import routing, self_check, source, tensor_parallel
from megarl.mcore.any_model.attention import Slot, Unsupported
from megarl.mcore.any_model.chunk import PREFIX, layers_of
from megarl.mcore.any_model.conversions import Conversions, converted
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.mcore.model.weight_table import HEAD, Weight
from megarl.mcore.parallel.fsdp import whole
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import CONFIG, READABLE, FolderReader, HFFolder
from megarl.mcore.weights.hf.hf_model import CLASSIFIER
from megarl.mcore.weights.reshard_plan import LocalWeights

SCORE = "score.weight"  # a classifier's head in a folder
UNREAD = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}  # of config.json


class AnyModel(NamedTuple):
    """A folder whose model is computed by transformers' modules."""

    folder: HFFolder
    flags: dict[str, object]  # Megatron's, without dashes; True for a switch
    vocab_size: int
    has_scalar_head: bool
    notes: tuple[str, ...] = ()

    family = Family("", {}, lambda _: {})  # of adapters: the module itself names what they adapt

    @property
    def folder_of_module(self) -> str:
        """The folder whose module of transformers computes the model."""
        return str(self.folder.path)

    def tokens(self) -> list[str]:
        """The flags as a command line."""
        pairs = ((f"--{name}", value) for name, value in self.flags.items())
        return [token for name, value in pairs for token in ([name] if value is True else [name, str(value)])]

    def other(self, path: str, flag: str, longest: int) -> "AnyModel":
        """As of `HFModel`: a folder with the same model, and other weights."""
        found = read_model(path, flag, longest)
        entries = self.folder.config.keys() | found.folder.config.keys()
        if changed := sorted(x for x in entries - UNREAD if self.folder.config.get(x) != found.folder.config.get(x)):
            raise UsageError(f"{flag} {path}: config.json describes another model than the server has ({changed[0]})")
        return found

    def check_exportable(self, value_head: bool):
        """UsageError for a folder without weights, whose tensors have no names that an export could take."""
        if not self.folder.has_weights:
            raise self.folder.error("has no weights, whose names an export takes")

    def check_adapters(self, flag: str):
        """Passes: adapters name the module's own linear layers."""

    def weight_map(self, args, value_head: bool) -> "ModuleMap":
        """The tensors of a role's weights. Arguments as of `WeightMap`."""
        return ModuleMap(self, args, value_head)


def read_model(path: str, flag: str, longest: int) -> AnyModel:
    """Reads a folder's config.json and finds the attention of its model.

    Args:
        flag: that gave the path, for messages.
        longest: maximum length of prompt and response together, in tokens.

    Raises:
        UsageError: no such folder, a type that transformers lacks, or a model that does not run here.
    """
    folder = HFFolder(path, flag)
    found = source.read(folder)
    slots, problem = slots_of(str(folder.path))
    if problem := problem or _self_check(str(folder.path), longest):
        raise folder.error(f"{problem}, which {source.FLAG} does not compute")
    source.check_length(found, longest, folder.error)
    names = folder.config.get("architectures") or []
    is_classifier = any(str(name).endswith(CLASSIFIER) for name in names)
    if is_classifier and found.config.num_labels != 1:
        raise folder.error(
            f"config.json: num_labels {found.config.num_labels}: allowed is one, a reward's or a critic's"
        )
    return AnyModel(folder, source.flags_of(found, slots, folder.error), found.text.vocab_size, is_classifier)


@functools.lru_cache(maxsize=8)
def slots_of(path: str) -> tuple[tuple[Slot, ...], str]:
    """The slots of the folder's module, and why it has none that can be computed, or an empty text."""
    found = source.of_path(path)
    try:
        return source.find_slots(found.module(torch.float32), found.text.vocab_size), ""
    except Exception as error:  # besides Unsupported whatever a class raises for an entry of config.json
        return (), _problem(found, error)


@functools.lru_cache(maxsize=8)
def _self_check(path: str, longest: int) -> str:
    """What differs between the folder's module alone and under megarl, or an empty text; one process of a node tries
    it. `longest`: as of `read_model`."""
    found = source.of_path(path)

    def try_it() -> str:
        try:
            self_check.check(found, longest)
        except Exception as error:  # as in `_slots`
            return _problem(found, error)
        return ""

    return node_files.text(("self-check", longest, node_files.identity(f"{path}/{CONFIG}")), try_it)


def _problem(found: source.Source, error: Exception) -> str:
    if isinstance(error, Unsupported):
        return str(error)
    return f"{found.kind.__name__} cannot be built ({type(error).__name__}: {one_line(str(error))[:200]})"


class ModuleMap:
    """The tensors of a folder that a role's module is made of."""

    def __init__(self, model: AnyModel, args, value_head: bool):
        """`value_head`: the role has a scalar head instead of the vocabulary's. UsageError if only the folder has."""
        if model.has_scalar_head and not value_head:
            raise model.folder.error("a sequence-classification model; a policy needs a language model")
        self.model, self.args, self.value_head = model, args, value_head
        self._module = source.of_path(str(model.folder.path)).module(torch.float32)
        tensors = {name: tensor.shape for name, tensor in model.folder.weights.items() if name != SCORE}
        self._conversions = Conversions(self._module, tensors)
        head = {name for name, each in self._module.named_modules() if each is self._module.get_output_embeddings()}
        self._head = {f"{name}.{kind}" for name in head for kind in ("weight", "bias")} if value_head else set()

    def check(self):
        """UsageError for a tensor that is missing, unknown, of another shape or of a type that is not read."""
        folder, conversions = self.model.folder, self._conversions
        if missing := [name for name in conversions.missing if name not in self._head]:
            raise folder.error(f"{missing[0]} is missing, which {type(self._module).__name__} of transformers needs")
        for group in conversions.groups:
            for name, shape in group.weights.items():
                wanted = conversions.weights.get(name)
                if wanted is None:
                    raise folder.error(
                        f"{next(iter(group.sources))}: transformers makes {name} of it, which is no weight"
                    )
                if shape != wanted:
                    raise folder.error(
                        f"{next(iter(group.sources))} gives {name} the shape {list(shape)}; config.json describes "
                        f"{list(wanted)}"
                    )
            for name in group.sources:
                if folder.weights[name].dtype not in READABLE:
                    raise folder.error(
                        f"{name} has type {folder.weights[name].dtype}; allowed are {', '.join(READABLE)}"
                    )
        if conversions.unknown:
            raise folder.error(f"{conversions.unknown[0]} is a tensor that {type(self._module).__name__} does not have")

    def differing_head_rows(self) -> list[str]:
        """As of `WeightMap`: the first row in which a stored weight differs from the one to which it is tied."""
        reader, stored = FolderReader(self.model.folder), self.model.folder.weights
        for name, tied in self._conversions.tied.items():
            if not self.value_head and name in stored and tied in stored:
                one, other = (reader[each][:, :] for each in (name, tied))
                if not torch.equal(one, other):
                    return [str(int((one != other).any(1).nonzero()[0]))]
        return []

    def read(self, weights: LocalWeights) -> Iterator[tuple[Tensor, Tensor, str]]:
        """Yields (a view of this rank's weights, what the folder has for it, the tensor's name)."""
        by_name, tied = {}, self._conversions.tied  # a tied weight has one of its names here, another in the folder
        for shard in weights.description().shards:
            name = shard.key.removeprefix(PREFIX)
            by_name.setdefault(tied.get(name, name), []).append(shard)
        reader = FolderReader(self.model.folder)

        def stored(name: str) -> Tensor:
            shape = self.model.folder.weights[name].shape
            return reader[name][tuple(slice(0, size) for size in shape)]

        for group in self._conversions.groups:
            wanted = [name for name in group.weights if tied.get(name, name) in by_name]
            if not wanted:
                continue
            first = next(iter(group.weights))
            made = converted(group.conversion, first, group.sources, stored, self._module)
            for name in wanted:
                for shard in by_name[tied.get(name, name)]:
                    box = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.shape, strict=True))
                    yield weights.view(shard), made[name][box], next(iter(group.sources))
        if self.model.has_scalar_head and HEAD in by_name:
            for shard in by_name[HEAD]:
                yield weights.view(shard), stored(SCORE), SCORE

    # -- exports ---------------------------------------------------------------------------------------------------

    def written(self, copies: Collection[str] = ()) -> "ModuleMap":
        """The tensors of an export: these."""
        return self

    def shared_copies(self) -> list[str]:
        """None: no layer of multi-token prediction is trained."""
        return []

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape by name of every tensor of an export."""
        stored = self.model.folder.weights
        heads = {weight for weight in self._conversions.weights if weight in self._head}
        found = {
            name: stored[name].shape
            for group in self._conversions.groups
            for name in group.sources
            if not heads.intersection(group.weights)
        }
        return found | ({SCORE: (1, self.args.hidden_size)} if self.value_head else {})

    def keeps(self, name: str) -> bool:
        """Whether an export has a tensor of the folder that the model does not use."""
        return name in self._conversions.unused

    def is_prediction(self, name: str) -> bool:
        """No tensor is one of multi-token prediction that could be left out."""
        return False

    def is_vocabulary(self, key: str) -> bool:
        """No weight has rows that pad the vocabulary."""
        return False

    def write(self, stages, weights: LocalWeights, wholes, files, copies, group):
        """As of `WeightMap`. Every rank makes all tensors, and writes those of its files."""
        for tensors in self._tensors(stages[0]):
            for file in files.values():
                for name in tensors.keys() & set(file.names):
                    file[name][...] = tensors[name]

    def _tensors(self, chunk) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of an export, group by group; a collective of the ranks that share the model."""
        for group in self._conversions.groups:
            if self._head.intersection(group.weights):
                continue
            names = {name: self._conversions.tied.get(name, name) for name in group.weights}
            yield self._conversions.reverted({name: chunk.whole_weight(of) for name, of in names.items()})
        if self.value_head:
            yield {SCORE: whole(chunk.output_layer.weight)}


def parameter_names(path: str, value_head: bool) -> list[str]:
    """The names of the parameters of a role with the folder at `path`, a tied one once."""
    module = source.of_path(path).module(torch.float32)
    if value_head:
        module.set_output_embeddings(torch.nn.Identity())
    return [name for name, _ in module.named_parameters()] + [HEAD] * value_head


def checkpoint_shapes(role: str, path: str, value_head: bool) -> dict[str, tuple[int, ...]]:
    """The global shapes by key that a checkpoint of a role with the folder at `path` must have."""
    tensors = _tensors_of(path, value_head)[1]
    return {f"{role}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}


def _tensors_of(path: str, value_head: bool) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A folder's module, and a role's parameters and persistent buffers by name, each once."""
    found = source.of_path(path)
    module = found.module(torch.float32)
    if value_head:
        module.set_output_embeddings(torch.nn.Identity())
    once = {id(each): (name, each) for name, each in reversed(module.state_dict(keep_vars=True).items())}
    head = {HEAD: torch.nn.Parameter(torch.empty(1, found.text.hidden_size, device="meta"))} if value_head else {}
    return module, {f"{PREFIX}{name}": each for name, each in reversed(once.values())} | head


@functools.lru_cache(maxsize=8)
def routed_layers(path: str) -> tuple[RoutedLayers, str | None]:
    """The layers of the module of the folder at `path` whose routes can be replayed; why those of its experts cannot
    be, if there are none."""
    found = source.of_path(path)
    module = found.module(torch.float32)
    source.find_slots(module, found.text.vocab_size)
    problem = "calls no experts by transformers' interface"
    try:
        if routers := routing.install(module, layers_of(module), found.text.vocab_size):
            return RoutedLayers(tuple(x.layer_number for x in routers), routers[0].experts, routers[0].topk), None
    except Unsupported as error:
        problem = str(error)
    return RoutedLayers((), 0, 0), f"{type(module).__name__}: {problem}"


# -- the planner -------------------------------------------------------------------------------------------------------


def rank_weights(args, value_head: bool, ranks: int) -> list[Weight]:
    """The parameters of a role's module that each of so many tensor-parallel ranks holds."""
    module, tensors = _tensors_of(args.model_folder, value_head)
    splits = tensor_parallel.splits_of(module, ranks) if ranks > 1 else {}
    found, size = [], args.params_dtype.itemsize
    for name, tensor in tensors.items():
        shape, split = list(tensor.shape), splits.get(name.removeprefix(PREFIX))
        if split is not None:
            shape[split.axis] //= ranks
        if isinstance(tensor, torch.nn.Parameter):
            found.append(Weight(name, tuple(shape) or (1,), size))
    return found


def mean_cache(args) -> tuple[int, int]:
    """Query groups of the whole model and channels whose product is the mean of the module's slots, as `SlotContext`
    has them."""
    slots = slots_of(args.model_folder)[0]
    if len({(slot.groups, slot.channels) for slot in slots}) == 1:
        return slots[0].groups, slots[0].channels
    ranks = args.tensor_model_parallel_size
    return ranks, -(-sum(slot.groups * slot.channels for slot in slots) // (ranks * len(slots)))
