"""Wrong input to the programs: exit status 2 and one line that says what is wrong, before any process group exists."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.checkpoint import manifest
from megarl.trainers import launch as launch_module
from tests.helpers.forked_programs import accepted, check, error_line, launch, refusal
from tests.helpers.programs import environment, inputs, rl_argv, train
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY_SECONDS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Run folder of one PPO step."""
    folder = tmp_path_factory.mktemp("run")
    train("rl", rl_argv(folder, "--train-iters 1"))
    return folder


# -- flags -------------------------------------------------------------------------------------------------------

DISJOINT = "actor=0-1;critic=2;reward=3;reference={}"
# What `test_bad_input.py` cannot check in one process: ranks, files, and a line of each program.
FLAGS = {
    "unknown flag": ("--no-such-flag 3", 1, ["--no-such-flag", "unknown"]),
    "rank outside the world": (f"--role-map {DISJOINT.format(4)}", 4, ["--role-map", "4", "0-3"]),
    "micro-batch of a role too small": ("--critic-max-tokens-per-microbatch 9", 1,
                                        ["--critic-max-tokens-per-microbatch 9", "10"]),
    "routes of another model": ("--num-experts 4 --router-replay rollout --router-replay-reference"
                                " --reference-num-experts 8", 1, ["--router-replay-reference", "--num-experts"]),
    "other shape": ("--hidden-size 64", 1, ["--pretrained-checkpoint", "[32, 32]", "[32, 64]"]),
    "missing reward model": ("--reward model --reward-model no/such", 1, ["--reward-model no/such", "no such folder"]),
    "missing reward tokenizer": ("--reward model --reward-model x --reward-tokenizer-model no/such", 1,
                                 ["--reward-tokenizer-model no/such", "no such file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags(case, tmp_path):
    flags, size, needles = FLAGS[case]
    line = refusal(rl_argv(tmp_path / "run", flags), size=size)
    assert all(needle in line for needle in needles), line
    assert not (tmp_path / "run").exists()


def test_accepted_input_is_told_from_refused_input(tmp_path):
    """Otherwise the tests here would show little; the process that checks is replaced."""
    for _ in range(2):
        status, _, err = check(rl_argv(tmp_path / "run"))
        assert status == 1 and "the input is accepted: the work begins" in err


def test_only_rank_0_prints_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_module, "REPORT_FIRST", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    argv = rl_argv(tmp_path / "run", "--clip-range -1")
    assert "--clip-range -1" in error_line(launch(tmp_path, argv, rank=0, size=2))
    assert launch(tmp_path, argv, rank=1, size=2) == (2, "", "")


def test_a_check_of_correct_input_says_so_and_starts_no_process_group(tmp_path):
    flags = f"--actor-tensor-model-parallel-size 2 --role-map {DISJOINT.format(3)}"
    assert "ranks 0-1; TP 2" in accepted(rl_argv(tmp_path / "run", flags), size=4)[0]


# -- files -----------------------------------------------------------------------------------------------------

SET = "is set in {file}; "
RECORDED = "--generation-lag 1 --rollout-correction tis --generation-schedule recorded"
SOURCES = {  # config file, further flags -> end of the line, with the {file}
    "a recipe's switch": ("replay-schedule: x", RECORDED,
                          "leave one of them out (--replay-schedule x " + SET + "null in a later file unsets it)"),
    "two flags": ("generation-lag: 3\nmax-staleness: 2",
                  "--rollout-correction tis --over-sampling 2 --partial-rollouts",
                  "many updates old (--max-staleness 2 " + SET + "the default is --max-staleness 0; "
                  "--generation-lag 3 " + SET + "the default is --generation-lag 0)"),
    "the flag of the error": ("environment: guess-number", f"--over-sampling 2 {RECORDED}",
                              "(--generation-schedule recorded, --replay-schedule) (--environment guess-number " + SET
                              + "null in a later file unsets it)"),
    "a flag of Megatron's": ("max-position-embeddings: 9", "", "(--max-position-embeddings 9 " + SET
                             + "null in a later file unsets it)"),
    "a wrong value": ("gamma: high", "", "(--gamma high " + SET + "the default is --gamma 1.0)"),
    "a file that is missing": ("chat-template: no/such.jinja", "", "(--chat-template no/such.jinja " + SET
                               + "null in a later file unsets it)"),
    "the command line wins": ("replay-schedule: x", f"--replay-schedule y {RECORDED}", "leave one of them out"),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES)
def test_an_error_says_which_flags_a_config_file_sets(case, tmp_path):
    text, flags, end = SOURCES[case]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    line = refusal(rl_argv(tmp_path / "run", f"--config {file} {flags}"))
    assert line.endswith(end.format(file=file) + "\n")


SHAPE = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --max-prompt-length 6 --max-response-length 4"
MISSING_POLICY = f"{SHAPE} --tokenizer-model no/such --load no/such"
FLAGS_FIRST = {  # the other programs': test_bad_input.py
    "evaluate": (f"{MISSING_POLICY} --eval-prompts no/such",
                 ["--max-position-embeddings 9", "--reward os:no_such", "--environment no.such:thing", "--eval-k 0",
                  "--rollout-server nowhere"]),
    "serve": (MISSING_POLICY, ["--max-position-embeddings 9", "--host 0.0.0.0", "--serve-routes",
                               "--weights-folder no/where", "--tool-call-parser xml"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS_FIRST)
def test_wrong_flags_come_before_wrong_files(name):
    files, wrong = FLAGS_FIRST[name]
    assert "no/such" in refusal(files.split(), name)
    for flags in wrong:
        line = refusal([*files.split(), *flags.split()], name)
        names = re.findall("--(?:critic-|reward-)?([a-z-]+)", flags)  # a role's name comes before the flag's
        assert any(each in line for each in names) and "no/such" not in line, line


# -- checkpoints -------------------------------------------------------------------------------------------------


def damaged(folder: Path, run: Path, damage) -> Path:
    """A copy of a run whose latest checkpoint `damage` was done to."""
    copy = folder / "copy"
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    damage(next((copy / "checkpoints").glob("step_*")))
    return copy


def garbage_metadata(step: Path):
    """Garbage that has its checksum."""
    (step / ".metadata").write_bytes(b"garbage")
    entries = manifest.read(step, "--load")
    manifest.write(step, entries | {"files": entries["files"] | {".metadata": manifest.seal(step / ".metadata")}})


DAMAGES = {
    "garbage metadata": (lambda step: (step / ".metadata").write_bytes(b"garbage"), ".metadata has 7 bytes"),
    "no metadata": (lambda step: (step / ".metadata").unlink(), ".metadata is missing"),
    "sealed garbage": (garbage_metadata, "unreadable checkpoint"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda step: (step / "manifest.json").write_text('{"step": 1,'), "manifest.json is damaged"),
    "another manifest": (lambda step: (step / "manifest.json").write_text("[]"), "manifest.json"),
    "empty manifest": (lambda step: (step / "manifest.json").write_text("{}"), "manifest.json"),
    "no folder": (shutil.rmtree, "step_00000001', which does not exist"),
}


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize("flag", ["--load", long("--pretrained-checkpoint")])
def test_damaged_checkpoints(case, flag, tmp_path, checkpoint):
    damage, needle = DAMAGES[case]
    copy = damaged(tmp_path, checkpoint, damage)
    argv = rl_argv(tmp_path / "run", f"--train-iters 2 --override-opt-param-scheduler {flag} {copy}", warm_start=False)
    line = refusal(argv)
    assert f"{flag} {copy}" in line and needle in line


RESUMES = {
    "other hidden size": ("--hidden-size 64", ["[32, 64]", "[32, 32]"]),
    "fewer layers": ("--num-layers 1", ["shape"]),
    "fewer steps": ("--train-iters 0", ["--train-iters"]),
    "other prompts": ("--prompts {heldout}", ["--prompts", "heldout.jsonl", "train.jsonl", "--load-changed-data"]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_checkpoint_of_another_run(case, tmp_path, checkpoint):
    flags, needles = RESUMES[case]
    flags = f"--train-iters 2 --load {checkpoint} " + flags.format(heldout=inputs() / "heldout.jsonl")
    line = refusal(rl_argv(tmp_path / "run", flags, warm_start=False))
    assert all(needle in line for needle in needles), line


def test_resuming_a_run_past_its_last_step(tmp_path, checkpoint):
    copy = damaged(tmp_path, checkpoint, lambda step: None)
    step = copy / "checkpoints" / "step_00000001"
    manifest.write(step, {**manifest.read(step, "--load"), "step": 5})
    line = refusal(rl_argv(tmp_path / "run", f"--train-iters 3 --load {copy}", warm_start=False))
    assert "--train-iters 3" in line and "5" in line


def test_supervised_checkpoints_do_not_resume_rl(tmp_path):
    argv = rl_argv(tmp_path / "run", f"--train-iters 50 --load {inputs() / 'sft'}", warm_start=False)
    assert f"--load {inputs() / 'sft'}" in refusal(argv)


# -- as users do -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("flags, needle", [
    ("--role-map actor=0;critic=0;reward=0;reference=9", "--role-map"),
    ("--load {damaged}", ".metadata has 7 bytes"),
])  # fmt: skip
def test_the_program_itself(flags, needle, tmp_path, checkpoint):
    copy = damaged(tmp_path, checkpoint, lambda step: (step / ".metadata").write_bytes(b"garbage"))
    argv = rl_argv(tmp_path / "run", flags.format(damaged=copy))
    command = [sys.executable, "-m", "megarl.train_rl", *argv]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert needle in error_line((done.returncode, done.stdout, done.stderr))


def test_a_reward_that_fails_ends_the_program_with_role_and_phase(tmp_path):
    argv = rl_argv(tmp_path / "run", "--reward tests.helpers.programs:broken_reward --train-iters 1")
    status, _, err = launch(tmp_path, argv)
    warning, first = err.splitlines()[:2]
    assert warning.startswith("megarl: warning: reward ") and "it failed on 12 of 12 responses" in warning
    assert status == 1 and first.startswith("megarl: rank 0 failed in reward/score of step 1: ")
    assert "broken_reward" in first
    file = tmp_path / "run" / "samples" / "failed_step_00000001_rank_0.jsonl"
    assert first.endswith(f"; the samples of the step are in {file}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 12 and all(row["prompt"] and row["answer"] and row["reward"] is None for row in rows)
    assert all("broken_reward" in row["failure"] and repr(row["response"]) in row["failure"] for row in rows)
