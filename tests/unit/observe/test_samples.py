"""Files of sampled responses."""

import json
import math
import os

import torch

from megarl.observe import samples
from megarl.observe.samples import write_samples


def test_rows_with_tokens_have_files_of_their_own(tmp_path):
    whole, by_token = {"sequence": 0, "response": "a"}, {"sequence": 0, "tokens": ["a"], "values": [0.1, math.nan]}
    write_samples(tmp_path, 3, [whole, by_token])
    write_samples(tmp_path, 4, [whole])
    found = {str(p.relative_to(tmp_path)): json.loads(p.read_text()) for p in tmp_path.rglob("*.jsonl")}
    assert found == {
        "samples/step_00000003.jsonl": whole,
        "samples/step_00000004.jsonl": whole,
        "tokens/step_00000003.jsonl": by_token | {"values": [0.1, None]},
    }


def test_each_rank_that_fails_keeps_its_own_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_running", None)
    assert samples.write_failed(0, 3) is None
    samples.keep_for_failure(tmp_path, list)
    assert samples.write_failed(0, 3) is None and not os.listdir(tmp_path)
    text = '\u2028\udc80"}\n{"x": 1}'
    for rank in (0, 1):
        samples.keep_for_failure(tmp_path, [{"sequence": rank, "response": text, "reward": None}].copy)
        path = samples.write_failed(rank, 3)
        assert path == tmp_path / "samples" / f"failed_step_00000003_rank_{rank}.jsonl"
        (line,) = path.read_text().removesuffix("\n").split("\n")
        assert json.loads(line) == {"sequence": rank, "response": text, "reward": None}
    assert len(os.listdir(tmp_path / "samples")) == 2


def test_samples_round_trip(tmp_path):
    rows = [
        {
            "prompt": "3 + 4 = ?\n\u2028", "response": "sieben ✓ \udc80", "reward": 1.0,
            "reward_parts": {"exact": 1.0, "model": float("nan")}, "correct": True, "length": 3, "finished": False,
        },
        {"prompt": "", "response": "", "reward": torch.tensor(0.5), "correct": None, "length": 0, "finished": True},
    ]  # fmt: skip
    write_samples(tmp_path, 12, rows)
    path = tmp_path / "samples" / "step_00000012.jsonl"
    assert path == tmp_path / "samples" / "step_00000012.jsonl"
    raw = path.read_bytes()
    assert "sieben ✓".encode() in raw and os.listdir(path.parent) == [path.name]
    first, second, end = raw.split(b"\n")
    assert end == b""
    assert json.loads(first) == {**rows[0], "reward_parts": {"exact": 1.0, "model": None}}
    assert json.loads(second) == {**rows[1], "reward": 0.5}
