# Mixtral-8x7B-v0.1: 46.70 B parameters, 12.88 B of them active: 2 of 8 experts a token.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=32000
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --disable-bias-linear --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 14336 --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --untie-embeddings-and-output-weights
)
