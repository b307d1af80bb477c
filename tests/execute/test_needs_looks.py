"""Collectives of MPI's own get on only while they are looked at: nobody naps meanwhile, unless it takes too long."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from compcoll import pending as steps
from compcoll.errors import CompcollError, PeerTimeout
from compcoll.execute import engine
from compcoll.execute.engine import Engine, Request
from compcoll.pending import NeedsPolling, Pending
from compcoll.stats import Stats


class Alone:
    """Nobody else is there."""

    def gave_up(self) -> bool:
        return False

    def ask(self, waiting: str, limit: float) -> CompcollError:
        return PeerTimeout(f"nothing came for {limit:g} s")


class AfterLooks:
    """Has come after so many looks, of some microseconds each."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def Test(self) -> bool:
        self.looks -= 1
        until = time.perf_counter() + 5e-6
        while time.perf_counter() < until:
            pass
        return self.looks <= 0


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the engine has napped."""
    found: list[float] = []
    sleep = time.sleep

    class Clock:
        monotonic, perf_counter = staticmethod(time.monotonic), staticmethod(time.perf_counter)

        @staticmethod
        def sleep(seconds: float) -> None:
            found.append(time.monotonic())
            sleep(seconds)

    monkeypatch.setattr(engine, "time", Clock)
    return found


def blocking(waits: Engine, pending: Pending) -> None:
    waits.follow(each for each in (pending,))


def nonblocking(waits: Engine, pending: Pending) -> None:
    request = Request()
    request.begin((each for each in (pending,)), Stats("", None, ""), waits, release=lambda error: error)
    waits.start(request)
    del pending
    request.wait()


@pytest.mark.parametrize("wait", [blocking, nonblocking])
def test_nobody_naps_while_it_is_under_way(wait: Any, sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SPIN_SECONDS", 60.0)
    waits = Engine(60.0, Alone())
    wait(waits, NeedsPolling(AfterLooks(300), 0))
    assert not sleeps and steps.spin_seconds() == 0.0
    wait(waits, AfterLooks(300))
    assert sleeps


def test_others_waits_do_not_nap_either(sleeps: list[float]) -> None:
    needy = NeedsPolling(AfterLooks(float("inf")), 600_000_000)
    assert 60.0 < steps.spin_seconds() < 61.0
    waits = Engine(60.0, Alone())
    blocking(waits, AfterLooks(300))
    assert not sleeps
    del needy
    blocking(waits, AfterLooks(300))
    assert sleeps


def test_naps_begin_where_a_rank_must_have_been_stopped(sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SPIN_SECONDS", 0.05)
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"nothing came for 0\.2 s"):
        blocking(Engine(0.2, Alone()), NeedsPolling(AfterLooks(float("inf")), 100))
    assert sleeps and sleeps[0] >= begun + 0.05


def test_they_come_and_go_in_many_threads() -> None:
    def come_and_go(_: int) -> None:
        for _ in range(500):
            needy = NeedsPolling(AfterLooks(1), 10)
            assert needy.Test() and steps.spin_seconds() > 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert not steps._spin_seconds
