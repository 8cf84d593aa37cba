#!/usr/bin/env bash
# Runs the quickstart with a mixture of 8 experts, 2 per token, split over the actor's two ranks.
#   bash launch/moe_quickstart.sh [flags of megarl.train_rl]
# Reads the variables of launch/quickstart.sh except CONFIG; SAVE defaults to runs/moe_quickstart. Same exit status.
set -euo pipefail

CONFIG=moe_quickstart exec bash "$(dirname -- "${BASH_SOURCE[0]}")/quickstart.sh" "$@"
