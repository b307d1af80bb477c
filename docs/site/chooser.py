"""Directives of docs/choose.md: what `python -m compcoll choose` answers, computed when the site is built.

``chooser`` is a form whose answers are looked up in the browser (static/chooser.js); ``choices`` makes tables for an
allowed error, which need no JavaScript.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

import compcoll
from compcoll.layout import World
from compcoll.plan import choose
from compcoll.plan.cost import DEFAULTS, Link, Profile
from compcoll.plan.explanation import duration
from compcoll.tools.arguments import parse_bytes, parse_speed
from compcoll.tools.choose import chosen, gain

PAGE = "choose"

SIZES = ("64K", "256K", "1M", "4M", "16M", "64M", "256M", "1G")
LINKS = ("1gbit", "10gbit", "25gbit", "100gbit", "400gbit")
NODES = (2, 4, 8, 16, 32, 64)
PER_NODE = (1, 2, 4, 8)
ERRORS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5")
"""The settings of the form, as `python -m compcoll choose` takes them."""

FIRST = {"bytes": "64M", "link": "10gbit", "nodes": "16", "per-node": "1", "error": "1e-2"}
"""The settings that the form begins with."""

TABLE_SIZES = ("64K", "1M", "16M", "100M", "1G")
TABLE_LINKS = LINKS[:4]
TABLE_RANKS = (2, 4, 16, 64)


def profile_of(link: str) -> Profile:
    """Return the default profile with another speed between nodes."""
    return replace(DEFAULTS, between=Link(DEFAULTS.between.latency, 1 / parse_speed(link)))


def answers() -> dict[str, Any]:
    """Return the form's settings and the answers to them, for static/chooser.js.

    ``answers`` follow each other as the settings do, the last (``per-node``) changing first: the time of MPI's own, and
    for each error an index of ``ways``. For -1, that is uncompressed, nothing follows; else the answer's gain, time and
    estimated error.
    """
    ways: dict[tuple[str, str], int] = {}
    found = [
        _answers(profile_of(link), World(count * per_node, per_node), parse_bytes(size), ways)
        for size, link, count, per_node in product(SIZES, LINKS, NODES, PER_NODE)
    ]
    settings = {"bytes": SIZES, "link": LINKS, "nodes": NODES, "per-node": PER_NODE, "error": ERRORS}
    return {"settings": settings, "ways": list(ways), "answers": found}


def _answers(profile: Profile, world: World, nbytes: int, ways: dict[tuple[str, str], int]) -> list[Any]:
    plan = chosen(profile, world, nbytes, float(ERRORS[0]))
    native = choose.options(plan.call._replace(codec=None, tolerance=None), plan.setting)[0]
    row: list[Any] = [duration(native.seconds)]
    for error in ERRORS:
        best = choose.chosen(plan.call._replace(tolerance=float(error)), plan.setting)
        if best.algorithm == choose.NATIVE:
            row.append([-1])
            continue
        assert best.codec is not None and best.error is not None
        way = ways.setdefault((best.codec.label, best.algorithm), len(ways))
        row.append([way, f"{native.seconds / best.seconds:.2f}", duration(best.seconds), f"{best.error:.1e}"])
    return row


LABELS = {
    "bytes": "Bytes of a rank's array",
    "link": "Network link of a node",
    "nodes": "Nodes",
    "per-node": "Ranks per node",
    "error": "Allowed error of the result",
}


def shown(name: str, value: object) -> str:
    """Return a setting as the form shows it."""
    if name == "bytes":
        return str(value).replace("K", " KiB").replace("M", " MiB").replace("G", " GiB")
    if name == "link":
        return str(value).replace("gbit", " Gb/s")
    if name == "error":
        return f"{100 * float(str(value)):g} %"
    return str(value)


def form(table: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the form, which static/chooser.js shows and fills."""
    yield '<form id="chooser" class="chooser" hidden>'
    for name, values in table["settings"].items():
        first = next(place for place, value in enumerate(values) if str(value) == FIRST[name])
        label = f'<label for="choose-{name}">{escape(LABELS[name])}</label>'
        texts = [escape(shown(name, value)) for value in values]
        if name in ("bytes", "nodes"):  # many values in order
            kind = f'type="range" min="0" max="{len(values) - 1}" value="{first}"'
            field = f'<input id="choose-{name}" name="{name}" {kind} data-texts="{"|".join(texts)}">'
            yield f'<div class="setting">{label}{field}<output for="choose-{name}">{texts[first]}</output></div>'
        else:
            items = "".join(
                f'<option value="{place}"{" selected" * (place == first)}>{text}</option>'
                for place, text in enumerate(texts)
            )
            yield f'<div class="setting">{label}<select id="choose-{name}" name="{name}">{items}</select></div>'
    yield '<p class="chooser-answer" role="status" aria-live="polite"></p>'
    yield '<dl class="chooser-figures"></dl>'
    yield "<p>The same from the command line, and the call in a program:</p>"
    for name in ("command", "call"):
        yield f'<div class="highlight"><pre class="chooser-{name}"></pre></div>'
    yield "</form>"
    yield "<noscript><p>The form needs JavaScript. The tables below do not.</p></noscript>"
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
    yield f'<script type="application/json" id="chooser-table">{text}</script>'


class Answering(Directive):
    """A directive whose page is read again when the library has changed."""

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        for source in (Path(__file__), *Path(compcoll.__file__).parent.rglob("*.py")):
            env.note_dependency(str(source))
        return self.content_nodes()

    def content_nodes(self) -> list[nodes.Node]:
        raise NotImplementedError


class Chooser(Answering):
    """The form."""

    def content_nodes(self) -> list[nodes.Node]:
        return [nodes.raw("", "\n".join(form(answers())), format="html")]


def cell(size: str, link: str, ranks: int, error: float) -> str:
    """Return the choice for one rank per node, and its gain."""
    plan = chosen(profile_of(link), World(ranks), parse_bytes(size), error)
    if plan.codec is None:
        return "uncompressed"
    return f"**{gain(plan):.1f} ×** {plan.codec.label}, {plan.algorithm}"


class Choices(Answering):
    """A table for each number of ranks; its argument is the error that is allowed."""

    required_arguments = 1

    def content_nodes(self) -> list[nodes.Node]:
        error = float(self.arguments[0])
        lines = ["````{tab-set}"]
        for ranks in TABLE_RANKS:
            heads = " | ".join(shown("link", link) for link in TABLE_LINKS)
            lines += [f"```{{tab-item}} {ranks} ranks", "", f"| bytes | {heads} |"]
            lines.append("|---" * (1 + len(TABLE_LINKS)) + "|")
            for size in TABLE_SIZES:
                cells = " | ".join(cell(size, link, ranks, error) for link in TABLE_LINKS)
                lines.append(f"| {shown('bytes', size)} | {cells} |")
            lines += ["```", ""]
        holder = nodes.container()
        self.state.nested_parse(StringList([*lines, "````"]), self.content_offset, holder)
        return list(holder.children)


def add_script(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Load the form's script and style on its page only."""
    if page == PAGE:
        app.add_js_file("chooser.js", loading_method="defer")
        app.add_css_file("chooser.css")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("chooser", Chooser)
    app.add_directive("choices", Choices)
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True}
