"""The self-check of a module of transformers: what it finds, and that it needs little memory."""

import pytest
import torch

from megarl.mcore.any_model import self_check, source
from megarl.mcore.any_model.attention import PackedPass, Unsupported
from megarl.mcore.attention.packing import pack_sequences
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

LONGEST = 128
OWN, PACKED, STEPS = "its own attention and experts", "two sequences packed together", "a prefill and steps after it"


def small(kind: str):
    return source.of_config(any_types.small_config(kind))


def without_windows(of_class):
    attend = of_class.attend_tokens
    return lambda self, slot, *rest: attend(self, slot._replace(window=None), *rest)


def other_scale(self, slot, query, key, value, scale, options):
    return attention_of_held(self, slot, query, key, value, scale * 1.1, options)


attention_of_held = self_check.HeldPass.attend_tokens


def one_sequence(lengths, **options):
    return pack_sequences(torch.tensor([int(lengths.sum())]), **options)


def doubled(self, hidden, chosen, gates):
    from megarl.mcore.any_model import rows

    return 2 * rows.experts(self, hidden, chosen, gates)


PLANTED = {  # what is replaced, by what, on which type, and what then differs
    "window of packed": (
        (PackedPass, "attend_tokens", without_windows(PackedPass)),
        "cohere2",
        OWN,
    ),
    "window of steps": ((self_check.HeldPass, "attend_tokens", without_windows(self_check.HeldPass)), "cohere2", STEPS),
    "scale of steps": ((self_check.HeldPass, "attend_tokens", other_scale), "granite", STEPS),
    "sequences see each other": ((self_check, "pack_sequences", one_sequence), "granite", PACKED),
}


@pytest.mark.parametrize("kind", by_default(("granite", "gemma4_text", "gpt_oss", "llama4_text"), ("gemma4_text",)))
def test_a_type_passes(kind):
    self_check.check(small(kind), LONGEST)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, monkeypatch):
    replaced, kind, what = PLANTED[name]
    monkeypatch.setattr(*replaced)
    with pytest.raises(Unsupported, match=f"computes other logits .* than with {what}: it has"):
        self_check.check(small(kind), LONGEST)


def test_wrong_experts_are_found(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "megarl", doubled)
    with pytest.raises(Unsupported, match=f"than with {OWN}"):
        self_check.check(small("qwen3_moe"), LONGEST)
