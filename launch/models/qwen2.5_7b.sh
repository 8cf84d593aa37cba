# Qwen2.5-7B: 7.62 B parameters.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=152064
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
    --group-query-attention --num-query-groups 4 --kv-channels 128 --add-qkv-bias --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --rotary-base 1000000
    --untie-embeddings-and-output-weights
)
