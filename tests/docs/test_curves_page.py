"""The table of curves is that of docs/curves.json."""

import json

from tests.helpers import documents
from tests.helpers.programs import ROOT


def test_the_table_has_the_numbers_of_the_curves():
    curves = json.loads((ROOT / "docs" / "curves.json").read_text())
    recipes = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))
    assert sorted({curve["recipe"] for curve in curves}) == recipes
    page = documents.text_of(ROOT / "docs" / "recipes.md")
    for recipe in recipes:
        seeds = [curve for curve in curves if curve["recipe"] == recipe]
        middle, last = ([100 * c["accuracy"][c["steps"].index(step)] for c in seeds] for step in (50, 110))
        tokens = sum(curve["tokens"][-1] for curve in seeds) / len(seeds)
        found = f"{sum(last) / len(last):.1f} % ({min(last):.1f}–{max(last):.1f})"
        assert len(seeds) == 3 and f"| `{recipe}` | {sum(middle) / 3:.1f} % | {found} | {tokens:,.0f} |" in page
    assert f"({100 * curves[0]['accuracy'][0]:.1f} %)" in page
