"""The site: every page is in the navigation, nothing is loaded from elsewhere, and mkdocs builds it."""

import re
import subprocess
import sys

import yaml

from tests.helpers.programs import ROOT
from tools import docs_hooks

DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """YAML whose Python tags are read as plain values."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def configuration() -> dict:
    """mkdocs.yml."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages_of(nav) -> list[str]:
    """The files of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages_of(item)]


def test_every_page_is_in_the_navigation_once():
    found = pages_of(configuration()["nav"])
    assert sorted(found) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_site_needs_no_network():
    config = configuration()
    assert config["theme"]["font"] is False and config["plugins"] == ["search", "offline"]
    files = [*config["extra"]["polyfills"], *config["extra_css"]]
    for name in files:
        assert not re.search(r"(https?:)?//\w+\.\w+", (DOCS / name).read_text()) and not name.startswith("http")
    for page in DOCS.rglob("*.svg"):
        assert "http" not in page.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_links_that_leave_the_docs_become_text():
    text = "[a](../README.md) [b](../README.md#the-code) [c](../megarl/train_rl.py) [d](plan.md)"
    assert docs_hooks.on_page_markdown(text, page=None) == "[a](index.md) [b](index.md) c [d](plan.md)"


def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in DOCS.rglob("*.md")} < {path.stem for path in tmp_path.rglob("*.html")}
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"?(https?:)?//", page.read_text()), page
    assert "assets/iframe-worker.js" in (tmp_path / "index.html").read_text()
    assert "partial rollouts" in (tmp_path / "search" / "search_index.js").read_text()
