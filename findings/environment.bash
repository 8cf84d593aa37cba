# Sourced by each finding. $FOLDER is a temporary folder; `need NAME==VERSION …` makes $PYTHON with these packages.
# PY=/path/to/python is used instead of a new environment if it has these versions; nothing is downloaded then.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
cd "$FOLDER"

HAS='import importlib.metadata as found, sys
wrong = [pin for pin in sys.argv[1:] if found.version(pin.split("==")[0]).split("+")[0] != pin.split("==")[1]]
sys.exit(f"other versions: {wrong}" if wrong else 0)'

need() { # NAME==VERSION...
    if [[ -n ${PY:-} ]]; then
        PYTHON=$PY
    else
        python3 -m venv "$FOLDER/venv"
        PYTHON=$FOLDER/venv/bin/python
        "$PYTHON" -m pip install -q --no-input --disable-pip-version-check "$@"
    fi
    "$PYTHON" -I -c "$HAS" "$@"
}
