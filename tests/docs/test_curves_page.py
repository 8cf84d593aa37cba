"""The table of curves is that of docs/curves.json."""

import json

from tests.helpers import documents
from tests.helpers.programs import ROOT


def test_the_table_has_the_numbers_of_the_curves():
    curves = json.loads((ROOT / "docs" / "curves.json").read_text())
    recipes = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))
    assert sorted(curve["recipe"] for curve in curves) == recipes
    page = documents.text_of(ROOT / "docs" / "recipes.md")
    for curve in curves:
        middle, last = (100 * curve["accuracy"][curve["steps"].index(step)] for step in (50, 110))
        assert f"| `{curve['recipe']}` | {middle:.1f} % | {last:.1f} % | {curve['tokens'][-1]:,} |" in page
    assert f"({100 * curves[0]['accuracy'][0]:.1f} %)" in page
