"""Kernels, Transformer Engine and modules of transformers: each is refused, with one line, for models that it does not
compute and machines that do not have it; on a CPU `--exact-rollout` changes nothing."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config import kernel_rules, megatron_flags
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.config.supported_flags import ARCHITECTURE, training
from tests.helpers.folders import any_types
from tests.helpers.models.tiny_models import SHAPES, parse_roles
from tests.helpers.refused_rules import refused
from tests.helpers.texts import refusals

EXPERTS = "--num-experts 4 --moe-router-topk 2"
RECURRENT = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
WRONG = {  # flags, what the line says
    "fp32": ("", "--bf16 False: with --exact-rollout on CUDA allowed is --bf16 or --fp16"),
    "tensor parallelism": ("--bf16 --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: with"),
    "context parallelism": ("--bf16 --context-parallel-size 2", "--context-parallel-size 2: with"),
    "recurrent states": (f"--bf16 {RECURRENT}", "--experimental-attention-variant gated_delta_net: with"),
    "Mamba-2": ("--bf16 --hybrid-layer-pattern M* --num-layers 2 --mamba-num-heads 8",
                "--hybrid-layer-pattern M*: with"),
    "softcap": ("--bf16 --attn-logit-softcapping 5", "--attn-logit-softcapping 5.0: with"),
    "sinks": ("--bf16 --softmax-type learnable", "--softmax-type learnable: with"),
    "other attention": ("--bf16 --attention-backend sdpa", "--attention-backend sdpa: with --exact-rollout on CUDA "
                        "allowed is auto or invariant"),
    "other rows": ("--bf16 --hidden-size 68 --kv-channels 16", "--hidden-size 68: with"),
    "other heads": ("--bf16 --kv-channels 20", "--kv-channels 20: with"),
    "grouped products": (f"--bf16 {EXPERTS} --moe-grouped-gemm", "--moe-grouped-gemm True: with"),
    "wide scores": (f"--bf16 {EXPERTS} --moe-router-dtype fp64", "--moe-router-dtype fp64: with"),
    "offset": (f"--bf16 {EXPERTS} --glu-linear-offset 1", "--num-experts 4: with"),
    "split experts": (f"--bf16 {EXPERTS} --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2: with"),
    "overlap": (f"--bf16 {EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap",
                "--moe-shared-expert-overlap True: with"),
    "latents by another backend": ("--bf16 --attention-backend eager", "--attention-backend eager: with --exact-rollout"
                                   " on CUDA allowed is auto or sdpa", "latent"),
    "short latents": ("--bf16 --kv-lora-rank 20", "--kv-lora-rank 20: with", "latent"),
    "short rotations": ("--bf16 --qk-pos-emb-head-dim 12", "--qk-pos-emb-head-dim 12: with", "latent"),
    "low rank": (f"--bf16 {EXPERTS} --lora-rank 4", "--lora-rank 4: with"),
}  # fmt: skip
RIGHT = [
    "--bf16", "--fp16 --attention-backend invariant --pipeline-model-parallel-size 2", "--bf16 --lora-rank 4",
    f"--bf16 {EXPERTS} --expert-model-parallel-size 2 --moe-router-dtype fp32 --router-replay rollout",
]  # fmt: skip


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: True)


def roles_of(flags: str, shape: str = "llama", exact: str = "--exact-rollout"):
    """The Megatron namespaces of a run's roles."""
    program = parse(f"{SHAPES[shape]} {exact} {flags}".split(), 2, "rl")
    return {name: role.megatron for name, role in program.roles.items()}


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_models(case):
    flags, needle, *shape = WRONG[case]
    assert needle in refusals.refusal(roles_of, flags, *shape)


def test_every_rule_is_broken_by_a_case():
    args = parse(SHAPES["llama"].split(), 1, "sft").roles["actor"].megatron
    flags = {rule.flag for rule in kernel_rules.exact_rules(args)} - {"--transformer-impl"}
    assert flags == {needle.split()[0] for name, (_, needle, *_) in WRONG.items() if name != "low rank"}


@pytest.mark.usefixtures("on_cuda")
def test_latents_are_attended_to_by_their_rows():
    for flags in ("", "--dsa-indexer-topk 8 --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16"):
        args = roles_of(f"--bf16 {flags}", "latent")["actor"]
        assert transformer_config(args).exact_rollout and args.attention_kernel == "sdpa"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("flags", RIGHT)
def test_the_policy_computes_so_in_training_and_rollout_and_no_other_model_does(flags):
    roles = roles_of(flags)
    for name, args in roles.items():
        is_policy = name in ("actor", "rollout")
        assert transformer_config(args).exact_rollout is is_policy
        assert args.attention_kernel == (kernel_rules.INVARIANT if is_policy or "invariant" in flags else "varlen")
    assert not any(transformer_config(args).exact_rollout for args in roles_of(flags, exact="").values())


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_it_changes_nothing(shape):
    with_flag = roles_of("", shape)
    for name, role in parse(SHAPES[shape].split(), 2, "rl").roles.items():
        args = with_flag[name]
        assert vars(args) | {"exact_rollout": False} == vars(role.megatron)
        assert not transformer_config(args).exact_rollout


@pytest.mark.usefixtures("on_cuda")
def test_the_backend_alone_needs_what_its_kernels_need():
    with pytest.raises(UsageError, match="--attention-backend invariant needs --bf16 or --fp16"):
        parse(f"{SHAPES['llama']} --attention-backend invariant".split(), 1, "sft")
    with pytest.raises(UsageError, match="--attention-backend varlen needs heads of at most 256 channels"):
        parse(f"{SHAPES['llama']} --bf16 --kv-channels 512 --attention-backend varlen".split(), 1, "sft")


@pytest.mark.usefixtures("on_cuda")
def test_wide_heads_have_another_backend():
    for channels, backend in ((256, "varlen"), (272, "sdpa")):
        program = parse(f"{SHAPES['llama']} --bf16 --kv-channels {channels}".split(), 1, "sft")
        assert program.roles["actor"].megatron.attention_kernel == backend


# -- Transformer Engine ------------------------------------------------------------------------------------------

TE = "--transformer-impl transformer_engine"
SPARSE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
REFUSED = {  # what is asked besides -> what is said
    "--multi-latent-attention": ("latent", "", "--multi-latent-attention True: allowed is none with"),
    "--use-torch-fsdp2": ("llama", "--use-torch-fsdp2", "--use-torch-fsdp2 True: allowed is none with"),
    "experts apart": ("llama", SPARSE, "--num-experts 4: allowed is none without --moe-grouped-gemm"),
    "biases of experts": ("gpt2", f"{SPARSE} --moe-grouped-gemm",
                          "--num-experts 4: allowed is none without --disable-bias-linear"),
    "latents of experts": ("llama", f"{SPARSE} --moe-grouped-gemm --moe-latent-size 16",
                           "--moe-latent-size 16: allowed is none with"),
}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """A machine with a CUDA device and the package."""
    monkeypatch.setattr(kernel_rules, "_missing", list)


def refusal(flags: str, shape: str = "llama") -> str:
    return refusals.refusal(parse_roles, f"{TE} {flags}", 1, shape)


def test_without_a_device_and_the_package_both_are_asked_for(monkeypatch):
    needs = f"actor: {TE} needs"
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert refusal("") == f"{needs} a CUDA device and the package transformer-engine[pytorch]"
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert refusal("") == f"{needs} the package transformer-engine[pytorch]"
    monkeypatch.setattr(kernel_rules.importlib.util, "find_spec", lambda name: object())
    assert kernel_rules._missing() == []


@pytest.mark.long
def test_a_program_ends_with_one_line():
    command = [sys.executable, "-m", "megarl.train_sft", *SHAPES["llama"].split(), *TE.split(), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_what_its_layers_do_not_compute_is_refused(case, installed):
    shape, flags, says = REFUSED[case]
    assert says in refusal(flags, shape)


def test_every_rule_of_its_layers_is_tested(installed):
    args = parse_roles("", 1)["actor"].megatron
    wrong = Namespace(**vars(args) | {"multi_latent_attention": True, "use_torch_fsdp2": True, "num_experts": 2,
                                      "moe_latent_size": 16, "add_bias_linear": True})  # fmt: skip
    assert all(rule.is_broken for rule in kernel_rules.transformer_engine_rules(wrong))
    assert len(kernel_rules.transformer_engine_rules(wrong)) == len(REFUSED)


def test_low_rank_factors_are_refused(installed):
    assert "allowed is local with --lora-rank" in refusal("--lora-rank 2")


def test_it_is_allowed_where_it_runs_and_local_stays_the_default(installed):
    assert parse_roles(TE, 1)["actor"].megatron.transformer_impl == "transformer_engine"
    assert parse_roles(f"{TE} {SPARSE} --moe-grouped-gemm", 1)["actor"].megatron.moe_grouped_gemm
    assert parse_roles("", 1)["actor"].megatron.transformer_impl == "local"


@pytest.mark.long
def test_the_package_is_hidden_from_megatron_without_a_device():
    code = "import sys, megarl.mcore; print([sys.modules[name] for name in ('transformer_engine', 'apex')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[None, None]\n", done.stderr


@pytest.mark.parametrize("flag", [
    "--fp8-format hybrid", "--delay-wgrad-compute", "--moe-single-grouped-weight", "--symmetric-ar-type two_shot",
    "--use-precision-aware-optimizer", "--moe-router-padding-for-fp8",
])  # fmt: skip
def test_its_features_that_megarl_does_not_have_are_refused(flag, installed):
    assert flag.split()[0] in refusal(flag)


# -- modules of transformers ---------------------------------------------------------------------------------------

LENGTHS = "--max-prompt-length 6 --max-response-length 4"
TP2, FULL = "--tensor-model-parallel-size 2", "--recompute-granularity full --recompute-method"
SOURCE = kernel_rules.WHERE + "allowed is"
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
    model = f"--hf-model {folders['granite']} {kernel_rules.MODULES} {LENGTHS} --global-batch-size 2"
    rows = {name: (flags.format(**folders), ranks, line) for name, (flags, ranks, line) in RULES.items()}
    found = refused(kernel_rules, model, rows, function="module_rules")
    for name, (_, _, line) in rows.items():
        assert line in found.lines[name], name
    assert [each.partition(": ")[2] for each in found.unbroken] == UNBROKEN


@pytest.mark.parametrize("flags", OTHERS)
def test_so_are_settings_of_a_run(flags, folders):
    argv = (
        f"{kernel_rules.MODULES} {LENGTHS} --advantage grpo --kl-coefficient 0 --hf-model {folders['granite']} {flags}"
    )
    with pytest.raises(UsageError) as error:
        parse(argv.format(**folders).split(), 1, "rl")
    assert OTHERS[flags] in str(error.value)


def test_every_flag_of_megatrons_layers_is_refused_beside_a_module():
    names = megatron_flags.destinations()
    flags = {names[option] for option in megatron_flags.accepted_options()} - training() - READ
    left = {name for name in flags if not kernel_rules.is_of_layers(name) and "pipeline" not in name}
    assert left ^ OTHERS_OF_RUN == set() and flags & ARCHITECTURE


def test_a_source_without_a_folder_is_refused():
    for role in ("", "critic-"):
        flags, flag = f"--{role}model-source transformers", f"--{role}hf-model"
        with pytest.raises(UsageError, match=f"^{flags}: needs {flag},"):
            parse(f"{flags} {LENGTHS} --num-layers 2 --hidden-size 32 --num-attention-heads 4".split(), 1, "rl")
