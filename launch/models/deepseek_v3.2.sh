# DeepSeek-V3.2: 671.88 B parameters, 38.41 B of them active: 8 of 256 experts and a shared one a token; 0.85 B of
# indexers, which are not trained. The layers of multi-token prediction are left out.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
VOCAB_SIZE=129280
MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --dsa-indexer-topk 2048 --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128
    --v-head-dim 128 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --position-embedding-type yarn --rotary-base 10000 --rotary-scaling-factor 40
    --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32 --yarn-beta-slow 1 --mscale 1 --mscale-all-dim 1
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '([0]*3+[1]*58)' --moe-router-dtype fp32 --moe-router-load-balancing-type none
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 8 --moe-router-group-topk 4
    --untie-embeddings-and-output-weights
)
