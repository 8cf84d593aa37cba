"""Linters, types, the version, and the files that contributors meet first."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megarl

ROOT = Path(megarl.__file__).parents[1]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def check(*command: str) -> str:
    """Output of a Python module that must succeed on the repository."""
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff_finds_nothing():
    assert check("ruff", "check", "--no-cache", ".") == "All checks passed!\n"
    check("ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.long
def test_mypy_finds_nothing(tmp_path):
    assert "Success: no issues found" in check("mypy", "--cache-dir", str(tmp_path))


# -- version -----------------------------------------------------------------------------------------------------


def problem_of(version: str, changelog: str) -> str | None:
    """What is wrong between a version and a changelog; None if nothing is."""
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    released = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", name) for name in sections]
    if not all(released[1:]) or not (released and (released[0] or sections[0] == "Unreleased")):
        return f"sections are Unreleased or 'VERSION (DATE)', not {sections}"
    numbers = [tuple(map(int, found.groups())) for found in released if found]
    if numbers != sorted(set(numbers), reverse=True):
        return f"releases are not in order: {sections}"
    given = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.dev0)?", version)
    if given is None:
        return f"{version} is neither X.Y.Z nor X.Y.Z.dev0"
    own, is_development = tuple(map(int, given.groups()[:3])), given[4] is not None
    if is_development != (sections[0] == "Unreleased"):
        return f"{version} does not fit the newest section {sections[0]}"
    if is_development and numbers and own <= numbers[0] or not is_development and own != numbers[0]:
        return f"{version} does not follow the newest release {sections[-len(numbers)]}"
    return None


def test_the_version_fits_the_changelog():
    assert problem_of(megarl.__version__, (ROOT / "CHANGELOG.md").read_text()) is None


@pytest.mark.parametrize(("version", "sections", "problem"), [
    ("0.1.0.dev0", ["Unreleased"], None),
    ("0.1.0", ["0.1.0 (2030-01-31)"], None),
    ("0.2.0.dev0", ["Unreleased", "0.1.1 (2030-02-01)", "0.1.0 (2030-01-31)"], None),
    ("0.10.0", ["0.10.0 (2030-02-01)", "0.9.0 (2030-01-31)"], None),
    ("0.1.0", ["Unreleased"], "does not fit"),
    ("0.1.0.dev0", ["0.1.0 (2030-01-31)"], "does not fit"),
    ("0.1.0.dev0", ["Unreleased", "0.1.0 (2030-01-31)"], "does not follow"),
    ("0.1.1", ["0.1.0 (2030-01-31)"], "does not follow"),
    ("0.1.0", ["0.1.0 (2030-01-31)", "0.2.0 (2030-01-30)"], "not in order"),
    ("0.1", ["Unreleased"], "neither"),
    ("0.1.0", ["0.1.0"], "sections are"),
    ("0.1.0", [], "sections are"),
])  # fmt: skip
def test_wrong_versions_are_found(version, sections, problem):
    found = problem_of(version, "# Changelog\n" + "".join(f"\n## {name}\n- text\n" for name in sections))
    assert found is None if problem is None else problem in found


# -- files for contributors --------------------------------------------------------------------------------------


def test_hooks_need_no_network_and_run_what_the_environment_has():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert {"ruff-check", "ruff-format", "mypy"} <= set(hooks)
    for hook in hooks.values():
        words = hook["entry"].split()
        assert hook["language"] == "system" and words[0] in ("python", "bash")
        assert words[1] in ("-n", "-m")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_what_github_requires(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form) and any(each["type"] != "markdown" for each in form["body"])
    ids = [each["id"] for each in form["body"]]
    assert len(ids) == len(set(ids)) and all(each["attributes"]["label"] for each in form["body"])
    for each in form["body"]:
        assert each["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert each["type"] != "checkboxes" or all(option["label"] for option in each["attributes"]["options"])


def test_there_is_a_form_for_bugs_features_and_questions():
    assert {path.stem for path in FORMS} == {"bug", "feature", "question", "config"}
