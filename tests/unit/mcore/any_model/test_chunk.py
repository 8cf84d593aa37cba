"""Models of transformers under megarl: their own log-probs and tokens, a gap of 0, and exports of the same bytes."""

import functools

import pytest
import torch

from megarl.mcore.any_model import attention, self_check, source
from megarl.mcore.any_model.chunk import HeadInputs
from tests.helpers.folders import any_measures, any_types
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

RUNNING = any_types.running()
MAPPED = tuple(kind for kind, is_mapped in RUNNING.items() if is_mapped)
TOGETHER = 12  # types of a world
DEFAULT = "gemma4_text", "lfm2"


def worlds(kinds):
    return [" ".join(kinds[at : at + TOGETHER]) for at in range(0, len(kinds), TOGETHER)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("types")
    save = functools.cache(lambda kind: any_types.save(kind, root / kind) and root / kind)
    return lambda kinds: {kind: save(kind) for kind in kinds.split()}


OTHERS = [kind for kind in RUNNING if kind not in DEFAULT]


@pytest.mark.parametrize("kinds", by_default([*worlds(DEFAULT), *worlds(OTHERS)], worlds(DEFAULT)))
def test_types_compute_what_they_compute_alone(kinds, folders, tmp_path):
    (found,) = run_world(any_measures.measure, 1, folders(kinds), tmp_path)
    assert found.keys() == set(kinds.split())
    wrong = {
        kind: each._replace(score_rows=[])
        for kind, each in found.items()
        if not (
            each.difference < 2e-5
            and all(each.greedy)
            and each.gaps == [0, 0]
            and each.is_alone_equal
            and each.changed == []
        )
    }
    assert not wrong


# Positions after those of a cache, of queries that later positions scale and of a table; and after padding's.
@pytest.mark.parametrize("kind", ["llama4_text", "bart", "roberta"])
def test_a_scalar_head_reads_what_the_model_computes_of_each_sequence_alone(kind):
    found = source.of_config(any_types.small_config(kind))
    module, own, lengths = found.module(torch.float32), found.module(torch.float32, "eager"), [21, 17]
    source.find_slots(module)
    for each in (module, own):
        each.set_output_embeddings(torch.nn.Identity())
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens, each = 2 + 3 * positions, self_check.HeldPass(38, sequence=torch.arange(38) // 21)
    of_own, of_module = (source.values_in(each, source.spread_values) for each in (own, module))
    with torch.no_grad(), of_own, of_module:
        alone = [own.base_model(input_ids=part[None], use_cache=False)[0][0] for part in tokens.split(lengths)]
        with attention.running(each):
            packed = HeadInputs(module)(tokens[None], positions[None], of_logits=False)
    assert each.held and packed.shape == (38, 64)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kinds", worlds(MAPPED))
def test_mapped_types_agree_with_megatrons_layers(kinds, folders):
    (found,) = run_world(any_measures.differences, 1, folders(kinds))
    assert found.keys() == set(kinds.split())
    assert {kind: each for kind, each in found.items() if not each < 1e-5} == {}


def test_the_list_of_types_has_what_it_must():
    assert len(RUNNING) >= 110 and len(MAPPED) >= 38


# Windows, sinks, softcaps, keys wider than values, chunks, experts; convolutions, state spaces, delta rules.
AT_LENGTH = "cohere2 gpt_oss gemma2 deepseek_v3 llama4_text qwen3_moe lfm2 bamba falcon_h1 mamba2 qwen3_next"

ROUNDED = {"bamba": 1e-4, "falcon_h1": 2e-4}  # so far is transformers' own fp32 from its float64


@pytest.mark.long
@pytest.mark.parametrize("kind", AT_LENGTH.split())
def test_sums_over_long_keys(kind, tmp_path, monkeypatch):
    """BLAS adds keys in another order where there are many, and 64 tokens follow each other without a fault."""
    monkeypatch.setitem(any_types.SMALL, "max_position_embeddings", 2048)
    monkeypatch.setitem(any_types.OWN["llama4_text"], "attention_chunk_size", 2048)
    for name, value in dict(LENGTHS=(1036, 700, 16), LONGEST=1036, COUNT=64).items():
        monkeypatch.setattr(any_measures, name, value)  # a rank is a fork of this process
    any_types.save(kind, tmp_path / kind)
    (found,) = run_world(any_measures.measure, 1, {kind: tmp_path / kind}, tmp_path / "out")
    found = found[kind]
    assert max(map(len, found.score_rows)) == 1099
    assert found.difference < ROUNDED.get(kind, 2e-5) and all(found.greedy) and len(found.greedy) == 3
    assert found.gaps == [0, 0] and found.is_alone_equal and found.changed == []
