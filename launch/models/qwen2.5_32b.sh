# Qwen2.5-32B: 32.76 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=152064
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40
    --group-query-attention --num-query-groups 8 --kv-channels 128 --add-qkv-bias --swiglu
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --rotary-base 1000000
    --untie-embeddings-and-output-weights
)
