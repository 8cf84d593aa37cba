"""Model shapes in configs/models: Megatron's flags that describe the published number of parameters."""

from pathlib import Path

import pytest

from megarl import arguments
from megarl.planning.parameters import parameter_totals

FOLDER = Path(__file__).parents[2] / "configs" / "models"
PUBLISHED = {"qwen3_0.6b": (151936, 596_049_920)}  # vocabulary, parameters of the Hugging Face checkpoint


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_a_model_config_describes_the_published_model(name):
    vocab_size, parameters = PUBLISHED[name]
    config = arguments.parse(["--config", str(FOLDER / f"{name}.yaml"), "--advantage", "grpo"], 1)
    assert parameter_totals(config.roles["actor"].megatron, vocab_size, value_head=False).total == parameters
