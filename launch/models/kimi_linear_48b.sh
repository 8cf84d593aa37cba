# Kimi-Linear-48B-A3B: 49.12 B parameters, 3.48 B of them active: 8 of 256 experts and a shared one a token.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=163840
MODEL_ARGS=(
    --num-layers 27 --hidden-size 2304 --ffn-hidden-size 9216 --num-attention-heads 32 --multi-latent-attention
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --latent-norm-epsilon 1e-6 --position-embedding-type none --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --disable-bias-linear --experimental-attention-variant gated_delta_net --linear-channel-decay
    --linear-attention-freq '([1]*3+[0])*6+[1]*2+[0]' --linear-gate-rank 128 --linear-num-key-heads 32
    --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4
    --num-experts 256 --moe-layer-freq '[0]+[1]*26' --moe-router-topk 8 --moe-ffn-hidden-size 1024
    --moe-shared-expert-intermediate-size 1024 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 2.446 --moe-router-dtype fp32
    --moe-router-load-balancing-type none --untie-embeddings-and-output-weights
)
