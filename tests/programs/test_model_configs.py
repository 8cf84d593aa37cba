"""Model shapes in launch/models: Megatron's flags of the published models.

Each file is compared with the published config.json as megarl reads it from a Hugging Face folder, and with the
published number of parameters.
"""

import json
import subprocess
from pathlib import Path

import pytest

from megarl import arguments
from megarl.planning.parameters import parameter_totals
from tests.helpers.folders.published_configs import PUBLISHED
from tests.helpers.programs import ROOT

FOLDER = ROOT / "launch" / "models"
# Not of the shape: where weights come from, and the length that rotary embeddings do not need.
ELSEWHERE = {"draws_weights", "max_position_embeddings"}


def shape_of(path: Path) -> tuple[int, list[str]]:
    """VOCAB_SIZE and MODEL_ARGS of a shell file."""
    script = f'set -eu; source "{path}"; printf "%s\\0" "$VOCAB_SIZE" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")
    return int(words[0]), words[1:-1]


def actor_of(flags: list[str]):
    """With sequences of more tokens than indexers choose."""
    return arguments.parse([*flags, "--advantage", "grpo", "--max-prompt-length", "4000"], 1).roles["actor"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.sh")))
def test_a_shape_is_that_of_the_published_model(name, tmp_path):
    config, parameters = PUBLISHED[name]
    vocab_size, flags = shape_of(FOLDER / f"{name}.sh")
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["XForCausalLM"], "hidden_act": "silu"})
    )
    described, published = actor_of(flags), actor_of(["--hf-model", str(tmp_path)])
    assert vocab_size == published.hf_model.vocab_size
    different = {
        key: (value, vars(published.megatron).get(key))
        for key, value in vars(described.megatron).items()
        if key not in ELSEWHERE and vars(published.megatron).get(key) != value
    }
    assert different == {}
    assert parameter_totals(described.megatron, vocab_size, value_head=False).total == parameters
