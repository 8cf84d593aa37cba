"""A killed export leaves nothing that can be loaded, not even an older one; an import maps a bounded part of a file."""

import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import UsageError
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import build
from tests.helpers.folders.hf_quantized import fp8
from tests.helpers.texts import small_tokenizers
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import RankFailed, run_world

# Functions of folder_weights before whose n-th call on a rank the process is killed.
STAGES = {
    "before the transfer": ("WeightTransfer", 1),
    "before the data is flushed": ("MappedFile.flush", 1),
    "before the files get their names": ("_publish", 1),
    "before the first rename": ("os.replace", 1),
    "before the last rename": ("os.replace", 3),
}


def export(rank: int, source: Path, folder: Path, stage: str | None):
    """Exports; kills the process at a stage."""
    from megarl.mcore.weights.hf import folder_weights as module

    _, groups, model, weights = build(source, "", False)
    if stage is not None:
        _kill_before(module, *STAGES[stage])
    module.export_weights(weights.weight_map, model, groups.pg_collection, folder)


def _kill_before(module, path: str, number: int):
    owners, _, name = path.rpartition(".")
    owner = operator.attrgetter(owners)(module) if owners else module
    original, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os._exit(9)
        return original(*args, **kwargs)

    setattr(owner, name, killed)


def is_loadable(folder: Path) -> bool:
    from megarl.mcore.weights.hf.folder import HFFolder

    try:
        return bool(HFFolder(folder).tensors)
    except UsageError:
        return False


@pytest.mark.parametrize("over_an_older_one", [long(False), True])
@pytest.mark.parametrize("stage", by_default(STAGES, ("before the transfer", "before the last rename")))
def test_a_killed_export_cannot_be_loaded(stage, over_an_older_one, tmp_path):
    source, folder = hf_folders.write_folder("qwen3", tmp_path / "hf", files=2), tmp_path / "export"
    if over_an_older_one:
        run_world(export, 1, source, folder, None)
        assert is_loadable(folder)
    with pytest.raises(RankFailed):
        run_world(export, 1, source, folder, stage)
    assert not is_loadable(folder)
    run_world(export, 1, source, folder, None)  # the next one repairs it
    assert is_loadable(folder) and not list(folder.glob("*.partial"))


def test_a_single_file_gets_its_name_last(tmp_path):
    source, folder = hf_folders.write_folder("qwen3", tmp_path / "hf"), tmp_path / "export"
    with pytest.raises(RankFailed):
        run_world(export, 1, source, folder, "before the first rename")
    assert not is_loadable(folder) and (folder / "config.json").exists()


def test_a_folder_is_not_exported_onto_itself(tmp_path):
    source = hf_folders.write_folder("qwen3", tmp_path / "hf")
    with pytest.raises(RankFailed, match="must not overwrite the folder that the model came from"):
        run_world(export, 1, source, source, None)
    assert is_loadable(source)


# -- memory of an import -------------------------------------------------------------------------------------------

MIB = 2**20
TP2 = "--tensor-model-parallel-size 2"
ALLOWED = 0.1  # growth of the peak during the import, as a fraction of the rank's weights


class Sizes(NamedTuple):
    """A llama in bf16."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int

    def shapes(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Shape by name of the tensors of each file: the vocabulary's, then each layer's."""
        outer = (self.vocabulary, self.hidden)
        yield {"model.embed_tokens.weight": outer, "lm_head.weight": outer, "model.norm.weight": (self.hidden,)}
        square, wide = (self.hidden, self.hidden), (self.ffn, self.hidden)
        for layer in range(self.layers):
            shapes = {f"self_attn.{name}_proj": square for name in "qkvo"}
            shapes |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
            shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (self.hidden,))
            yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


GIB = Sizes(layers=6, hidden=2048, ffn=8192, heads=16, vocabulary=32768)
SMALL = Sizes(layers=4, hidden=512, ffn=4096, heads=8, vocabulary=8192)


def write_folder(sizes: Sizes, folder: Path, one_file: bool) -> Path:
    """Writes random weights, a file at a time unless all are in one."""
    small_tokenizers.characters(folder)
    config = hf_folders.reference("llama2").config | {
        "num_hidden_layers": sizes.layers, "hidden_size": sizes.hidden, "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads, "vocab_size": sizes.vocabulary,
        "head_dim": sizes.hidden // sizes.heads, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator, files = torch.Generator().manual_seed(1), list(sizes.shapes())
    if one_file:
        files = [{name: shape for file in files for name, shape in file.items()}]
    places = {}
    for number, shapes in enumerate(files, start=1):
        name = "model.safetensors" if one_file else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {key: torch.rand(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, name)
    if not one_file:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def memory(entry: str) -> int:
    """Bytes of this process by /proc/self/status: VmRSS now, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{entry}:"))
    return int(value) * 1024


def growth(rank: int, folder: Path, warm: Path, flags: str, mapped_bytes: int | None) -> tuple[int, int, bool]:
    """Growth of this rank's peak during the import, size of its weights, and whether they are the folder's.

    The model is built, and its memory in use, before. `warm`: a folder that is imported first, so that the code is in
    memory. `mapped_bytes`: another limit of what is mapped at a time.
    """
    from megarl.mcore.weights.hf import folder as folders
    from tools.convert import differing_tensors

    build(warm, flags, False)
    _, groups, model, weights = build(folder, flags, False, load=False)
    if mapped_bytes is not None:
        folders.MAPPED_BYTES = mapped_bytes
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(float("nan"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    weights.load(model, groups.pg_collection)
    grown = memory("VmHWM") - before
    is_equal = not differing_tensors(weights.weight_map, model, groups.pg_collection)
    return grown, sum(parameter.nbytes for parameter in parameters), is_equal


def fractions(folder: Path, tmp_path: Path, flags: str, mapped_bytes: int | None = None) -> list[float]:
    """Growth of each rank's peak as a fraction of its weights."""
    warm = hf_folders.write_folder("llama2", tmp_path / "warm")
    found = run_world(growth, 2, folder, warm, f"{TP2} {flags}", mapped_bytes)
    assert all(is_equal for *_, is_equal in found)
    return [grown / size for grown, size, _ in found]


@pytest.mark.parametrize("one_file, is_fp8", by_default(
    [(True, False), (False, False), (True, True)], [(True, False)]
))  # fmt: skip
def test_an_import_maps_a_bounded_part_of_a_file(one_file, is_fp8, tmp_path):
    folder = write_folder(SMALL, tmp_path / "folder", one_file)
    if is_fp8:
        fp8((128, 128))(folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 32 * MIB
    assert max(fractions(folder, tmp_path, "", 2 * MIB)) <= ALLOWED


def test_the_measurement_sees_what_is_mapped(tmp_path):
    """Without a limit a rank maps all of the file that it reads."""
    folder = write_folder(SMALL, tmp_path / "folder", one_file=True)
    assert min(fractions(folder, tmp_path, "", 2**40)) > 3 * ALLOWED


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_an_import_of_a_gibibyte_needs_a_tenth_more_than_its_weights(flags, tmp_path):
    folder = write_folder(GIB, tmp_path / "folder", one_file=False)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) >= 1024 * MIB
    assert max(fractions(folder, tmp_path, flags)) <= ALLOWED
