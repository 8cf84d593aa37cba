"""Rules on models with recurrent states: each is broken by a case, which one line refuses before any work."""

import sys

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config import recurrent_rules
from megarl.mcore.recurrence import fused_chunks
from megarl.trainers import setup
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

SHAPE = f"{SHAPES['recurrent']} {LENGTHS} --lr 1e-3"
FLAG = recurrent_rules.FLAG

# A case of a model with recurrent states: its flags, and words of the line.
WRONG = {
    "no pattern": ("--linear-attention-freq 1", "--linear-attention-freq 1: allowed is a number from 2 to"),
    "long period": ("--linear-attention-freq 3", "--linear-attention-freq 3: allowed is a number from 2"),
    "short pattern": ("--linear-attention-freq [1]", "--linear-attention-freq [1]: allowed is a number from 2"),
    "all recurrent": ("--linear-attention-freq [1,1]", "--linear-attention-freq [1, 1]: allowed is a number from 2"),
    "none recurrent": ("--linear-attention-freq [0,0]", "--linear-attention-freq [0, 0]: allowed is a number from 2"),
    "no key heads": ("--linear-num-key-heads 0", "--linear-num-key-heads 0: allowed is 1 or more"),
    "key heads": ("--linear-num-key-heads 3 --linear-num-value-heads 3 --tensor-model-parallel-size 2",
                  "--linear-num-key-heads 3: allowed is a multiple of --tensor-model-parallel-size 2"),
    "value heads": ("--linear-num-value-heads 3", "--linear-num-value-heads 3: allowed is a multiple of"),
    "value channels": ("--linear-value-head-dim 24", "--linear-value-head-dim 24: allowed is a multiple of 16"),
    "one tap": ("--linear-conv-kernel-dim 1", "--linear-conv-kernel-dim 1: allowed is from 2 to 8"),
    "no key channels": ("--linear-key-head-dim 0", "--linear-key-head-dim 0: allowed is 1 or more"),
    "context parallelism": ("--linear-num-key-heads 1 --context-parallel-size 2",
                            "-key-heads 1: allowed is a multiple of --tensor-model-parallel-size 1 × --context-par"),
    "fp16": ("--fp16", "--fp16 True: allowed is --bf16 or fp32"),
    "post-norm": ("--layernorm-position post", "--layernorm-position post: allowed is pre with"),
    "LayerNorm": ("--normalization LayerNorm", "--normalization LayerNorm: allowed is RMSNorm with"),
    "recomputed norm": ("--recompute-granularity selective --recompute-modules gdn_norm_out",
                        "--recompute-modules gdn_norm_out: allowed is others than gdn_norm_out"),
    "norm of all heads": ("--qk-layernorm-all-heads", "--qk-layernorm-all-heads True: allowed is none with"),
    "biases with gates": ("--add-qkv-bias", "--attention-output-gate True: allowed is none with biases"),
    "factors of attention": ("--lora-rank 2 --lora-targets q_proj --pipeline-model-parallel-size 2",
                             "--lora-targets q_proj: a pipeline stage of the actor has none of these"),
    "factors of states": ("--lora-rank 2 --lora-targets in_proj_z,out_proj --pipeline-model-parallel-size 2",
                          "--lora-targets in_proj_z,out_proj: a pipeline stage of the actor has none of these"),
    "latents of one decay": ("--linear-gate-rank 8", "--linear-gate-rank 8: allowed is none without --linear-channel"),
    "bound of one decay": ("--linear-decay-bound -5", "--linear-decay-bound -5.0: allowed is none without --linear"),
    "kernels of 16 bits": ("--delta-rule-backend fla", "--delta-rule-backend fla: allowed is torch without --bf16"),
    "wide keys for kernels": ("--delta-rule-backend fla --bf16 --linear-key-head-dim 257",
                              "--delta-rule-backend fla: allowed is torch with --linear-key-head-dim 257, above 256"),
    "deterministic kernels": ("--delta-rule-backend fla --bf16 --deterministic",
                              "actor: --delta-rule-backend fla: allowed is torch with --deterministic: which of its"),
}  # fmt: skip
ALONE = {  # flag that sizes need
    FLAG: [("linear-num-key-heads", 4), ("linear-num-value-heads", 4), ("linear-key-head-dim", 8),
           ("linear-value-head-dim", 16), ("linear-conv-kernel-dim", 3), ("linear-attention-freq", 2)],
    "--hybrid-layer-pattern": [("mamba-num-heads", 4), ("mamba-state-dim", 8), ("mamba-dt-min", 0.5)],
}  # fmt: skip
# The same with layers of Mamba-2.
WRONG_MAMBA = {
    "short": ("--num-layers 5", "--hybrid-layer-pattern M-*M: allowed is for each of --num-layers 5 M (Mamba-2)"),
    "letters": ("--hybrid-layer-pattern M-*X", "--hybrid-layer-pattern M-*X: allowed is for each"),
    "no state": ("--hybrid-layer-pattern *-*-", "--hybrid-layer-pattern *-*-: allowed is for each"),
    "experts": ("--hybrid-layer-pattern ME*M", "ME*M: allowed is one with E if and only if --num-experts"),
    "groups": ("--mamba-num-groups 1 --tensor-model-parallel-size 2",
               "--mamba-num-groups 1: allowed is a multiple of --tensor-model-parallel-size 2"),
    "heads": ("--mamba-num-heads 7", "--mamba-num-heads 7: allowed is a multiple of --mamba-num-groups 2"),
    "no groups": ("--mamba-num-groups 0", "--mamba-num-groups 0: allowed is 1 or more"),
    "channels": ("--mamba-head-dim 8", "--mamba-head-dim 8: allowed is a multiple of 16"),
    "state": ("--mamba-state-dim 0", "--mamba-state-dim 0: allowed is 1 or more"),
    "smallest step": ("--mamba-dt-min -1", "--mamba-dt-min -1.0: allowed is 0 or more"),
    "taps": ("--linear-conv-kernel-dim 9", "--linear-conv-kernel-dim 9: allowed is from 2 to 8"),
    "key heads": ("--linear-num-key-heads 4", f"--linear-num-key-heads 4: allowed is none without {FLAG}"),
    "kernels of gated delta nets": ("--delta-rule-backend fla --bf16", f"fla: allowed is torch without {FLAG}"),
    "both kinds": (f"{FLAG} gated_delta_net --linear-attention-freq 2", "M-*M: allowed is none with"),
    "frequency of experts": ("--moe-layer-freq 2", "--moe-layer-freq 2: allowed is none with --hybrid-layer-pattern"),
    "fp16": ("--fp16", "--fp16 True: allowed is --bf16 or fp32"),
    "factors of a stage": ("--lora-rank 2 --lora-targets up_proj --pipeline-model-parallel-size 2",
                           "--lora-targets up_proj: a pipeline stage of the actor has none of these"),
    "factors of a virtual stage": ("--lora-rank 2 --lora-targets in_proj,down_proj --pipeline-model-parallel-size 2"
                                   " --num-layers-per-virtual-pipeline-stage 1",
                                   "--lora-targets down_proj,in_proj: a pipeline stage of the actor has none of these"),
}  # fmt: skip


# The same with decays of channels.
WRONG_CHANNELS = {
    "keys of several values": ("--linear-num-value-heads 8", "--linear-channel-decay True: allowed is none with --line"
                               "ar-num-key-heads 4, --linear-num-value-heads 8: each value has a key"),
    "narrow keys": ("--linear-key-head-dim 8", "--linear-channel-decay True: allowed is none with --linear-key-head-dim"
                    " 8, --linear-value-head-dim 16: they are equal"),
    "kernels of other decays": ("--delta-rule-backend fla --bf16", "-backend fla: allowed is torch with --linear-chan"),
    "no latents": ("--linear-gate-rank 0", "--linear-gate-rank 0: allowed is 1 or more"),
    "growth": ("--linear-decay-bound 1", "--linear-decay-bound 1.0: allowed is below 0, -80 or more"),
    "no number": ("--linear-decay-bound nan", "--linear-decay-bound nan: allowed is a finite number"),
}  # fmt: skip

ROWS = [
    *(("recurrent", *row) for row in WRONG.values()), *(("mamba", *row) for row in WRONG_MAMBA.values()),
    ("llama", "--linear-channel-decay", "--linear-channel-decay True: allowed is none without --experimental-att"),
    *(("llama", f"--{name} {value}", f"--{name} {value}: allowed is none without {flag}")
      for flag, sizes in ALONE.items() for name, value in sizes),
    *(("kimi", *row) for row in WRONG_CHANNELS.values()),
    ("latent", f"{FLAG} gated_delta_net --linear-attention-freq 2",
     "--multi-latent-attention True: allowed is none without --linear-channel-decay with"),
]  # fmt: skip


@pytest.mark.parametrize("shape, flags, needle", ROWS)
def test_wrong_models(shape, flags, needle):
    with pytest.raises(UsageError) as error:
        parse(f"{SHAPES[shape]} {LENGTHS} --lr 1e-3 {flags}".split(), 2, "sft")
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_kernels_need_a_device_and_their_package(monkeypatch, capsys):
    config = parse(f"{SHAPE} --delta-rule-backend fla --bf16".split(), 1, "sft")
    with pytest.raises(UsageError, match="actor: --delta-rule-backend fla: needs a CUDA device; a CPU has kernels"):
        setup.check_device(config)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    for version in (None, "0.5.9"):
        monkeypatch.setattr(fused_chunks, "version", lambda version=version: fused_chunks.supported(version))
        with pytest.raises(UsageError, match="fla: needs the package fla-core 0.6 or later; run bash"):
            setup.check_device(config)
    monkeypatch.setattr(fused_chunks, "version", lambda: fused_chunks.supported("0.6.1"))
    setup.check_device(config)
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    with pytest.raises(UsageError, match="--delta-rule-backend fla: fla-core 0.6.1 does not load: .*fla"):
        setup.choose_kernels(config, 0)
    monkeypatch.setattr(fused_chunks, "load", lambda: None)
    for line in (f"{SHAPE} --delta-rule-backend fla --bf16", SHAPE, f"{SHAPES['llama']} {LENGTHS} --lr 1e-3"):
        setup.choose_kernels(parse(line.split(), 1, "sft"), 0)
    of_nets = "megarl: kernels of gated delta nets: "
    assert capsys.readouterr().out == f"{of_nets}fla-core 0.6.1\n{of_nets}PyTorch's operators\n"


def test_states_of_prompts_need_a_model_with_states():
    flags = f"{LENGTHS} --lr 1e-3 --advantage grpo --rollout-prefix-caching --rollout-state-snapshots"
    assert parse(f"{SHAPES['recurrent']} {flags} 4".split(), 1, "rl").settings.rollout_state_snapshots == 4
    with pytest.raises(UsageError, match=f"--rollout-state-snapshots 4: needs {FLAG}"):
        parse(f"{SHAPES['llama']} {flags} 4".split(), 1, "rl")
    with pytest.raises(UsageError, match="--rollout-state-snapshots 0: allowed is a number above 0"):
        parse(f"{SHAPES['recurrent']} {flags} 0".split(), 1, "rl")
