"""Thousands of collectives under way: what each costs does not grow with their number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World

from compcoll.execute.engine import Request
from compcoll.pending import OrderingTicket

FEW, MANY = 100, 3000


def steps_each(count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> float:
    """How often a collective, or what it waits for, is looked at while so many of two ranks end; both in turns."""
    world = World(2, seed=None)
    looks: Counter[str] = Counter()
    advance, test = Request._advance, OrderingTicket.Test

    def counted_advance(request: Request, *patience: Any) -> bool:
        looks["requests"] += 1
        return advance(request, *patience)

    def counted_test(ticket: OrderingTicket) -> bool:
        looks["turns"] += 1
        return test(ticket)

    with monkeypatch.context() as patched:
        patched.setattr(Request, "_advance", counted_advance)
        patched.setattr(OrderingTicket, "Test", counted_test)
        pending = [
            [comm.iallreduce(np.full(50, n, np.float32), **options) for n in range(count)] for comm in world.comms
        ]
        while any(not requests[-1].done for requests in pending):
            for requests in pending:
                requests[-1].test()
    for requests in pending:
        for n, request in enumerate(requests):
            np.testing.assert_allclose(request.wait(), np.full(50, 2.0 * n), rtol=0.05)
    return looks.total() / count


@pytest.mark.parametrize(
    "options", [{}, {"codec": "zfp", "rate": 16, "algorithm": "ring"}, {"algorithm": "direct"}], ids=str
)
def test_looks_do_not_grow(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (steps_each(count, monkeypatch, **options) for count in (FEW, MANY))
    assert many < 1.5 * few, (few, many)
