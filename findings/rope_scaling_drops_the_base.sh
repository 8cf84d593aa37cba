#!/usr/bin/env bash
# transformers 5.24.0: a config.json with both `rope_parameters` (new) and `rope_scaling` (old) loses its base.
# rope_parameters says 500,000; with a rope_scaling beside it the configuration has 10,000, without a warning.
# Beside the old `rope_theta` at the top, or alone, the base is kept.
# Output: both 10000.0; rope_parameters alone 500000.0; rope_theta and rope_scaling 500000.0
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import json
import pathlib

from transformers import AutoConfig

new = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
scaling = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


def base(entries):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    pathlib.Path("config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100} | shape | entries))
    return AutoConfig.from_pretrained(".").rope_parameters["rope_theta"]


found = base(new | scaling), base(new), base({"rope_theta": 500000.0} | scaling)
print("both {}; rope_parameters alone {}; rope_theta and rope_scaling {}".format(*found))
assert found == (10000.0, 500000.0, 500000.0)
PYTHON
