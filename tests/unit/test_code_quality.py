"""Linters, types, the version, and the files that contributors meet first."""

import importlib.util
import re
import subprocess
import sys
import tomllib
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


KINDS = [
    each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def problem_of(version: str, changelog: str, fragments: list[str]) -> str | None:
    """What is wrong between a version, a changelog and the names of files in changelog.d/; None if nothing is."""
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    released = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", name) for name in sections]
    if not released or not all(released):
        return f"sections are 'VERSION (DATE)', not {sections}"
    numbers = [tuple(map(int, found.groups())) for found in released if found]
    if numbers != sorted(set(numbers), reverse=True):
        return f"releases are not in order: {sections}"
    given = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.dev0)?", version)
    if given is None:
        return f"{version} is neither X.Y.Z nor X.Y.Z.dev0"
    own = tuple(map(int, given.groups()[:3]))
    if own <= numbers[0] if given[4] else own != numbers[0]:
        return f"{version} does not follow or name the newest release {sections[0]}"
    if fragments and not given[4]:
        return f"{version} is a release, so its changes are no longer in changelog.d/: {fragments}"
    wrong = [name for name in fragments if not re.fullmatch(rf"\+\w+\.({'|'.join(KINDS)})\.md", name)]
    return f"names in changelog.d/ are +SOME_WORDS.KIND.md with a KIND of {KINDS}, not {wrong}" if wrong else None


def test_the_version_fits_the_changelog():
    fragments = [path.name for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    assert problem_of(megarl.__version__, (ROOT / "CHANGELOG.md").read_text(), fragments) is None


@pytest.mark.parametrize(("version", "sections", "fragments", "problem"), [
    ("0.1.0", ["0.1.0 (2030-01-31)"], [], None),
    ("0.2.0.dev0", ["0.1.1 (2030-02-01)", "0.1.0 (2030-01-31)"], ["+some_words.new.md", "+b.change.md"], None),
    ("0.10.0", ["0.10.0 (2030-02-01)", "0.9.0 (2030-01-31)"], [], None),
    ("0.1.0.dev0", ["0.1.0 (2030-01-31)"], [], "does not follow"),
    ("0.1.1", ["0.1.0 (2030-01-31)"], [], "does not follow"),
    ("0.1.0", ["0.1.0 (2030-01-31)", "0.2.0 (2030-01-30)"], [], "not in order"),
    ("0.1", ["0.1.0 (2030-01-31)"], [], "neither"),
    ("0.1.0", ["0.1.0"], [], "sections are"),
    ("0.1.0", ["Unreleased", "0.1.0 (2030-01-31)"], [], "sections are"),
    ("0.1.0", [], [], "sections are"),
    ("0.1.0", ["0.1.0 (2030-01-31)"], ["+some_words.new.md"], "is a release"),
    ("0.2.0.dev0", ["0.1.0 (2030-01-31)"], ["some_words.md"], "names in"),
    ("0.2.0.dev0", ["0.1.0 (2030-01-31)"], ["+a.removed.md"], "names in"),
])  # fmt: skip
def test_wrong_versions_are_found(version, sections, fragments, problem):
    found = problem_of(version, "# Changelog\n" + "".join(f"\n## {name}\n- text\n" for name in sections), fragments)
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
