"""Colours of the pages' pictures. One picture serves light and dark pages, since its background is transparent."""

from __future__ import annotations

from contextlib import AbstractContextManager

TEXT = "#7b7b7b"
COLOURS = (
    "#2a7fc0",
    "#d1690f",
    "#2c9a2c",
    "#dc3c3c",
    "#9467bd",
    "#a0664f",
    "#cf5aab",
    "#7f7f7f",
    "#8d8d1c",
    "#1391a1",
)
"""Blue, orange, green, red, purple, brown, pink, grey, olive and cyan: matplotlib's own, made darker or lighter."""


def for_both_schemes() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws with colours that are readable on white and on near black."""
    import matplotlib
    from cycler import cycler

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    settings: dict[str, object] = dict.fromkeys(names, TEXT)
    settings |= {"savefig.transparent": True, "legend.framealpha": 0.0, "legend.edgecolor": TEXT}
    settings["axes.prop_cycle"] = cycler(color=COLOURS)
    return matplotlib.rc_context(settings)  # type: ignore[arg-type]
