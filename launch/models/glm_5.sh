# GLM-5 and 5.1: 743.91 B parameters, 41.78 B of them active: 8 of 256 experts and a shared one a token; 0.73 B of
# indexers, which are not trained. The layer of multi-token prediction is left out.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=154880
MODEL_ARGS=(
    --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64
    --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64
    --v-head-dim 256 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --latent-norm-epsilon 1e-6
    --disable-bias-linear --position-embedding-type rope --rotary-base 1000000
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '([0]*3+[1]*75)' --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.5 --untie-embeddings-and-output-weights
    --dsa-indexer-topk 2048 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-rope-interleaved
)
