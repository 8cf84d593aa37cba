"""A Hugging Face folder that stays a model of transformers: what it describes, and where its weights lie.

`AnyModel` and `ModuleMap` are to a folder of any type what `HFModel` and `WeightMap` are to a mapped family's. Many
folders keep names, or single experts, that the classes of transformers do not have. Transformers' own conversions are
applied group by group, so that only the tensors of one group are in memory.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from megarl.errors import UsageError
from megarl.mcore.any_model import source
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.chunk import PREFIX
from megarl.mcore.any_model.folder_module import FolderModule
from megarl.mcore.model.weight_table import HEAD
from megarl.mcore.parallel.fsdp import whole
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import READABLE, FolderReader, HFFolder
from megarl.mcore.weights.hf.hf_model import CLASSIFIER
from megarl.mcore.weights.reshard_plan import LocalWeights

SCORE = "score.weight"  # a classifier's head in a folder
Shape = tuple[int, ...]
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
    def folder_of_module(self) -> FolderModule:
        """The folder whose module of transformers computes the model."""
        return FolderModule(self.folder.path)

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
    module = FolderModule(folder.path)
    try:
        slots = module.reach().slots
        module.self_check(longest)
    except Unsupported as error:
        raise folder.error(f"{error}, which {source.FLAG} does not compute") from None
    source.check_length(found, longest, folder.error)
    names = folder.config.get("architectures") or []
    is_classifier = any(str(name).endswith(CLASSIFIER) for name in names)
    if is_classifier and found.config.num_labels != 1:
        raise folder.error(
            f"config.json: num_labels {found.config.num_labels}: allowed is one, a reward's or a critic's"
        )
    return AnyModel(folder, source.flags_of(found, slots, folder.error), found.text.vocab_size, is_classifier)


# -- weights -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Weights of a module that are made of the same tensors of a folder."""

    first: str  # name of the first weight
    sources: dict[str, str]  # name of a tensor -> the pattern by which a conversion takes it, or the name itself
    conversion: WeightConverter | WeightRenaming
    weights: dict[str, Shape]  # by name; of parameters and persistent buffers

    def made(self, read: Callable[[str], Tensor], module: PreTrainedModel) -> dict[str, Tensor]:
        """The weights by name. `read`: the tensor of a name."""
        own = copy.deepcopy(self.conversion)
        for name, pattern in self.sources.items():
            own.add_tensor(self.first, name, pattern, read(name))  # type: ignore[arg-type]  # it takes tensors, too
        made = own.convert(self.first, model=module, config=module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Conversions:
    """The groups of a folder's tensors, and the tensors and weights that belong to none."""

    def __init__(self, module: PreTrainedModel, tensors: dict[str, Shape]):
        """`module`: without values; `tensors`: shape by name, of the folder."""
        self.module = module
        self.weights = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.tied: dict[str, str] = dict(module.all_tied_weights_keys)  # weight -> the one that it is
        self.groups: list[Group] = []
        for first, (conversion, sources) in self._matched(tensors).items():
            group = Group(first, sources, conversion, {})
            made = group.made(lambda name: torch.empty(tensors[name], device="meta"), module)
            shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
            self.groups.append(group._replace(weights=shapes))
        unknown = tensors.keys() - {name for group in self.groups for name in group.sources}
        given = {name for group in self.groups for name in group.weights}
        given |= {name for pair in self.tied.items() if given.intersection(pair) for name in pair}
        self.missing = sorted(self.weights.keys() - given - self._ignored(dict(module.named_buffers()), "missing"))
        self.unused = self._ignored(unknown, "unexpected")  # tensors that transformers does not read
        self.unknown = sorted(unknown - self.unused)

    def _matched(self, names: Iterable[str]) -> dict[str, tuple[WeightConverter | WeightRenaming, dict[str, str]]]:
        """First weight -> (conversion, sources). The module gets the conversions that a name of the folder used."""
        module, mapping = self.module, get_model_conversion_mapping(self.module)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, found = module.base_model_prefix, dict[str, tuple[WeightConverter | WeightRenaming, dict[str, str]]]()
        for name in sorted(names, key=dot_natural_key):
            weight, pattern = rename_source_key(name, renamings, converters, prefix, self.weights)
            if weight not in self.weights and name in self.weights:
                weight, pattern = rename_source_key(name, [], [], prefix, self.weights)
            if weight in self.weights:
                conversion = WeightRenaming(name, weight) if pattern is None else by_pattern[pattern]
                found.setdefault(weight, (conversion, {}))[1][name] = pattern or name
        vars(module)["_weight_conversions"] = [each for each in mapping if each.was_used()]
        return found

    def _ignored(self, names: Collection[str], kind: str) -> set[str]:
        """Names that transformers' class says may be missing in, or unexpected of, a folder."""
        patterns = getattr(self.module, f"_keys_to_ignore_on_load_{kind}", None) or ()
        return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}

    def check(self, folder: HFFolder, without: Collection[str] = ()):
        """UsageError for a tensor that is missing, of another shape or of a type that is not read. `without`: weights
        that may be missing."""
        if missing := [name for name in self.missing if name not in without]:
            raise folder.error(f"{missing[0]} is missing, which {type(self.module).__name__} of transformers needs")
        for group in self.groups:
            first = next(iter(group.sources))
            for name, shape in group.weights.items():
                wanted = self.weights.get(name)
                if wanted is None:
                    raise folder.error(f"{first}: transformers makes {name} of it, which is no weight")
                if shape != wanted:
                    described = f"the shape {list(shape)}; config.json describes {list(wanted)}"
                    raise folder.error(f"{first} gives {name} {described}")
            for name in group.sources:
                if (dtype := folder.weights[name].dtype) not in READABLE:
                    raise folder.error(f"{name} has type {dtype}; allowed are {', '.join(READABLE)}")

    def reverted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a folder that a whole group's weights become."""
        if len(weights) == 1:
            (name,) = weights
            group = next(group for group in self.groups if name in group.weights)
            if isinstance(group.conversion, WeightRenaming):
                return {next(iter(group.sources)): weights[name]}
        return revert_weight_conversion(self.module, weights)


class ModuleMap:
    """The tensors of a folder that a role's module is made of."""

    keeps_prediction = True  # no tensor is one of multi-token prediction that could be left out

    def __init__(self, model: AnyModel, args, value_head: bool):
        """`value_head`: the role has a scalar head instead of the vocabulary's. UsageError if only the folder has."""
        if model.has_scalar_head and not value_head:
            raise model.folder.error("a sequence-classification model; a policy needs a language model")
        self.model, self.args, self.value_head = model, args, value_head
        self._module = model.folder_of_module.source().module(torch.float32)
        tensors = {name: tensor.shape for name, tensor in model.folder.weights.items() if name != SCORE}
        self._conversions = Conversions(self._module, tensors)
        head = {name for name, each in self._module.named_modules() if each is self._module.get_output_embeddings()}
        self._head = {f"{name}.{kind}" for name in head for kind in ("weight", "bias")} if value_head else set()

    def check(self):
        """UsageError for a tensor that is missing, unknown, of another shape or of a type that is not read."""
        folder, conversions = self.model.folder, self._conversions
        conversions.check(folder, self._head)
        if conversions.unknown:
            raise folder.error(f"{conversions.unknown[0]} is a tensor that {type(self._module).__name__} does not have")

    def differing_head_rows(self) -> list[str]:
        """As of `WeightMap`: the first row in which a stored weight differs from the one to which it is tied."""
        reader, stored = FolderReader(self.model.folder), self.model.folder.weights
        for name, tied in self._conversions.tied.items():
            if not self.value_head and name in stored and tied in stored:
                one, other = map(reader.read, (name, tied))
                if not torch.equal(one, other):
                    return [str(int((one != other).any(1).nonzero()[0]))]
        return []

    def read(self, weights: LocalWeights) -> Iterator[tuple[Tensor, Tensor, str]]:
        """Yields (a view of this rank's weights, what the folder has for it, the tensor's name)."""
        by_name, tied = {}, self._conversions.tied  # a tied weight has one of its names here, another in the folder
        for shard in weights.shards:
            name = shard.key.removeprefix(PREFIX)
            by_name.setdefault(tied.get(name, name), []).append(shard)
        reader = FolderReader(self.model.folder)
        for group in self._conversions.groups:
            wanted = [name for name in group.weights if tied.get(name, name) in by_name]
            if not wanted:
                continue
            made = group.made(reader.read, self._module)
            for name in wanted:
                for shard in by_name[tied.get(name, name)]:
                    box = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.shape, strict=True))
                    yield weights.view(shard), made[name][box], next(iter(group.sources))
        if self.model.has_scalar_head and HEAD in by_name:
            for shard in by_name[HEAD]:
                yield weights.view(shard), reader.read(SCORE), SCORE

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
        found = {name: stored[name].shape for group in self._exported() for name in group.sources}
        return found | ({SCORE: (1, self.args.hidden_size)} if self.value_head else {})

    def _exported(self) -> list[Group]:
        return [each for each in self._conversions.groups if not self._head.intersection(each.weights)]

    def keeps(self, name: str) -> bool:
        """Whether an export has a tensor of the folder that the model does not use."""
        return name in self._conversions.unused

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
        for group in self._exported():
            names = {name: self._conversions.tied.get(name, name) for name in group.weights}
            yield self._conversions.reverted({name: chunk.whole_weight(of) for name, of in names.items()})
        if self.value_head:
            yield {SCORE: whole(chunk.output_layer.weight)}
