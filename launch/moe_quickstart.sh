#!/usr/bin/env bash
# The quickstart with a mixture of experts: 8 of them, 2 for each token, half of them on each of the actor's two ranks.
#   bash launch/moe_quickstart.sh [flags of megarl.train_rl]
# Reads and does what launch/quickstart.sh does; everything is in runs/moe_quickstart unless SAVE names another folder.
set -euo pipefail

CONFIG=moe_quickstart exec bash "$(dirname -- "${BASH_SOURCE[0]}")/quickstart.sh" "$@"
