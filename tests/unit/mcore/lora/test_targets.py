"""Targets and scales of low-rank factors."""

import pytest

from megarl.mcore.lora.targets import LoRASettings


@pytest.mark.parametrize("text, targets", [
    ("all-linear", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj",
                    "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj",
                    *(f"in_proj_{part}" for part in "qkvzba"), "g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj",
                    "in_proj", "out_proj")),
    ("v_proj, q_proj", ("q_proj", "v_proj")),
])  # fmt: skip
def test_targets_are_read_in_one_order(text, targets):
    from megarl.mcore.lora.targets import parse_targets

    assert parse_targets(text) == targets


def test_scales():
    assert LoRASettings(16, 8.0, False, ("q_proj",)).scale == 0.5
    assert LoRASettings(16, 8.0, True, ("q_proj",)).scale == 2.0
    settings = LoRASettings(16, 8.0, True, ("q_proj",))
    assert settings.with_rank(64).scale == 2.0 and LoRASettings.from_values(settings.values()) == settings
