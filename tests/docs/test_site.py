"""The site: every page is in the navigation, nothing is loaded from elsewhere, and mkdocs builds it."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.helpers.programs import ROOT
from tools import docs_hooks

pytestmark = pytest.mark.nightly

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
    assert sorted(found) == sorted(["index.md", *(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))])


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
    text = "[a](docs/plan.md#b) ![c](docs/d.png) [e](CONTRIBUTING.md#f)"
    assert docs_hooks.first_page(text) == "[a](plan.md#b) ![c](d.png) e"


def test_the_script_builds_the_site_without_a_warning(tmp_path):
    """From another folder, with an interpreter that has mkdocs in the place of the environment's."""
    root, site = tmp_path / "root", tmp_path / "site"
    (root / "launch").mkdir(parents=True)
    for name in ("docs", "tools", "mkdocs.yml"):
        (root / name).symlink_to(ROOT / name)
    (root / "launch" / "setup_env.sh").write_text(f'[[ $1 == docs ]] && echo "{sys.executable}"\n')
    script = shutil.copy(
        ROOT / "tools" / "build_docs.sh", root / "launch"
    )  # it looks for its files from its own folder
    done = subprocess.run(["bash", script, str(site)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"build_docs: {site}/index.html\n"), done.stderr
    assert "WARNING" not in done.stderr
    assert {path.stem for path in DOCS.rglob("*.md")} < {path.stem for path in site.rglob("*.html")}
    for page in site.rglob("*.html"):
        assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"?(https?:)?//", page.read_text()), page
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()
    assert "partial rollouts" in (site / "search" / "search_index.js").read_text()


def test_a_dead_link_fails_the_build(tmp_path):
    """With the options of the script and the checks of mkdocs.yml."""
    (options,) = re.findall(r"-m mkdocs (build [a-z -]*?) --site-dir", (ROOT / "tools" / "build_docs.sh").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[there](nowhere.md)")
    config = {key: value for key, value in configuration().items() if key in ("site_name", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "nowhere.md" in done.stderr
