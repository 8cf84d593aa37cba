"""Attention backends are modules that a flag names."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from megarl.mcore.attention import backends
from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.config.supported_flags import ATTENTION_BACKENDS, LAYER_SPECS
from tests.helpers.models.attention_inputs import packed_attention, random_heads

LENGTHS = torch.tensor([3, 5])


def inputs():
    return [random_heads(8, heads, torch.float32, i) for i, heads in enumerate((4, 2, 2))]


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_a_backend_defines_what_the_layers_call(name):
    backend = importlib.import_module(f"{backends.__name__}.{name}")
    assert all(callable(getattr(backend, name)) for name in ("packed_attention", "plan_cache_reads", "PagedAttention"))


def test_the_config_names_the_backend_that_runs(monkeypatch):
    twice = ModuleType("twice")
    twice.packed_attention = lambda *arguments: 2 * sdpa.packed_attention(*arguments)
    monkeypatch.setitem(sys.modules, f"{backends.__name__}.twice", twice)
    layout, attention = pack_sequences(LENGTHS), packed_attention()
    once = attention(*inputs(), None, packed_seq_params=layout)
    attention.config.attention_kernel = "twice"
    attention.backend = backends.load(attention.config)
    doubled = attention(*inputs(), None, packed_seq_params=layout)
    assert torch.equal(doubled, 2 * once) and once.abs().max() > 0


def test_the_names_are_those_of_the_files():
    assert "sdpa" in ATTENTION_BACKENDS and "local" in LAYER_SPECS
