"""Drawings of the pages have a title and a description, and colours for light and dark pages."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_drawing(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text
    assert description is not None and len(description.text or "") > 80
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert "prefers-color-scheme: dark" in path.read_text()
    shown = [page for page in DOCS.rglob("*.md") if f"pictures/{path.name})" in page.read_text()]
    assert shown, "no page shows it"
    for page in shown:
        (alt,) = re.findall(rf"!\[([^\]]+)\]\(\S*pictures/{path.name}\)", page.read_text())
        assert len(alt) > 60
