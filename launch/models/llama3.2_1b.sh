# Llama-3.2-1B: 1.24 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=128256
MODEL_ARGS=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 64 --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --disable-bias-linear --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0
)
