# Llama-3.1-70B and Llama-3.3-70B: 70.55 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=128256
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --disable-bias-linear --rotary-base 500000 --use-rope-scaling
    --rope-scaling-factor 8.0 --untie-embeddings-and-output-weights
)
