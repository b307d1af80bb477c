"""No bit changes unseen: results, residuals and messages are those of `digests.txt`."""

from __future__ import annotations

from typing import Any

import pytest
from golden import golden

KEPT = golden.kept()


def cases() -> list[Any]:
    quick = {(dtype, 1) for dtype in golden.TYPES} | {("float32", 3)}
    return [
        pytest.param(dtype, ranks, marks=[pytest.mark.slow] * ((dtype, ranks) not in quick))
        for dtype in golden.TYPES
        for ranks in golden.RANKS
    ]


@pytest.mark.parametrize(("dtype", "ranks"), cases())
def test_digests(dtype: str, ranks: int) -> None:
    at = 2 * golden.RANKS.index(ranks)
    found = golden.lines([dtype], [ranks])
    changed = {
        str(kind): (KEPT[kind][at : at + 2], now) for kind, now in found.items() if now != KEPT[kind][at : at + 2]
    }
    assert not changed, f"{len(changed)} of {len(found)} kinds of calls, (kept, found): {changed}"
