"""The tokens of a step's first responses one by one."""

import json

import numpy as np
import pytest
import torch

from megarl.batch import FIELDS, Batch
from megarl.data.tokenizers import SentencePieceTokenizer
from megarl.observe.files import json_line
from megarl.trainers import sample_rows
from megarl.trainers.sample_rows import QUANTITIES, TokenSamples
from megarl.trainers.step_reports import StepReport
from tests.helpers.models.batches import random_batch
from tests.helpers.texts.small_tokenizers import sentence_piece

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
    monkeypatch.setattr(sample_rows, "MAX_TOKENS", 3)
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
