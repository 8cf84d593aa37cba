# Moonlight-16B-A3B: 15.96 B parameters, 2.9 B of them active: 6 of 64 experts and two shared ones a token.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=163840
MODEL_ARGS=(
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --latent-norm-epsilon 1e-6
    --disable-bias-linear --rotary-base 50000
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq '([0]+[1]*26)' --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.446 --untie-embeddings-and-output-weights
)
