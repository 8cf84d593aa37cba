"""The generated pages: as the generator writes them, with every flag and metric."""

import dataclasses

import pytest

from megarl.flags.parser import own_flags
from megarl.flags.settings import Settings
from tools import make_reference
from tools._metric_catalog import METRICS


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Name of a page -> what the generator writes."""
    return {path.name: text for path, text in make_reference.pages().items() if path.suffix == ".md"}


def test_the_committed_pages_are_what_the_generator_writes():
    for path, text in make_reference.pages().items():
        assert path.read_text() == text, "run python tools/make_reference.py"


def test_every_flag_has_a_line(pages):
    lines = [line for line in pages["flags.md"].split("\n") if line.startswith("`--")]
    for program in make_reference.parser.MODULES:
        for flag in own_flags(program).values():
            (line,) = (line for line in lines if line.startswith(f"`--{flag.common}` |"))
            programs = line.split(" | ")[3].split(", ")
            assert programs == ["all"] or program in programs + [*make_reference.TRAINING] * ("training" in programs)
    for name in (
        "--tensor-model-parallel-size",
        "--lr",
        "--num-experts",
        "--global-batch-size",
        "--geglu",
        "--muon-momentum",
    ):
        assert [line for line in lines if f"`{name}`" in line.split(" | ")[0]], name
    assert not [line for line in lines if "`--lion" in line.split(" | ")[0]]  # megarl refuses it


def test_a_line_says_what_is_allowed_and_when_a_flag_does_nothing(pages):
    (line,) = (line for line in pages["flags.md"].split("\n") if line.startswith("`--kl-target`"))
    assert line.split(" | ")[1:4] == ["number > 0", "", "rl"]
    assert line.endswith("without `--kl-controller` adaptive and `--kl-coefficient` above 0")
    (line,) = (line for line in pages["flags.md"].split("\n") if line.startswith("`--gae-lambda`"))
    assert line.endswith("| `--advantage` other than gae")
    (line,) = (line for line in pages["flags.md"].split("\n") if line.startswith("`--offload`"))
    assert "Per role: actor, critic, reward, reference" in line


def test_every_section_has_a_title_of_its_own(pages):
    assert set(make_reference.titles()) == {field.name for field in dataclasses.fields(Settings)}
    titles = [line for line in pages["flags.md"].split("\n") if line.startswith("#")]
    assert len(titles) == len(set(titles))


def test_every_metric_has_a_line(pages):
    for metric in METRICS:
        assert f"\n`{metric.name}` | {metric.unit} |" in pages["metrics.md"]
    assert "\n`megarl_requests_total` | counter |" in pages["metrics.md"]


def test_cells_are_one_cell(pages):
    """A bar or a line break in a help text would break its table."""
    for text in pages.values():
        lengths = [len(line.replace("\\|", "").split("|")) for line in text.split("\n") if " | " in line]
        assert min(lengths) >= 3 and max(lengths) <= 6
    assert make_reference.prose("a|b\nc `d` --top-k [x](y) <i>") == "a\\|b c d `--top-k` \\[x](y) &lt;i>"


def test_a_stale_page_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "flags.md"
    monkeypatch.setattr(make_reference, "ROOT", tmp_path)
    monkeypatch.setattr(make_reference, "pages", lambda: {path: "new"})
    path.write_text("old")
    assert make_reference.main(["--check"]) == 1 and path.read_text() == "old"
    assert "flags.md is stale" in capsys.readouterr().err
    assert make_reference.main([]) == 0 and path.read_text() == "new"
    assert make_reference.main(["--check"]) == 0
