# Qwen3-235B-A22B: 235.09 B parameters, 22 B of them active: 8 of 128 experts a token.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=151936
MODEL_ARGS=(
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --rotary-base 1000000 --num-experts 128
    --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --untie-embeddings-and-output-weights
)
