"""The search for missing ranks when a wait has taken too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..errors import CommunicatorBroken, CompcollError, PeerTimeout
from ..pending import wait_until
from .failures import as_failure

_SECONDS_TO_ANSWER = 0.5
_WAITS = "waits: "


class Caller(Protocol):
    """The part of a `Connection` that announces to other ranks that this rank gives up."""

    rank: int
    size: int

    def announce(self, text: str) -> None: ...

    def announced(self) -> Mapping[int, str]: ...

    def failure(self, error: BaseException) -> CompcollError | None: ...

    def abandon(self) -> None: ...


class FailureDetector:
    """Finds missing ranks.

    A rank that gives up announces to all others what it waited for. Other waiting ranks receive this, give up as well,
    and announce what they waited for. A rank that does not answer is missing.

    Parameters
    ----------
    transport : Caller
        Connection between the ranks.
    seconds : float
        Seconds to wait for answers.
    """

    def __init__(self, transport: Caller, seconds: float = _SECONDS_TO_ANSWER) -> None:
        self._transport, self._seconds = transport, seconds
        self._failure: CompcollError | None = None
        self._announced = False

    def gave_up(self) -> bool:
        """Return whether some other rank has given up."""
        return bool(self._heard()) or self._failure is not None

    def _heard(self) -> Mapping[int, str]:
        try:
            return self._transport.announced()
        except Exception as error:
            failure = self._transport.failure(error) or as_failure(error, self._transport.rank)
            assert isinstance(failure, CompcollError)
            self._failure = failure
            return {}

    def announce(self, error: BaseException) -> None:
        """Announce to all other ranks why this rank gives up, unless it has already announced something."""
        if self._announce_once(f"{type(error).__name__}: {error}"):
            self._transport.abandon()

    def _announce_once(self, text: str) -> bool:
        """Announce a text unless this rank has already announced something; return whether it did."""
        if self._announced:
            return False
        self._announced = True
        self._transport.announce(text)
        return True

    def ask(self, waiting: str, limit: float) -> CompcollError:
        """Give up, after ``limit`` seconds or because another rank did.

        Inform all other ranks, find the missing ranks, and return the error to raise.
        """
        first = sorted(self._heard())
        self._announce_once(f"{_WAITS}{waiting}")
        others = self._transport.size - 1
        wait_until(lambda: self._failure is not None or len(self._heard()) >= others, self._seconds)
        heard = dict(self._heard())
        self._transport.abandon()
        if self._failure is not None:
            return self._failure
        reasons = {rank: text for rank, text in heard.items() if not text.startswith(_WAITS)}
        if reasons:
            return CommunicatorBroken("; ".join(f"rank {rank} gave up: {text}" for rank, text in reasons.items()))
        missing = tuple(r for r in range(self._transport.size) if r != self._transport.rank and r not in heard)
        why = f"{_listed(first)} gave up" if first else f"nothing came for {limit:g} s"
        parts = [f"{why}: {waiting}"]
        if missing:
            parts.append(f"{_listed(missing)} did not answer")
        waits: dict[str, list[int]] = {}
        for rank, text in sorted(heard.items()):
            waits.setdefault(text.removeprefix(_WAITS), []).append(rank)
        parts += [f"{_listed(ranks)} wait{'s' * (len(ranks) == 1)} in {text}" for text, ranks in waits.items()]
        return PeerTimeout("; ".join(parts), missing)


def _listed(ranks: list[int] | tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
