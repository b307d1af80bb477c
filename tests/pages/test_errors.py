"""The page of the errors of sums: its figures, and which estimates count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from compcoll.codecs import ALL
from osu_like_bench.pages import errors


@pytest.mark.parametrize(
    ("error", "estimate", "expected"),
    [
        (0.1, 0.12, True),
        (0.1, 0.14, False),
        (0.1, 0.07, False),
        (0.1, None, None),
        (6e-8, 0.0, None),  # float32 rounds
        (11.0, 14.0, None),  # worth nothing
        (0.1, 14.0, False),
    ],
)
def test_estimates_that_count(error: float, estimate: float | None, expected: bool | None) -> None:
    assert errors.within({"error": error, "estimate": estimate}) is expected


def test_the_command_measures_every_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks estimates are nearly as good as on the page's 64."""
    path = tmp_path / "errors.json"
    monkeypatch.setattr(sys, "argv", ["errors", "--ranks", "4", "-m", "256K", "--json", str(path)])
    errors.main()
    rows = json.loads(path.read_text())["results"]
    assert {row["codec"] for row in rows} == {
        repr(cls(**one.options)) for cls in ALL if not cls.needs_reference for one in cls.examples
    }
    wrong = [row for row in rows if errors.within(row) is False and row["estimate"] < 1]
    assert not wrong
