"""Pictures of the pages are readable on light and on dark pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from osu_like_bench.pages.pictures import COLOURS, TEXT, for_both_schemes

BACKGROUNDS = ("#ffffff", "#0d1117", "#131416")
"""A white page, a forge's dark one, and furo's."""


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_colours_stand_out(background: str) -> None:
    assert min(contrast(colour, background) for colour in COLOURS) > 3.5  # WCAG asks 3 of graphics
    assert contrast(TEXT, background) > 4.2  # black on white has 21; no colour has more than 4.35 on all three


def test_a_picture_is_transparent(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    with for_both_schemes():
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot([0, 1], [0, 1])
        figure.savefig(tmp_path / "line.png")
    assert imread(tmp_path / "line.png")[0, 0, 3] == 0


def test_stored_pictures_are_transparent() -> None:
    """All of docs/measurements: `python -m osu_like_bench.pages PAGE --report` draws them again."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    pictures = sorted((Path(__file__).parents[2] / "docs" / "measurements").glob("*.png"))
    assert len(pictures) > 5
    assert [path.name for path in pictures if imread(path)[0, 0, 3] != 0] == []
