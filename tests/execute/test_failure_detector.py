"""What a rank asks, tells and learns when it has waited too long: by a transport that says what a test has it say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World

from compcoll.errors import CollectiveFailed, CommunicatorBroken, CompcollError, PeerFailed, PeerTimeout
from compcoll.execute import failure_detector
from compcoll.execute.compiled_plan import CompiledPlan
from compcoll.execute.failure_detector import FailureDetector
from compcoll.execute.failures import as_failure


class Answers:
    """Four ranks, of which this is rank 1; the others announce something so many seconds after the clock's begin."""

    rank, size = 1, 4

    def __init__(self, monkeypatch: pytest.MonkeyPatch, texts: dict[int, tuple[float, str]]) -> None:
        self.now, self.texts = 100.0, texts
        self.told: list[str] = []
        self.abandoned = 0
        self.error: Exception | None = None
        self.meaning: CompcollError | None = None
        monkeypatch.setattr(failure_detector, "wait_until", self._wait_until)

    def _wait_until(self, test: Callable[[], bool], seconds: float) -> bool:
        deadline = self.now + seconds
        while not test():
            if self.now > deadline:
                return False
            self.now += 0.004
        return True

    def announced(self) -> dict[int, str]:
        if self.error is not None:
            raise self.error
        return {rank: text for rank, (seconds, text) in self.texts.items() if self.now - 100 >= seconds}

    def announce(self, text: str) -> None:
        self.told.append(text)

    def abandon(self) -> None:
        self.abandoned += 1

    def failure(self, error: BaseException) -> CompcollError | None:
        return self.meaning


def ask(answers: Answers, limit: float = 2.5) -> CompcollError:
    return FailureDetector(answers).ask("allreduce by ring", limit)  # type: ignore[arg-type]


def test_who_does_not_answer_within_half_a_second_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {3: (0.2, "waits: bcast"), 0: (0.45, "waits: bcast"), 2: (0.6, "waits: late")})
    error = ask(answers)
    assert type(error) is PeerTimeout and error.missing == (2,)
    assert str(error) == ("nothing came for 2.5 s: allreduce by ring; rank 2 did not answer; ranks 0, 3 wait in bcast")
    assert answers.now == pytest.approx(100.5, abs=0.01) and answers.abandoned == 1
    assert answers.told == ["waits: allreduce by ring"]


def test_nobody_is_waited_for_who_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {0: (0, "waits: a"), 2: (0.1, "waits: b"), 3: (0, "waits: a")})
    error = ask(answers)
    assert type(error) is PeerTimeout and error.missing == ()
    assert str(error) == "ranks 0, 3 gave up: allreduce by ring; ranks 0, 3 wait in a; rank 2 waits in b"
    assert answers.now == pytest.approx(100.1, abs=0.01)


def test_reasons_come_before_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {0: (0, "waits: a"), 2: (0.3, "WireCorrupted: bad"), 3: (0.4, "KeyError: 7")})
    error = ask(answers)
    assert type(error) is CommunicatorBroken
    assert str(error) == "rank 2 gave up: WireCorrupted: bad; rank 3 gave up: KeyError: 7"
    assert answers.abandoned == 1


def test_each_rank_tells_once_why_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {})
    call = FailureDetector(answers)  # type: ignore[arg-type]
    assert not call.gave_up()
    for text in ("first", "second"):
        call.announce(PeerTimeout(text))
    assert answers.told == ["PeerTimeout: first"] and answers.abandoned == 1
    call.ask("anything", 1.0)
    assert answers.told == ["PeerTimeout: first"] and answers.abandoned == 2
    other = Answers(monkeypatch, {2: (0, "waits: x")})
    call = FailureDetector(other)  # type: ignore[arg-type]
    assert call.gave_up() and isinstance(call.ask("mine", 1.0), PeerTimeout)
    call.announce(PeerTimeout("mine"))
    assert other.told == ["waits: mine"]


@pytest.mark.parametrize("meaning", [PeerFailed("rank 3 has died", (3,)), None])
def test_who_cannot_hear_the_others_says_so(meaning: CompcollError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: MPI's error, or what the transport makes of it."""
    answers = Answers(monkeypatch, {})
    answers.error, answers.meaning = OSError("no route"), meaning
    call = FailureDetector(answers)  # type: ignore[arg-type]
    assert call.gave_up()
    answers.error = None
    assert call.gave_up()  # what was found out stays so
    answers.error = OSError("no route")
    error = call.ask("mine", 1.0)
    assert answers.now == 100 and answers.abandoned == 1
    if meaning is None:
        assert type(error) is CollectiveFailed and str(error) == "rank 1, a collective: OSError: no route"
        assert isinstance(error.__cause__, OSError)
    else:
        assert error is meaning


def test_names_of_errors() -> None:
    """Who, in which call, and the first line of what was raised; ours, and interrupts, are as they are."""
    comm = World(2).comms[0]
    plan = comm._collectives.check("allreduce", np.ones(8, np.float32), "sum", None, None, ("minmax", "ring", {}))[0]
    assert isinstance(plan, CompiledPlan)
    for untouched in (PeerTimeout("late"), KeyboardInterrupt(), SystemExit(3)):
        assert as_failure(untouched, 5, plan) is untouched
    of_mpi: Any = type("Exception", (Exception,), {"__module__": "mpi4py.MPI"})
    told = as_failure(of_mpi("MPI_ERR_TRUNCATE, error stack:\ninternal(3): x"), 5, None, plan)
    assert type(told) is CollectiveFailed and isinstance(told.__cause__, of_mpi)
    assert str(told) == f"rank 5, {plan.plan.signature.call}: MPI: MPI_ERR_TRUNCATE"
    assert str(as_failure(ValueError("odd\neven"), 0)) == "rank 0, a collective: ValueError: odd"
