"""Low-rank factors on a model of a Hugging Face folder: exports, PEFT adapters, resume, conversion, evaluation."""

import importlib.util
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint import folders
from tests.helpers.evaluation import run_evaluate
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.folders import hf_folders
from tests.helpers.forked_programs import refusal
from tests.helpers.models.lora_models import stored_tensors
from tests.helpers.programs import metrics, train, write_lines
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

RL = (
    "--max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256 --prompts-per-step 4"
    " --samples-per-prompt 2 --minibatch-size 4 --rollout-buffer-gb 0.01 --rollout-max-requests 8 --advantage grpo"
    " --reward length --kl-coefficient 0.1 --kl-in loss --lr 1e-2 --save-interval 1 --export-hf --export-peft"
)
LORA = "--lora-rank 4 --lora-alpha 8"
LINEAR = re.compile(r"_proj|experts\.\d+\.w[123]\.|attention\.dense")  # names of adapted layers in a folder
CASES = ("llama3", "qwen3_moe", "qwen3_next", "nemotron_h_moe", "kimi_linear", "ling_3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of a dense model, of one with experts and of four with recurrent states, and a file of prompts."""
    folder = tmp_path_factory.mktemp("hf")
    for case in CASES:
        hf_folders.write_folder(case, folder / case)
    write_lines(folder / "train.jsonl", [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(16)])
    return folder


def lora_of(case: str) -> str:
    """Factors that can be exported to PEFT, which refuses the out_proj of Mamba-2."""
    targets = "q_proj,k_proj,v_proj,o_proj,up_proj,down_proj,in_proj"
    return f"{LORA} --lora-targets {targets}" if case == "nemotron_h_moe" else LORA


def argv(data, case: str, save, flags: str = "") -> list[str]:
    files = ["--hf-model", str(data / case), "--prompts", str(data / "train.jsonl"), "--save", str(save)]
    return [*RL.split(), *files, *flags.split()]


@pytest.fixture(scope="module", params=by_default(CASES, ["qwen3_moe"]))
def run(request, data, tmp_path_factory):
    """(case, run folder of two steps)."""
    save = tmp_path_factory.mktemp("runs") / request.param
    train("rl", argv(data, request.param, save, f"{lora_of(request.param)} --train-iters 2"))
    return request.param, save


def converted(rank: int, *words):
    from tools import convert

    sys.argv = ["convert.py", *map(str, words)]
    convert.main()


def assert_equal_to_conversion(source, save, out, *flags):
    """The export of the second step is what the checkpoint becomes."""
    run_world(converted, 1, "to-hf", "--hf-model", source, "--load", save, "--save", out, *flags)
    export = save / "hf" / "step_00000002" / "model.safetensors"
    assert export.read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_exports_of_sharded_parameters(data, tmp_path, flags):
    source, layout = data / "llama3", "--use-torch-fsdp2 --tensor-model-parallel-size 1"
    train("rl", argv(data, "llama3", tmp_path / "run", f"{LORA} --train-iters 2 {layout} {flags}"), 2)
    assert_equal_to_conversion(source, tmp_path / "run", tmp_path / "out", *flags.split())
    base, trained = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert sum(not torch.equal(base[name], trained[name]) for name in base) > 7
    factors = load_file(tmp_path / "run" / "peft" / "step_00000002" / "adapter_model.safetensors")
    stored = stored_tensors(folders.step_folder(tmp_path / "run", 2))
    for name in ("q_proj", "o_proj"):
        for side in "AB":
            written = factors[f"base_model.model.model.layers.0.self_attn.{name}.lora_{side}.weight"]
            linear = {"q_proj": "linear_qkv", "o_proj": "linear_proj"}[name]
            kept = stored[f"actor.lora.decoder.layers.0.self_attention.{linear}.{name}.lora_{side}"]
            assert torch.equal(written, kept.to(written.dtype)) and written.any()


def test_all_ways_out_give_the_same_model(run, data, tmp_path):
    """The export during training, the conversion of the checkpoint, and PEFT's merge of the adapter."""
    case, save = run
    source, export = data / case, save / "hf" / "step_00000002" / "model.safetensors"
    assert_equal_to_conversion(source, save, tmp_path / "out")
    base, trained = load_file(source / "model.safetensors"), load_file(export)
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    linears = {name for name in base if LINEAR.search(name)}
    assert changed <= linears and len(changed) > len(linears) / 2  # an expert without tokens does not change
    if importlib.util.find_spec("peft"):
        (largest,) = run_world(difference_in_peft, 1, source, export.parent, save / "peft" / "step_00000002", case)
        assert largest <= 1e-5


@torch.no_grad()
def difference_in_peft(rank: int, source, export, adapter, case: str) -> float:
    """Largest relative difference of logits: the source with the adapter, and the export."""
    import peft
    import transformers

    models = [transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (source, export)]
    adapted = peft.PeftModel.from_pretrained(models[0], adapter)
    ids = torch.tensor([hf_folders.reference(case).tokens[0]])
    found, expected = adapted(ids).logits, models[1](ids).logits
    return float((found - expected).abs().max() / expected.abs().max())


TP2_EP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
APART = (
    "--role-map actor=0-1;reference=0-1;reward=0-1;rollout=2 --expert-model-parallel-size 2"
    " --rollout-expert-model-parallel-size 1 --verify-weights"
)
OF_STATES = [(2, TP2_EP2), (2, f"{TP2_EP2} --bf16"), (3, f"{APART} --bf16")]
RECURRENT = {
    "qwen3_next": {"in_proj_q", "in_proj_z", "in_proj_a", "q_proj"},
    "nemotron_h_moe": {"in_proj", "q_proj"},
    "kimi_linear": {"in_proj_q", "in_proj_b", "g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj", "q_proj"},
    "ling_3": {"in_proj_q", "in_proj_z", "in_proj_a", "g_proj", "q_b_proj"},
}


@pytest.mark.long
@pytest.mark.parametrize("case", RECURRENT)
@pytest.mark.parametrize("size, flags", OF_STATES)
def test_factors_of_recurrent_layers_roll_out_exactly(size, flags, case, data, tmp_path):
    words = [word for word in argv(data, case, tmp_path, f"{LORA} {flags} --train-iters 3") if word != "--export-peft"]
    train("rl", words, size)
    rows = metrics(tmp_path)
    assert max(row["rollout/logprob_gap_max"] for row in rows.values()) <= largest_gap_allowed()
    assert rows[3]["kl/reference"] > 0 and rows[1]["actor/ppo_kl_first"] == 0
    stored = stored_tensors(folders.step_folder(tmp_path, 3))
    changed = {key.split(".")[-2] for key in stored if key.endswith(".lora_B") and stored[key].any()}
    assert RECURRENT[case] | {"out_proj", "o_proj"} <= changed


@pytest.mark.long
def test_an_export_that_peft_refuses_is_refused(data, tmp_path):
    says = refusal(argv(data, "nemotron_h_moe", tmp_path, f"{LORA} --train-iters 1"))
    assert "--export-peft: PEFT refuses the out_proj of Mamba-2; give --lora-targets q_proj,k_proj," in says
    assert says.rstrip().endswith("down_proj,in_proj")


def test_an_adapter_starts_another_run(run, data, tmp_path):
    """Its first export, before anything is learnt, is the model that the adapter came from."""
    case, save = run
    flags = f"--lora-adapter {save}/peft/step_00000002 --train-iters 1 --lr 0 --weight-decay 0"
    train("rl", argv(data, case, tmp_path, flags))
    one, other = (load_file(f / "hf" / f"step_{s:08d}" / "model.safetensors") for f, s in ((tmp_path, 1), (save, 2)))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert metrics(tmp_path)[1]["kl/reference"] > 0  # the reference is the base


@pytest.mark.long
def test_an_evaluation_needs_the_folder(run, data, tmp_path):
    case, save = run
    words = ["--hf-model", data / case, "--load", save, "--eval-prompts", data / "train.jsonl", "--save", tmp_path]
    lengths = "--max-prompt-length 48 --max-response-length 8 --rollout-buffer-gb 0.01 --rollout-max-requests 8"
    run_evaluate([*map(str, words), *lengths.split(), "--reward", "length"])
    assert (tmp_path / "samples.jsonl").stat().st_size > 0
