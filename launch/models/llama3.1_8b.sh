# Llama-3.1-8B: 8.03 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=128256
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --disable-bias-linear --rotary-base 500000 --use-rope-scaling
    --rope-scaling-factor 8.0 --untie-embeddings-and-output-weights
)
