"""`--exact-rollout`: models that it is refused for on CUDA, each with one line; on a CPU it changes nothing."""

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config import exact_rules
from megarl.mcore.config.megatron_flags import transformer_config
from tests.helpers.tiny_models import SHAPES

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
    "low rank": (f"--bf16 {EXPERTS} --lora-rank 4", "--lora-rank 4: with"),
}  # fmt: skip
RIGHT = [
    "--bf16", "--fp16 --attention-backend invariant --pipeline-model-parallel-size 2", "--bf16 --lora-rank 4",
    f"--bf16 {EXPERTS} --expert-model-parallel-size 2 --moe-router-dtype fp32 --router-replay rollout",
]  # fmt: skip


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: True)


def roles_of(flags: str, shape: str = "llama"):
    """The Megatron namespaces of a run's roles."""
    program = parse(f"{SHAPES[shape]} --exact-rollout {flags}".split(), 2, "rl")
    return {name: role.megatron for name, role in program.roles.items()}


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_models(case):
    flags, needle = WRONG[case]
    with pytest.raises(UsageError) as error:
        roles_of(flags)
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_every_rule_is_broken_by_a_case():
    args = parse(SHAPES["llama"].split(), 1, "sft").roles["actor"].megatron
    flags = {rule.flag for rule in exact_rules.rules(args)} - {"--transformer-impl", "--multi-latent-attention"}
    assert flags == {needle.split()[0] for name, (_, needle) in WRONG.items() if name != "low rank"}


@pytest.mark.usefixtures("on_cuda")
def test_latents():
    with pytest.raises(UsageError, match="--multi-latent-attention True: with --exact-rollout on CUDA allowed is none"):
        roles_of("--bf16", "latent")


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("flags", RIGHT)
def test_the_policy_computes_so_in_training_and_rollout_and_no_other_model_does(flags):
    roles = roles_of(flags)
    for name, args in roles.items():
        is_policy = name in ("actor", "rollout")
        assert transformer_config(args).exact_rollout is is_policy
        assert args.attention_kernel == (exact_rules.BACKEND if is_policy or "invariant" in flags else "varlen")
    assert not any(transformer_config(args).exact_rollout for args in _without_the_flag(flags))


def _without_the_flag(flags: str):
    program = parse(f"{SHAPES['llama']} {flags}".split(), 2, "rl")
    return [role.megatron for role in program.roles.values()]


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
