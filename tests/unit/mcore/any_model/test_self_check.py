"""The self-check of a module of transformers: what it finds, and that it needs little memory."""

import pytest

from megarl.mcore.any_model import self_check, source
from megarl.mcore.any_model.attention import Unsupported
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

LONGEST = 128
OWN, PACKED, STEPS = "its own attention and experts", "two sequences packed together", "a prefill and steps after it"


def small(kind: str):
    return source.of_config(any_types.small_config(kind))


attend = self_check.HeldPass.attend_tokens


def without_windows(self, slot, *rest):
    return attend(self, slot._replace(window=None), *rest)


def without_windows_in_steps(self, slot, *rest):
    return attend(self, slot if len(self.sequence) == self.tokens else slot._replace(window=None), *rest)


def other_scale_in_steps(self, slot, query, key, value, scale, options):
    is_whole = len(self.sequence) == self.tokens  # nothing is held
    return attend(self, slot, query, key, value, scale if is_whole else scale * 1.1, options)


def as_one_sequence(self, *rest):
    self.sequence = self.sequence * 0
    return attend(self, *rest)


def doubled(self, hidden, chosen, gates):
    from megarl.mcore.any_model import rows

    return 2 * rows.experts(self, hidden, chosen, gates)


recur = self_check.HeldPass.recur


def without_states(self, rule):
    self.held.pop(str(self.recurrences), None)
    return recur(self, rule)


def states_of_others(self, rule):
    self.sequence = self.sequence * 0
    return recur(self, rule)


def late_states(self, rule):
    """Each step begins where the one before it began."""
    name, held = str(self.recurrences), self.held
    before = held[name].clone() if name in held else None
    read = recur(self, rule)
    if before is not None:
        held[name] = before
    return read


PLANTED = {  # how attention is computed instead, on which type, and what then differs
    "window of packed": (without_windows, "cohere2", OWN),
    "window of steps": (without_windows_in_steps, "cohere2", STEPS),
    "scale of steps": (other_scale_in_steps, "granite", STEPS),
    "sequences see each other": (as_one_sequence, "granite", PACKED),
}
STATES = {  # of recurrences
    "not carried": (without_states, STEPS), "of the sequence before": (states_of_others, PACKED),
    "a step late": (late_states, STEPS),
}  # fmt: skip
RECURRENT = "lfm2", "bamba", "qwen3_next"  # convolutions, a state space, a delta rule
FAULTS = [(kind, name) for kind in RECURRENT for name in STATES]


TYPES = "granite", "gemma4_text", "gpt_oss", "llama4_text", "bart", "roberta", *RECURRENT


@pytest.mark.parametrize("kind", by_default(TYPES, ("gemma4_text",)))
def test_a_type_passes(kind):
    self_check.check(small(kind), LONGEST)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, monkeypatch):
    replacement, kind, what = PLANTED[name]
    monkeypatch.setattr(self_check.HeldPass, "attend_tokens", replacement)
    with pytest.raises(Unsupported, match=f"computes other logits .* than with {what}: it has"):
        self_check.check(small(kind), LONGEST)


@pytest.mark.parametrize(("kind", "name"), by_default(FAULTS, [("lfm2", name) for name in STATES]))
def test_a_fault_in_states_is_found(kind, name, monkeypatch):
    replacement, what = STATES[name]
    monkeypatch.setattr(self_check.HeldPass, "recur", replacement)
    with pytest.raises(Unsupported, match=f"computes other logits .* than with {what}: it has"):
        self_check.check(small(kind), LONGEST)


def test_wrong_experts_are_found(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "megarl", doubled)
    with pytest.raises(Unsupported, match=f"than with {OWN}"):
        self_check.check(small("qwen3_moe"), LONGEST)
