"""Rank and scale of a module of an adapter: those of the first pattern that matches its name."""

import json

import pytest

from megarl.errors import UsageError
from megarl.mcore.lora.peft_config import CONFIG, read_config, stored_settings

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "use_rslora": False}
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "self_attn.*": 16, "k": 3},
    "alpha_pattern": {r"layers\.1\..*": 12, "v_proj": 6},
}


@pytest.mark.parametrize(
    "name, rank, alpha",
    [
        (None, 8, 4),
        ("model.layers.0.mlp.up_proj", 8, 4),
        ("model.layers.0.self_attn.q_proj", 2, 4),  # the first pattern of two that match
        ("model.layers.0.self_attn.k_proj", 16, 4),  # a pattern matches whole names alone
        ("model.layers.1.self_attn.v_proj", 16, 12),
        ("model.layers.0.self_attn.v_proj", 16, 6),
    ],
)
def test_the_first_pattern_that_matches_a_name_counts(name, rank, alpha):
    found = stored_settings(PLAIN | PATTERNS, name)
    assert (found.rank, found.alpha, found.scale) == (rank, alpha, alpha / rank)


def test_a_config_is_read_as_it_is_and_a_wrong_entry_is_named(tmp_path):
    for config, says in ((PLAIN, None), (PLAIN | {"r": True}, "r is True"), ({"r": 8}, "describes no LoRA adapter")):
        (tmp_path / CONFIG).write_text(json.dumps(config))
        if says is None:
            assert read_config(tmp_path, UsageError) == config
        else:
            with pytest.raises(UsageError, match=says):
                read_config(tmp_path, UsageError)
