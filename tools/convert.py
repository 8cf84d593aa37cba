"""Converts between megarl's checkpoints and Hugging Face folders, and compares the two, in any parallel layout.

    python tools/convert.py from-hf --hf-model DIR --save RUN
    python tools/convert.py to-hf   --hf-model DIR --load RUN --save NEW_DIR
    python tools/convert.py verify  --hf-model DIR --load RUN
    python tools/convert.py average --load RUN --save NEW_RUN …
    torchrun --nproc-per-node 8 tools/convert.py to-hf … --tensor-model-parallel-size 8

`from-hf` writes a checkpoint for `--pretrained-checkpoint` or `--load` of an evaluation. `to-hf` writes the weights of
a run with the names, types and files of the folder that the run started from; a folder with only a config.json gives
new files in its `dtype`; `--hf-mtp drop` leaves out tensors of multi-token prediction. `verify` compares every bit of
a checkpoint, rounded to the folder's types, with the folder.
`average` writes the moving average of a run with `--ema-decay` as a checkpoint like those of `from-hf`; the model is
that of `--hf-model` or of the flags.
All take Megatron's flags. `--reward` or `--critic` as the first flag selects a model with a scalar head: a reward
model, or the critic of an RL run.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.arguments import RunConfig, Settings
from megarl.checkpoint import folders
from megarl.checkpoint.pretrained import (
    CheckpointWeights,
    PretrainedWeights,
    factor_weights,
    folder_weights,
    stored_factors,
)
from megarl.checkpoint.resume import holds_average
from megarl.checkpoint.writer import CheckpointWriter
from megarl.errors import UsageError
from megarl.mcore.lora.adapter import folded_weights
from megarl.mcore.model import gpt
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.model.weight_table import weight_shapes
from megarl.mcore.weights import dist_checkpoint
from megarl.mcore.weights.hf.folder import DTYPES
from megarl.mcore.weights.hf.folder_weights import export_weights
from megarl.mcore.weights.hf.weight_map import WeightMap, weight_map_of
from megarl.mcore.weights.reshard_plan import model_weights
from megarl.observe.timers import Timers
from megarl.trainers.launch import launch
from megarl.trainers.setup import check_required, check_save, read_inputs

COMMANDS = ("from-hf", "to-hf", "verify", "average")
HEADS = {"--reward": "reward", "--critic": "critic"}  # roles with a scalar head, by option
# The lengths of a run do not matter here; a model with few positions must pass the check of --max-position-embeddings.
LENGTHS = ["--max-prompt-length", "1", "--max-response-length", "1"]
NAMED = 5  # maximum tensors in the message of `verify`


@torch.no_grad()
def differing_tensors(weight_map: WeightMap, stages, pg_collection) -> dict[str, float]:
    """Largest difference of each of the folder's tensors from this rank's weights, rounded to the folder's types.

    Tensors without a difference, not even in the sign of a zero, are left out.
    """
    weights, different = model_weights(stages, pg_collection), {}
    for view, numbers, name in weight_map.read(weights):
        stored = numbers.to(DTYPES[weight_map.model.folder.weights[name].dtype])
        held = view.to(stored.dtype).cpu().contiguous()
        if not torch.equal(held.view(torch.uint8), stored.contiguous().view(torch.uint8)):
            largest = float((held.double() - stored.double()).abs().max())
            different[name] = max(different.get(name, 0.0), largest)
    return different


class Conversion:
    """A model on this rank, filled from a folder or a checkpoint."""

    def __init__(self, command: str, role: str, config: RunConfig):
        """Checks the flags and loads the weights.

        Args:
            role: whose weights a checkpoint holds: actor, critic or reward.

        Raises:
            UsageError: a missing flag, or a wrong folder or checkpoint.
        """
        s, (self.settings,) = config.settings, config.roles.values()
        self.name, self.value_head = role, role != "actor"
        self.stored = dist_checkpoint.average_of(role) if command == "average" else role  # whose keys are read
        check_required({"--hf-model": command == "average" or self.settings.hf_model})
        check_required({"--load": command == "from-hf" or s.load, "--save": command == "verify" or s.save})
        check_save(s)
        self.save = Path(s.save) if s.save else None
        if (model := self.settings.hf_model) is not None:
            if self.save and self.save.resolve() == model.folder.path.resolve():
                raise UsageError(f"--save {s.save}: is the folder of --hf-model; allowed is another one")
            if command == "to-hf":
                model.check_exportable(self.value_head)
            self.weight_map = weight_map_of(model, self.settings.megatron, self.value_head)
        self.source = model.folder.path if model is not None and command == "from-hf" else s.load
        read = functools.partial(self._weights, None if command == "from-hf" else s.load)
        weights, self.mesh, _ = read_inputs(config, Timers(), read)
        self.groups = self.mesh[self.settings.name].pg_collection
        self.model = gpt.build_frozen_model(self.settings.megatron, self.vocab_size, self.groups, self.value_head)
        weights.load(self.model, self.groups)
        if self.name == "actor" and isinstance(weights, CheckpointWeights):
            self._add_prediction(weights.folder)

    def _add_prediction(self, folder: Path):
        """Adds the layer of multi-token prediction that a checkpoint has (`--mtp-train`)."""
        of_role = dist_checkpoint.prediction_of(self.name)
        if not any(key.startswith(f"{of_role}.") for key in dist_checkpoint.tensor_shapes(folder)):
            return
        args = self.settings.megatron
        args.predicts = True
        layer = PredictionLayer(args, self.groups).requires_grad_(False)
        state = {"model": dist_checkpoint.model_state(of_role, [layer], self.groups)}
        dist_checkpoint.load_weights([layer], dist_checkpoint.load_role(state, folder, self.groups)["model"])
        self.model.append(layer)
        self.say("the layer of multi-token prediction is that of the checkpoint")

    def _weights(self, load: str | None) -> PretrainedWeights:
        if load is None:
            self.vocab_size = self.settings.model_vocab_size(0)
            return folder_weights(self.settings, self.value_head)
        folder = folders.find(load, "--load")
        manifest = folders.read_manifest(folder, "--load")
        if self.stored != self.name and not holds_average(manifest):
            raise UsageError(f"--load {folder}: has no moving average; its run needs --ema-decay")
        self.vocab_size = vocab_size = self.settings.model_vocab_size(manifest.get("vocab_size", 0))
        if stored := stored_factors(folder, "--load", self.name):
            return factor_weights(folder, "--load", self.settings, vocab_size, self.stored, stored)
        shapes = weight_shapes(self.stored, self.settings.megatron, vocab_size, value_head=self.value_head)
        folders.check_weights(folder, "--load", self.name, shapes)
        return CheckpointWeights(folder, self.stored)

    def from_hf(self):
        """Writes a checkpoint of step 0 without optimizer state."""
        self._write("the weights")

    def average(self):
        """Writes the moving average of a run as a checkpoint of step 0."""
        with folded_weights(self.model):
            self._write("the moving average")

    def _write(self, what: str):
        stages = [chunk for chunk in self.model if not isinstance(chunk, PredictionLayer)]
        states = {self.name: {"model": dist_checkpoint.model_state(self.name, stages, self.groups)}}
        CheckpointWriter(self.save, self.mesh, Settings()).save(0, states, {"program": "convert", "role": self.name})
        self.say(f"{folders.step_folder(self.save, 0)}: {what} of {self.source}")

    def to_hf(self):
        """Writes a folder."""
        with folded_weights(self.model):
            export_weights(self.weight_map, self.model, self.groups, self.save)
        self.say(f"{self.save}: the weights of {self.source}")

    def verify(self) -> int:
        """Compares with the folder; returns the exit status, 1 if a tensor differs."""
        self.weight_map.check()
        gathered: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(gathered, differing_tensors(self.weight_map, self.model, self.groups))
        different = {name: max(found.get(name, 0.0) for found in gathered) for found in gathered for name in found}
        count = len(self.weight_map.expected())
        if different:
            first = ", ".join(f"{name} (by {size:.3g})" for name, size in sorted(different.items())[:NAMED])
            self.say(f"{len(different)} of {count} tensors differ: {first}")
        else:
            self.say(f"all {count} tensors are equal")
        return int(bool(different))

    def say(self, text: str):
        """Prints a line on rank 0."""
        if self.mesh.rank == 0:
            print(text, flush=True)


def main():
    """Takes the command and the head from the command line; the programs' parser reads the rest."""
    command = sys.argv[1] if len(sys.argv) > 1 else "nothing"
    if command in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    if command not in COMMANDS:
        print(f"convert: {command}: allowed is {', '.join(COMMANDS)}, then flags", file=sys.stderr)
        sys.exit(2)
    rest = sys.argv[2:]
    role = HEADS.get(rest[0] if rest else "", "actor")
    rest = rest if role == "actor" else rest[1:]
    # An export's flags have an effect; without a place for it, a message of its own says so.
    exports = command == "to-hf" and any(token.startswith(("--save", "--config")) for token in rest)
    sys.argv[1:] = LENGTHS + ["--export-hf"] * exports + rest
    with torch.no_grad():
        launch(
            lambda config, _: getattr(Conversion(command, role, config), command.replace("-", "_"))(),
            "sft" if role == "actor" else "reward",
        )


if __name__ == "__main__":
    main()
