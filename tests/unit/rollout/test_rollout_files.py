"""Saved rollouts in a folder: which of them a run can train on."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.batch import generated_fields
from megarl.checkpoint import manifest as manifests
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.groups import PromptGroups
from megarl.rollout import response_log
from megarl.rollout.rollout_files import RESPONSES, SavedRollouts

FILE = "replica_00000.log"
DATA = {"prompts": {"value": "a.jsonl", "sha256": "0" * 64}}
FACTS = {
    "prompts_per_step": 2, "samples_per_prompt": 1, "vocab_size": 16, "data": DATA, "greedy_baseline": False,
    "partial_rollouts": False, "environment": None, "routes": None,
}  # fmt: skip
LENGTHS = torch.tensor([2, 3])
FIELDS = {
    "sequence_ids": torch.arange(2), "prompt_ids": torch.tensor([4, 7]), "prompt_lengths": torch.ones(2).long(),
    "finished": LENGTHS > 2, "lengths": LENGTHS, "tokens": torch.arange(5), "response_mask": torch.arange(5) > 0,
    "rollout_logprobs": -torch.arange(5).float(),
}  # fmt: skip


def written(run: Path, fields=FIELDS, **entries) -> Path:
    """Three steps of a run, each of one round; `entries`: others of their manifests."""
    for step in (1, 2, 3):
        folder = run / f"rollouts/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(response_log.packed({"round": 0, "kind": RESPONSES}, fields))
        round_ = {"lines": [4, 7], "kept": [True, True], "draws": [[step, 0]] * 2, "sizes": [1, 1]}
        manifests.write(folder, {
            **FACTS, "step": step, "waiting": 0, "order": {"position": 2, "size": 9}, "tokens": 3, "metrics": {},
            "layers": None, "program": "train_rl", "world_size": 1, "rounds": [round_], "longest": 3, "version": 0,
            **entries, "files": {FILE: manifests.seal(folder / FILE)},
        })  # fmt: skip
    return run


def read(run: Path) -> torch.Tensor:
    """The tokens of the second step's round, on a replica that has all groups."""
    saved = SavedRollouts(str(run), range(1, 4), FACTS, 3)
    place, groups = SimpleNamespace(replicas=[range(1)], dp_rank=0), PromptGroups.equal(2, 1)
    return saved.read(saved.records[2], 0, RESPONSES, generated_fields(Settings()), None, place, groups).tokens


def test_what_was_written_is_read(tmp_path):
    assert read(written(tmp_path)).tolist() == [*range(5)]


@pytest.mark.parametrize("fields, says", [
    (FIELDS | {"tokens": torch.arange(5) * 4}, "does not hold 2 sequences of known tokens"),
    (FIELDS | {"sequence_ids": torch.tensor([0, 2])}, "does not hold 2 sequences of known tokens"),
    (FIELDS | {"tokens": torch.arange(5).float()}, "lacks some of"),
    ({name: field for name, field in FIELDS.items() if name != "finished"}, "lacks some of"),
])  # fmt: skip
def test_fields_that_generation_does_not_write_are_an_error(fields, says, tmp_path):
    with pytest.raises(RuntimeError, match=says):
        read(written(tmp_path, fields))


ROUTES = {"layers": [1], "topk": 2, "experts": 4}
# Entries of the files, facts of the run, its last step, its longest sequence, what the message says.
REFUSED = [
    ({}, {}, 5, 3, "has no step 4, but steps 1-3; the run takes 1-5, those after the checkpoint of --load up to"),
    ({}, {"samples_per_prompt": 3}, 3, 3, "was written with --samples-per-prompt 1; this run has 3"),
    ({}, {"prompts_per_step": 4}, 3, 3, "was written with --prompts-per-step 2; this run has 4"),
    ({}, {"vocab_size": 8}, 3, 3, "has tokens of a vocabulary of 16; this run's has 8"),
    ({}, {"data": {"prompts": {"value": "b.jsonl", "sha256": "1" * 64}}}, 3, 3,
     "was written with another --prompts (a.jsonl) than b.jsonl"),
    ({}, {}, 3, 2, "has sequences of 3 tokens; --max-prompt-length + --max-response-length is 2"),
    ({}, {"greedy_baseline": True}, 3, 3, "was written without --greedy-baseline"),
    ({}, {"partial_rollouts": True}, 3, 3, "was written without --partial-rollouts"),
    ({}, {"environment": "guess-number"}, 3, 3, "was written without --environment"),
    ({"environment": "guess-number"}, {}, 3, 3, "was written with --environment"),
    ({}, {"routes": ROUTES}, 3, 3, "has routes of no layers; --router-replay rollout needs"),
    ({"metrics": {"\n": 1.0}}, {}, 3, 3, "has metrics that megarl does not write"),
]  # fmt: skip


@pytest.mark.parametrize("entries, facts, steps, longest, says", REFUSED)
def test_rollouts_of_other_runs_are_refused_in_one_line(entries, facts, steps, longest, says, tmp_path):
    with pytest.raises(UsageError) as caught:
        SavedRollouts(str(written(tmp_path, **entries)), range(1, steps + 1), FACTS | facts, longest)
    text = str(caught.value)
    place = tmp_path if steps == 5 else tmp_path / "rollouts/step_00000001"
    assert text.startswith(f"--load-rollouts {place}: {says}") and "\n" not in text


DAMAGE = {
    "manifest": (lambda step: (step / "manifest.json").write_text("{"), "manifest.json is damaged"),
    "step": (lambda step: shutil.copy(step.parent / "step_00000001/manifest.json", step), "is no rollout of"),
    "size": (lambda step: os.truncate(step / FILE, 100), f"{FILE} has 100 bytes, and was written with"),
    "missing": (lambda step: (step / FILE).unlink(), f"{FILE} is missing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_rollouts_are_refused_in_one_line(kind, tmp_path):
    change, says = DAMAGE[kind]
    change(written(tmp_path) / "rollouts/step_00000002")
    with pytest.raises(UsageError) as caught:
        SavedRollouts(str(tmp_path / "rollouts"), range(1, 4), FACTS, 3)
    text = str(caught.value)
    assert text.startswith(f"--load-rollouts {tmp_path}/rollouts/step_00000002: {says}") and "\n" not in text


def test_a_folder_without_rollouts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no rollouts; allowed is the folder of a run with --save-rollouts"):
        SavedRollouts(str(tmp_path), range(1, 4), FACTS, 3)
