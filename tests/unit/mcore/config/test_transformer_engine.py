"""Where `--transformer-impl transformer_engine` is refused, in one line, before anything starts."""

import subprocess
import sys
from argparse import Namespace

import pytest

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config import transformer_engine
from tests.helpers.tiny_models import SHAPES, parse_roles

TE = "--transformer-impl transformer_engine"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
REFUSED = {  # what is asked besides -> what is said
    "--multi-latent-attention": ("latent", "", "--multi-latent-attention True: allowed is none with"),
    "--use-torch-fsdp2": ("llama", "--use-torch-fsdp2", "--use-torch-fsdp2 True: allowed is none with"),
    "experts apart": ("llama", EXPERTS, "--num-experts 4: allowed is none without --moe-grouped-gemm"),
    "biases of experts": ("gpt2", f"{EXPERTS} --moe-grouped-gemm",
                          "--num-experts 4: allowed is none without --disable-bias-linear"),
    "latents of experts": ("llama", f"{EXPERTS} --moe-grouped-gemm --moe-latent-size 16",
                           "--moe-latent-size 16: allowed is none with"),
}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """A machine with a CUDA device and the package."""
    monkeypatch.setattr(transformer_engine, "_missing", list)


def refusal(flags: str, shape: str = "llama") -> str:
    with pytest.raises(UsageError) as error:
        parse_roles(f"{TE} {flags}", 1, shape)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_a_device_and_the_package_both_are_asked_for(monkeypatch):
    needs = f"actor: {TE} needs"
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert refusal("") == f"{needs} a CUDA device and the package transformer-engine[pytorch]"
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert refusal("") == f"{needs} the package transformer-engine[pytorch]"
    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: object())
    assert transformer_engine._missing() == []


@pytest.mark.long
def test_a_program_ends_with_one_line():
    command = [sys.executable, "-m", "megarl.train_sft", *SHAPES["llama"].split(), *TE.split(), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_what_its_layers_do_not_compute_is_refused(case, installed):
    shape, flags, says = REFUSED[case]
    assert says in refusal(flags, shape)


def test_every_rule_is_tested(installed):
    args = parse_roles("", 1)["actor"].megatron
    wrong = Namespace(**vars(args) | {"multi_latent_attention": True, "use_torch_fsdp2": True, "num_experts": 2,
                                      "moe_latent_size": 16, "add_bias_linear": True})  # fmt: skip
    assert all(rule.is_broken for rule in transformer_engine.rules(wrong))
    assert len(transformer_engine.rules(wrong)) == len(REFUSED)


def test_low_rank_factors_are_refused(installed):
    assert "allowed is local with --lora-rank" in refusal("--lora-rank 2")


def test_it_is_allowed_where_it_runs_and_local_stays_the_default(installed):
    assert parse_roles(TE, 1)["actor"].megatron.transformer_impl == "transformer_engine"
    assert parse_roles(f"{TE} {EXPERTS} --moe-grouped-gemm", 1)["actor"].megatron.moe_grouped_gemm
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
