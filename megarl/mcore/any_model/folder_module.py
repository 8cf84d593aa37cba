"""What is known of a folder's module before it has weights, for the rooms that build, plan and check a model.

A role's Megatron namespace has it as `model_folder`. Rooms that `any_model` itself needs ask it, and import nothing.
"""

import collections
import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.data import node_files
from megarl.errors import UsageError
from megarl.mcore.any_model import routing, self_check, source, tensor_parallel, walk
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.chunk import PREFIX, AnyChunk
from megarl.mcore.any_model.source import Source
from megarl.mcore.any_model.walk import Reach
from megarl.mcore.lora.targets import ALL_LINEAR, LoRASettings
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.mcore.model.weight_table import HEAD, Weight
from megarl.mcore.weights.hf.folder import CONFIG, HFFolder

# Projections of a dense MLP and of shared experts that PEFT 0.21 takes for those of experts, in models with experts.
RENAMED = (".gate_proj", ".up_proj", ".down_proj", ".gate", ".w1", ".w2", ".w3")
_once = functools.lru_cache(maxsize=8)  # by path: a process asks many times


class FolderModule(str):
    """A folder, which is its path, whose module of transformers computes a role's model."""

    __slots__ = ()

    @_once
    def source(self) -> Source:
        """Of a folder that was read before without an error."""
        return source.read(HFFolder(self))

    @_once
    def reach(self) -> Reach:
        """What a pass over text does with the module. Raises Unsupported."""
        found = self.source()
        with source.one_line_errors(found.kind, "be built"):
            return walk.reach(found.module(torch.float32))

    def chunk(self, args, config, pg_collection, value_head: torch.nn.Module | None) -> AnyChunk:
        """The model without values. Arguments as of `AnyChunk`."""
        return AnyChunk(config, args, pg_collection, value_head)

    @_once
    def self_check(self, longest: int):
        """Raises Unsupported for a module that computes other logits alone than under megarl.

        Args:
            longest: maximum length of prompt and response together, in tokens.
        """
        self._tried("self-check", longest, lambda found: self_check.check(found, longest))

    # -- low-rank factors, named and chosen as PEFT does ----------------------------------------------------------

    @_once
    def linears(self, targets: tuple[str, ...] | None = None) -> dict[str, tuple[int, int]]:
        """(rows, columns) by name of the layers that can have factors, and that PEFT's `target_modules` name; None:
        all."""
        ends = None if targets is None else tuple(f".{target}" for target in targets)
        return {x: size for x, size in self.reach().linears.items() if ends is None or f".{x}".endswith(ends)}

    def renamed_by_peft(self) -> tuple[str, ...]:
        """Ends of names of layers that PEFT must be given as parameters: some in models with experts that are one."""
        return RENAMED if any(parameter.dim() == 3 for parameter in self.reach().module.parameters()) else ()

    def parse_targets(self, text: str) -> tuple[str, ...]:
        """`--lora-targets`, in the order of the text. UsageError for a name that no layer has."""
        names = self.linears()
        if not names:
            raise UsageError(f"--lora-targets {text}: the module of {self} has no linear layers")
        if text == ALL_LINEAR:
            return self.targets_naming(names)
        targets = tuple(dict.fromkeys(target.strip() for target in text.split(",")))
        for target in targets:
            if not self.linears((target,)):
                allowed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
                raise UsageError(
                    f"--lora-targets {text}: no linear layer of {self} is {target}; allowed are {ALL_LINEAR}, "
                    f"and with commas {allowed}"
                )
        return targets

    def targets_naming(self, names: Collection[str]) -> tuple[str, ...]:
        """The shortest targets that name exactly these layers: the last part of a name, or all of it."""
        ends = {name: name.rpartition(".")[2] for name in names}
        return tuple(dict.fromkeys(name if self.linears((end,)).keys() - names else end for name, end in ends.items()))

    def factor_shapes(self, lora: LoRASettings) -> dict[str, tuple[int, ...]]:
        """As of `lora.targets`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in self.linears(lora.targets).items():
            key = f"lora.{PREFIX}{name}.lora_"
            shapes |= {f"{key}A": (lora.rank, columns), f"{key}B": (rows, lora.rank)}
        return shapes

    # -- what else runs with it -----------------------------------------------------------------------------------

    @_once
    def routed_layers(self) -> tuple[RoutedLayers, str | None]:
        """The layers whose routes can be replayed; why those of the module's experts cannot be, if there are none."""
        module = self.source().module(torch.float32)
        source.find_slots(module)
        try:
            if routers := routing.install(module):
                return RoutedLayers(tuple(x.layer_number for x in routers), routers[0].experts, routers[0].topk), None
            problem = "calls no experts by transformers' interface"
        except Unsupported as error:
            problem = str(error)
        return RoutedLayers((), 0, 0), f"{type(module).__name__}: {problem}"

    def inexact_part(self) -> str | None:
        """What keeps an exact rollout on CUDA from the module; None: nothing that is known."""
        return walk.inexact_part(self.source())

    def split_problem(self, ranks: int, shards: bool) -> str | None:
        """Why the module cannot be split over so many tensor-parallel ranks; None: it can.

        Args:
            shards: each part is sharded over data-parallel ranks, too.
        """
        module = self.reach().module
        try:
            splits = tensor_parallel.splits_of(module, ranks)
            self.partial_weights(ranks)
        except Unsupported as error:
            return str(error)
        packed = [name for name, split in splits.items() if split.parts > 1 and split.axis > 0]
        if packed and shards:
            return f"--use-torch-fsdp2 shards {packed[0]} along another axis than that of its packed parts"
        return None

    @_once
    def partial_weights(self, ranks: int) -> tuple[str, ...]:
        """As of `self_check`. Raises Unsupported."""
        return self._tried("trial", ranks, lambda found: self_check.partial_weights(found, ranks))

    def _tried(self, kind: str, size: int, attempt: Callable[[Source], Sequence[str] | None]) -> tuple[str, ...]:
        """The names that an attempt finds, which one process of a node makes. Raises Unsupported, as the attempt."""
        found = self.source()

        def try_it() -> str:
            try:
                with source.one_line_errors(found.kind, "be built"):
                    return "\n".join(["", *(attempt(found) or ())])
            except Unsupported as error:
                return str(error)

        text = node_files.text((kind, size, node_files.identity(f"{self}/{CONFIG}")), try_it)
        problem, *names = text.split("\n")
        if problem:
            raise Unsupported(problem)
        return tuple(names)

    def checkpoint_shapes(self, role: str, value_head: bool) -> dict[str, tuple[int, ...]]:
        """The global shapes by key that a checkpoint of a role must have."""
        tensors = self._tensors(value_head)[1]
        return {f"{role}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}

    def rank_weights(self, value_head: bool, ranks: int, element: int) -> list[Weight]:
        """The parameters, of elements of so many bytes, that each of so many tensor-parallel ranks holds."""
        module, tensors = self._tensors(value_head)
        splits = tensor_parallel.splits_of(module, ranks) if ranks > 1 else {}
        experts, found = self.reach().experts, []
        layers: dict[int, list[int]] = collections.defaultdict(list)
        for number, layer in enumerate(source.layers_of(module)):
            for parameter in layer.parameters():
                layers[id(parameter)].append(number)
        for name, tensor in tensors.items():
            shape, split = list(tensor.shape), splits.get(name.removeprefix(PREFIX))
            if split is not None:
                shape[split.axis] //= ranks
            if isinstance(tensor, torch.nn.Parameter):
                is_routed, of_layers = name.removeprefix(PREFIX).rpartition(".")[0] in experts, layers[id(tensor)]
                found.append(Weight(name, tuple(shape) or (1,), element, is_routed=is_routed, layers=(*of_layers,)))
        return found

    @_once
    def _tensors(self, value_head: bool) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """The module, and a role's parameters and persistent buffers by name, each once. Nobody changes either."""
        found = self.source()
        module = found.module(torch.float32) if value_head else self.reach().module
        if value_head:
            module.set_output_embeddings(torch.nn.Identity())
        head = {HEAD: torch.nn.Parameter(torch.empty(1, found.text.hidden_size, device="meta"))} if value_head else {}
        return module, {f"{PREFIX}{name}": each for name, each in source.own_tensors(module).items()} | head
