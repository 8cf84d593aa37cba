"""Hooks of the documentation's site (mkdocs.yml): the README is its first page, and links that leave docs/ are text."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def first_page(text: str) -> str:
    """The README as a page of docs/: links into docs/ lose the folder, others become plain text."""
    text = re.sub(r"\]\(docs/([^)]*)\)", r"](\1)", text)
    return re.sub(r"\[([^\]]*)\]\([A-Z]+\.md[^)]*\)", r"\1", text)


def on_files(files, config):
    """Adds the README as index.md."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=first_page(README.read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """A page's text for the site, where the repository's other files do not exist."""
    markdown = re.sub(r"\]\(\.\./README\.md(#[\w-]*)?\)", "](index.md)", markdown)
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
