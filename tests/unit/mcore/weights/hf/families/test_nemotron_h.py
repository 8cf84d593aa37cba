"""Nemotron-H: a configuration as published, and flags of the paper."""

from tests.helpers.folders.published_families import Published, checked

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_8B = Published(
    {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072,
        "hidden_size": 4096, "hybrid_override_pattern": PATTERN,
    },
    {
        "hybrid-layer-pattern": PATTERN, "num-layers": 52, "mamba-state-dim": 128, "mamba-num-groups": 8,
        "squared-relu": True, "position-embedding-type": "none",
    },
)  # fmt: skip


test_published_configuration = checked({"Nemotron-H-8B": NEMOTRON_H_8B})
