"""Links between the pages, and from them to files: every target and anchor exists."""

import re

import pytest

from tests.helpers.pages import documents
from tests.helpers.programs import ROOT

PAGES = {documents.name_of(page): page for page in documents.pages()}


def dead_links(page) -> list[str]:
    """The links of a page whose file or anchor does not exist."""
    dead = []
    for line, target in documents.links(documents.text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        is_dead = (
            not path.exists()
            or bool(name)
            and not path.is_relative_to(page.parent if ROOT not in page.parents else ROOT)
        )
        if not is_dead and anchor:
            is_dead = path.suffix != ".md" or anchor not in documents.anchors(documents.text_of(path))
        if is_dead:
            dead.append(f"{documents.name_of(page)}:{line} {target}")
    return dead


@pytest.mark.parametrize("name", PAGES)
def test_no_link_is_dead(name):
    dead = dead_links(PAGES[name])
    assert not dead, "\n".join(dead)


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `--flag`, and (more): x\n## Twice\n## Twice\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#a---flag-and-more-x) [b](other.md#twice-1) [c](#here) ![d](no.png)\n"
                    "# Here\n`[in code](no.md)` [e](https://example.org/no.md)\n```\n[f](no.md)\n```\n"
                    "[g](no.md) [h](other.md#no-heading) [i](#there)\n[j](other.md#twice-2)\n")  # fmt: skip
    found = [dead.removeprefix("page.md:") for dead in dead_links(page)]
    assert found == ["1 no.png", "7 no.md", "7 other.md#no-heading", "7 #there", "8 other.md#twice-2"]


def test_pages_have_links():
    assert sum(len(documents.links(documents.text_of(page))) for page in PAGES.values()) > 60
