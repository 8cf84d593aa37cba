"""Hooks of the documentation's site (mkdocs.yml): links that leave docs/ become plain text, or lead to the overview."""

import re


def on_page_markdown(markdown: str, **_) -> str:
    """A page's text for the site, where the repository's other files do not exist."""
    markdown = re.sub(r"\]\(\.\./README\.md(#[\w-]*)?\)", "](index.md)", markdown)
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
