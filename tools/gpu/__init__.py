"""Stages of tools/gpu_check.sh. Each prints its findings as lines of JSON, as soon as it has them."""

import json


def report(**findings):
    """Prints findings as a line of JSON."""
    print(json.dumps(findings), flush=True)
