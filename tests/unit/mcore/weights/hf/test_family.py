"""Hugging Face folders in every layout: the numbers that transformers computes, and exports equal byte for byte."""

import filecmp
import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megarl.mcore.weights.hf.family import NO_PREDICTION, PREDICTION_LAYERS, PREDICTION_MODULE
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import (
    CONFIG,
    FIRST,
    INDEX,
    SINGLE,
    config,
    in_order,
    tensors,
    text_config,
    transposed_experts,
)
from tests.helpers.folders.hf_layouts import (
    DENSE,
    FAMILIES,
    GENERATED,
    LONG,
    MOE,
    RECURRENT,
    REWARD,
    SHORT,
    SUPPORTED,
    build,
    run_cases,
)
from tests.helpers.folders.hf_prediction import EMBEDDING, HEAD, add_module, prediction_tensors, with_prediction
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import RankFailed, run_world

TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
UNEVEN_PP2 = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
TP4 = "--tensor-model-parallel-size 4"
EVEN_HEADS = tuple(case for case in SUPPORTED if case != "smollm2")  # it has three

# layout -> ranks, flags, cases, whether the rollout engine runs on it
LAYOUTS = {
    "one rank": (1, "", SUPPORTED, True),
    "tp2": (2, TP2, tuple(case for case in EVEN_HEADS if case in DENSE + REWARD), True),
    "tp2-sp": (2, f"{TP2} {SP}", EVEN_HEADS, True),
    # Two ranks share a query group; recurrent states of these models have two key heads.
    "tp4-sp": (4, f"{TP4} {SP}", tuple(case for case in EVEN_HEADS if case not in RECURRENT), False),
    "pp2": (2, UNEVEN_PP2, SUPPORTED, True),
    "ep2": (2, "--expert-model-parallel-size 2", MOE, True),
    "sharded": (2, "--use-torch-fsdp2", SUPPORTED, False),
    "tp2-sp-ep2-pp2": (4, f"{TP2} {SP} {UNEVEN_PP2} --expert-model-parallel-size 2", MOE, True),
    "cp2": (2, "--context-parallel-size 2", DENSE + MOE, False),
}
# Layouts that the others almost cover, with the cases that run in them by default.
ALIKE = {
    "tp2": ("gemma2", "olmo2", "qwen35_dense"),
    "tp2-sp-ep2-pp2": ("qwen3_moe", "gpt_oss", "deepseek_v3_yarn", "qwen3_next"),
    "sharded": ("qwen25_tied", "gemma2", "mixtral", "qwen35_dense"),
    "cp2": ("mistral_window", "gemma3", "glm4_moe", "qwen35_moe"),
}


def unequal_files(one: Path, other: Path) -> list[str]:
    """Names of files that differ, or that only one folder has."""
    names = {path.name for path in (*one.iterdir(), *other.iterdir())}
    _, different, missing = filecmp.cmpfiles(one, other, sorted(names), shallow=False)
    return different + missing


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a case; some have one weight file, some two."""

    @functools.cache
    def write(case: str) -> Path:
        files = 1 + (SUPPORTED.index(case) % 2)
        return hf_folders.write_folder(case, tmp_path_factory.mktemp("folders") / case, files)

    return write


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("one rank", "tp2", "sharded")))
def test_every_layout_computes_what_transformers_computes_and_exports_the_same_bytes(layout, folder_of, tmp_path):
    check(layout, quick_cases(layout), SHORT, folder_of, tmp_path, GENERATED)


@pytest.mark.long  # five minutes; on one rank with the rollouts of all families
@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_cases_in_every_layout(layout, folder_of, tmp_path):
    """On one rank all of them, with responses of another length."""
    is_alone = LAYOUTS[layout][0] == 1
    further = set(LAYOUTS[layout][2]) - set([] if is_alone else quick_cases(layout))
    check(layout, sorted(further), LONG if is_alone else SHORT, folder_of, tmp_path)


def quick_cases(layout):
    """One of each family, and some where another layout has almost the same."""
    chosen = ALIKE.get(layout, FAMILIES)
    return [case for case in LAYOUTS[layout][2] if case in chosen]


def check(layout, cases, count, folder_of, tmp_path, chosen=SUPPORTED):
    """Compares what a layout finds of the cases; `count`: tokens of a rollout of the `chosen` ones, where its engine
    runs."""
    size, flags, _, generates = LAYOUTS[layout]
    folders = {case: folder_of(case) for case in cases}
    generating = {case for case in cases if generates and case in chosen}
    for found in run_world(run_cases, size, flags, folders, tmp_path, count, generating):
        for case, result in found.items():
            stored = hf_folders.reference(case)
            assert result.difference <= 1e-5, (case, result.difference)
            if case in generating and case not in REWARD:
                assert result.greedy == stored.greedy[:count], case
                assert result.gap <= largest_gap_allowed(), (case, result.gap)
    for case, folder in folders.items():
        assert unequal_files(folder, tmp_path / case) == [], case


# -- folders as others store them --------------------------------------------------------------------------------


def stored_head(held):
    """Qwen3-0.6B and 1.7B have the head to which the embedding is tied."""
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()


def rotary_buffers(held):
    """As early versions of transformers stored llamas."""
    held |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.arange(8.0) for i in range(3)}


def integers(held):
    """A tensor of prediction in a type that megarl does not read."""
    held["model.layers.3.count"] = torch.arange(5)


def index_of_one_file(folder: Path):
    """What converters write that always write an index."""
    with safe_open(folder / SINGLE, framework="pt") as stored:
        names = dict.fromkeys(stored.keys(), SINGLE)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def renamed(rule):
    """A change of the names of a folder's tensors."""

    def change(held):
        for name in list(held):
            held[rule(name)] = held.pop(name)

    return tensors(change)


def name_since(name: str) -> str:
    """That of a tensor of Qwen2-VL in folders of later versions of transformers."""
    plain = name.removeprefix("model.")
    of_model = plain if plain.startswith("visual") else f"language_model.{plain}"
    return name if name.startswith("lm_head") else f"model.{of_model}"


def flat(folder: Path):
    """The published config.json of Qwen2.5-VL: the language model's entries are beside those of the tower."""
    path = folder / "config.json"
    entries = json.loads(path.read_text())
    text = entries.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": entries["model_type"],
             "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}  # fmt: skip
    path.write_text(json.dumps(text | entries))


def unnamed_tensor(folder: Path):
    """A tensor that was deleted from the index."""
    tensors(lambda held: held.update({"model.layers.3.eh_proj.weight": torch.ones(64, 128)}), FIRST)(folder)


def written_by_transformers(rank: int, folders: dict[str, Path]):
    """Rewrites folders with the experts of a layer in two tensors, as transformers has them in memory."""
    from transformers import AutoModelForCausalLM

    for folder in folders.values():
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, save_original_format=False)
        with safe_open(folder / SINGLE, framework="pt") as stored:
            assert any(name.endswith("experts.gate_up_proj") for name in stored.keys()), folder


# case+name -> files, change
STORED_OTHERWISE = {
    "qwen25_tied+stored_head": (1, tensors(stored_head)),
    "llama2+rotary_buffers": (1, tensors(rotary_buffers)),
    "deepseek_v3+prediction_layer": (1, in_order(with_prediction, tensors(integers))),
    "glm4_moe+prediction_layer": (1, with_prediction),
    "glm4_moe_lite+prediction_layer": (1, with_prediction),
    "qwen3_next+prediction_module": (1, tensors(add_module)),
    "nemotron_h_moe+prediction_module": (1, tensors(add_module)),
    "nemotron_h+names_in_memory": (1, renamed(lambda name: name.replace("backbone.", "model."))),
    "qwen35_vision+prediction_module": (1, tensors(add_module)),
    "qwen3+index_of_one_file": (1, index_of_one_file),
    "llama3+unnamed_tensor": (2, unnamed_tensor),
    "gemma3_vision+names_in_memory": (1, renamed(lambda name: "model." + name.replace("model.model.", "model."))),
    "gemma3_vision+untied_without_head": (1, config(tie_word_embeddings=False)),
    "qwen2_vl+names_since": (1, renamed(name_since)),
    "qwen2_5_vl+flat": (1, flat),
    "qwen3_vl_moe+transposed_experts": (1, transposed_experts),
    "qwen3_vl+tied_with_another_head": (1, text_config(tie_word_embeddings=True)),
}
FUSED = [f"{x}+fused" for x in ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe_window", "qwen35_moe", "afmoe")]
# Those that are like another one.
FURTHER = [
    "glm4_moe+prediction_layer", "glm4_moe_lite+prediction_layer", "nemotron_h_moe+prediction_module",
    "qwen35_vision+prediction_module", "gemma3_vision+untied_without_head", *FUSED[1:4],
]  # fmt: skip


@pytest.mark.parametrize("names", [[x for x in [*STORED_OTHERWISE, *FUSED] if x not in FURTHER], long(FURTHER)],
                         ids=["chosen", "further"])  # fmt: skip
def test_what_others_store_is_computed_and_exported_again(names, tmp_path):
    folders = {}
    for name in names:
        files, change = STORED_OTHERWISE.get(name, (1, lambda folder: None))
        folders[name] = hf_folders.write_folder(name.partition("+")[0], tmp_path / name, files)
        change(folders[name])
    run_world(written_by_transformers, 1, {name: folders[name] for name in names if name in FUSED})
    flags = f"{TP2} {SP} --expert-model-parallel-size 2"
    dense = {name: folder for name, folder in folders.items() if name.partition("+")[0] in DENSE}
    sparse = {name: folder for name, folder in folders.items() if name not in dense}
    for layout, cases in ((TP2, dense), (flags, sparse)):
        for found in run_world(run_cases, 2, layout, cases, tmp_path / "exports", 0):
            assert all(result.difference <= 1e-5 for result in found.values()), found
    for name, folder in folders.items():
        assert unequal_files(folder, tmp_path / "exports" / name) == [], name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value, tmp_path):
    """A run would skip each of its updates, and end well."""
    folder, name = hf_folders.write_folder("llama3", tmp_path / "llama3"), "model.layers.1.mlp.up_proj.weight"
    tensors(lambda held: held[name][3].index_fill_(0, torch.tensor(5), value))(folder)
    with pytest.raises(RankFailed, match=f"UsageError: --hf-model {folder}: {name} has a NaN or an infinity"):
        run_world(run_cases, 1, "", {"llama3": folder}, tmp_path / "exports", 0)


def test_every_family_has_a_case():
    from megarl.mcore.weights.hf.families import families

    assert families().keys() == {hf_folders.reference(case).config["model_type"] for case in FAMILIES}
    assert set(FAMILIES) <= set(SUPPORTED)


# -- tensors of multi-token prediction -----------------------------------------------------------------------------


def test_layers_after_those_of_the_model():
    found = PREDICTION_LAYERS._replace(numbers=range(61, 62), is_kept=True)
    assert found.has("model.layers.61.eh_proj.weight") and found.has("model.layers.61.mlp.experts.7.up_proj.weight")
    assert not any(map(found.has, ("model.layers.60.enorm.weight", "model.layers.62.enorm.weight", "model.layers.61")))
    assert found.copied("model.layers.61.embed_tokens.weight") == "model.embed_tokens.weight"
    assert found.copied("model.layers.61.shared_head.head.weight") == "lm_head.weight"
    assert found.copied("model.layers.61.shared_head.norm.weight") is None
    assert found.copied("model.layers.60.embed_tokens.weight") is None
    assert found.without({"num_nextn_predict_layers": 1, "a": 2}) == {"num_nextn_predict_layers": 0, "a": 2}
    assert found.without({}) == {"num_nextn_predict_layers": 0}


def test_a_prefix_of_their_own():
    found = PREDICTION_MODULE
    assert found.has("mtp.fc.weight") and found.has("mtp.layers.0.mlp.gate.weight")
    assert not found.has("model.layers.4.mtp.weight") and found.copied("mtp.fc.weight") is None
    assert found.note(["mtp.fc.weight", "lm_head.weight"]) is not None


def test_families_without_any():
    found = NO_PREDICTION._replace(is_kept=True)
    assert not found.has("model.layers.3.eh_proj.weight") and found.note(["model.layers.3.eh_proj.weight"]) is None


COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
OF_PREDICTION = {
    "one rank": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


def export_changed(rank: int, source: Path, folder: Path, flags: str):
    """Exports the model after a change of all its weights."""
    from megarl.mcore.weights.hf.folder_weights import export_weights

    _, groups, model, weights = build(source, flags, False)
    with torch.no_grad():
        for parameter in (each for chunk in model for each in chunk.parameters()):
            parameter.mul_(2)
    export_weights(weights.weight_map, model, groups.pg_collection, folder)


def own_embedding(held):
    """An embedding that the prediction layer does not share."""
    held["model.layers.3.embed_tokens.weight"][5, 5] += 1


@pytest.mark.parametrize("layout", by_default(OF_PREDICTION, ["pp2"]))
def test_copies_are_those_of_the_trained_weights(layout, tmp_path):
    source, (size, flags) = hf_folders.write_folder("deepseek_v3", tmp_path / "hf"), OF_PREDICTION[layout]
    with_prediction(source)
    run_world(export_changed, size, source, tmp_path / "out", flags)
    before, after = prediction_tensors(source), load_file(tmp_path / "out" / SINGLE)
    for name, tensor in before.items():
        of = COPIES.get(name.removeprefix("model.layers.3."))
        assert after[name].equal(tensor if of is None else after[of]), name
    assert after[EMBEDDING].equal(2 * load_file(source / SINGLE)[EMBEDDING])
    assert (source / CONFIG).read_bytes() == (tmp_path / "out" / CONFIG).read_bytes()


@pytest.mark.long
def test_what_is_no_copy_stays_as_it_is(tmp_path):
    source = hf_folders.write_folder("deepseek_v3", tmp_path / "hf")
    in_order(with_prediction, tensors(own_embedding))(source)
    run_world(export_changed, 1, source, tmp_path / "out", "")
    before, after = prediction_tensors(source), load_file(tmp_path / "out" / SINGLE)
    changed = [name for name, tensor in before.items() if not after[name].equal(tensor)]
    assert changed == ["model.layers.3.shared_head.head.weight"]


@pytest.mark.long
@pytest.mark.parametrize("case, layer", [("glm4_moe", 4), ("deepseek_v3", 3)])
def test_dropped_tensors(case, layer, tmp_path):
    source = hf_folders.write_folder(case, tmp_path / "hf")
    with_prediction(source)
    run_world(export_changed, 1, source, tmp_path / "out", "--export-hf --save x --hf-mtp drop")
    before, after = load_file(source / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert after.keys() == {name for name in before if not name.startswith(f"model.layers.{layer}.")}
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config == json.loads((source / CONFIG).read_text()) | {"num_nextn_predict_layers": 0}


@pytest.mark.long
def test_a_critic_has_none(tmp_path):
    """Its head is not the one that prediction shares."""
    source = hf_folders.write_folder("deepseek_v3", tmp_path / "hf")
    with_prediction(source)
    run_world(export_critic, 1, source, tmp_path / "out")
    after = load_file(tmp_path / "out" / SINGLE)
    assert not [name for name in after if name.startswith("model.layers.3.")] and "score.weight" in after
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["num_nextn_predict_layers"] == 0


def export_critic(rank: int, source: Path, folder: Path):
    from megarl.mcore.weights.hf.folder_weights import export_weights

    _, groups, model, weights = build(source, "", True)
    export_weights(weights.weight_map, model, groups.pg_collection, folder)
