"""PEFT adapters of every family in and out, against PEFT: equal log-probs in any layout, equal factors back."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl import probe
from megarl.errors import UsageError
from megarl.mcore.lora.peft_files import read_adapter
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import logprobs, role_of
from tests.helpers.models.lora_models import draw_factors, trained_state
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY, run_world

# PEFT and transformers run in processes of their own: they start threads, and worlds are forked from this process.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")

TP2, TP4, SP = (*(f"--tensor-model-parallel-size {size}" for size in (2, 4)), "--sequence-parallel")
PP2 = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
DENSE = ("llama3", "qwen2", "phi4", "gemma2", "olmo2", "glm4", "qwen35_dense", "nemotron_h", "qwen2_5_vl", "mistral3",
         "gemma3_vision")  # fmt: skip
MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "deepseek_v2_lite", "qwen3_next",
       "qwen35_moe", "nemotron_h_moe", "nemotron_h_latent", "qwen3_vl_moe", "sarvam_moe", "hy_v3")  # fmt: skip
TOWERS = ("qwen2_5_vl", "mistral3", "gemma3_vision", "qwen3_vl_moe")
LAYOUTS = {
    "one rank": (1, "", DENSE + MOE),
    "tp2-sp": (2, f"{TP2} {SP}", ("phi4", "gemma2", "qwen2_moe", "gpt_oss", "deepseek_v3")),
    "tp2-sp-recurrent": (2, f"{TP2} {SP}", ("qwen3_next", "qwen35_dense", "nemotron_h", "nemotron_h_moe")),
    "tp4-sp": (4, f"{TP4} {SP}", ("llama3", "phi4", "qwen2", "gpt_oss")),  # two ranks share a query group
    "pp2": (2, PP2, ("llama3", "glm4_moe", "qwen35_dense", "nemotron_h", "qwen2_5_vl")),
    "ep2": (2, "--expert-model-parallel-size 2", ("qwen3_moe", "gpt_oss", "nemotron_h_latent", "qwen3_vl_moe")),
    "fsdp2": (2, "--use-torch-fsdp2", ("llama3", "qwen3_moe", "qwen35_moe", "nemotron_h")),
}
RSLORA = ("llama3", "qwen2", "qwen3_moe")
DENSE_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
                 "gate_up_proj"]  # fmt: skip
# Of gated delta nets; Qwen3-Next fuses what Qwen3.5 has apart.
RECURRENT = ["in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
DENSE_TARGETS += RECURRENT
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
ATTENTION += RECURRENT
MAMBA = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj"]  # without the out_proj of Mamba-2, which PEFT refuses
MAMBA_CASES = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latent")
MAMBA_TARGETS = ",".join([*MAMBA, "up_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def write(case: str) -> Path:
        if case not in folders:
            folders[case] = hf_folders.write_folder(case, tmp_path_factory.mktemp("folders") / case)
        return folders[case]

    return write


def load(folder: Path):
    """transformers' model of a folder, in fp32."""
    import transformers

    has_tower = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if has_tower else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def expected_logprobs(model, sequences) -> list[torch.Tensor]:
    """Log-probs of each sequence's tokens from the second on."""
    found = []
    with torch.no_grad():
        for ids in map(torch.tensor, sequences):
            rows = model(ids.unsqueeze(0)).logits[0, :-1].double().log_softmax(-1)
            found.append(rows.gather(1, ids[1:, None])[:, 0])
    return found


def run_in_one_process(function, calls: list[tuple]) -> list:
    """Results of a function that needs PEFT, whose import takes seconds: one process computes all of them."""
    return run_world(lambda _: [function(*call) for call in calls], 1)[0]


def in_peft(folder: Path, adapter: Path, sequences) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs of a folder's model, and of it with an adapter."""
    import peft

    base = expected_logprobs(load(folder), sequences)
    return base, expected_logprobs(peft.PeftModel.from_pretrained(load(folder), adapter), sequences)


_meshes = {}


def model_with_factors(folder: Path, flags: str):
    """(TrainableModel of a folder, role groups)."""
    from megarl.checkpoint.pretrained import find_pretrained
    from megarl.comm import role_mesh
    from megarl.roles.trainable_model import TrainableModel

    role = role_of(folder, f"--lr 1e-3 {flags}", dist.get_world_size(), False)
    if not _meshes:
        _meshes["actor"] = role_mesh.create_mesh({"actor": role}, SAFETY)["actor"]
    model = TrainableModel(role, _meshes["actor"], role.model_vocab_size(0), 1)
    model.load_pretrained(find_pretrained(role, role.model_vocab_size(0)))
    return model, _meshes["actor"]


def exported(rank: int, folders: dict, flags: str, target: Path) -> dict:
    """Log-probs of each case with drawn factors, which are written to `target`."""
    found = {}
    for case, folder in folders.items():
        targets = f"--lora-targets {MAMBA_TARGETS}" if case in MAMBA_CASES else ""
        model, place = model_with_factors(folder, f"{flags} --lora-rank 4 --lora-alpha 6 {targets}")
        draw_factors(model.model)
        model.export_peft(target / case)
        sequences = hf_folders.reference(case).tokens
        found[case] = logprobs(model.model, place, sequences, model.role.model_vocab_size(0))
    return found


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("tp2-sp",)))
def test_peft_loads_what_is_written(layout, folder_of, tmp_path):
    size, flags, cases = LAYOUTS[layout]
    folders = {case: folder_of(case) for case in cases}
    results = run_world(exported, size, folders, flags, tmp_path)
    calls = [(folder, tmp_path / case, hf_folders.reference(case).tokens) for case, folder in folders.items()]
    for case, (base, adapted) in zip(folders, run_in_one_process(in_peft, calls), strict=True):
        assert max(float((a - b).abs().max()) for a, b in zip(base, adapted, strict=True)) > 0.1, case
        for found in results:
            difference = max(float((a - b).abs().max()) for a, b in zip(found[case], adapted, strict=True))
            assert difference <= 1e-5, (case, difference)


def imported(rank: int, adapters: dict, flags: str, target: Path) -> dict:
    """(log-probs, rank, all factors) of each case that starts from an adapter; writes it again."""
    found = {}
    for case, (folder, adapter) in adapters.items():
        model, place = model_with_factors(folder, f"{flags} --lora-adapter {adapter}")
        model.export_peft(target / case)
        sequences = hf_folders.reference(case).tokens
        rows = logprobs(model.model, place, sequences, model.role.model_vocab_size(0))
        whole = whole_weights(model.model, place.pg_collection, trained_state)
        found[case] = rows, model.role.lora, whole
    return found


def targets_of(case: str) -> dict[str, list[str] | None]:
    """What PEFT adapts in a case's model."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    if case == "nemotron_h":
        return {"target_modules": [*MAMBA, "up_proj", "down_proj"]}
    if case in MAMBA_CASES:
        return {"target_modules": MAMBA, "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"]}
    names = ATTENTION if case in MOE else DENSE_TARGETS
    of_all = {"target_modules": rf".*language_model.*\.({'|'.join(names)})" if case in TOWERS else names}
    return of_all | ({"target_parameters": experts} if case in MOE else {})


def make_adapter(folder: Path, target: Path, case: str, rslora: bool, sequences) -> list[torch.Tensor]:
    """Writes a PEFT adapter with random factors; returns the log-probs with it."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, task_type="CAUSAL_LM", **targets_of(case))
    model = peft.get_peft_model(load(folder), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(target)
    return expected_logprobs(model.eval(), sequences)


@pytest.fixture(scope="module")
def made_by_peft(folder_of, tmp_path_factory) -> dict[tuple[str, bool], tuple[Path, list[torch.Tensor]]]:
    """(case, whether it is scaled as rsLoRA does) -> an adapter that PEFT wrote, and PEFT's log-probs with it."""
    pairs = [(case, False) for case in DENSE + MOE] + [(case, True) for case in RSLORA]
    target = tmp_path_factory.mktemp("adapters")
    calls = [
        (folder_of(case), target / f"{case}-{rslora}", case, rslora, hf_folders.reference(case).tokens)
        for case, rslora in pairs
    ]
    logprobs = run_in_one_process(make_adapter, calls)
    return {pair: (call[1], rows) for pair, call, rows in zip(pairs, calls, logprobs, strict=True)}


def cases_of(layout: str, rslora: bool) -> list[str]:
    """The cases whose adapters a layout loads; few of them are made as rsLoRA scales them."""
    return [case for case in LAYOUTS[layout][2] if not rslora or case in RSLORA]


PAIRS = [(layout, rslora) for layout in LAYOUTS for rslora in (False, True) if cases_of(layout, rslora)]


@pytest.mark.parametrize("layout, rslora", by_default(PAIRS, [("one rank", True)]))
def test_what_peft_writes_is_loaded(layout, rslora, made_by_peft, folder_of, tmp_path):
    size, flags, _ = LAYOUTS[layout]
    cases = cases_of(layout, rslora)
    adapters = {case: (folder_of(case), made_by_peft[case, rslora][0]) for case in cases}
    expected = {case: made_by_peft[case, rslora][1] for case in cases}
    for found in run_world(imported, size, adapters, flags, tmp_path):
        for case, (rows, lora, _) in found.items():
            difference = max(float((a - b).abs().max()) for a, b in zip(rows, expected[case], strict=True))
            assert difference <= 1e-5, (case, difference)
            assert lora.rslora == rslora and lora.rank == 4
    # What is written again is the same adapter to PEFT.
    calls = [(folder_of(case), tmp_path / case, hf_folders.reference(case).tokens) for case in cases]
    for case, (_, again) in zip(cases, run_in_one_process(in_peft, calls), strict=True):
        assert max(float((a - b).abs().max()) for a, b in zip(again, expected[case], strict=True)) <= 1e-5, case


@pytest.mark.long
def test_written_factors_are_read_to_the_bit(folder_of, tmp_path):
    folders = {case: folder_of(case) for case in DENSE + MOE}
    run_world(exported, 1, folders, "", tmp_path / "one")
    adapters = {case: (folder, tmp_path / "one" / case) for case, folder in folders.items()}
    run_world(imported, 1, adapters, "", tmp_path / "two")
    for case in folders:
        one, two = (load_file(tmp_path / name / case / "adapter_model.safetensors") for name in ("one", "two"))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), case
        configs = [(tmp_path / name / case / "adapter_config.json").read_text() for name in ("one", "two")]
        assert configs[0] == configs[1]


def test_a_larger_rank_keeps_the_function(made_by_peft, folder_of, tmp_path):
    target, expected = made_by_peft["llama3", True]
    adapters = {"llama3": (folder_of("llama3"), target)}
    ((rows, lora, whole),) = (f["llama3"] for f in run_world(imported, 1, adapters, "--lora-rank 6", tmp_path / "x"))
    assert max(float((a - b).abs().max()) for a, b in zip(rows, expected, strict=True)) <= 1e-5
    assert lora.rank == 6
    a, b = (next(value for key, value in whole.items() if key.endswith(name)) for name in ("lora_A", "lora_B"))
    assert a[4:].all() and not b[:, 4:].any()  # new ranks can learn, and change nothing yet


Q_LAYER = "base_model.model.model.layers.0."


# Case -> the module of the experts in transformers 4, and its projections: gate, up, down.
SINGLES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}


def with_single_experts(tensors: dict, case: str) -> dict:
    """The tensors of an adapter of fused experts as those that transformers 4 has for each expert."""
    config, (module, names) = hf_folders.reference(case).config, SINGLES[case]
    experts, found = config.get("num_experts") or config["num_local_experts"], dict(tensors)
    for name in [name for name in tensors if ".experts.base_layer.lora_A" in name]:
        prefix, a = name.removesuffix("base_layer.lora_A.weight"), found.pop(name)
        b = found.pop(f"{prefix}base_layer.lora_B.weight")
        inner, outer = found.pop(f"{prefix}lora_A.weight"), found.pop(f"{prefix}lora_B.weight")
        prefix = prefix.replace("mlp.experts", module)
        for i in range(experts):
            of_expert = b.view(len(b), -1, experts)[..., i]
            for half, projection in zip(of_expert.chunk(2), names, strict=False):
                found[f"{prefix}{i}.{projection}.lora_A.weight"] = a.view(experts, -1, a.shape[-1])[i].clone()
                found[f"{prefix}{i}.{projection}.lora_B.weight"] = half.clone()
            found[f"{prefix}{i}.{names[2]}.lora_A.weight"] = inner.view(experts, -1, inner.shape[-1])[i].clone()
            found[f"{prefix}{i}.{names[2]}.lora_B.weight"] = outer.view(len(outer), -1, experts)[..., i].clone()
    assert len(found) == config["num_hidden_layers"] * 2 * (4 + 3 * experts)
    return found


@pytest.mark.parametrize("case", SINGLES)
def test_modules_of_single_experts_are_read(case, made_by_peft, folder_of, tmp_path):
    """Factors as transformers 4 names them; PEFT's reading of a fused module is the reference."""
    folder, target = folder_of(case), tmp_path / case
    sequences = hf_folders.reference(case).tokens
    shutil.copytree(made_by_peft[case, False][0], target)
    tensors = with_single_experts(load_file(target / "adapter_model.safetensors"), case)
    adapters = {case: (folder, target)}
    ((fused, _, _),) = (found[case] for found in run_world(imported, 1, adapters, "", tmp_path / "x"))
    save_file(tensors, target / "adapter_model.safetensors")
    change_config(target, target_parameters=None)
    ((rows, lora, _),) = (found[case] for found in run_world(imported, 1, adapters, "", tmp_path / "y"))
    assert lora.rank == 4 and all(torch.equal(a, b) for a, b in zip(rows, fused, strict=True))
    assert len(rows) == len(sequences)


def reader_of(folder: Path):
    """`read_adapter` for the model of a folder, which takes the adapter's."""
    role = role_of(folder, "", 1, False)
    return lambda path: read_adapter(str(path), args=role.megatron, family=role.hf_model.family)


def test_single_experts_have_ranks_and_scales_of_their_own(made_by_peft, folder_of, tmp_path):
    """Patterns match the names of single experts; an expert without factors has none, and keeps its function."""
    target, experts = tmp_path / "adapter", "model.layers.0.block_sparse_moe.experts"
    shutil.copytree(made_by_peft["mixtral", False][0], target)
    tensors = with_single_experts(load_file(target / "adapter_model.safetensors"), "mixtral")
    a, b = (f"base_model.model.{experts}.3.w1.lora_{kind}.weight" for kind in "AB")
    tensors[a], tensors[b] = tensors[a][:2].clone(), tensors[b][:, :2].clone()
    for name in [name for name in tensors if f"{experts}.5.w1." in name]:
        del tensors[name]
    save_file(tensors, target / "adapter_model.safetensors")
    change_config(target, target_parameters=None, rank_pattern={r"0\..*\.3\.w1": 2}, alpha_pattern={r"0\..*\.3\.w1": 5})
    found = reader_of(folder_of("mixtral"))(target)
    key = "lora.decoder.layers.0.mlp.experts.local_experts.linear_fc1.gate_proj.lora_"
    products = found.lora.scale * found.factors[f"{key}B"] @ found.factors[f"{key}A"]
    assert torch.allclose(products[3], 5 / 2 * tensors[b] @ tensors[a], atol=1e-6)
    assert not products[5].any() and all(each.any() for i, each in enumerate(products) if i != 5)


def test_names_of_a_folder_with_fused_projections_are_read(folder_of, tmp_path):
    """The own code of Sarvam 30B has one module for queries, keys and values; transformers has three."""
    read, generator = reader_of(folder_of("sarvam_moe")), torch.Generator().manual_seed(5)
    shapes = hf_folders.reference("sarvam_moe").tensors
    rows, columns = next(each.shape for each in shapes if each.name.endswith("0.attention.query_key_value.weight"))
    config = hf_folders.reference("sarvam_moe").config
    sizes = [config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", *["key_value"] * 2)]
    assert sum(sizes) == rows
    a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
    plain = {f"self_attn.{x}_proj": part for x, part in zip("qkv", b.split(sizes), strict=True)}
    found = []
    for modules in (plain, {"attention.query_key_value": b}):
        tensors = {f"{Q_LAYER}{name}.lora_A.weight": a.clone() for name in modules}
        tensors |= {f"{Q_LAYER}{name}.lora_B.weight": part.clone() for name, part in modules.items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        found.append(read(tmp_path).factors)
    assert len(found[0]) == 6 and found[0].keys() == found[1].keys()
    assert all(torch.equal(factor, found[1][key]) for key, factor in found[0].items())


def train_as_said(folder: Path, target: Path, entries: dict):
    """Writes an adapter that PEFT makes with these entries of its config."""
    import peft

    peft.get_peft_model(load(folder), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **entries)).save_pretrained(target)


ALL_LINEAR = {  # case -> a module that the line names
    "qwen3_moe": "model.layers.*.mlp.gate",
    "mixtral": "model.layers.*.mlp.gate",
    "deepseek_v3": "model.layers.*.mlp.gate",
    "qwen2_moe": "model.layers.*.mlp.shared_expert_gate",
    "qwen3_next": "model.layers.*.mlp.gate, model.layers.*.mlp.shared_expert_gate",
    "mistral3": "model.multi_modal_projector.linear_1",
    "qwen2_5_vl": "model.visual.blocks.*.attn.proj",
    "gemma3_vision": "model.vision_tower.encoder.layers.*.mlp.fc1",
}


@pytest.mark.parametrize("case", by_default(ALL_LINEAR, ("mixtral", "mistral3")))
def test_what_all_linear_trains_beside_layers_is_refused_with_what_to_train(case, folder_of, tmp_path):
    """PEFT's own adapters train routers, gates and towers, too; the line's entries give one that is read."""
    folder, read = folder_of(case), reader_of(folder_of(case))
    run_in_one_process(train_as_said, [(folder, tmp_path / "all", {"target_modules": "all-linear"})])
    with pytest.raises(UsageError) as error:
        read(tmp_path / "all")
    line = str(error.value)
    assert "trains modules that have no factors in megarl: " + ALL_LINEAR[case] in line and "merge_and_unload" in line
    said = re.search(r"train with (target_.*), or merge", line)[1]
    entries = eval(f"dict({said})")  # as a user pastes it into LoraConfig
    run_in_one_process(train_as_said, [(folder, tmp_path / "said", entries)])
    rest = load_file(tmp_path / "said" / "adapter_model.safetensors").keys()
    assert rest < load_file(tmp_path / "all" / "adapter_model.safetensors").keys()
    assert read(tmp_path / "said").factors


def test_names_of_published_code_are_read(made_by_peft, folder_of, tmp_path):
    """Nemotron-H's own code has its layers in `backbone`, transformers in `model`; patterns match these names."""
    folder, (adapter, _) = folder_of("nemotron_h"), made_by_peft["nemotron_h", False]
    shutil.copytree(adapter, tmp_path / "own")
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace(".model.layers.", ".backbone.layers."): tensor for name, tensor in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, tmp_path / "own" / "adapter_model.safetensors")
    for prefix, path in (("model", adapter), ("backbone", tmp_path / "own")):
        change_config(path, alpha_pattern={rf"{prefix}\.layers\.0\.mixer\.in_proj": 12})
    read = reader_of(folder)
    found, expected = read(tmp_path / "own"), read(adapter)
    change_config(adapter, alpha_pattern={})
    assert found.lora == expected.lora and found.factors.keys() == expected.factors.keys()
    assert all(torch.equal(factor, expected.factors[key]) for key, factor in found.factors.items())
    plain = read(adapter).factors
    changed = {key for key, factor in plain.items() if not torch.equal(factor, found.factors[key])}
    assert changed == {"lora.decoder.layers.0.self_attention.in_proj.in_proj.lora_B"}


@pytest.fixture
def adapter(made_by_peft) -> Path:
    return made_by_peft["llama3", False][0]


def change_config(folder: Path, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Q = f"{Q_LAYER}self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
SCORE, CONV = "base_model.model.score.weight", f"{Q_LAYER}linear_attn.conv1d.lora_{{}}.weight"
FIT = "model.layers.0.self_attn.q_proj has factors of shapes"
# What is changed in the config or the tensors, or the file and its new content (None: removed); what the error says.
DAMAGES = {
    "no config": (("adapter_config.json", None), "adapter_config.json is missing"),
    "no weights": (("adapter_model.safetensors", None), "adapter_model.safetensors is missing"),
    "not JSON": (("adapter_config.json", b"{"), "adapter_config.json cannot be read"),
    "cut weights": (("adapter_model.safetensors", b"12"), "is no readable safetensors file"),
    "another method": ({"peft_type": "IA3"}, "describes no LoRA adapter"),
    "DoRA": ({"use_dora": True}, "use_dora is not supported"),
    "trained biases": ({"bias": "all"}, "trains biases (bias 'all'); train with bias none, or merge the adapter into"),
    "whole modules": (
        {"modules_to_save": ["lm_head", "score"]},
        "trains whole modules (modules_to_save lm_head); train",
    ),
    "KaSA": ({"kasa_config": {"beta": 1e-4}}, "kasa_config is not supported: factors may compute something else"),
    "an entry of a later PEFT": ({"use_later": True}, "use_later is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "changes the weights under the factors"),
    "no rank": ({"r": None}, "r and lora_alpha are missing"),
    "a rank of text": ({"r": "8"}, "r is '8'; it must be a whole number above 0"),
    "no scale": ({"lora_alpha": 0}, "lora_alpha is 0; it must be a number above 0"),
    "scales of text": ({"alpha_pattern": {"q_proj": "x"}}, "it must be numbers above 0 by pattern"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '(' is no regular expression"),
    "a nested pattern": ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 1}}, "is no regular expression"),
    "a rank that no factor has": (
        {"r": 10**9},
        "q_proj has factors of rank 4, but adapter_config.json says 1000000000",
    ),
    "ranks by pattern": (
        {"rank_pattern": {"q_proj": 2}},
        "q_proj has factors of rank 4, but adapter_config.json says 2",
    ),
    "ranks of text": ({"rank_pattern": {"q_proj": "4"}}, "it must be whole numbers above 0 by pattern"),
    "an endless pattern": (
        {"alpha_pattern": {"([a-z_.0-9]+)+#": 1}},
        "takes more than 1 s, or 1 GiB of memory, to match",
    ),
    "a number of modules": ({"modules_to_save": 5}, "modules_to_save is 5; it must be a list of names"),
    "a long name": ({"init_lora_weights": "x" * 10**6}, "…"),
    "a deep config": (("adapter_config.json", b"[" * 10**5), "adapter_config.json cannot be read"),
    "a number for a matrix": (lambda t: t | {Q: torch.tensor(1.0)}, "q_proj.lora_A.weight is float32 []; factors are"),
    "whole numbers": (lambda t: t | {Q: t[Q].int()}, "q_proj.lora_A.weight is int32 [4, 64]; factors are matrices of"),
    "no number": (lambda t: t | {Q: t[Q].fill_(float("nan"))}, "q_proj.lora_A.weight has a NaN or an infinity"),
    "an infinity": (lambda t: t | {Q: t[Q].index_fill(1, torch.tensor(3), float("inf"))}, "has a NaN or an infinity"),
    "an embedding's": (lambda t: t | {EMBEDDING: t[Q].clone()}, "have no factors in megarl: model.embed_tokens; train"),
    "a resized embedding": (
        lambda t: t | {EMBEDDING.replace("lora_embedding_A", "weight"): t[Q].clone()},
        "embed_tokens",
    ),
    "a bias": (
        lambda t: t | {Q.replace("lora_A.weight", "base_layer.bias"): t[Q][0].clone()},
        "base_layer.bias is not one",
    ),
    "a convolution": (
        lambda t: t | {CONV.format(x): t[Q][None].clone() for x in "AB"},
        "model.layers.*.linear_attn.conv1d; train",
    ),
    "two files in one": (
        lambda t: t | {Q.replace("q_proj", "q_proj.q_proj"): t[Q].clone()},
        "lora_A.weight is not one of",
    ),
    "a stack of matrices": (
        lambda t: t | {Q: t[Q][None].clone()},
        "q_proj.lora_A.weight is float32 [1, 4, 64]; factors",
    ),
    "a head of two labels": (
        lambda t: t | {SCORE: t[Q][:2].clone()},
        "score.weight is [2, 64]; a scalar head is [1, 64]",
    ),
    "a head of no number": (lambda t: t | {SCORE: t[Q][:1] / 0}, "score.weight has a NaN or an infinity"),
    "a head": (lambda t: t | {SCORE: t[Q][:1].clone()}, "has a scalar head (score.weight), which the actor has not"),
    "a wrong rank": (lambda t: t | {Q: t[Q][:2].clone()}, FIT),
    "wrong columns": (lambda t: t | {Q: t[Q][:, :3].clone()}, FIT),
    "half of a pair": (lambda t: {n: x for n, x in t.items() if n != Q}, "q_proj.lora_B.weight is not one of a pair"),
    "nothing": (lambda t: {}, "has no factors"),
}


def damage_adapter(folder: Path, change):
    """Applies a change of `DAMAGES`."""
    if isinstance(change, dict):
        change_config(folder, **change)
    elif isinstance(change, tuple):
        name, content = change
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    else:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file(change(tensors), folder / "adapter_model.safetensors")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_adapters_are_refused_in_one_line(damage, adapter, folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 1)
    shutil.copytree(adapter, tmp_path / "bad")
    change, says = DAMAGES[damage]
    damage_adapter(tmp_path / "bad", change)
    with pytest.raises(UsageError) as error:
        role_of(folder_of("llama3"), f"--lr 1e-3 --lora-adapter {tmp_path}/bad", 1, False)
    assert str(error.value).startswith(f"--lora-adapter {tmp_path}/bad: ") and says in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 2000


def test_a_pickled_adapter_is_named(adapter, folder_of, tmp_path):
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(UsageError, match="adapter_model.safetensors is missing; adapter_model.bin is not read"):
        reader_of(folder_of("llama3"))(tmp_path)


@pytest.mark.parametrize("flags, says", [
    ("--lora-rank 2", "--lora-rank 2: the factors of --lora-adapter"),
    ("--lora-targets q_proj", "--lora-targets: --lora-adapter"),
    ("--lora-alpha 3", "--lora-alpha: --lora-adapter"),
    ("--lora-rslora", "--lora-rslora: --lora-adapter"),
])  # fmt: skip
def test_flags_that_contradict_an_adapter_are_refused(flags, says, adapter, folder_of):
    with pytest.raises(UsageError) as error:
        role_of(folder_of("llama3"), f"--lr 1e-3 --lora-adapter {adapter} {flags}", 1, False)
    assert str(error.value).startswith(says)
