"""Mends what screen readers and keyboards miss in pages of Sphinx and furo, after the build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MENDED = (
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Pages">'),
    (r'<aside class="toc-drawer( no-toc)?">', r'<aside class="toc-drawer\1" aria-label="Sections of this page">'),
    (r'<th class="([^"]*)"><p></p></th>', r'<td class="\1 corner"></td>'),
    (r'(?<!</h1>\n)<div id="search-results"></div>', '<h1>Search</h1>\n<div id="search-results"></div>'),
)
"""Patterns, and what takes their place. None matches its own result, since a later build may read it again."""


def mended(page: str) -> str:
    """Return a page with levels of headings, names of landmarks, and no empty heads of columns."""
    for pattern, instead in MENDED:
        page = re.sub(pattern, instead, page)
    return page


def mend(app: Any, exception: Exception | None) -> None:
    """Mend all pages of the site."""
    if exception is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            text = path.read_text(encoding="utf-8")
            if (new := mended(text)) != text:
                path.write_text(new, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
