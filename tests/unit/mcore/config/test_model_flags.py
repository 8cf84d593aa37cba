"""Rules on the flags that describe a model's layers: each can be broken, with its flag and value; right ones pass.

Those on multi-token prediction are at the end."""

import functools

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError
from megarl.mcore.config import model_flags
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import config, in_order, tensors
from tests.helpers.folders.hf_prediction import add_layer, with_prediction
from tests.helpers.models.tiny_models import LENGTHS, SHAPES
from tests.helpers.refused_rules import refused

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128"
    " --max-prompt-length 5 --max-response-length 6"
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8"
INDEXED = "--dsa-indexer-topk 8 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64"
YARN = "--position-embedding-type yarn"
LATENT = "--multi-latent-attention"
CHOICE, QUERIES = "--dsa-indexer-topk", f"{LATENT} --q-lora-rank 8"
CHOOSES = f"{QUERIES} {CHOICE} 8 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64"
PATTERN = "a number above 1, or a pattern of 4 zeros (full attention) and ones, with a one"

# Flags besides MODEL and what the line must say.
WRONG = {
    "one number": ("--window-size 4", "--window-size (4,): allowed is N,0 with N of 0 or more"),
    "tokens after it": ("--window-size 4,1", "--window-size (4, 1): allowed is N,0"),
    "endless window": ("--window-size=-1,0", "--window-size (-1, 0): allowed is N,0"),
    "period alone": ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2: allowed is none without --window-size"),
    "period 1": ("--window-size 4,0 --window-attn-skip-freq 1", PATTERN),
    "short pattern": ("--window-size 4,0 --window-attn-skip-freq [1,0]", PATTERN),
    "no window at all": ("--window-size 4,0 --window-attn-skip-freq [0]*4", PATTERN),
    **{name: (f"--{name} 0", f"--{name} 0.0: allowed is above 0") for name in (
           "embedding-multiplier", "attn-logit-softcapping", "final-logit-softcapping", "query-pre-attn-scalar")},
    "two norms of queries": ("--qk-layernorm --qk-layernorm-all-heads --normalization RMSNorm",
                             "--qk-layernorm-all-heads True: allowed is none with --qk-layernorm"),
    "LayerNorm of all heads": ("--qk-layernorm-all-heads", "--qk-layernorm-all-heads True: allowed is none with --no"),
    "zero-centred over all heads": ("--qk-layernorm-all-heads --normalization RMSNorm --apply-layernorm-1p",
                                    "--qk-layernorm-all-heads True: allowed is none with --apply-layernorm-1p"),
    "groups of no grouped queries": ("--num-query-groups 2",
                                     "--num-query-groups 2: allowed is none without --group-query-attention"),
    "recomputed norms": ("--recompute-granularity selective --recompute-modules core_attn layernorm",
                         "--recompute-modules core_attn layernorm: allowed is none with layernorm"),
    "recomputed modules alone": ("--recompute-modules mlp",
                                 "--recompute-modules mlp: allowed is none without --recompute-granularity"),
    "a form of another activation": ("--swiglu --gelu-approximation tanh",
                                     "--gelu-approximation tanh: allowed is none with --swiglu"),
    "two gates": ("--swiglu --geglu", "--geglu True: allowed is none with --swiglu"),
    "shared expert with biases": (f"{MOE} --moe-shared-expert-intermediate-size 8",
                                  "--moe-shared-expert-intermediate-size 8: allowed is none without --disable-bias"),
    "offset without a gate": ("--glu-linear-offset 1", "--glu-linear-offset 1.0: allowed is 0 without a gated MLP"),
    "clamp without a gate": ("--activation-func-clamp-value 7", "-clamp-value 7.0: allowed is above 0, with a gated"),
    "rotary base": ("--rotary-base 1", "--rotary-base 1: allowed is above 1"),
    "no rotation": ("--rotary-percent 0", "--rotary-percent 0.0: allowed is above 0"),
    "base of windows": ("--window-size 4,0 --window-rotary-base 0.5", "--window-rotary-base 0.5: allowed is above 1"),
    "base without windows": ("--window-rotary-base 50", "--window-rotary-base 50: allowed is none without --window"),
    "linear factor": ("--rotary-seq-len-interpolation-factor 0.5", "-interpolation-factor 0.5: allowed is 1 or more"),
    "Llama 3 factor": ("--use-rope-scaling --rope-scaling-factor 0.5", "--rope-scaling-factor 0.5: allowed is 1 or mo"),
    "order of factors": ("--use-rope-scaling --rope-low-freq-factor 5",
                         "--rope-high-freq-factor 4.0: allowed is above --rope-low-freq-factor 5.0"),
    "Llama 3 length": ("--use-rope-scaling --rope-original-max-position-embeddings 0", "embeddings 0: allowed is 1 or"),
    "YaRN factor": (f"{YARN} --rotary-scaling-factor 0.5", "--rotary-scaling-factor 0.5: allowed is 1 or more"),
    "order of betas": (f"{YARN} --yarn-beta-fast 0.5", "--yarn-beta-fast 0.5: allowed is --yarn-beta-slow 1.0, which"),
    "YaRN length": (f"{YARN} --yarn-original-max-position-embeddings 0", "embeddings 0: allowed is 1 or more"),
    "two scalings": (f"{YARN} --use-rope-scaling", "--use-rope-scaling True: allowed is none with --position-emb"),
    "two kinds of scaling": ("--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
                             "--use-rope-scaling True: allowed is none with --rotary-seq-len-interpolation-factor"),
    **{f"{flag} without rotation": (f"{flag} {value} --position-embedding-type {kind}",
                                    f"{flag} {value or 'True'}: allowed is none with --position-embedding-type {kind}")
       for flag, value, kind in [
           ("--rotary-base", 7, "learned_absolute"), ("--rotary-percent", 0.5, "none"), ("--no-rope-freq", 2, "none"),
           ("--rotary-seq-len-interpolation-factor", 2, "none"), ("--use-rope-scaling", "", "learned_absolute")]},
    "YaRN and linear": (f"{YARN} --rotary-seq-len-interpolation-factor 2",
                        "-factor 2: allowed is none with --position-embedding-type yarn"),
    **{f"{name} alone": (f"--{name} {value}", f"--{name} {value}: allowed is none without --{flag}") for flag, name,
       value in [
           ("use-rope-scaling", "rope-low-freq-factor", 2.0), ("use-rope-scaling", "rope-scaling-factor", 4.0),
           ("use-rope-scaling", "rope-high-freq-factor", 8.0),
           ("use-rope-scaling", "rope-original-max-position-embeddings", 64),
           *(("position-embedding-type yarn", name, value) for name, value in [
               ("yarn-original-max-position-embeddings", 64), ("yarn-beta-fast", 16.0), ("yarn-beta-slow", 2.0),
               ("rotary-scaling-factor", 4.0), ("mscale", 0.5), ("mscale-all-dim", 0.5)]),
       ]},
    "largest score without groups": (f"{MOE} --moe-router-group-score max",
                                     "--moe-router-group-score max: allowed is sum without --moe-router-num-groups"),
    **{f"{name} without latents": (f"--{name} {value}", f"--{name} {value}: allowed is none without {LATENT}")
       for name, value in [("q-lora-rank", 8), ("kv-lora-rank", 8), ("qk-head-dim", 8), ("qk-pos-emb-head-dim", 8),
                           ("v-head-dim", 8), ("latent-norm-epsilon", 0.1)]},
    **{f"no {name}": (f"{LATENT} --{name} 0", f"--{name} 0: allowed is 1 or more")
       for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")},
    **{f"odd {name}": (f"{LATENT} --{name} 7", f"--{name} 7: allowed is an even number")
       for name in ("kv-lora-rank", "qk-pos-emb-head-dim")},
    "epsilon of latents": (f"{LATENT} --latent-norm-epsilon 0", "--latent-norm-epsilon 0.0: allowed is above 0"),
    **{f"latents and {flags.split()[0]}": (f"{LATENT} --{flags}", f"--{shown}: allowed is none with {LATENT}")
       for flags, shown in [
           ("group-query-attention --num-query-groups 2", "group-query-attention True"),
           ("add-qkv-bias", "add-qkv-bias True"),
           ("qk-layernorm-all-heads --normalization RMSNorm", "qk-layernorm-all-heads True"),
           ("window-size 4,0", "window-size (4, 0)"), ("no-rope-freq 2", "no-rope-freq 2"),
           ("query-pre-attn-scalar 5", "query-pre-attn-scalar 5.0"), ("rotary-percent 0.5", "rotary-percent 0.5"),
           ("attn-logit-softcapping 5", "attn-logit-softcapping 5.0"),
           ("softmax-type learnable", "softmax-type learnable"), ("kv-channels 16", "kv-channels 16")]},
    "latents expanded again": (f"{LATENT} --recompute-granularity selective --recompute-modules core_attn mla_up_proj",
                               "--recompute-modules core_attn mla_up_proj: allowed is core_attn without mla_up_proj"),
    "latents with learned positions": (f"{LATENT} --position-embedding-type learned_absolute",
                                       "-type learned_absolute: allowed is rope, yarn or none with"),
    **{f"{name} without a choice": (f"{LATENT} --{name} {value}", f"--{name} {shown}: allowed is none without {CHOICE}")
       for name, value, shown in [
           ("dsa-indexer-n-heads", 4, 4), ("dsa-indexer-head-dim", 64, 64), ("dsa-indexer-rope-interleaved", "", True),
           ("dsa-indexer-layers", "1,1,1,1", "[1, 1, 1, 1]")]},
    "a choice of no keys": (f"{LATENT} {CHOICE} 0", f"{CHOICE} 0: allowed is 1 or more"),
    "a choice without latents": (f"{CHOICE} 8", f"{CHOICE} 8: allowed is none without {LATENT} and --q-lora-rank"),
    "a choice without positions": (f"{QUERIES} {INDEXED} --position-embedding-type none",
                                   f"{CHOICE} 8: allowed is none with --position-embedding-type none"),
    "a choice beside states": (f"{QUERIES} {INDEXED} --experimental-attention-variant gated_delta_net",
                               f"{CHOICE} 8: allowed is none with --experimental-attention-variant"),
    "a choice without heads": (f"{QUERIES} {CHOICE} 8 --dsa-indexer-head-dim 64", "None: allowed is 1 or more with"),
    **{f"{size} index channels": (f"{QUERIES} {CHOICE} 8 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim {size}",
                                  f"-head-dim {size}: allowed is a multiple of 16, --qk-pos-emb-head-dim 64 or more")
       for size in (48, 72)},
    **{f"indexers in layers {text}": (f"{CHOOSES} --dsa-indexer-layers {text}",
                                      "allowed is a zero or a one for each of 4 layers, the first of them one")
       for text in ("1,0", "0,1,1,1", "1,2,1,1")},
    "a choice by another backend": (f"{CHOOSES} --attention-backend eager",
                                    f"--attention-backend eager: allowed is auto or sdpa with {CHOICE}"),
    "divisors and another scaling": (
        "--use-rope-scaling --rotary-divisors 1,2,3,4,5,6,7,8",
        "--rotary-divisors 1,2,3,4,5,6,7,8: allowed is none with another scaling",
    ),
    "divisors of others": ("--rotary-divisors 1,2", "--rotary-divisors 1,2: allowed is"),
    "no divisors": ("--rotary-divisors 1,x", "--rotary-divisors 1,x: allowed is"),
    "factor and another scaling": ("--use-rope-scaling --rotary-attention-factor 1.2",
                                   "--rotary-attention-factor 1.2: allowed is none with another scaling"),
    "factor 0": ("--rotary-attention-factor 0", "--rotary-attention-factor 0.0: allowed is above 0"),
    "rounding alone": ("--no-yarn-correction-range-round-to-int",
                       "--yarn-correction-range-round-to-int False: allowed is none without --position-embedding-type"),
}  # fmt: skip
RIGHT = [
    f"{MOE} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7 --softmax-type learnable",
    f"{YARN} --rotary-scaling-factor 4 --rotary-base 12345.5 --window-size 4,0 --window-rotary-base 1e4",
    "--use-rope-scaling --rope-low-freq-factor 2 --rope-high-freq-factor 3 --rope-original-max-position-embeddings 64",
    "--rotary-seq-len-interpolation-factor 2.5",
    f"{LATENT} --q-lora-rank 8 --kv-lora-rank 6 --qk-head-dim 5 --qk-pos-emb-head-dim 4 --v-head-dim 7 --qk-layernorm"
    f" --latent-norm-epsilon 1e-6 {YARN} --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.7",
    f"{LATENT} {MOE} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score max",
    f"{CHOOSES} --dsa-indexer-rope-interleaved --dsa-indexer-layers [1,1,0,0] --attention-backend sdpa",
    "--geglu --gelu-approximation none",
    "--gelu-approximation tanh",
    "--geglu --layernorm-position sandwich --apply-layernorm-1p --embedding-multiplier 7.5",
    "--qk-layernorm-all-heads --normalization RMSNorm --layernorm-position post",
    "--window-size 0,0",
    "--window-size 4,0 --window-attn-skip-freq 2",
    "--window-size 4,0 --window-attn-skip-freq [1,0]*2",
]


# On a CPU a rule on layouts stops expert tensor parallelism before.
ON_GPUS = {"split experts": (f"{MOE} --expert-tensor-parallel-size 2", 2, "-parallel-size 2: allowed is 1 with")}
UNEQUAL = f"{QUERIES} {CHOICE} 8 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 64 --tensor-model-parallel-size 2"
ROWS = {name: (text, 1, needle) for name, (text, needle) in WRONG.items()} | ON_GPUS
ROWS["a choice of unequal ranks"] = (UNEQUAL, 2, "-heads 3: allowed is a multiple of --tensor-model-parallel-size 2")
found = functools.cache(lambda: refused(model_flags, MODEL, ROWS, ON_GPUS))


@pytest.mark.parametrize("case", ROWS)
def test_wrong_models(case):
    line = found().lines[case]
    assert line.startswith("actor: ") and "\n" not in line and ROWS[case][2] in line


def test_each_rule_can_be_broken():
    """Every rule is the one that stops some case of the table: none is covered by those before it."""
    assert found().unbroken == []


@pytest.mark.parametrize("text", RIGHT)
def test_right_models(text):
    assert parse(f"{MODEL} {text}".split(), 1, "sft").roles["actor"].megatron.num_layers == 4


# -- multi-token prediction ----------------------------------------------------------------------------------------

SHAPE = f"{SHAPES['llama']} {LENGTHS} --lr 1e-3 --advantage grpo --kl-coefficient 0 --reward length"
EP2 = "--num-experts 4 --expert-model-parallel-size 2"
# Flags besides SHAPE, and words of the line.
WRONG_PREDICTION = {
    "stages": ("--mtp-train --pipeline-model-parallel-size 2",
               "with --mtp-train allowed is 1: the layer reads the embedding and the last hidden states"),
    "sharded": ("--mtp-train --use-torch-fsdp2", "--use-torch-fsdp2 True: with --mtp-train allowed is none"),
    "post-norm": ("--mtp-train --layernorm-position post", "--layernorm-position post: with --mtp-train allowed is"),
    "window": ("--mtp-train --window-size 3,0", "with --mtp-train allowed is none"),
    "factors": ("--mtp-train --lora-rank 2", "--mtp-train: not yet with --lora-rank 2"),
    "nothing trained": ("--mtp-drafts", "--mtp-drafts: nothing has trained the layer; give --mtp-train, or"),
    "nothing trains": ("--mtp-drafts --debug-rollout-only", "--mtp-drafts: not with --debug-rollout-only"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_PREDICTION)
def test_what_the_layer_does_not_allow_is_refused(case):
    flags, needle = WRONG_PREDICTION[case]
    with pytest.raises(UsageError) as caught:
        parse(f"{SHAPE} {flags}".split(), 2, "rl")
    assert needle in str(caught.value) and "\n" not in str(caught.value)


def test_experts_may_be_on_several_ranks():
    assert parse(f"{SHAPE} --mtp-train --mtp-drafts {EP2}".split(), 2, "rl").roles["actor"].megatron.predicts


def test_folders_need_just_one_layer_that_is_computed(tmp_path):
    folder = hf_folders.write_folder("glm4_moe", tmp_path / "hf")
    flags = f"{LENGTHS} --lr 1e-3 --advantage grpo --kl-coefficient 0 --reward length --mtp-drafts --hf-model {folder}"
    with pytest.raises(UsageError, match="has no tensors of multi-token prediction, which --mtp-drafts needs"):
        parse(flags.split(), 1, "rl")
    with_prediction(folder)
    assert parse(flags.split(), 1, "rl").roles["rollout"].megatron.predicts
    in_order(tensors(add_layer), config(num_nextn_predict_layers=2))(folder)
    with pytest.raises(UsageError, match="has 2 layers of multi-token prediction; --mtp-drafts allows 1"):
        parse(flags.split(), 1, "rl")

    carried = hf_folders.write_folder("hy_v3", tmp_path / "carried")
    with_prediction(carried)
    with pytest.raises(UsageError, match="has a layer of multi-token prediction that exports keep and --mtp-drafts"):
        parse(flags.replace(str(folder), str(carried)).split(), 1, "rl")
