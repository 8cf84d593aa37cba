"""Models of transformers under megarl: their own log-probs and tokens, a gap of 0, and exports of the same bytes."""

import functools

import pytest

from tests.helpers.folders import any_measures, any_types
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

# One type of each kind: scaled logits, windows, unlike layers that share keys, sinks, a bias of the head, experts.
KINDS = ("granite", "cohere2", "gemma4_text", "gpt_oss", "phi", "ernie4_5_moe", "llama4_text", "longcat_flash")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("types")
    return functools.cache(lambda kind: any_types.save(kind, root / kind) and root / kind)


@pytest.mark.parametrize("kind", by_default(KINDS, ("granite", "gemma4_text")))
def test_a_type_computes_what_it_computes_alone(kind, folders, tmp_path):
    (found,) = run_world(any_measures.measure, 1, {kind: folders(kind)}, tmp_path)
    found = found[kind]
    assert found.difference < 2e-5 and all(found.greedy)
    assert found.gaps == [0, 0] and found.is_alone_equal
    assert found.changed == []
