"""The catalogue of metrics: code writes every entry. That runs write nothing else is checked by `programs.metrics`."""

import functools
import json
import re
from pathlib import Path

import pytest

import megarl
from tests.helpers.pages import documents
from tests.helpers.programs import metrics as rows_of_run
from tools import _metric_catalog as metric_catalog
from tools._metric_catalog import METRICS, Metric, is_reproducible

PACKAGE = Path(megarl.__file__).parent
READERS = {*PACKAGE.glob("extras/report*.py"),
           *(PACKAGE / "observe" / f"{name}.py" for name in ("alarms", "terminal"))}  # fmt: skip
EXAMPLES = {"role": "actor", "phase": "update", "term": "format", "task": "chain_sum", "layer": "003", "k": "4",
            "component": "format", "bound": "mean_abs", "teacher": "math", "file": "code"}  # fmt: skip
HOLE = documents.HOLE
pytestmark = pytest.mark.usefixtures("without_collection")


@functools.cache
def literals() -> frozenset[str]:
    """The literals of the code that writes metrics."""
    return frozenset(text for path in set(PACKAGE.rglob("*.py")) - READERS for text in documents.literals(path))


@functools.cache
def pattern(literal: str) -> re.Pattern:
    """Of the texts that an f-string can be."""
    return re.compile(".+".join(map(re.escape, literal.split(HOLE))))


@functools.cache
def last_components() -> frozenset[str]:
    """What comes after the last slash of the literals, where it has letters of its own."""
    return frozenset(text.rpartition("/")[2] for text in literals() if text.rpartition("/")[2].strip(HOLE))


@functools.cache
def begins() -> tuple[str, ...]:
    """Last components that begin with a word, as in f"gap_{name}"."""
    return tuple(text for text in last_components() if re.match(f"[a-z]{{3,}}_{HOLE}", text))


@functools.cache
def prefixes() -> tuple[str, ...]:
    """F-strings that begin with a text and a slash."""
    return tuple(text for text in literals() if re.match(f"[a-z_/]+/.*{HOLE}", text, re.DOTALL))


def is_written(metric: Metric) -> bool:
    """Whether some code has the name; or the last component, and before it what the name begins with."""
    name = re.sub("<([a-z]+)>", lambda match: EXAMPLES[match[1]], metric.name)
    if name in literals():
        return True
    last = re.sub("<[a-z]+>", HOLE, metric.name.rpartition("/")[2])
    has_last = last == HOLE or last in last_components() or any(pattern(text).fullmatch(last) for text in begins())
    folders = {name[:at] for at, letter in enumerate(name) if letter == "/"}
    has_first = folders & literals() or any(pattern(text).fullmatch(name) for text in prefixes())
    return bool(has_last and has_first)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.name} of {metric.programs[0]}")
def test_some_code_writes_the_metric(metric):
    assert is_written(metric)


def test_a_metric_that_no_code_writes_is_found():
    invented = ("actor/wisdom", "reward/<term>/median", "router/idle_layers", "eval/luck@<k>", "nowhere/loss", "speed")
    assert not [name for name in invented if is_written(Metric(name, "", ""))]


@functools.cache
def phases() -> set[str]:
    """The phases of roles."""
    return {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'\.phase\(.*"(\w+)"\)', path.read_text())}


def unknown_names(text: str) -> list[str]:
    """The names in a text that begin as those of metrics do, and are neither one nor a phase of a role."""
    first = "|".join({re.escape(metric.name.split("/")[0]) for metric in METRICS if "/" in metric.name})
    names = re.findall(rf"(?<![\w/.])(?:{first})/[a-z0-9_@<>/]*[a-z0-9_>](?![\w.:/])", text)
    listed = {metric.name for metric in METRICS}
    return [name for name in names if name not in listed and name.split("/", 1)[1] not in phases()
            and metric_catalog.unknown([name.replace("<role>", "actor")])]  # fmt: skip


def test_reports_alarms_and_pages_name_metrics_that_exist():
    for path in READERS:
        assert unknown_names("\n".join(documents.literals(path))) == [], path.name
    for page in documents.pages():
        spans = [span for _, span in documents.inline_code(documents.text_of(page))]
        assert unknown_names("\n".join(span for span in spans if not (documents.ROOT / span).exists())) == [], page.name
    assert unknown_names("actor/loss actor/wisdom actor/update time/<role>/<phase>_s") == ["actor/wisdom"]


def test_a_name_has_one_entry_in_a_program():
    keys = [(metric.name, program) for metric in METRICS for program in metric.programs]
    assert len(keys) == len(set(keys))


def test_names_are_found():
    for name, entry in {
        "time/critic/update_s": "time/<role>/<phase>_s", "eval/pass@16": "eval/pass@<k>",
        "eval/tasks/of a/name/maj@4": "eval/<task>/maj@<k>", "router/disagreement/layer_012":
        "router/disagreement/layer_<layer>", "reward/my.module:score/std": "reward/<term>/std",
    }.items():  # fmt: skip
        assert metric_catalog.find(name)[0].name == entry
    assert {metric.programs for metric in metric_catalog.find("reward/mean")} == {("train_rl",), ("train_reward",)}
    unknown = ["time/judge/update_s", "eval/pass@k", "router/disagreement/layer_1", "reward/mean/", "loss"]
    assert metric_catalog.unknown(["step", *unknown, "perf/tokens"]) == unknown


def test_a_run_that_writes_an_unknown_metric_fails_its_test(tmp_path):
    """`programs.metrics`, through which tests read metrics.jsonl, refuses it."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/loss": 0.5}) + "\n")
    assert rows_of_run(tmp_path) == {1: {"step": 1, "actor/loss": 0.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/wisdom": 0.5}) + "\n")
    with pytest.raises(AssertionError, match="actor/wisdom"):
        rows_of_run(tmp_path)


def test_what_depends_on_clock_and_machine_is_told_by_name():
    """Numbers of seconds, of memory, of what a cache still has, of what waits in queues, and of processes that broke;
    all others must be equal in repeated runs."""
    of_clock = {metric.name for metric in METRICS if metric.unit in ("s", "tokens/s")} | {"environment/waiting_share"}
    of_machine = {metric.name for metric in METRICS if metric.name.startswith(("time/", "memory/"))}
    of_order = {"images/cache_hits"} | {
        f"{role}_tokens" for role in ("rollout/prefill", "rollout/reused", "judge/prompt", "judge/reused")
    }
    of_queues = {"rollout/lead", "weights/staged_bytes"}
    of_accidents = {f"environment/{name}" for name in ("restarts", "timeouts", "journalled_steps")}
    of_accidents |= {
        f"rollout/{name}" for name in ("replicas", "joined", "reissued", "lost_tokens", "duplicates_differ")
    }
    others = {metric.name for metric in METRICS if not is_reproducible(metric.name)}
    assert others == of_clock | of_machine | of_order | of_queues | of_accidents
    assert is_reproducible("rollout/accepted_tokens_per_step") and not is_reproducible("perf/tokens_per_s")
