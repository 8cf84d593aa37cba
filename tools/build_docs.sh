#!/usr/bin/env bash
# Builds the documentation's site from docs/ and mkdocs.yml, without network. Any warning is an error.
#   bash tools/build_docs.sh [FOLDER]      default: site; open FOLDER/index.html in a browser, no server is needed
# Reads: PYTHON and MEGARL_VENV (see launch/setup_env.sh).
# Exit status: 0; otherwise that of mkdocs or of the environment's installation.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
FOLDER=$(realpath -m -- "${1:-$ROOT/site}")
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" docs)
cd "$ROOT"
# Not --quiet: it hides warnings from --strict, too.
NO_MKDOCS_2_WARNING=1 "$PYTHON_BIN" -m mkdocs build --strict --site-dir "$FOLDER"
echo "build_docs: $FOLDER/index.html"
