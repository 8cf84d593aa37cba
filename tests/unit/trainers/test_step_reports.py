"""Reports of steps through a real TCPStore, whose limits a FileStore does not have: large, odd and hostile ones."""

import json
import math
import pickle
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.batch import FIELDS, Batch
from megarl.data.tokenizers import SentencePieceTokenizer
from megarl.observe.files import json_line
from megarl.trainers import step_reports
from megarl.trainers.step_reports import QUANTITIES, AsyncMetrics, StepReport, TokenSamples
from tests.helpers.models.batches import random_batch
from tests.helpers.texts.small_tokenizers import sentence_piece
from tests.helpers.worlds import SAFETY, run_world


def report(rank: int, samples=()) -> StepReport:
    return StepReport({"a/b": 0.1 + rank}, {("actor", "update"): 1 / 3, ("", "step"): 2.5}, 1.5, list(samples))


def long_samples(rank: int) -> list[dict]:
    """64 responses of 300,000 characters: 19 MB."""
    return [{"sequence": i, "response": f"{rank}{i}é" * 60_000} for i in range(64)]


def over_tcp(rank: int, function):
    """Runs `function(rank, store)` with a TCPStore as the default group's store."""
    file_store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=SAFETY)
        file_store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(file_store.get("port")), 2, is_master=False, timeout=SAFETY)
    dist.distributed_c10d._get_default_store = lambda: store
    result = function(rank, store)
    dist.barrier()  # rank 0 serves the store
    return result


def publish_long_samples(rank: int, store):
    async_reports = AsyncMetrics(SimpleNamespace(rank=rank, size=2), SAFETY)
    async_reports.publish(1, report(rank, long_samples(rank) if rank else ()))
    found = async_reports.poll(wait=True)
    if rank == 0:
        (step, (own, other)) = found[0]
        assert step == 1 and own == report(0) and other == report(1, long_samples(1))
        dist.barrier()
        return store.num_keys()
    dist.barrier()


def test_a_rank_with_64_long_samples_ends_its_step():
    """A TCPStore closes the connection on a value above 8 MiB."""
    left, _ = run_world(over_tcp, 2, publish_long_samples)
    assert left <= 1, "reports stay in the store"  # the store counts one key of its own


class Mine:
    """Its pickle raises when loaded."""

    def __reduce__(self):
        return exec, ("raise SystemError('code of a stranger has run')",)


HOSTILE = [
    pickle.dumps(Mine()),
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    json.dumps([{}, [], 1.0, [{"no": "sequence"}]]).encode(),
    json.dumps([{"a": "text"}, [], 1.0, []]).encode(),
    json.dumps([{}, [["actor", "update", "x"]], 1.0, []]).encode(),
]


def read_hostile(rank: int) -> list[str]:
    """The message for each hostile report of rank 1, and for wrong numbers of pieces."""
    store, messages = dist.HashStore(), []
    dist.distributed_c10d._get_default_store = lambda: store
    for step, data in enumerate([*HOSTILE, b"-1", b"1000000", b"x", b"2"]):
        key = AsyncMetrics._key(step, 1)
        if step < len(HOSTILE):
            store.set(f"{key}/0", data)
        store.set(key, "1" if step < len(HOSTILE) else data)
        reports = AsyncMetrics(SimpleNamespace(rank=0, size=2), timedelta(seconds=1))
        reports.publish(step, report(0))
        with pytest.raises(RuntimeError) as error:
            reports.poll(wait=False)
        messages.append(str(error.value))
    return messages


def test_nothing_in_the_store_is_unpickled_or_believed():
    messages = run_world(read_hostile, 1)[0]
    for step, message in enumerate(messages):
        assert message.startswith(f"the report of rank 1 on step {step} is damaged: "), message
    assert len(messages) == len(HOSTILE) + 4


def test_reports_read_back_as_the_same_numbers():
    metrics = {"a": 0.1, "b": 5e-324, "c": math.inf, "d": 7, "e": True, "f": 1e23, "g": np.float64(0.3),
               "h": torch.tensor(2.5)}  # fmt: skip
    samples = [{"sequence": 3, "response": "é\ud800\n", "parts": {"x": 0.2}, "none": None}]
    sent = StepReport(metrics, {("actor", "update"): 1e-9}, 0.5, samples)
    found = StepReport.decode(sent.encode())
    assert found == sent._replace(metrics={**metrics, "h": 2.5})
    assert [type(found.metrics[name]) for name in "de"] == [int, bool]
    assert math.isnan(StepReport.decode(sent._replace(metrics={"a": math.nan}).encode()).metrics["a"])
    with pytest.raises(TypeError, match="a report holds a set"):
        sent._replace(samples=[{"sequence": {1}}]).encode()


# -- rows of responses ---------------------------------------------------------------------------------------------


TEXTS = ("1+2=", "7+8=")


class _Prompt:
    def __init__(self, text: str):
        self.text = text


class _Step(dict):
    """A step batch as far as this needs it."""

    prompts = [_Prompt(text) for text in TEXTS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return SentencePieceTokenizer(sentence_piece(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"))


def make_batch(tokenizer, ids: list[int], answers: list[str]) -> Batch:
    """Responses `answers` with the numbers `ids` to the two prompts in turn, and random numbers at every token."""
    prompts = [tokenizer.encode(TEXTS[i % 2]) for i in range(len(ids))]
    responses = [[*tokenizer.encode(answer), tokenizer.eos_id] for answer in answers]
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
    draw = torch.Generator().manual_seed(1)
    numbers = {name: torch.randn(int(lengths.sum()), generator=draw) for name in QUANTITIES}
    tokens = torch.tensor([t for p, r in zip(prompts, responses, strict=True) for t in p + r])
    count = len(ids)
    return Batch(sequence_ids=torch.tensor(ids), prompt_ids=torch.arange(count) % 2, lengths=lengths, tokens=tokens,
                 prompt_lengths=torch.tensor([len(p) for p in prompts]), scores=torch.arange(count) / 2,
                 finished=torch.arange(count) % 2 == 0, **numbers)  # fmt: skip


def test_rows_hold_the_response_tokens_of_the_first_responses(tokenizer):
    batch = make_batch(tokenizer, [0, 3, 5, 9], ["3", "15", "4", "16"])
    rows = TokenSamples(6, tokenizer).rows(_Step(actor=batch))
    assert [row["sequence"] for row in rows] == [0, 3, 5]
    assert [row["prompt"] for row in rows] == [TEXTS[0], TEXTS[1], TEXTS[0]]
    assert [row["response"] for row in rows] == ["3", "15", "4"]
    assert [row["reward"] for row in rows] == [0.0, 0.5, 1.0] and [row["finished"] for row in rows] == [
        True,
        False,
        True,
    ]
    starts = batch.cu_seqlens.tolist()
    for number, row in enumerate(rows):
        response = slice(starts[number] + int(batch.prompt_lengths[number]), starts[number + 1])
        assert row["token_ids"] == batch.tokens[response].tolist() and row["length"] == len(row["token_ids"])
        assert "".join(row["tokens"]).strip() == row["response"] + tokenizer.eos_token
        for name in QUANTITIES:  # every bit, after the file, too
            read = np.array(json.loads(json_line(row))[name], dtype=np.float32)
            assert read.tolist() == getattr(batch, name)[response].tolist(), name


def test_fields_that_a_run_lacks_are_left_out(tokenizer):
    batch = make_batch(tokenizer, [0], ["3"])
    batch.values = batch.returns = batch.reference_logprobs = None
    (row,) = TokenSamples(8, tokenizer).rows(_Step(actor=batch))
    assert set(QUANTITIES) - set(row) == {"values", "returns", "reference_logprobs"}
    assert set(QUANTITIES) <= set(FIELDS)


def test_a_long_response_is_cut(tokenizer, monkeypatch):
    monkeypatch.setattr(step_reports, "MAX_TOKENS", 3)
    (row,) = TokenSamples(1, tokenizer).rows(_Step(actor=make_batch(tokenizer, [0], ["1234567"])))
    assert len(row["tokens"]) == len(row["token_ids"]) == len(row["values"]) == 3
    assert row["length"] > 3 and row["response"] == "1234567"


def test_no_row_without_a_response_of_the_first_ones(tokenizer):
    batch = make_batch(tokenizer, [4, 7], ["1", "2"])
    assert TokenSamples(4, tokenizer).rows(_Step(actor=batch)) == []
    assert TokenSamples(0, tokenizer).rows(_Step(actor=make_batch(tokenizer, [0], ["1"]))) == []
    empty = random_batch(1, ids=torch.zeros(0, dtype=torch.int64))
    assert TokenSamples(4, tokenizer).rows(_Step(actor=empty)) == []


def test_rows_survive_the_way_to_rank_0(tokenizer):
    batch = make_batch(tokenizer, [0], ["3"])
    batch.values[-1] = float("nan")
    rows = TokenSamples(1, tokenizer).rows(_Step(actor=batch))
    (found,) = StepReport.decode(StepReport({}, {}, 0.0, rows).encode()).samples
    assert np.isnan(found["values"][-1]) and json.loads(json_line(found))["values"][-1] is None
    assert {name: found[name] for name in found if name != "values"} == {
        n: v for n, v in rows[0].items() if n != "values"
    }


def test_observations_are_marked_with_an_environment_only(tokenizer):
    batch = make_batch(tokenizer, [0], ["15"])
    assert "observed" not in TokenSamples(6, tokenizer).rows(_Step(actor=batch))[0]
    batch.turn_rewards = torch.zeros(len(batch.tokens))
    batch.response_mask = torch.arange(len(batch.tokens)) != int(batch.prompt_lengths[0]) + 1
    batch.response_mask[: int(batch.prompt_lengths[0])] = False
    row = TokenSamples(6, tokenizer).rows(_Step(actor=batch))[0]
    assert row["observed"] == [False, True] + [False] * (len(row["tokens"]) - 2)
    assert "response_mask" not in row
