"""Resuming: other prompts, another seed or tokenizer are refused; a damaged checkpoint is passed over; branches."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.arguments import Settings
from megarl.checkpoint import folders, manifest, resume
from tests.helpers.checkpoints import WAITING
from tests.helpers.models.lora_models import stored_tensors
from tests.helpers.programs import (
    addition,
    in_world,
    inputs,
    metrics,
    program,
    rl_argv,
    sft_argv,
    timeless,
    train,
    write_lines,
)
from tests.helpers.texts.refusals import refusal
from tests.helpers.worlds import run_world
from tools.train_tokenizer import train as train_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of three steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    train("sft", sft_argv(folder, f"--train-iters 3 --save-interval 1 {SCHEDULE}"))
    return folder


SCHEDULE = "--lr-decay-iters 4"


def rejected(rank: int, name: str, parsed) -> str:
    """The message with which a run is rejected."""
    return refusal(in_world, rank, name, parsed)


def message(argv: list[str], name: str = "sft") -> str:
    (found,) = run_world(rejected, 1, name, program(name, argv, 1))
    return found


# -- data --------------------------------------------------------------------------------------------------------


def other_prompts(folder: Path) -> Path:
    """As many prompts as before, one with another answer."""
    rows = [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()]
    return write_lines(folder / "other.jsonl", [*rows[:-1], addition(1, 1)])


def test_other_prompts_are_refused_or_drawn_from_their_start(run, tmp_path):
    other = other_prompts(tmp_path)
    argv = sft_argv(tmp_path / "on", f"--train-iters 4 {SCHEDULE} --load {run} --prompts {other}")
    assert message(argv) == (
        f"--prompts {other}: has other content than the checkpoint of --load {run} was written with "
        f"({inputs()}/train.jsonl); --load-changed-data resumes with other prompts"
    )
    train("sft", [*argv, "--load-changed-data"])
    manifest = folders.read_manifest(folders.step_folder(tmp_path / "on", 4), "--load")
    assert manifest["prompt_order"]["position"] == 12 and manifest["step"] == 4  # one batch, from the start


def test_the_same_prompts_in_another_place_are_the_same(run, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((inputs() / "train.jsonl").read_bytes())
    train("sft", sft_argv(tmp_path / "on", f"--train-iters 4 {SCHEDULE} --load {run} --prompts {copy}"))
    assert (
        folders.read_manifest(folders.find(str(tmp_path / "on"), "--load"), "--load")["prompt_order"]["position"] == 48
    )


def test_another_seed_or_tokenizer_is_refused(run, tmp_path):
    base = f"--train-iters 4 {SCHEDULE} --load {run} --load-changed-data"
    assert message(sft_argv(tmp_path, f"{base} --seed 6")) == (
        f"--seed 6: the checkpoint of --load {run} was written with --seed 5"
    )
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(["3+4=7", "5+5=10", "29+8=37", "6+1=7", "20+2=22"], 16, False))
    assert message(sft_argv(tmp_path, f"{base} --tokenizer-model {other}")) == (
        f"--tokenizer-model {other}: has other content than the checkpoint of --load {run} was written with "
        f"({inputs()}/tokenizer.model)"
    )
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert message(sft_argv(tmp_path, f"{base} --chat-template {template}")).startswith(
        f"--chat-template {template}: has other content than the checkpoint"
    )


def test_changed_prompts_are_refused_while_responses_to_the_old_ones_wait(tmp_path):
    flags = f"{WAITING} --lr-decay-iters 9 --train-iters"
    train("rl", rl_argv(tmp_path / "run", f"{flags} 1"))
    argv = rl_argv(tmp_path / "on", f"{flags} 2 --load {tmp_path}/run --prompts {other_prompts(tmp_path)}")
    assert message([*argv, "--load-changed-data"], "rl").startswith("--load-changed-data: the checkpoint of --load")


def test_settings_that_decide_no_number_exist():
    assert {field.name for field in dataclasses.fields(Settings)} >= resume._NOT_NUMBERS


def test_other_settings_and_libraries_are_named_and_a_layout_is_not(run, tmp_path, monkeypatch, capfd):
    resumed = f"--train-iters 4 {SCHEDULE} --load {run}"
    train("sft", sft_argv(tmp_path / "a", f"{resumed} --tensor-model-parallel-size 2 --save-interval 2"), 2)
    assert "resumes with" not in capfd.readouterr().err
    before = manifest.versions()
    assert folders.read_manifest(folders.step_folder(run, 3), "--load")["versions"] == before and before["torch"]
    monkeypatch.setattr(manifest, "versions", lambda: {**before, "megarl": "9", "torch": "9.1", "transformers": None})
    changes = "--clip-grad 0.5 --bf16 --use-distributed-optimizer --ema-decay 0.5"
    train("sft", sft_argv(tmp_path / "b", f"{resumed} {changes}"))
    said, line = capfd.readouterr().err, f"megarl: warning: --load {folders.step_folder(run, 3)}: resumes with other"
    settings = "--actor-bf16 True (before: False), --actor-clip-grad 0.5 (before: 1.0), --ema-decay 0.5 (before: none)"
    assert f"{line} settings: {settings}\n" in said
    libraries = f"torch 9.1 (before: {before['torch']}), transformers none (before: {before['transformers']})"
    assert said.count(f"{line} libraries: {libraries}\n") == 1


# -- damage ------------------------------------------------------------------------------------------------------


def test_a_run_whose_latest_checkpoint_has_a_flipped_byte_resumes_from_the_one_before(run, tmp_path, capfd):
    save = tmp_path / "run"
    train("sft", sft_argv(save, f"--train-iters 2 --save-interval 1 {SCHEDULE}"))
    broken = folders.step_folder(save, 2) / "__0_0.distcp"
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    resumed = f"--train-iters 3 --save-interval 1 {SCHEDULE} --load"
    assert message(sft_argv(save, f"{resumed} {broken.parent}")) == (
        f"--load {broken.parent}: __0_0.distcp is damaged (its content does not have its checksum)"
    )
    capfd.readouterr()
    train("sft", sft_argv(save, f"{resumed} {save}"), 2)
    warning = (
        f"megarl: warning: --load {broken.parent}: __0_0.distcp is damaged (its content does not have its checksum)"
    )
    assert capfd.readouterr().err.count(f"{warning}; step_00000001 is used\n") == 1  # by one of two ranks
    assert sorted(metrics(save)) == [1, 2, 3]
    expected, found = (stored_tensors(folders.step_folder(folder, 3)) for folder in (run, save))
    assert expected.keys() == found.keys()
    assert (save / "checkpoints" / "abandoned-1" / "step_00000002").is_dir()


# -- branches ----------------------------------------------------------------------------------------------------


def one_step_without_save(rank: int, parsed):
    """A run that ends without a further word after one step."""
    from megarl.observe.timers import Timers
    from megarl.trainers.sft_trainer import SFTTrainer

    trainer = SFTTrainer(parsed, Timers())
    step = next(trainer.steps())
    trainer.update(trainer.next_batch())
    trainer.log(step)
    trainer.flush()
    dist.barrier()


@pytest.mark.long
def test_a_run_killed_after_it_left_a_branch_resumes_its_own(tmp_path):
    save = tmp_path / "run"
    train("sft", sft_argv(save, f"--train-iters 3 --save-interval 1 {SCHEDULE}"))
    old = metrics(save)
    argv = sft_argv(save, f"--train-iters 4 {SCHEDULE} --load {folders.step_folder(save, 1)} --clip-grad 1e-3")
    run_world(one_step_without_save, 1, program("sft", argv, 1))
    assert folders.find(str(save), "--load") == folders.step_folder(save, 1)
    train("sft", sft_argv(save, f"--train-iters 4 {SCHEDULE} --load {save} --clip-grad 1e-3"))
    rows = metrics(save)
    assert sorted(rows) == [1, 2, 3, 4] and timeless(rows[3]) != timeless(old[3])
    left = save / "checkpoints" / "abandoned-1"
    steps = [json.loads(line)["step"] for line in (left / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 3] and (left / "step_00000003").is_dir()
