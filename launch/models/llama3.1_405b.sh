# Llama-3.1-405B: 405.85 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=128256
MODEL_ARGS=(
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
    --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --disable-bias-linear --rotary-base 500000 --use-rope-scaling
    --rope-scaling-factor 8.0 --untie-embeddings-and-output-weights
)
