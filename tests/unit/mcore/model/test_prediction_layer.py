"""The layer of multi-token prediction of Hugging Face folders: the numbers of transformers, in every layout."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.folders.hf_damage import SINGLE
from tests.helpers.folders.hf_layouts import build
from tests.helpers.folders.hf_prediction import ROWS, STORED, of_case
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

CASES = ("deepseek_v3", "glm4_moe", "qwen3_next")
LAYOUTS = {
    "one rank": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2"),
}


def scored(layer, model, hidden, output_layer, weight, packing, vocab_size: int) -> torch.Tensor:
    """Log-probs of the token after each one's next, of the whole stream."""
    from megarl.mcore.kernels.head import HeadOptions
    from megarl.mcore.kernels.head_scores import head_scores
    from megarl.mcore.model.forward_pass import gather_stream

    tokens, own = torch.tensor(sum(ROWS, [])), copy.copy(packing)
    own.routing = None
    stream = torch.cat([tokens, tokens.new_zeros(packing.padding)])
    following = stream.roll(-1)[packing.token_indices].unsqueeze(0)
    embedded, frequencies, *_ = model._preprocess(following, packing.positions.unsqueeze(0), packed_seq_params=own)
    states = layer(hidden.unsqueeze(1), embedded, frequencies, own).squeeze(1)
    targets, is_split = stream.roll(-2)[packing.token_indices], model.config.sequence_parallel
    found, *_ = head_scores(
        states, weight, targets, HeadOptions(1.0, vocab_size, output_layer.tp_group, is_split), squares=False
    )
    return gather_stream(found, packing)


def measured(rank: int, flags: str, folders: dict[str, Path], out: Path) -> dict[str, float]:
    """Largest difference of each case from the stored numbers; writes its export."""
    from megarl.mcore.model.forward_pass import inference_mode, run_chunk
    from megarl.mcore.model.prediction_layer import PredictionLayer
    from megarl.mcore.weights.hf.folder_weights import export_weights, import_weights
    from megarl.mcore.weights.hf.weight_map import WeightMap

    stored, differences = json.loads(STORED.read_text()), {}
    for case, folder in folders.items():
        role, groups, model, weights = build(folder, flags, False)
        role.megatron.predicts = True
        weight_map = WeightMap(role.hf_model, role.megatron)
        weight_map.check()
        layer = PredictionLayer(role.megatron, groups.pg_collection).requires_grad_(False)
        import_weights(weight_map, [layer], groups.pg_collection)

        def process(hidden, output_layer, weight, targets, packing, of, layer=layer, size=role.model_vocab_size(0)):
            return scored(layer, of, hidden, output_layer, weight, packing, size)

        lengths = torch.tensor([len(row) for row in ROWS])
        with inference_mode(model):
            found = run_chunk(model[0], torch.tensor(sum(ROWS, [])), lengths, process, None, None)
        rows = (row[:-2] for row in found.split(lengths.tolist()))
        pairs = zip(rows, map(torch.tensor, stored[case]), strict=True)
        differences[case] = max(float((row - expected).abs().max()) for row, expected in pairs)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(2)
        export_weights(weight_map, [*model, layer], groups.pg_collection, out / case)
    return differences


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["one rank"]))
def test_log_probs_are_those_of_transformers_and_exports_have_what_was_trained(layout, tmp_path):
    folders = {case: of_case(case, tmp_path / case) for case in CASES}
    size, flags = LAYOUTS[layout]
    for differences in run_world(measured, size, flags, folders, tmp_path / "out"):
        assert max(differences.values()) <= 1e-5, differences
    for case, folder in folders.items():
        before, after = load_file(folder / SINGLE), load_file(tmp_path / "out" / case / SINGLE)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        shared = ("embed_tokens.weight", "shared_head.head.weight", "correction_bias")
        prefixes = ("mtp.", f"model.layers.{layers}.")
        own = [name for name in before if name.startswith(prefixes) and not name.endswith(shared)]
        assert before.keys() == after.keys() and len(own) > 10
        for name, tensor in before.items():
            assert after[name].equal(2 * tensor if name in own else tensor), name
