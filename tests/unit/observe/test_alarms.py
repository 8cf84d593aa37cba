"""Alarms on metrics: their grammar, when they hold, and what they do."""

import math

import pytest

from megarl.errors import RunStopped, UsageError
from megarl.observe.alarms import DEFAULT_ALARMS, MIN_HISTORY, Alarm, Alarms, parse_alarms, update_check


def watch(text: str, values: list, name: str = "m") -> Alarms:
    alarms = Alarms(text)
    for step, value in enumerate(values, start=1):
        alarms.watch(step, {name: value})
    return alarms


def test_alarms_are_parsed_and_printed_as_they_were_given():
    text = "actor/ppo_kl > 0.3: skip; m < 0.5x: warn; a/b-c@4 > -2: stop"
    first, second, third = parse_alarms(text)
    assert first == Alarm("actor/ppo_kl", ">", 0.3, False, "skip")
    assert second == Alarm("m", "<", 0.5, True, "warn") and third == Alarm("a/b-c@4", ">", -2.0, False, "stop")
    assert "; ".join(map(str, parse_alarms(text))) == text
    assert parse_alarms("m < 1e-09 for 5: warn") == [Alarm("m", "<", 1e-9, False, "warn", 5)]
    assert parse_alarms("m>1e3x:warn;") == [Alarm("m", ">", 1000.0, True, "warn")] and parse_alarms("") == []
    assert "; ".join(map(str, parse_alarms(DEFAULT_ALARMS))) == DEFAULT_ALARMS


@pytest.mark.parametrize("text, says", [
    ("m", "'m': allowed is 'METRIC > LIMIT: ACTION'"),
    ("m >= 3: warn", "allowed is"),
    ("m > : warn", "allowed is"),
    ("m > inf: warn", "'inf' is no limit"),
    ("m > nan: warn", "'nan' is no limit"),
    ("m > 3y: warn", "'3y' is no limit"),
    ("m > 3: shout", "'shout' is no action; allowed are warn, skip, stop"),
    ("m > 3: warn; reward/mean < 1: skip", "'reward/mean < 1: skip': only an update can be skipped"),
    ("actor/loss > 3x: skip", "skip needs a number"),
    ("actor/loss > 3 for 2: skip", "skip needs a number as its limit, and no steps"),
    ("m > 3 for 0: warn", "allowed is"),
    ("m > 3 for ever: warn", "allowed is"),
])  # fmt: skip
def test_malformed_alarms_are_refused_in_one_line(text, says):
    with pytest.raises(UsageError) as error:
        parse_alarms(text)
    assert str(error.value).startswith("--alarms ") and says in str(error.value) and "\n" not in str(error.value)


def test_an_alarm_warns_when_it_begins_to_hold(capsys):
    watch("m > 3: warn", [1, 4, 5, 2, math.nan, 7])
    told = [f"megarl: warning: step {at} (--alarms 'm > 3: warn')" for at in ("2: m is 4", "6: m is 7")]
    assert capsys.readouterr().err.splitlines() == told


def test_an_alarm_may_hold_for_some_steps_before_it_warns(capsys):
    watch("m < 1 for 3: warn", [0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0.5])
    (first, second) = capsys.readouterr().err.splitlines()
    assert first == "megarl: warning: step 6: m is 0, for 3 steps (--alarms 'm < 1 for 3: warn')"
    assert second.startswith("megarl: warning: step 11: m is 0.5, for 3 steps ")


@pytest.mark.parametrize("name, value", [("actor/updates", 0), ("actor/grad_norm", 0.0), ("reward/std", 0.0)])
def test_a_run_that_learns_nothing_is_told_by_default(name, value, capsys):
    watch(DEFAULT_ALARMS, [value] * 6, name)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} is 0, for " in line


def test_a_multiple_is_of_the_median_of_earlier_steps(capsys):
    few = [1.0] * (MIN_HISTORY - 1)
    watch("m > 3x: warn", [*few, 100.0])
    watch("m > 3x: warn", [-2.0] * 9 + [100.0])  # no multiple of a negative number
    assert not capsys.readouterr().err
    watch("m > 3x: warn", [*few, math.inf, 1.0, 2.9, 3.1, 3.1])  # infinite values do not count in the median
    watch("m < 0.3x: warn", [1.0, 2.0, 3.0, 4.0, 5.0, 0.91, 0.74])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        f"megarl: warning: step {at}" for at in ("8: m is 3.1, median 1", "7: m is 0.74, median 2.5")
    ]


def test_an_alarm_can_stop_the_run():
    with pytest.raises(RunStopped) as error:
        watch("m < 0.2: stop", [1.0, 0.1, 2.0])
    assert str(error.value) == "step 2: m is 0.1 (--alarms 'm < 0.2: stop')"


def test_a_metric_that_does_not_exist_is_named_once(capsys):
    watch("n > 1: warn; m > 9: stop; eval/accuracy < 0.1: warn", [1, 2, 3])
    assert capsys.readouterr().err.splitlines() == ["megarl: warning: --alarms: step 1 has no metric n"]
    watch(DEFAULT_ALARMS, [1, 2])
    assert not capsys.readouterr().err


def test_updates_are_skipped_by_what_is_known_before_them(capsys):
    accepts = update_check("actor/ppo_kl > 0.3: skip; critic/loss > 1: skip; actor/loss > 0: stop", "actor")
    assert accepts(1.0, {"actor/loss": 1.0, "actor/ppo_kl": 0.3})
    assert not accepts(1.0, {"actor/loss": 1.0, "actor/ppo_kl": 0.31})
    assert not accepts(math.nan, {}) and not accepts(-math.inf, {})
    assert update_check("actor/ppo_kl > 0.3: skip", "critic")(5.0, {"critic/loss": 5.0})
    watch("actor/ppo_kl > 0.3: skip", [1.0], "actor/ppo_kl")
    assert not capsys.readouterr().err


def test_a_gap_between_policies_is_no_gap_between_engine_and_training(capsys):
    row = {"rollout/logprob_gap_mean": 0.2, "rollout/staleness": 1.5}
    Alarms(DEFAULT_ALARMS).watch(1, row)
    assert capsys.readouterr().err == ""
    Alarms(DEFAULT_ALARMS).watch(1, row | {"rollout/staleness": 0.0})
    Alarms("rollout/logprob_gap_mean > 0.05: warn").watch(1, row)
    assert capsys.readouterr().err.count("rollout/logprob_gap_mean is 0.2") == 2
