"""Verifiers that raise, hang or die: the sample gets the fall-back, the others their scores, and no process is left."""

import os
import re
import signal
import threading

import pytest

from megarl.errors import UsageError
from megarl.rewards.base import Sample, Score, Verifier
from megarl.rewards.verifiers import VerifierSet
from tests.helpers.envs.moody_rewards import PLUG_IN
from tests.helpers.tiers import long

FAILED = Score(-2.0, False)


def samples(*responses: str) -> list[Sample]:
    return [Sample("q", response, "a") for response in responses]


def line(verifier: str, reason: str, response: str) -> str:
    return f"reward moody_rewards:{verifier} on prompt 'q': {reason}; the response was {response!r}"


def without_place(reason: str) -> str:
    """A reason without the line of the plug-in, which is that of its `raise`."""
    found = re.fullmatch(r"(.*) \(.*moody_rewards\.py:(\d+)\)(.*)", reason)
    if found is None:
        return reason
    assert re.search("raise|exit", PLUG_IN.splitlines()[int(found[2]) - 1]), found[2]
    return found[1] + found[3]


class Clock:
    """Stands where the module `time` does: the seconds are what a test says."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_seconds_of_calls_are_those_of_each_verifier(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("megarl.rewards.verifiers.time", clock)

    def taking(name: str, seconds: float) -> Verifier:
        def reward(sample: Sample) -> float:
            clock.now += seconds
            if sample.response == "raise":
                raise ValueError
            return 1.0

        return Verifier(name, reward)

    by_name = {"slow": taking("slow", 3.0), "quick": taking("quick", 0.25), "thread": taking("thread", 1.0)}
    verifiers = VerifierSet(by_name, {"slow": 60.0}, {"thread": 1}, None, 0.0, {}, ())
    for _ in range(2):  # each call counts anew
        verifiers.score(samples("a", "raise"), names=["slow", "quick"])
        assert verifiers.seconds_of_calls == {"slow": 6.0, "quick": 0.5}
    verifiers.score(samples("a", "b"), names=["thread"])
    assert verifiers.seconds_of_calls == {"thread": 2.0}
    verifiers.close()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_failure_affects_only_its_sample(build, workers, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))
    verifiers = build("moody_rewards:moody+0*exact-match+moody_rewards:lengths", workers)
    assert verifiers.names == ("moody_rewards:moody", "exact-match", "moody_rewards:lengths")
    responses = ["a", "raise", "b" * 200_000, "hang", "leave", "hide", "stubborn", "nan", "crash", "text", "c"]
    scores = verifiers.score(samples(*responses))
    reasons = {"raise": "KeyError: 'x'", "hang": "no result within 1 s", "leave": "SystemExit: 3",
               "hide": "no result within 1 s", "stubborn": "no result within 1 s",
               "nan": "reward is nan, not a finite number",
               "text": "returned str, not a Score or a number"}  # fmt: skip
    if workers:
        reasons["crash"] = f"its worker process ended with status {-signal.SIGSEGV}"
    nothing = "returned str, not a Score or a number"
    failures = {name: [without_place(line) for line in lines] for name, lines in verifiers.failures.items()}
    assert failures == {
        "moody_rewards:moody": [line("moody", reasons[text], text) for text in responses if text in reasons],
        "exact-match": [], "moody_rewards:lengths": [line("lengths", nothing, "raise")],
    }  # fmt: skip
    assert [reason and without_place(reason) for reason in verifiers.reasons] == [
        line("moody", reasons[text], text) if text in reasons else None for text in responses
    ]
    good = [FAILED if text in reasons else Score(0.5, False, extracted=text) for text in responses]
    assert scores["moody_rewards:moody"] == good
    assert [score.correct for score in scores["exact-match"]] == [True] + [False] * 10
    assert [score.reward for score in scores["moody_rewards:lengths"]] == [
        -2.0 if text == "raise" else len(text) for text in responses
    ]
    # The next call works again, and has its own failures.
    assert verifiers.score(samples("a"))["moody_rewards:moody"] == [Score(0.5, False, extracted="a")]
    assert not any(verifiers.failures.values())
    assert verifiers.score([]) == {name: [] for name in verifiers.names}


@pytest.mark.parametrize("workers", [long(0), 1])
def test_a_batched_verifier_is_called_once(build, workers):
    verifiers = build("moody_rewards:lengths", workers)
    assert [score.reward for score in verifiers.score(samples("a", "bb"))["moody_rewards:lengths"]] == [1.0, 2.0]
    if not workers:
        import moody_rewards

        assert moody_rewards.calls == [2]
    for first, reason in [
        ("short", "ValueError: returned 1 results for 3 samples"),
        ("hang", "no result within 3 s"),
    ]:
        assert verifiers.score(samples(first, "b", "c"))["moody_rewards:lengths"] == [FAILED] * 3
        lines = [line("lengths", reason, text) for text in (first, "b", "c")]
        assert verifiers.failures["moody_rewards:lengths"] == lines == verifiers.reasons


@pytest.mark.parametrize("workers", [long(0), 2])
def test_a_grouped_verifier_fails_on_its_group_alone(build, workers):
    verifiers = build("moody_rewards:places+exact-match", workers)
    texts = ["a", "b", "raise", "short", "b", "hang", "b", "a"]
    scores = verifiers.score(samples(*texts), groups=[[0, 1, 2], [3, 4], [5, 6], [7]])
    assert [score.reward for score in scores["moody_rewards:places"]] == [3.0, 3.1, *[-2.0] * 5, 1.0]
    reasons = ["returned str, not a Score or a number", *["ValueError: returned 1 results for 2 samples"] * 2,
               *["no result within 2 s"] * 2]  # fmt: skip
    lines = [line("places", reason, text) for reason, text in zip(reasons, texts[2:7], strict=True)]
    assert verifiers.failures["moody_rewards:places"] == lines and verifiers.reasons == [None, None, *lines, None]
    assert [score.correct for score in scores["exact-match"]] == [text == "a" for text in texts]
    assert verifiers.needs_whole_groups and not build("moody_rewards:lengths").needs_whole_groups


@pytest.mark.parametrize("workers", [0, long(1)])
def test_calls_of_an_async_reward_run_together(build, workers):
    verifiers = build("moody_rewards:meeting", workers)
    texts = ["wait", "raise", "leave", "hang", "own", "come"]
    for _ in range(2):  # the loop stays, so that a client of the module can be used again
        scores = verifiers.score(samples(*texts))["moody_rewards:meeting"]
        assert [score.reward for score in scores] == [0.5, -2.0, -2.0, -2.0, -2.0, 0.5]
        reasons = ["KeyError: 'x'", "SystemExit: 3", "no result within 1 s", "TimeoutError: of its own"]
        found = [without_place(reason) for reason in verifiers.failures["moody_rewards:meeting"]]
        assert found == [line("meeting", *item) for item in zip(reasons, texts[1:5], strict=True)]


@pytest.mark.parametrize("name, rewards", [
    ("asker", [2.0, 4.0]), ("method", [3.0, 6.0]), ("part", [4.0, 8.0]), ("wrapped", [2.0, 4.0]),
    ("together", [1.0, 2.0]),
])  # fmt: skip
def test_every_form_of_an_async_reward_is_awaited(build, name, rewards):
    scores = build(f"moody_rewards:{name}").score(samples("a", "bb"))[f"moody_rewards:{name}"]
    assert [score.reward for score in scores] == rewards


@pytest.mark.parametrize("name, problem", [
    ("yields", "yields; allowed"), ("ayields", "yields; allowed"), ("Asker", "is a class; allowed"),
])  # fmt: skip
def test_what_no_call_can_score_is_refused_before_the_run(build, name, problem):
    with pytest.raises(UsageError, match=f"--reward moody_rewards:{name}: {problem}"):
        build(f"moody_rewards:{name}")


def test_a_plug_in_with_two_marks_is_refused(build):
    with pytest.raises(UsageError, match="moody_rewards:confused: is marked both batched and grouped; keep the mark"):
        build("moody_rewards:confused")


@pytest.mark.parametrize("workers", [long(0), 1])
def test_a_time_out_that_the_response_caused_is_a_wrong_answer(build, workers):
    flags = {"reward_pattern": "(a+)+$", "reward_format": "(a|aa)+", "reward_length": 5}
    verifiers = build("regex+format+length", workers, timeout=0.5, **flags)
    many = verifiers.score([Sample("q", "a" * 50 + "b", tokens=50), Sample("q", "aa", tokens=6)])
    assert many["regex"] == [Score(0.0, False, {"regex": 0.0}, timed_out=True), Score(1.0, True, {"regex": 1.0}, "aa")]
    assert [score.reward for score in many["format"]] == [0.0, 1.0]
    assert [score.reward for score in many["length"]] == [0.0, 0.8]
    assert not any(verifiers.failures.values()) and verifiers.timeouts == {"regex": 1, "format": 1}
    # Where the reference answer takes too long, too, the pattern is at fault.
    slow = "a" * 50 + "b"
    assert verifiers.score([Sample("q", slow, slow)], names=["regex"]) == {"regex": [FAILED]}
    (reason,) = verifiers.failures["regex"]
    assert "no result within 0.5 s;" in reason and verifiers.timeouts == {"regex": 0, "format": 1}


def test_a_formula_that_takes_for_ever_is_a_wrong_answer(build):
    verifiers = build("math-verify", timeout=2.0)
    huge = Sample("q", "$9^{9^{9^9}}$", "0.5"), Sample("q", "$9^{9^{9^9}}$", "$9^{9^{9^9}}$")
    scores = verifiers.score([huge[0], Sample("q", "$\\frac{1}{2}$", "0.5")])["math-verify"]
    assert [score.reward for score in scores] == [0.0, 1.0] and not verifiers.failures["math-verify"]


def test_code_verifiers_run_in_parallel_with_others(build):
    verifiers = build("code+exact-match", timeout=100.0)
    tests = [{"tests": [{"input": "4", "output": output}]} for output in "56"]
    lines = [Sample("q", "print(int(input()) + 1)", "a", metadata) for metadata in tests]
    scores = verifiers.score([*lines, Sample("q", "print(5)", "print(5)")])
    assert [score.reward for score in scores["code"]] == [1.0, 0.0, -2.0]
    assert [score.reward for score in scores["exact-match"]] == [0.0, 0.0, 1.0]
    (reason,) = verifiers.failures["code"]
    assert "ValueError: metadata must hold tests" in reason


def test_off_the_main_thread_an_alarm_is_rejected(build):
    verifiers, caught = build("moody_rewards:moody"), []

    def score():
        try:
            verifiers.score(samples("a"))
        except UsageError as error:
            caught.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert caught == ["--reward-workers 0: only a main thread can stop a verifier that hangs; allowed: 1 or more"]
