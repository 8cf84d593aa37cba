"""docs/figures.md is what its data say, and other pages name numbers that it has."""

import json
import re

import pytest

from tests.helpers.pages import documents
from tests.helpers.programs import RL_RECIPES, ROOT
from tools import make_figures

PAGE = ROOT / "docs" / "figures.md"


def test_the_committed_page_is_what_the_generator_writes():
    assert PAGE.read_text() == make_figures.page(), "run python tools/make_figures.py"
    assert make_figures.main(["--check"]) == 0


def test_a_stale_page_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "figures.md").write_text("old")
    text = make_figures.page()
    monkeypatch.setattr(make_figures, "page", lambda: text)
    monkeypatch.setattr(make_figures, "DOCS", tmp_path)
    assert make_figures.main(["--check"]) == 1 and "is stale" in capsys.readouterr().err
    assert make_figures.main([]) == 0 and (tmp_path / "figures.md").read_text() == text


@pytest.mark.parametrize("lacks", ["recorded", "processor", "ratio", "command"])
def test_a_figure_without_its_record_is_refused(lacks, tmp_path, monkeypatch):
    figure = {"title": "A", "recorded": "2026-01-02 0123abcd", "processor": "one", "ratio": "2", "command": "python x"}
    content = {"processors": {}, "sections": [{"title": "B", "figures": [figure | {"rows": "1"}]}]}
    monkeypatch.setattr(make_figures, "DOCS", tmp_path)
    (tmp_path / "figures.yaml").write_text(json.dumps(content))
    assert make_figures.figures(make_figures.read())
    del figure[lacks]
    (tmp_path / "figures.yaml").write_text(json.dumps({"processors": {}, "sections": [{"figures": [figure]}]}))
    with pytest.raises(ValueError, match=f"A: lacks .*{lacks}"):
        make_figures.read()


def test_recipes_have_three_seeds_each_and_one_grpo():
    older, newer = make_figures.curves_of("curves.json"), make_figures.curves_of("curves_newer.json")
    grpo = [{c["seed"]: c["accuracy"] for c in curves if c["recipe"] == "grpo"} for curves in (older, newer)]
    assert grpo[0] == grpo[1] and len(grpo[0]) == 3
    names = {curve["recipe"] for curve in older + newer}
    assert len(names) == len(make_figures.recipe_rows()) == 16 and names <= {path.stem for path in RL_RECIPES}


@pytest.mark.parametrize("name", ["lag_curves.json", "lag_curves_ppo.json"])
def test_each_lag_has_three_seeds(name):
    curves = make_figures.curves_of(name)
    assert len(curves) == 39 and [len(row) for row in make_figures.lag_rows(name)] == [5] * 3


def test_every_figure_that_a_page_links_is_one():
    titles = {figure["title"] for figure in make_figures.figures(make_figures.read())}
    headings = set(re.findall(r"^### (.+)$", documents.text_of(PAGE), re.MULTILINE))
    assert titles == headings and len(titles) > 30
