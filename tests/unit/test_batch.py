"""The packed batch: select, sort, concatenate and update keep every field with its own sequence."""

import itertools
from pathlib import Path

import pytest
import torch

from megarl import batch as batch_module
from megarl.batch import (
    FIELDS,
    FORMED,
    GENERATED,
    ON_ROLLOUT,
    READERS,
    SCORED,
    Batch,
    concatenate,
    empty_batch,
    fields_sent,
    generated_fields,
)
from megarl.flags.settings import Settings
from tests.helpers.models.batches import random_batch, sequences

SEEDS = range(25)


def assert_dtypes(batch: Batch):
    for name in batch.present():
        assert getattr(batch, name).dtype == FIELDS[name]["dtype"], name


def test_offsets_and_lengths():
    mask = torch.tensor([0, 1, 0, 1, 0, 0, 0]).bool()  # an observation between two turns; two empty responses
    batch = Batch(lengths=torch.tensor([4, 1, 2]), response_mask=mask)
    assert len(batch) == 3
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 7] and batch.cu_seqlens.dtype == torch.int64
    assert batch.response_lengths.tolist() == [2, 0, 0] and batch.response_lengths.dtype == torch.int64
    assert batch.present() == ["lengths", "response_mask"]


@pytest.mark.parametrize("name, said", [
    ("scores", "the batch has no scores yet (filled by: scored, reward)"),
    ("returns", "the batch has no returns yet (filled by: actor)"),
    ("entropy", "the batch has no entropy yet (filled where it is read)"),
])  # fmt: skip
def test_a_field_that_nobody_has_filled_is_named_with_who_would(name, said):
    batch = random_batch(1, ["tokens"])
    assert batch.need("tokens") is batch.tokens
    with pytest.raises(RuntimeError) as caught:
        batch.need(name)
    assert str(caught.value) == said


def test_only_some_fields_are_the_same_memory():
    batch = random_batch(1)
    found = batch.only("tokens", "response_mask").only("values", "response_mask")
    assert set(found.present()) == {"sequence_ids", "lengths", "response_mask"} < set(batch.present())
    assert found.response_mask.data_ptr() == batch.response_mask.data_ptr()


@pytest.mark.parametrize("seed", SEEDS)
def test_select_takes_whole_sequences_in_the_order_given(seed):
    batch = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(batch), generator=generator)[: 1 + len(batch) // 2]
    chosen = batch.select(index)
    assert sequences(chosen) == [sequences(batch)[i] for i in index.tolist()]
    assert_dtypes(chosen)
    if len(batch):
        twice = torch.tensor([0, 0, len(batch) - 1])
        assert sequences(batch.select(twice)) == [sequences(batch)[i] for i in twice.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_then_sorted_is_the_batch(seed):
    batch = random_batch(seed)
    shuffled = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))
    assert sequences(shuffled.sorted()) == sequences(batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_split_over_replicas_then_concatenated_is_the_batch(seed):
    batch = random_batch(seed)
    owner = batch.sequence_ids // 2 % 3
    parts = [batch.select((owner == dp_rank).nonzero().flatten()) for dp_rank in (2, 0, 1)]
    assert sum(len(part) for part in parts) == len(batch)
    joined = concatenate(parts)
    assert sequences(joined) == sequences(batch)
    assert_dtypes(joined)


def test_concatenate_keeps_the_fields_that_are_present():
    names = ("tokens", "values")
    joined = concatenate([random_batch(1, names, count=2), random_batch(2, names, count=3)])
    assert joined.present() == ["sequence_ids", "lengths", "tokens", "values"]
    assert joined.sequence_ids.tolist() == sorted(joined.sequence_ids.tolist())
    with pytest.raises(TypeError):
        concatenate([random_batch(1, names), random_batch(2, ("tokens",))])


def test_update_takes_fields_of_the_same_sequences_alone():
    batch = random_batch(3, ("tokens",), count=4)
    other = Batch(sequence_ids=batch.sequence_ids, lengths=batch.lengths, values=torch.rand(len(batch.tokens)))
    batch.update(other, ["values"])
    assert batch.values is other.values
    shifted = Batch(sequence_ids=batch.sequence_ids + 1, lengths=batch.lengths, values=other.values)
    with pytest.raises(ValueError, match="other sequences"):
        batch.update(shifted, ["values"])
    longer = Batch(sequence_ids=batch.sequence_ids, lengths=batch.lengths + 1, values=other.values)
    with pytest.raises(ValueError, match="other sequences"):
        batch.update(longer, ["values"])
    with pytest.raises(ValueError, match="other sequences"):
        batch.update(batch.select(torch.arange(3)), ["tokens"])


def test_to_moves_every_field_that_is_present():
    batch = random_batch(5, count=3)
    there = batch.to("meta")
    assert there.present() == batch.present()
    assert all(getattr(there, name).device.type == "meta" for name in there.present())
    assert sequences(batch.to("cpu")) == sequences(batch)


def test_the_empty_batch():
    nothing = empty_batch(list(FIELDS), torch.device("cpu"))
    assert len(nothing) == 0 and nothing.cu_seqlens.tolist() == [0]
    assert_dtypes(nothing)
    assert nothing.present() == list(FIELDS)
    assert sequences(nothing.sorted()) == []
    assert len(nothing.select(torch.zeros(0, dtype=torch.int64))) == 0
    batch = random_batch(6, count=3)
    assert sequences(concatenate([nothing, batch, nothing])) == sequences(batch)
    assert len(concatenate([nothing, nothing])) == 0


@pytest.mark.parametrize("layers", [3, 0], ids=["experts", "none on this rank"])
def test_routes_go_with_their_tokens(layers):
    batch = random_batch(7, ("tokens",), count=5)
    batch.routes = torch.arange(len(batch.tokens) * layers * 2, dtype=torch.int16).view(len(batch.tokens), layers, 2)
    batch.routing = "of a micro-batch"
    cut = batch.routes.split(batch.lengths.tolist())
    index = torch.tensor([3, 0, 4])
    chosen = batch.select(index)
    assert torch.equal(chosen.routes, torch.cat([cut[i] for i in index.tolist()]))
    assert_dtypes(chosen)
    assert torch.equal(chosen.sorted().routes, torch.cat([cut[0], cut[3], cut[4]]))
    assert torch.equal(concatenate([chosen, batch.select(torch.tensor([2, 1]))]).routes, batch.routes)
    assert torch.equal(concatenate([batch, batch.select(index[:0])]).routes, batch.routes)
    assert batch.to("meta").routes.shape == batch.routes.shape and torch.equal(batch.to("cpu").routes, batch.routes)
    assert batch.present() == ["sequence_ids", "lengths", "tokens", "routes"]
    assert chosen.routing is None and batch.to("cpu").routing is None and Batch.routing is None


def test_routes_are_not_exchanged_with_the_batch():
    assert "routes" in FIELDS and "routing" not in FIELDS
    assert "routes" not in fields_sent(Settings(router_replay="rollout"), [*ON_ROLLOUT, *READERS])


RESPONSE = ["prompt_ids", "prompt_lengths", "finished", "tokens", "response_mask"]
EPISODE = ["solved", "turn_rewards", "row_starts"]
PARTS = {"reward": "format+length", "advantage": "gdpo"}


@pytest.mark.parametrize("flags, source, reader, names", [
    ({}, GENERATED, "reward", RESPONSE), ({}, GENERATED, "actor", [*RESPONSE, "rollout_logprobs"]),
    ({}, SCORED, None, []), ({}, FORMED, None, []),
    ({"environment": "x"}, GENERATED, "critic", [*RESPONSE, *EPISODE]),
    ({"environment": "x", "thinking_budget": 3}, GENERATED, "reward", [*RESPONSE, *EPISODE, "forced"]),
    ({"thinking_budget": 3}, GENERATED, "reward", RESPONSE),
    ({"greedy_baseline": True}, SCORED, "actor", ["baseline_scores"]),
    ({"group_filter": "reward"}, SCORED, "critic", ["scores", "correct"]),
    ({"group_filter": "reward", **PARTS}, SCORED, "actor", ["scores", "correct", "reward_parts"]),
    ({"generation_lag": 2}, FORMED, "actor", ["staleness"]), ({"generation_lag": 2}, FORMED, "critic", []),
    ({}, "reward", "actor", ["scores", "correct", "response_mask"]), ({}, "reward", "teacher", []),
    ({"reward_failure": "fallback"}, "reward", "actor", ["scores", "correct"]),
    ({"teacher_context": "sibling"}, "reward", "teacher", ["scores", "correct", "response_mask"]),
    ({"teacher_context": "sibling", "group_filter": "reward"}, "reward", "teacher", []),
    ({}, "teacher", "actor", []), ({"distill": "reward"}, "teacher", "actor", ["teacher_logprobs"]),
    ({"distill": "loss", "teachers": "a=b"}, "teacher", "actor", ["teacher_ids", "teacher_states"]),
    ({"distill": "reward", "teachers": "a=b"}, "teacher", "actor", ["teacher_ids", "teacher_logprobs"]),
    ({"reward_failure": "fallback"}, "actor", "critic", ["returns"]), ({}, "critic", "actor", ["values"]),
    ({"reward_failure": "fallback", "environment": "x"}, "actor", "critic", ["returns", "response_mask"]),
])  # fmt: skip
def test_roles_get_the_fields_that_they_read(flags, source, reader, names):
    settings = Settings(**flags)
    assert sorted(fields_sent(settings, [source], reader)) == sorted(names)
    assert {"sequence_ids", "lengths", *fields_sent(settings, [GENERATED])} == {*generated_fields(settings)}


def test_every_field_documents_its_shape():
    source = Path(batch_module.__file__).read_text()
    for name, spec in FIELDS.items():
        above, line = next(
            pair for pair in itertools.pairwise(source.splitlines()) if pair[1].startswith(f"    {name}: Tensor")
        )
        text = line if "#" in line else above
        assert ("[T]" if spec["kind"] == "token" else "[N]") in text.partition("#")[2]
