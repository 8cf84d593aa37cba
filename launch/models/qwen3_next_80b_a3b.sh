# Qwen3-Next-80B-A3B: 79.67 B parameters, 3.87 B of them active: 10 of 512 experts and a shared one a token.
# The layer of multi-token prediction is left out.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --group-query-attention
    --num-query-groups 2 --kv-channels 256 --qk-layernorm --apply-layernorm-1p --attention-output-gate --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --rotary-base 10000000 --rotary-percent 0.25
    --experimental-attention-variant gated_delta_net --linear-attention-freq '([1]*3+[0])*12' --linear-num-key-heads 16
    --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --untie-embeddings-and-output-weights
)
