"""Flags of train_rl by what they are about, for small runs with some of them."""

import functools
from pathlib import Path

from tests.helpers import programs
from tests.helpers.pages.flag_cases import ONLINE
from tests.laws.files import named

BASE = "--train-iters 1 --kl-coefficient 0 --prompts-per-step 4 --minibatch-size 4 --ppo-epochs 1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
RECURRENT = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2"
    " --linear-num-value-heads 4 --linear-key-head-dim 24 --linear-value-head-dim 16 --attention-output-gate"
)
MAMBA = (
    "--hybrid-layer-pattern M* --num-layers 2 --mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2"
    " --mamba-state-dim 16"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
)
CHOICE = f"{LATENT} --dsa-indexer-topk 3 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16"
_CHANNELS = (  # beside latents
    f"{LATENT} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-channel-decay"
    " --linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 16 --linear-value-head-dim 16"
)
CHANNELS = [f"{_CHANNELS} --position-embedding-type none --linear-gate-rank 8",
            f"{_CHANNELS} --attention-output-gate --linear-decay-bound -4"]  # fmt: skip
# Reference and critic have no place here: runs with them are refused, or run as the other values say.
APART = "--train-iters 3 --advantage grpo --role-map actor=0;reward=1;rollout=1"
TURNS = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 3 --max-turn-length 4 --max-response-length 18"
    " --max-tokens-per-microbatch 100 --environment-timeout 60 --reward environment"
)
AGENT = TURNS.replace("sum_environments:Sums", "agents:sums")
BRANCHES = AGENT.replace("agents:sums", "agents:branching") + " --max-turns 8 --max-response-length 80"

# A case has one value of some of these axes. A value may need another one's: then the case is not accepted, and ends.
AXES = {
    "advantage": ["--advantage grpo", "--advantage rloo", "--advantage opo", "--advantage reinforce++",
                  "--advantage reinforce++-baseline", "--advantage remax --greedy-baseline", "--advantage gae",
                  "--advantage gae --critic-warmup-steps 1", "--advantage gae --gae-length-alpha 0.1",
                  "--advantage grpo --group-std false", "--advantage maxrl", "--advantage otb",
                  "--advantage pass-at-k", "--advantage gdpo --reward exact-match+0.1*length",
                  f"{ONLINE} --minibatch-size 8", f"{ONLINE} --minibatch-size 8 --preference-loss ipo"],
    "loss": [f"--policy-loss {name}" for name in (
        "cispo", "gmpo", "gspo", "gspo-token", "reinforce", "sapo", "dppo-tv", "dppo-kl", "rollout-is", "vespo", "topr",
        "luspo", "fipo", "real", "m2po --m2po-threshold 0.001", "clip-cov --clip-cov-least 0",
        "kl-cov --kl-cov-share 0.1")],
    "old log-probs": ["--old-logprobs rollout", "--old-logprobs interpolate", "--rollout-rejection token-k1=0.9:1.1",
                      "--rollout-rejection mean-abs=0.1 max-k3=0.5"],
    "terms": ["--opsm-threshold 0.01", "--positive-nll-coefficient 0.1", "--rollout-correction-normalize"],
    "aggregation": [f"--loss-aggregation seq-mean-token-{name}" for name in ("mean", "sum", "sum-norm")],
    "kl": ["--kl-coefficient 0.1", "--kl-coefficient 0.1 --kl-in loss", "--kl-coefficient 0.1 --kl-in loss "
           "--kl-estimator k3+", "--kl-coefficient 0.1 --kl-in loss --kl-estimator k3-unbiased",
           "--kl-coefficient 0.1 --kl-controller adaptive --kl-target 0.1",
           "--kl-coefficient 0.1 --reference-update-interval 1",
           "--kl-coefficient 0.1 --reference-update-interval 1 --reference-mixup 0.5"],
    "teacher": [f"{programs.GRADED} --distill {flags}" for flags in (
        "loss --teachers default={sft} other={sft}", "loss --teacher self --teacher-temperature 0.5",
        "loss --distill-divergence jsd --teacher ema --ema-decay 0.5",
        "loss --teacher self --teacher-context sibling --teacher-max-prompt-length 300 --max-tokens-per-microbatch 400",
        "reward --teacher self --distill-coefficient 0.1", "loss --teacher self --teacher-offload")],
    "updates": ["--ppo-epochs 2", "--minibatch-size 2", "--entropy-coefficient 0.01", "--clip-range 0.3"],
    "shaping": ["--reward 0*exact-match+cosine+0.1*repetition", "--reward length+0.5*truncated+0.1*adaptive-length"],
    "masks": ["--mask-truncated-responses", "--overlong-buffer 2", "--reward-failure fallback"],
    "sampling": ["--temperature 0.7", "--top-k 3", "--top-p 0.8", "--samples-per-prompt 4", "--samples-per-prompt 1",
                 "--stop 1", "--stop-token-ids 5,6", "--min-p 0.2"],
    "thoughts": ["--thinking-budget 1 --thinking-budget-text +</think> --prompts {thinkers}/train.jsonl"
                 " --tokenizer-model {thinkers}/tokenizer.model --max-prompt-length 12 --max-response-length 12"
                 " --max-tokens-per-microbatch 100"],
    "pools": ["--pool-bounds 0.2,0.8", "--pool-bounds 0.2,0.8 --pool-weights 0,1,0.5 --pool-retire-after 2",
              "--group-filter range --group-filter-range 0.1,0.9"],
    "groups": ["--group-filter reward", "--group-filter reward --dynamic-sampling --max-sampling-rounds 2",
               "--group-filter correct --dynamic-sampling --over-sampling 2"],
    "correction": ["--rollout-correction tis", "--rollout-correction mis --rollout-correction-level sequence",
                   "--rollout-correction icepop --rollout-correction-floor 0.5"],
    "overlap": [f"{APART} --generation-lag 1 --rollout-correction tis",
                f"{APART} --generation-lag 2 --rollout-correction mis",
                f"{APART} --generation-lag 1 --rollout-correction tis --generation-schedule recorded",
                "--partial-rollouts --over-sampling 2 --rollout-correction tis"],
    "turns": [TURNS, f"{TURNS} --partial-rollouts --over-sampling 2 --rollout-correction tis",
              f"{TURNS} {APART} --generation-lag 1 --rollout-correction tis --tool-call-parser mistral",
              AGENT, f"{AGENT} --partial-rollouts --over-sampling 2 --rollout-correction tis",
              f"{AGENT} {APART} --generation-lag 1 --rollout-correction tis --prompts {{environments}}",
              f"{BRANCHES} --max-prompt-length 20 --max-tokens-per-microbatch 400",
              f"{TURNS} --branch-turns 1 --samples-per-prompt 3",
              f"{AGENT} --branch-turns 2 --samples-per-prompt 3 --partial-rollouts --over-sampling 2"
              " --rollout-correction tis"],
    "data": ["--prompts {limits}", "--prompts {rewards}", "--prompts {sizes}"],
    "kept": ["--keep-responses false", "--save-rollouts", "--keep-responses false --save-rollouts"],
    "experts": [f"{EXPERTS} {flags}" for flags in (
        "", "--moe-z-loss-coeff 0.1", "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-shared-expert-intermediate-size 16", "--moe-latent-size 16", "--moe-layer-freq 2",
        "--router-replay rollout", "--router-replay old-logprob")],
    "attention": ["--qk-layernorm", "--window-size 3,0", "--softmax-type off-by-one", "--softmax-type learnable",
                  "--attn-logit-softcapping 5", "--position-embedding-type learned_absolute", "--kv-channels 16",
                  "--position-embedding-type yarn --rotary-scaling-factor 4", RECURRENT,
                  MAMBA, LATENT, CHOICE, *CHANNELS],
    "model": ["--untie-embeddings-and-output-weights", "--normalization LayerNorm", "--apply-layernorm-1p",
              "--layernorm-position sandwich", "--num-layers 3", "--final-logit-softcapping 5"],
    "source": [f"--hf-model {{{kind}}} --model-source transformers"
               for kind in ("gemma2", "gemma4_text", "qwen3_moe", "lfm2_moe", "bamba")],
    "pictures": [f"{{{kind}}} --max-prompt-length 80 --max-tokens-per-microbatch 200 --rollout-buffer-gb 0.01"
                 for kind in ("pictures", "module_pictures")],
    "precision": ["--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --accumulate-allreduce-grads-in-fp32"],
    "optimizer": ["--adam-beta2 0.9", "--use-distributed-optimizer", "--clip-grad 0", "--weight-decay 0.1",
                  "--use-distributed-optimizer --overlap-grad-reduce", "--lr-decay-style cosine --lr-warmup-iters 0",
                  "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
                  "--optimizer sgd", "--optimizer sgd --sgd-momentum 0 --use-distributed-optimizer",
                  "--lr-multipliers *.mlp.*=0.5 --weight-decay-multipliers *.linear_proj.*=2",
                  "--freeze *.mlp.*", "--optimizer sgd --freeze embedding.* --use-distributed-optimizer"],
    "recompute": ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                  "--recompute-granularity selective --recompute-modules mlp"],
    "factors": ["--lora-rank 2", "--lora-rank 2 --lora-targets q_proj"],
    "memory": ["--actor-offload", "--max-tokens-per-microbatch 20", "--exact-rollout", "--kernels blas"],
    "evaluation": ["--evals a={heldout} b={heldout} --eval-interval 1 --eval-samples 4 --best-metric b/accuracy",
                   "--eval-prompts {heldout} --eval-interval 1 --eval-samples 4", "--save-interval 1",
                   "--eval-prompts {heldout} --eval-interval 1 --eval-samples 4 --ema-decay 0.5 --evaluate-ema"],
    "layout": [TP2, f"{TP2} --sequence-parallel", f"{TP2} --sequence-parallel --num-query-groups 1", PP2,
               "--context-parallel-size 2", "--use-torch-fsdp2",
               "--expert-model-parallel-size 2", "--role-map actor=0;critic=1;reward=1;reference=0",
               "--role-map actor=0-1;reward=1", f"--rollout{TP2[1:]}", "--actor-pipeline-model-parallel-size 2"],
}  # fmt: skip
# What changes no byte of the samples, and no number of the updates.
NEUTRAL = [
    "--rollout-max-requests 3", "--rollout-dispatch static", "--rollout-prefix-caching", "--speculative-rollout",
    "--rollout-chunked-prefill", "--async-save --save-interval 1", "--save-memory", "--reward-workers 1",
    "--verify-weights", "--ema-decay 0.9", "--mtp-train --mtp-drafts",
]  # fmt: skip


@functools.cache
def mixtures() -> dict[str, Path]:
    """Mixtures of prompt files, whose second file has a limit, a reward, an environment, or a group size of its own."""
    folder = programs.inputs()
    rows = [programs.addition(35, number) for number in range(6)]
    few = programs.write_lines(folder / "few.jsonl", rows)
    own = {"limits": "max-response-length: 2", "rewards": "reward: length+0.2*repetition",
           "environments": "environment: tests.helpers.envs.agents:sums", "sizes": "samples-per-prompt: 3"}  # fmt: skip
    for name, line in own.items():
        text = f"many:\n  prompts: {folder / 'train.jsonl'}\n  weight: 2\nfew:\n  prompts: {few}\n  {line}\n"
        (folder / f"{name}.yaml").write_text(text)
    return {name: folder / f"{name}.yaml" for name in own}


def argv_of(values: list[str], save: Path) -> list[str]:
    """Command line of a case: a small run of one step, without a warm start."""
    flags = named(" ".join([BASE, *values]), sft=programs.inputs() / "sft", save=save, **mixtures())
    has_critic = "--advantage" not in flags or "--advantage gae" in flags
    critic = " --critic-lr 1e-3" * (has_critic and "--advantage" in flags)
    return with_groups_that_fit(programs.rl_argv(save, flags + critic, warm_start=False))


def with_groups_that_fit(argv: list[str]) -> list[str]:
    """A command line without the query groups of all small runs if its attention is latent, which has none."""
    if "--multi-latent-attention" not in argv or "--group-query-attention" not in argv:
        return argv
    place = argv.index("--group-query-attention")
    return argv[:place] + argv[place + 3 :]
