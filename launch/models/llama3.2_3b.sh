# Llama-3.2-3B: 3.21 B parameters, tied embeddings.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=128256
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --disable-bias-linear --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0
)
