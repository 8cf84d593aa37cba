"""Records of the bank: a finished response is read as it was written, and what is none is refused."""

import pytest
import torch

from megarl.mcore.inference.generation import Completion
from megarl.rollout import bank, response_log
from megarl.rollout.response_log import Record

ROUTES = torch.arange(5 * 2 * 3, dtype=torch.int16).view(5, 2, 3) - 1
COMPLETIONS = [
    Completion([1, 2, 3], [-0.5, -1 / 3, 0.0], True),
    Completion([7], [-2.0], False, ROUTES),
    Completion([4, 4], [-1e-30, -100.0], True),
]


def test_responses_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "00000-000.log"
    path.write_bytes(b"".join(bank.pack({"identity": f"{i}"}, c) for i, c in enumerate(COMPLETIONS)))
    entries = list(response_log.intact(path, print))
    assert [entry.facts["identity"] for entry in entries] == ["0", "1", "2"]
    for entry, expected in zip(entries, COMPLETIONS, strict=True):
        found = bank.unpack(entry.read())
        assert (found.tokens, found.finished) == (expected.tokens, expected.finished)
        assert found.logprobs == torch.tensor(expected.logprobs).tolist()
        assert (found.routes is None) == (expected.routes is None)
        assert found.routes is None or torch.equal(found.routes, expected.routes)


TOKENS, LOGPROBS = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.0, -1.0])


@pytest.mark.parametrize("facts, fields", [
    ({"finished": True}, {"tokens": TOKENS}), ({}, {"tokens": TOKENS, "rollout_logprobs": LOGPROBS}),
    ({"finished": 1}, {"tokens": TOKENS, "rollout_logprobs": LOGPROBS}),
    ({"finished": True}, {"tokens": TOKENS.long(), "rollout_logprobs": LOGPROBS}),
    ({"finished": True}, {"tokens": TOKENS, "rollout_logprobs": LOGPROBS[:1]}),
    ({"finished": True}, {"tokens": TOKENS.view(1, 2), "rollout_logprobs": LOGPROBS.view(1, 2)}),
    ({"finished": True}, {"tokens": TOKENS, "rollout_logprobs": LOGPROBS, "routes": LOGPROBS}),
])  # fmt: skip
def test_what_is_no_response_is_refused(facts, fields):
    with pytest.raises(ValueError, match="holds no response|do not fit"):
        bank.unpack(Record(facts, fields))
