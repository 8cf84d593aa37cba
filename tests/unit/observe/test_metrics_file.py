"""metrics.jsonl: exact floats, resume, torn lines, nothing deleted; and what TensorBoard reads back."""

import json
import math
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch

from megarl.errors import UsageError
from megarl.observe.metrics_file import MetricsWriter, read_metrics


def _write(directory, resume_step, steps, value=lambda step: step / 3):
    with closing(MetricsWriter(directory, resume_step)) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": value(step)})


def _tensorboard_scalars(directory, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_line_is_exact_sorted_and_strict_json(tmp_path):
    values = {
        "z/last": 0.1 + 0.2,
        "a/first": 5e-324,
        "count": 7,
        "bad/nan": math.nan,
        "bad/inf": -math.inf,
        "numpy": np.float32(0.1),
        "torch": torch.tensor(2.5),
    }
    with closing(MetricsWriter(tmp_path, None)) as writer:
        writer.write(3, values)
        text = (tmp_path / "metrics.jsonl").read_text()  # before close: every line is flushed
    assert text == (
        '{"step": 3, "a/first": 5e-324, "bad/inf": null, "bad/nan": null, "count": 7, '
        '"numpy": 0.10000000149011612, "torch": 2.5, "z/last": 0.30000000000000004}\n'
    )
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert record["z/last"] == values["z/last"] and record["a/first"] == 5e-324
    assert type(record["count"]) is int and record["bad/nan"] is None


def test_resumed_file_equals_the_uninterrupted_one_byte_for_byte(tmp_path):
    _write(tmp_path / "whole", None, range(1, 7), value=lambda step: math.sin(step))
    _write(tmp_path / "parts", None, range(1, 6), value=lambda step: math.sin(step))
    _write(tmp_path / "parts", 3, range(4, 7), value=lambda step: math.sin(step))
    whole, parts = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts and whole.count(b"\n") == 6


def test_resume_drops_later_lines_and_tensorboard_hides_them(tmp_path):
    _write(tmp_path, None, range(1, 6), value=float)
    _write(tmp_path, 3, [4, 5], value=lambda step: -float(step))
    assert [row["reward/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, -4, -5]
    assert _tensorboard_scalars(tmp_path, "reward/mean") == [(1, 1), (2, 2), (3, 3), (4, -4), (5, -5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_resume_without_an_old_file_starts_an_empty_one(tmp_path):
    _write(tmp_path / "new", 10, [11])
    assert [row["step"] for row in read_metrics(tmp_path / "new" / "metrics.jsonl")] == [11]


@pytest.mark.parametrize("tail", [b'{"step": 3, "reward/me', b'{"step": 3, "a": "\xc3', b"\x00\x00\x00\n"])
def test_torn_last_line_is_dropped_with_a_note(tmp_path, capsys, tail):
    path = tmp_path / "metrics.jsonl"
    _write(tmp_path, None, [1, 2])
    good = path.read_bytes()
    path.write_bytes(good + tail)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    note = capsys.readouterr().err
    assert "line 3" in note and note.count("\n") == 1
    _write(tmp_path, 3, [4])  # the torn line is gone from the file too
    assert path.read_bytes().startswith(good) and [row["step"] for row in read_metrics(path)] == [1, 2, 4]


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    _write(tmp_path, 2, [3])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{broken", '{"loss": 1}', '{"step": "2"}', "[2]"])
def test_malformed_middle_line_is_rejected_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_metrics(path)
    with pytest.raises(UsageError, match="line 2"):
        MetricsWriter(tmp_path, 3)
    assert line in path.read_text()


def test_a_new_run_never_appends_to_an_earlier_ones_metrics(tmp_path):
    _write(tmp_path, None, [10])
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path, None)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 10


def test_steps_must_grow_and_step_is_no_metric(tmp_path):
    with closing(MetricsWriter(tmp_path, 5)) as writer:
        with pytest.raises(ValueError, match="5"):
            writer.write(5, {})
        writer.write(6, {})
        with pytest.raises(ValueError, match="step 6"):
            writer.write(6, {})
        with pytest.raises(ValueError, match="'step'"):
            writer.write(7, {"step": 7})
        with pytest.raises(TypeError):
            writer.write(7, {"loss": [1.0]})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [6]


def test_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="metrics.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_import_is_light():
    """Every rank imports the package; only rank 0 needs TensorBoard and matplotlib."""
    modules = "observe.files observe.metrics_file observe.samples observe.settings_file observe.terminal observe.timers"
    modules += " extras.report extras.report_figure"
    code = "import sys; " + "; ".join(f"import megarl.{name}" for name in modules.split())
    code += "; print([name for name in ('tensorboard', 'matplotlib', 'torch', 'megatron') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
