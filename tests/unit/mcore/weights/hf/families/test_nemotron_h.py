"""Nemotron-H: a configuration as published, and flags of the paper."""

from tests.helpers.folders.published_families import NEMOTRON_H, Published, checked

KNOWN = {
    "hybrid-layer-pattern": NEMOTRON_H["hybrid_override_pattern"], "num-layers": 52, "mamba-state-dim": 128,
    "mamba-num-groups": 8, "squared-relu": True, "position-embedding-type": "none",
}  # fmt: skip

test_published_configuration = checked({"Nemotron-H-8B": Published(NEMOTRON_H, KNOWN)})
