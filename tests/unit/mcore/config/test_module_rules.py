"""Flags beside a model of transformers' modules: each that they do not read, or that they cannot have, is refused."""

import json
import shutil

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore.config import megatron_flags, module_rules
from megarl.mcore.config.supported_flags import ARCHITECTURE, training
from tests.helpers.folders import any_types
from tests.helpers.refused_rules import refused

LENGTHS = "--max-prompt-length 6 --max-response-length 4"
TP2, FULL = "--tensor-model-parallel-size 2", "--recompute-granularity full --recompute-method"
SOURCE = module_rules.WHERE + "allowed is"
RULES = {
    "stages": ("--pipeline-model-parallel-size 2", 2, f"--pipeline-model-parallel-size 2: {SOURCE} 1"),
    "experts": ("--expert-model-parallel-size 2", 2, f"--expert-model-parallel-size 2: {SOURCE} 1"),
    "heads": (f"{TP2} --hf-model {{narrow}}", 2, f"{TP2}: {SOURCE} 1: model.layers.0.self_attn has 4 heads with 1"),
    "packed experts": (f"{TP2} --use-torch-fsdp2 --hf-model {{qwen3_moe}}", 4, f"{TP2}: {SOURCE} 1: --use-torch-fsdp2"),
    "no plan": (f"{TP2} --hf-model {{stablelm}}", 2, f"{TP2}: {SOURCE} 1"),
    "parts": ("--recompute-granularity selective", 1, f"--recompute-granularity selective: {SOURCE} full"),
    "activations": ("--recompute-activations", 1, f"--recompute-activations True: {SOURCE} none"),
    "several layers": (f"{FULL} uniform --recompute-num-layers 2", 1, f"--recompute-num-layers 2: {SOURCE} 1"),
    "sequences": (f"{TP2} --sequence-parallel", 2, f"--sequence-parallel True: {SOURCE} none"),
    "fp16": ("--fp16", 1, f"--fp16 True: {SOURCE} none"),
    "muon": ("--optimizer muon", 1, f"--optimizer muon: {SOURCE} adam or sgd"),
}
OTHERS = {  # of train_rl
    "--mtp-drafts": f"--mtp-train or --mtp-drafts True: {SOURCE} none",
    "--hf-mtp drop --export-hf --save x": "--hf-mtp drop: with --model-source transformers allowed is keep",
    "--attention-backend sdpa --hf-model {gemma2}": "--attention-backend sdpa: allowed with --attn-logit-softcapping",
    "--num-layers 6": "actor: --num-layers: the modules of transformers that compute --hf-model",
}
# Rules that no row breaks: of settings of a run, below; of CUDA; and one that a rule of all models comes before.
UNBROKEN = ["--mtp-train or --mtp-drafts", "--exact-rollout", "--attention-backend"]
# Flags of parts that a module has, too, or that say how a run is laid out.
READ = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "use_torch_fsdp2",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "fp16", "bf16",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations",
    "deterministic_mode", "attention_backend", "max_position_embeddings", "pretrained_checkpoint",
    "distributed_timeout_minutes", "calculate_per_token_loss", "log_max_attention_logit", "delta_rule_backend",
}  # fmt: skip
# What Megarl sets in any case, and of communication.
OTHERS_OF_RUN = {
    "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage",
    "gradient_accumulation_fusion", "apply_rope_fusion", "bias_dropout_fusion", "masked_softmax_fusion",
    "ep_overlap_early_attn_memory_release", "bias_gelu_fusion", "bias_swiglu_fusion", "no_persist_layer_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("types")
    for kind in ("granite", "qwen3_moe", "stablelm", "gemma2"):
        any_types.save(kind, root / kind)
    shutil.copytree(root / "granite", root / "narrow")
    config = json.loads((root / "narrow" / "config.json").read_text())
    (root / "narrow" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    return {path.name: path for path in root.iterdir()}


def test_what_a_module_cannot_have_is_refused_in_one_line(folders):
    model = f"--hf-model {folders['granite']} {module_rules.FLAG} {LENGTHS} --global-batch-size 2"
    rows = {name: (flags.format(**folders), ranks, line) for name, (flags, ranks, line) in RULES.items()}
    found = refused(module_rules, model, rows)
    for name, (_, _, line) in rows.items():
        assert line in found.lines[name], name
    assert [each.partition(": ")[2] for each in found.unbroken] == UNBROKEN


@pytest.mark.parametrize("flags", OTHERS)
def test_so_are_settings_of_a_run(flags, folders):
    argv = f"{module_rules.FLAG} {LENGTHS} --advantage grpo --kl-coefficient 0 --hf-model {folders['granite']} {flags}"
    with pytest.raises(UsageError) as error:
        parse(argv.format(**folders).split(), 1, "rl")
    assert OTHERS[flags] in str(error.value)


def test_every_flag_of_megatrons_layers_is_refused_beside_a_module():
    names = megatron_flags.destinations()
    flags = {names[option] for option in megatron_flags.accepted_options()} - training() - READ
    left = {name for name in flags if not module_rules.is_of_layers(name) and "pipeline" not in name}
    assert left ^ OTHERS_OF_RUN == set() and flags & ARCHITECTURE


def test_a_source_without_a_folder_is_refused():
    for flags, flag in (
        (module_rules.FLAG, "--hf-model"),
        ("--critic-model-source transformers", "--critic-hf-model"),
    ):
        with pytest.raises(UsageError, match=f"^{flags}: needs {flag},"):
            parse(f"{flags} {LENGTHS} --num-layers 2 --hidden-size 32 --num-attention-heads 4".split(), 1, "rl")
