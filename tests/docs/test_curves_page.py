"""The tables of curves are those of docs/curves.json, docs/curves_newer.json and docs/lag_curves.json."""

import json
from statistics import fmean

import pytest

from tests.helpers import documents
from tests.helpers.programs import RL_RECIPES, ROOT
from tools.curves import interval


def test_the_table_has_the_numbers_of_the_curves():
    older, newer = (json.loads((ROOT / "docs" / f"{name}.json").read_text()) for name in ("curves", "curves_newer"))
    again = {curve["seed"]: curve["accuracy"] for curve in newer if curve["recipe"] == "grpo"}
    base = {curve["seed"]: 100 * fmean(curve["accuracy"][1:]) for curve in older if curve["recipe"] == "grpo"}
    assert again == {curve["seed"]: curve["accuracy"] for curve in older if curve["recipe"] == "grpo"}
    curves = older + [curve for curve in newer if curve["recipe"] != "grpo"]
    recipes = sorted({curve["recipe"] for curve in curves})
    assert len(recipes) == 16 and set(recipes) <= {path.stem for path in RL_RECIPES}
    page = documents.text_of(ROOT / "docs" / "recipes.md")
    for recipe in recipes:
        seeds = [curve for curve in curves if curve["recipe"] == recipe]
        middle, last = ([100 * c["accuracy"][c["steps"].index(step)] for c in seeds] for step in (50, 110))
        tokens = sum(curve["tokens"][-1] for curve in seeds) / len(seeds)
        found = f"{sum(last) / len(last):.1f} % ({min(last):.1f}–{max(last):.1f})"
        means = {curve["seed"]: 100 * fmean(curve["accuracy"][1:]) for curve in seeds}
        difference = interval([mean - base[seed] for seed, mean in means.items()]) * (recipe != "grpo")
        found += f" | {fmean(means.values()):.1f} % | {difference} | {tokens:,.0f} |"
        assert len(seeds) == 3 and f"| `{recipe}` | {sum(middle) / 3:.1f} % | {found}" in page
    assert f"({100 * curves[0]['accuracy'][0]:.1f} %)" in page


@pytest.mark.parametrize("file, title", [("lag_curves.json", "GRPO"), ("lag_curves_ppo.json", "PPO")])
def test_the_tables_of_lags_have_the_numbers_of_their_curves(file, title):
    curves = json.loads((ROOT / "docs" / file).read_text())
    names = list(dict.fromkeys(curve["recipe"] for curve in curves))
    assert len(names) == 13 and len(curves) == 39
    page = documents.text_of(ROOT / "docs" / "staleness.md").partition(f"| {title} |")[2].partition("\n\n")[0]
    means = {(c["recipe"], c["seed"]): 100 * fmean(c["accuracy"][1:]) for c in curves}
    for name in names:
        seeds = [curve for curve in curves if curve["recipe"] == name]
        last = [100 * curve["accuracy"][-1] for curve in seeds]
        differences = [means[name, c["seed"]] - means["lag 0", c["seed"]] for c in seeds]
        text = f"{fmean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f})" * (name != "lag 0")
        size, kl = (fmean(c["metrics"][f"correction/{x}"] for c in seeds) for x in ("effective_sample_size", "kl_k3"))
        found = (
            f"{fmean(last):.1f} % ({min(last):.1f}–{max(last):.1f}) | {fmean(means[name, s] for s in (1, 2, 3)):.1f} %"
        )
        assert f"| {name.replace('/', ', ')} | {found} | {text} | {size:.2f} | {kl:.4f} |" in page
