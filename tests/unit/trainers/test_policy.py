"""The policy of a program that does not train: what is wrong with its tokenizer or weights is one line."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import urllib3

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.extras import report
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.remote_generator import RemoteGenerator
from megarl.trainers.policy import PolicyInputs
from tests.helpers.evaluation import MODEL, evaluate_argv
from tests.helpers.programs import GRADED, environment, inputs, metrics, program, rl_argv, timeless, train
from tests.helpers.server.servers import ANNOUNCED, ForkedLauncher, scores
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY_SECONDS, wait_until

REFUSALS = {
    "no checkpoint": ("--load {none}", "--load .*none: no such folder"),
    "no best": ("--load {sft}/checkpoints/best", "--load .*best: no such folder; allowed .* checkpoints/best"),
    "experts": ("--num-experts 4 --moe-router-topk 2", r"--load .*: has no actor.*router.weight, which actor needs"),
    "other shape": ("--hidden-size 64", r"--load .*: .* shape \[32, 32\]; the flags of actor describe \[32, 64\]"),
    "no tokenizer": ("--tokenizer-model {none}", "--tokenizer-model .*none: no such file"),
    "weights from elsewhere": ("--pretrained-checkpoint {sft}", "--pretrained-checkpoint .*: weights come from --load"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_rejected_in_one_line(case, tmp_path):
    flags, message = REFUSALS[case]
    command = evaluate_argv(flags=flags.format(none=tmp_path / "none", sft=inputs() / "sft"))
    line = refusal(PolicyInputs, program("evaluate", command, 1))
    assert re.match(message, line) and "\n" not in line


@pytest.mark.parametrize(
    "flag, named", [("--load", "--load or --hf-model"), ("--tokenizer-model", "--tokenizer-model")]
)
def test_flags_without_default_are_required(flag, named):
    command = evaluate_argv()
    place = command.index(flag)
    config = program("evaluate", command[:place] + command[place + 2 :], 1)
    assert refusal(PolicyInputs, config) == f"{named} is missing: it has no default"


def test_results_name_the_checkpoint():
    policy = PolicyInputs(program("evaluate", evaluate_argv(), 1))
    source = policy.source()
    assert source["program"] == "train_sft" and source["checkpoint"].startswith(str(inputs() / "sft"))
    assert policy.rollout_role().lora is None


# -- the policy's server -------------------------------------------------------------------------------------------


STEPS = 4
ASKED = [GenerationRequest([4 + i % 5, 3, 6], i, 4, SamplingSettings(), (), 1) for i in range(10)]
APART = "--role-map actor=1;critic=0;reward=0;reference=0"
AHEAD = "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --generation-lag 2 --rollout-correction tis"
LAYOUTS = [
    (1, ""), long((2, "")), long((2, APART)), long((2, AHEAD)), long((2, "--tensor-model-parallel-size 2")),
]  # fmt: skip


def flags(layout: str) -> str:
    reward = f"--reward tests.helpers.programs:waiting_reward --reward-timeout {SAFETY_SECONDS}"
    return f"--train-iters {STEPS} --save-interval 1 {reward} {layout}"


class Asking(threading.Thread):
    """A client that asks again and again until the run has ended; it keeps the answers."""

    def __init__(self, url: str):
        super().__init__()
        self.generator, self.answers, self.ended = RemoteGenerator(url, seconds=SAFETY_SECONDS), [], None

    def run(self):
        try:
            while True:
                self.answers.append(self.generator.generate(ASKED))
        except RuntimeError as error:
            self.ended = str(error)


def queued(url: str) -> int:
    """Requests that the server has and has not answered."""
    text = urllib3.request("GET", f"{url}/metrics").data.decode()
    return int(sum(map(float, re.findall(r"^megarl_(?:running|waiting)_requests.* (\S+)$", text, re.MULTILINE))))


def run_and_ask(argv: list[str], size: int, first_asked: Path):
    """Runs the training and a client beside it; returns its answers and how its last request ended.

    The first step ends only after the client's first requests are there: `first_asked` is made then.
    """
    log = first_asked.with_name("log")
    process = ForkedLauncher(["--nproc-per-node", str(size), "train_rl", *argv], log)
    try:
        found = next(filter(None, map(ANNOUNCED.match, process.stdout)), None)
        assert found, log.read_text()
        client = Asking(found[2])
        client.start()
        assert wait_until(lambda: queued(found[2]) == len(ASKED))
        first_asked.touch()
        process.stdout.read()  # until the run ends
        assert process.wait(SAFETY_SECONDS) == 0, log.read_text()
        client.join(SAFETY_SECONDS)
        assert not client.is_alive()
        return client.answers, client.ended
    finally:
        process.kill()


@pytest.mark.parametrize(("size", "more"), LAYOUTS)
def test_answers_between_updates_change_nothing_of_the_run(tmp_path, monkeypatch, size, more):
    train("rl", rl_argv(tmp_path / "alone", flags(more)), size)
    monkeypatch.setenv("MEGARL_TEST_AWAITED", str(tmp_path / "asked"))
    monkeypatch.setattr(report, "write_report", lambda folder: None)
    served = rl_argv(tmp_path / "served", f"{flags(more)} --serve-policy --port 0")
    answers, ended = run_and_ask(served, size, tmp_path / "asked")
    rows = [metrics(tmp_path / name) for name in ("alone", "served")]
    assert list(rows[0]) == list(rows[1]) == list(range(1, STEPS + 1))
    assert all(timeless(rows[0][step]) == timeless(rows[1][step]) for step in rows[0])
    assert answers and re.search("shutting down|no answer|program that generates|is lost", ended)
    versions = {version for found in answers for completion in found for version in completion.versions}
    assert versions <= set(range(1, STEPS + 1)) and min(versions) == 1
    for found in (answers[0], answers[-1]):
        check_log_probs(tmp_path / "served", found, "" if "--role-map" in more else more, size)


def check_log_probs(run, found, layout: str, size: int):
    """The log-probs of each completion are those of the checkpoint that its version names."""
    for version in {version for completion in found for version in completion.versions}:
        argv = [*MODEL.split(), "--tokenizer-model", str(inputs() / "tokenizer.model"), *layout.split()]
        argv += ["--load", str(run / "checkpoints" / f"step_{version:08d}")]
        mine = [(r, c) for r, c in zip(ASKED, found, strict=True) if set(c.versions) == {version}]
        expected = scores(argv, [[*request.prompt, *completion.tokens] for request, completion in mine], size)
        assert mine and [c.logprobs for _, c in mine] == [scored.logprobs[3:] for scored in expected]


@pytest.mark.long
def test_a_run_goes_on_without_its_server(tmp_path):
    argv = rl_argv(tmp_path, f"--train-iters {STEPS} {GRADED} --serve-policy --port 0")
    command = [sys.executable, "-m", "megarl.launcher", "--nproc-per-node", "1", "train_rl", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert next(filter(None, map(ANNOUNCED.match, process.stdout)), None)
    import psutil

    (server,) = [child for child in psutil.Process(process.pid).children(recursive=True)
                 if "megarl.serving.frontend" in child.cmdline()]  # fmt: skip
    server.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=SAFETY_SECONDS)
    assert process.returncode == 0 and "the run goes on without the server" in err
    assert list(metrics(tmp_path)) == list(range(1, STEPS + 1))
