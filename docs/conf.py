"""The site's configuration: `make docs` builds it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site"))

import compcoll  # noqa: E402
from compcoll.codecs import ALL  # noqa: E402

project = "compcoll"
author = "compcoll developers"
copyright = "compcoll developers"
release = compcoll.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_design",
    "sphinx_copybutton",
    "accessible",
    "chooser",
]
exclude_patterns = ["site"]
html_theme = "furo"
html_title = f"compcoll {release}"
html_static_path = ["site/static"]
html_css_files = ["plots.css"]
html_js_files = [("scroll.js", {"defer": "defer"})]
html_favicon = "site/static/favicon.svg"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4  # links such as torch/ddp.md#feedback mean headings, as on a forge
myst_enable_extensions = ["colon_fence", "attrs_inline"]

highlight_language = "none"
default_role = "py:obj"  # `Codec.bias` in a docstring
autodoc_typehints = "none"  # numpydoc's tables have them
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# What stands at the repository's top, and links to it from pages.
ABOVE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}


def read_links_above(app: Any, page: str, text: list[str]) -> None:
    """Let links between the repository's folders mean pages of the site."""
    up = "../" * (page.count("/") + 1)
    for above, inside in ABOVE.items():
        text[0] = text[0].replace(f"]({up}{above}", f"]({up[3:]}{inside}")


def read_included_links(app: Any, path: Path, page: str, text: list[str]) -> None:
    """Let links of the files at the top mean pages of the site."""
    text[0] = text[0].replace("](docs/", "](")
    read_links_above(app, page, text)


def list_codecs(app: Any, page: str, text: list[str]) -> None:
    """Let docs/api/codecs.md describe every codec."""
    classes = "\n".join(f".. autoclass:: compcoll.{cls.__name__}" for cls in ALL)
    text[0] = text[0].replace(".. autoclass:: {each of compcoll.codecs.ALL}", classes)


def link_pages(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Let docs/model.md in a docstring be a link."""
    lines[:] = [re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("source-read", read_links_above)
    app.connect("source-read", list_codecs)
    app.connect("include-read", read_included_links)
