"""No bit changes unseen: results, residuals and messages are those of `digests.txt`."""

from __future__ import annotations

from typing import Any

import pytest
from golden import golden

KEPT = golden.kept()


def cases() -> list[Any]:
    return [
        pytest.param(dtype, ranks, marks=[pytest.mark.slow] * (ranks != 1 and (dtype, ranks) != ("float32", 3)))
        for dtype, sizes in golden.RANKS.items()
        for ranks in sizes
    ]


def test_every_kind_of_call_has_its_digests() -> None:
    kinds = {str(kind) for dtype in golden.RANKS for kind in golden.kinds(dtype)}
    write = "run `python tests/golden/golden.py` and look at what differs in"
    assert kinds - set(KEPT) == set(), f"{write} {golden.FILE.name}, which lacks these kinds of calls"
    assert set(KEPT) - kinds == set(), f"{write} {golden.FILE.name}, which has kinds of calls that are no more"


@pytest.mark.parametrize(("dtype", "ranks"), cases())
def test_digests(dtype: str, ranks: int) -> None:
    at = 2 * golden.RANKS[dtype].index(ranks)
    found = golden.lines({dtype: [ranks]})
    # The test above names the kinds without digests.
    now = {str(kind): digest for kind, digest in found.items() if str(kind) in KEPT}
    changed = {kind: (KEPT[kind][at : at + 2], new) for kind, new in now.items() if new != KEPT[kind][at : at + 2]}
    assert not changed, f"{len(changed)} of {len(found)} kinds of calls, (kept, found): {changed}"
