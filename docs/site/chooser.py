"""A directive, ``chooser``: tables of what `python -m compcoll choose` says, made when the site is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, Link
from compcoll.tools.arguments import parse_bytes, parse_speed
from compcoll.tools.choose import chosen, gain

LINKS = ("1gbit", "10gbit", "25gbit", "100gbit")
SIZES = ("64K", "1M", "16M", "100M", "1G")
RANKS = (2, 4, 16, 64)


def cell(size: str, link: str, ranks: int, error: float) -> str:
    """What is chosen, and its gain."""
    profile = replace(DEFAULTS, between=Link(DEFAULTS.between.latency, 1 / parse_speed(link)))
    plan = chosen(profile, World(ranks), parse_bytes(size), error)
    if plan.codec is None:
        return "uncompressed"
    return f"**{gain(plan):.1f} ×** {plan.codec.label}, {plan.algorithm}"


class Chooser(Directive):
    """A table for each number of ranks; its argument is the error that is allowed."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        error = float(self.arguments[0])
        lines = ["````{tab-set}"]
        for ranks in RANKS:
            lines += [f"```{{tab-item}} {ranks} ranks", "", f"| bytes | {' | '.join(LINKS)} |", "|---" * 5 + "|"]
            for size in SIZES:
                lines.append(f"| {size} | {' | '.join(cell(size, link, ranks, error) for link in LINKS)} |")
            lines += ["```", ""]
        holder = nodes.container()
        self.state.nested_parse(StringList([*lines, "````"]), self.content_offset, holder)
        return list(holder.children)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("chooser", Chooser)
    return {"parallel_read_safe": True}
