"""config.json of published models of a family, and what megarl's flags of them must be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NOTHING_KNOWN: dict[str, object] = {}
SHAPES = {"num-layers": "num_hidden_layers", "hidden-size": "hidden_size", "norm-epsilon": "rms_norm_eps",
          "num-attention-heads": "num_attention_heads"}  # fmt: skip

NEMOTRON_H = {  # Nemotron-H-8B: what its config.json says beside the defaults of the class
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip


class Published(NamedTuple):
    """Entries of config.json as the model's authors published them."""

    config: dict[str, Any]
    known: dict[str, object] = NOTHING_KNOWN  # flags read off paper and card, which the class does not show
    is_tied: bool = False
    has_windows: bool = False


def flags_of(folder: Path, entries: dict[str, Any]) -> dict[str, object]:
    """Megarl's flags of a new folder with this config.json."""
    from megarl.mcore.weights.hf.hf_model import read_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    return read_model(str(folder), "--hf-model", 64).flags


def checked(models: dict[str, Published]) -> Callable:
    """A test that the flags of each model have the sizes of its file, and what is known of it."""

    @pytest.mark.parametrize("name", models)
    def test(name, tmp_path):
        model = models[name]
        flags = flags_of(tmp_path / "published", model.config)
        assert flags.items() >= model.known.items()
        assert ("untie-embeddings-and-output-weights" in flags) != model.is_tied
        assert ("window-size" in flags) == model.has_windows
        of_text = model.config.get("text_config", model.config)  # which may leave out what the class has
        assert all(flags[flag] == of_text.get(key, flags[flag]) for flag, key in SHAPES.items())

    return test
