# DeepSeek-V3.2: 671.88 B parameters, 38.41 B of them active: the layers of DeepSeek-V3, and 0.85 B of indexers, which are
# not trained.
# shellcheck shell=bash disable=SC2034 # variables of the script that sources this file
source "$(dirname "${BASH_SOURCE[0]}")/deepseek_v3.sh"
MODEL_ARGS+=(--dsa-indexer-topk 2048 --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128)
