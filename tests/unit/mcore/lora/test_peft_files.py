"""PEFT adapters of every family in and out, against PEFT: equal log-probs in any layout, equal factors back."""

import functools
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.errors import UsageError
from megarl.mcore.lora.peft_files import read_adapter
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_layouts import logprobs, role_of
from tests.helpers.models.lora_models import draw_factors, trained_state
from tests.helpers.models.updates import whole_weights
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import SAFETY, run_world

# PEFT and transformers run in processes of their own: they start threads, and worlds are forked from this process.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")

TP2, TP4, SP = (*(f"--tensor-model-parallel-size {size}" for size in (2, 4)), "--sequence-parallel")
PP2 = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
DENSE = ("llama3", "qwen2", "phi4", "gemma2", "olmo2", "glm4", "qwen35_dense", "nemotron_h", "qwen2_5_vl", "mistral3",
         "gemma3_vision")  # fmt: skip
MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "deepseek_v2_lite", "qwen3_next",
       "qwen35_moe", "nemotron_h_moe", "nemotron_h_latent", "qwen3_vl_moe", "sarvam_moe", "hy_v3", "kimi_linear",
       "ling_3")  # fmt: skip
TOWERS = ("qwen2_5_vl", "mistral3", "gemma3_vision", "qwen3_vl_moe")
LAYOUTS = {
    "one rank": (1, "", DENSE + MOE),
    "tp2-sp": (2, f"{TP2} {SP}", ("phi4", "gpt_oss", "deepseek_v3")),
    "tp2-sp-others": (2, f"{TP2} {SP}", ("gemma2", "qwen2_moe")),
    "tp2-sp-recurrent": (2, f"{TP2} {SP}", ("qwen3_next", "qwen35_dense", "nemotron_h", "nemotron_h_moe")),
    "tp2-sp-channels": (2, f"{TP2} {SP}", ("kimi_linear", "ling_3")),
    "tp4-sp": (4, f"{TP4} {SP}", ("llama3", "phi4", "qwen2", "gpt_oss")),  # two ranks share a query group
    "pp2": (2, PP2, ("llama3", "glm4_moe", "qwen35_dense", "nemotron_h", "qwen2_5_vl")),
    "ep2": (2, "--expert-model-parallel-size 2", ("qwen3_moe", "gpt_oss", "nemotron_h_latent", "qwen3_vl_moe")),
    "fsdp2": (2, "--use-torch-fsdp2", ("llama3", "qwen3_moe", "qwen35_moe", "nemotron_h")),
}
RSLORA = ("llama3", "qwen2", "qwen3_moe")
# Case -> the module of the experts in transformers 4, and its projections: gate, up, down.
SINGLES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
DENSE_TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv_proj gate_up_proj".split()
# Of gated delta nets; Qwen3-Next fuses what Qwen3.5 has apart.
RECURRENT = ["in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
DENSE_TARGETS += RECURRENT
CHANNELS = "b_proj g_a_proj g_b_proj f_a_proj f_b_proj g_proj f_proj".split()  # of Kimi delta attention, and its gates
ATTENTION = [
    *"q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split(),
    *RECURRENT,
    *CHANNELS,
]
MAMBA = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj"]  # without the out_proj of Mamba-2, which PEFT refuses
MAMBA_CASES = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latent")
MAMBA_TARGETS = ",".join([*MAMBA, "up_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return functools.cache(lambda case: hf_folders.write_folder(case, root / case))


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


def gap(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


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
        assert gap(base, adapted) > 0.1, case
        for found in results:
            assert gap(found[case], adapted) <= 1e-5, case


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


# What the default tests load: PEFT, whose import takes seconds, makes all of it in one process.
OFTEN = [*((case, True) for case in RSLORA), *((case, False) for case in (*SINGLES, "nemotron_h", "llama3"))]


@pytest.fixture(scope="module")
def made_by_peft(folder_of, tmp_path_factory):
    """(case, whether it is scaled as rsLoRA does), … -> for each an adapter that PEFT wrote, and PEFT's log-probs."""
    target, found = tmp_path_factory.mktemp("adapters"), {}

    def make(*pairs: tuple[str, bool]) -> list[tuple[Path, list[torch.Tensor]]]:
        if missing := [pair for pair in dict.fromkeys((*pairs, *OFTEN)) if pair not in found and {*pairs} - {*found}]:
            paths = [target / f"{case}-{rslora}" for case, rslora in missing]
            calls = [(folder_of(case), path, case, rslora, hf_folders.reference(case).tokens)
                     for (case, rslora), path in zip(missing, paths, strict=True)]  # fmt: skip
            found.update(zip(missing, zip(paths, run_in_one_process(make_adapter, calls), strict=True), strict=True))
        return [found[pair] for pair in pairs]

    return make


def cases_of(layout: str, rslora: bool) -> list[str]:
    return [case for case in LAYOUTS[layout][2] if not rslora or case in RSLORA]


PAIRS = [(layout, rslora) for layout in LAYOUTS for rslora in (False, True) if cases_of(layout, rslora)]


@pytest.mark.parametrize("layout, rslora", by_default(PAIRS, [("one rank", True)]))
def test_what_peft_writes_is_loaded(layout, rslora, made_by_peft, folder_of, tmp_path):
    size, flags, _ = LAYOUTS[layout]
    cases = cases_of(layout, rslora)
    made = dict(zip(cases, made_by_peft(*((case, rslora) for case in cases)), strict=True))
    adapters = {case: (folder_of(case), path) for case, (path, _) in made.items()}
    expected = {case: rows for case, (_, rows) in made.items()}
    for found in run_world(imported, size, adapters, flags, tmp_path):
        for case, (rows, lora, _) in found.items():
            assert gap(rows, expected[case]) <= 1e-5, case
            assert lora.rslora == rslora and lora.rank == 4
    # What is written again is the same adapter to PEFT.
    calls = [(folder_of(case), tmp_path / case, hf_folders.reference(case).tokens) for case in cases]
    for case, (_, again) in zip(cases, run_in_one_process(in_peft, calls), strict=True):
        assert gap(again, expected[case]) <= 1e-5, case


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
    ((target, expected),) = made_by_peft(("llama3", True))
    adapters = {"llama3": (folder_of("llama3"), target)}
    ((rows, lora, whole),) = (f["llama3"] for f in run_world(imported, 1, adapters, "--lora-rank 6", tmp_path / "x"))
    assert gap(rows, expected) <= 1e-5
    assert lora.rank == 6
    a, b = (next(value for key, value in whole.items() if key.endswith(name)) for name in ("lora_A", "lora_B"))
    assert a[4:].all() and not b[:, 4:].any()  # new ranks can learn, and change nothing yet


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


@pytest.mark.parametrize("case", by_default(SINGLES, ("mixtral",)))
def test_modules_of_single_experts_are_read(case, made_by_peft, folder_of, tmp_path):
    """Factors as transformers 4 names them; PEFT's reading of a fused module is the reference."""
    folder, target = folder_of(case), tmp_path / case
    shutil.copytree(made_by_peft((case, False))[0][0], target)
    tensors = with_single_experts(load_file(target / "adapter_model.safetensors"), case)
    adapters = {case: (folder, target)}
    ((fused, _, _),) = (found[case] for found in run_world(imported, 1, adapters, "", tmp_path / "x"))
    save_file(tensors, target / "adapter_model.safetensors")
    change_config(target, target_parameters=None)
    ((rows, lora, _),) = (found[case] for found in run_world(imported, 1, adapters, "", tmp_path / "y"))
    assert lora.rank == 4 and all(torch.equal(a, b) for a, b in zip(rows, fused, strict=True))


def reader_of(folder: Path):
    """`read_adapter` for the model of a folder, which takes the adapter's."""
    role = role_of(folder, "", 1, False)
    return lambda path: read_adapter(str(path), args=role.megatron, family=role.hf_model.family)


def test_single_experts_have_ranks_and_scales_of_their_own(made_by_peft, folder_of, tmp_path):
    """Patterns match the names of single experts; an expert without factors has none, and keeps its function."""
    target, experts = tmp_path / "adapter", "model.layers.0.block_sparse_moe.experts"
    shutil.copytree(made_by_peft(("mixtral", False))[0][0], target)
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


FIRST = ("mixtral", "mistral3")


@pytest.mark.parametrize("cases", [FIRST, long([case for case in ALL_LINEAR if case not in FIRST])])
def test_what_all_linear_trains_beside_layers_is_refused_with_what_to_train(cases, folder_of, tmp_path):
    """PEFT's own adapters train routers, gates and towers, too; the line's entries give one that is read."""
    everything = {"target_modules": "all-linear"}
    run_in_one_process(train_as_said, [(folder_of(case), tmp_path / case / "all", everything) for case in cases])
    calls = []
    for case in cases:
        with pytest.raises(UsageError) as error:
            reader_of(folder_of(case))(tmp_path / case / "all")
        line = str(error.value)
        assert "trains modules that have no factors in megarl: " + ALL_LINEAR[case] in line
        said = re.search(r"train with (target_.*), or merge", line)[1]
        assert "merge_and_unload" in line
        # As a user pastes it into LoraConfig.
        calls.append((folder_of(case), tmp_path / case / "said", eval(f"dict({said})")))
    run_in_one_process(train_as_said, calls)
    for case in cases:
        whole, rest = (load_file(tmp_path / case / name / "adapter_model.safetensors") for name in ("all", "said"))
        assert rest.keys() < whole.keys() and reader_of(folder_of(case))(tmp_path / case / "said").factors


def test_names_of_published_code_are_read(made_by_peft, folder_of, tmp_path):
    """Nemotron-H's own code has its layers in `backbone`, transformers in `model`; patterns match these names."""
    folder, ((adapter, _),) = folder_of("nemotron_h"), made_by_peft(("nemotron_h", False))
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


def change_config(folder: Path, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("flags, says", [
    ("--lora-rank 2", "--lora-rank 2: the factors of --lora-adapter"),
    ("--lora-targets q_proj", "--lora-targets: --lora-adapter"),
    ("--lora-alpha 3", "--lora-alpha: --lora-adapter"),
    ("--lora-rslora", "--lora-rslora: --lora-adapter"),
])  # fmt: skip
def test_flags_that_contradict_an_adapter_are_refused(flags, says, made_by_peft, folder_of):
    ((adapter, _),) = made_by_peft(("llama3", False))
    with pytest.raises(UsageError) as error:
        role_of(folder_of("llama3"), f"--lr 1e-3 --lora-adapter {adapter} {flags}", 1, False)
    assert str(error.value).startswith(says)
