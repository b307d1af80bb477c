"""No bit changes unseen: results, residuals and messages are those of `digests.txt`."""

from __future__ import annotations

import pytest
from golden import golden

KEPT = golden.kept()


@pytest.mark.parametrize("dtype", golden.TYPES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (1, 3))) for n in golden.RANKS])
def test_digests(dtype: str, ranks: int) -> None:
    at = 2 * golden.RANKS.index(ranks)
    found = golden.lines([dtype], [ranks])
    changed = {
        str(kind): (KEPT[kind][at : at + 2], now) for kind, now in found.items() if now != KEPT[kind][at : at + 2]
    }
    assert not changed, f"{len(changed)} of {len(found)} kinds of calls, (kept, found): {changed}"
