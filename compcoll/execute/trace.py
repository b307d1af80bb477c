"""Timelines of collectives: with COMPCOLL_TRACE=folder each rank writes its own to ``folder/rank-N.json``.

A file is an array of events, one per line, in the format of Chrome's traces, which Perfetto and chrome://tracing show.
The closing bracket is optional there, so the file of a killed process can be loaded, too.

"Trace Event Format", Google, 2016: metadata ("M") and complete ("X") events in the JSON array format.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import config
from ..errors import InvalidArgument
from ..kernels._host import Collective, Operation, Program
from ..layout import amount
from ..pending import Pending, Steps
from ..stats import HANDSHAKE, OPERATION, WAIT, WIRE, Span, Stats
from ..transports.base import Connection, Group, Transport, Wire
from ..transports.nodes import host_name
from .compiled_plan import CompiledPlan, Run
from .programs import received, sent

PERIOD = 30 * 86400 * 10**9
"""Timestamps count from the last multiple of this, in nanoseconds since 1970, so that a double holds each of them."""

_lock = threading.Lock()
_files: dict[tuple[Path, int], _File] = {}


class _File:
    """The file of one rank, which all its communicators share."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank-{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        except OSError as error:
            raise InvalidArgument(
                f"{config.TRACE}={str(folder)!r} in the environment: rank {rank} cannot write {path.name} there "
                f"({error.strerror}): name a folder that every rank can create or write to, or unset {config.TRACE}"
            ) from error
        self._path, self._rank = path, rank
        self._separator = "[\n"
        self._offset = _realtime_offset()
        self._base = (time.perf_counter_ns() + self._offset) // PERIOD * PERIOD
        self._threads: dict[str, int] = {}
        self._communicators: dict[str, int] = {}
        host = host_name()
        about = {"name": f"rank {rank} on {host.split()[0]}", "host": host, "base_ns": self._base}
        self.write([self._metadata("process_name", 0, about)])

    def communicator(self, ranks: Sequence[int]) -> tuple[str, str]:
        """Return an identity for a new communicator, equal on all its ranks, and the prefix of its threads' names."""
        of_ranks = f"{len(ranks)} ranks {zlib.crc32(repr(list(ranks)).encode()):08x}"
        number = self._communicators[of_ranks] = self._communicators.get(of_ranks, 0) + 1
        return f"{of_ranks} {number}", f"communicator {sum(self._communicators.values())}"

    def nanoseconds(self, seconds: float) -> int:
        """Convert a time of `time.perf_counter` to CLOCK_REALTIME, in nanoseconds from the file's base."""
        return round(seconds * 1e9) + self._offset - self._base

    def event(self, kind: str, name: str, thread: str, begun: int, ended: int, args: dict[str, Any]) -> list[str]:
        """Return the lines of an event, in nanoseconds. Before a thread's first event, a line names the thread."""
        lines = []
        if thread not in self._threads:
            self._threads[thread] = len(self._threads) + 1
            lines.append(self._metadata("thread_name", self._threads[thread], {"name": thread}))
        times = {"ts": begun / 1000, "dur": (ended - begun) / 1000}
        place = {"pid": self._rank, "tid": self._threads[thread]}
        return [*lines, json.dumps({"name": name, "cat": kind, "ph": "X", **times, **place, "args": args})]

    def _metadata(self, name: str, thread: int, args: dict[str, Any]) -> str:
        return json.dumps({"name": name, "ph": "M", "pid": self._rank, "tid": thread, "args": args})

    def write(self, lines: list[str]) -> None:
        with self._path.open("a") as file:
            file.write(self._separator + ",\n".join(lines))
        self._separator = ",\n"


class Trace:
    """The timeline of one communicator's collectives on this rank. Each is written when it ends.

    Parameters
    ----------
    folder : Path
        The folder of the files; created if it is missing.
    ranks : sequence of int
        The number of each of the communicator's ranks in the whole job.
    rank : int
        This rank in the communicator.

    Raises
    ------
    InvalidArgument
        If the file cannot be written.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], rank: int) -> None:
        key = folder.resolve(), ranks[rank]
        with _lock:
            if key not in _files:
                _files[key] = _File(*key)
            self._file = _files[key]
            self._identity, self._threads = self._file.communicator(ranks)
        self._calls: list[int] = []  # the last end in each row of calls: requests in flight overlap
        self._failed = False

    @classmethod
    def of(cls, connection: Connection) -> Trace | None:
        """Return the trace of a new communicator; None if COMPCOLL_TRACE is not set."""
        folder = config.trace()
        return cls(Path(folder), connection.global_ranks(), connection.rank) if folder else None

    def write(self, plan: CompiledPlan, stats: Stats, number: int, begun: float) -> None:
        """Write a collective that has just ended, with the steps in ``stats.spans``, and remove these.

        Parameters
        ----------
        plan, stats : CompiledPlan, Stats
            What ran.
        number : int
            Its sequence number, equal on all ranks.
        begun : float
            Its begin by `time.perf_counter`.
        """
        spans, stats.spans = stats.spans or [], None
        if self._failed:
            return
        ended, codec = time.perf_counter(), plan.plan.codec
        coded = "" if codec is None or stats.codec is None else f"{codec.name} "
        with _lock:
            first, last = self._file.nanoseconds(begun), self._file.nanoseconds(ended)
            row = _row(self._calls, first, last)
            calls = f"{self._threads}, calls{_numbered(row)}"
            identity = {"communicator": self._identity, "number": number}
            lines = self._file.event(
                "call",
                f"{stats.collective} {coded}{stats.algorithm} {amount(stats.raw_nbytes)}",
                *(calls, first, last),
                {"bytes": stats.raw_nbytes, "wire_bytes": stats.wire_nbytes, "codec": stats.codec, **identity},
            )
            before, messages = first, list[int]()
            for kind, begin, end, nbytes, name in sorted(spans, key=lambda span: span[1]):
                at, to = self._file.nanoseconds(begin), self._file.nanoseconds(end)
                thread = calls
                if kind == WIRE:
                    at, to = max(at, first), min(to, last)
                    thread = f"{self._threads}, messages{_numbered(row)} {_row(messages, at, to) + 1:03}"
                else:  # rounding a time to a nanosecond must not make steps overlap
                    at = max(at, before)
                    before = to = min(max(at, to), last)
                args = identity if kind == HANDSHAKE else {"bytes": nbytes}
                lines += self._file.event(kind, name or kind, thread, at, to, args)
            try:
                self._file.write(lines)
            except OSError as error:
                self._failed = True
                warnings.warn(f"the trace ends here, since it cannot be written: {error}", stacklevel=2)


def recorded(call: Collective, operation: Operation | None, algorithm: str, nbytes: int) -> list[Span]:
    """Return the steps of a collective that has just ended: its handshake, and those of the operation that ran it.

    Parameters
    ----------
    call, operation : Collective, Operation or None
        What ran the collective, both with a record of times. Without an operation, a generator ran it.
    algorithm : str
        The name of the step of an operation that has no steps of its own.
    nbytes : int
        Bytes of the rank's buffer.
    """
    begun, agreed, ended = call.times
    spans: list[Span] = [(HANDSHAKE, begun, agreed, 0, "")]
    if isinstance(operation, Program):
        spans += operation.spans
    elif operation is not None:
        spans.append((OPERATION, agreed, ended or time.perf_counter(), nbytes, algorithm))
    return spans


def steps_of(start: Callable[[Run], Steps], run: Run) -> Steps:
    """Return the generator that runs a collective. If the run has spans, it adds its waits and messages to them."""
    spans = run.stats.spans
    if spans is None:
        return start(run)
    return _with_waits(
        start(replace(run, group=Group(with_messages(run.group.transport, spans), run.group.tag))), spans
    )


def _with_waits(steps: Steps, spans: list[Span]) -> Steps:
    while True:
        try:
            pending = next(steps)
        except StopIteration as end:
            return end.value
        begun = time.perf_counter()
        yield pending
        if pending is not None:
            spans.append((WAIT, begun, time.perf_counter(), 0, ""))


def with_messages(transport: Transport, spans: list[Span] | None) -> Transport:
    """Return a transport that adds its messages to the spans, unless they are None."""
    return transport if spans is None else _TracedTransport(transport, spans)


class _TracedTransport:
    """A transport that records its messages (implements `compcoll.transports.base.Transport`)."""

    def __init__(self, transport: Transport, spans: list[Span]) -> None:
        self.rank, self.size, self.nodes = transport.rank, transport.size, transport.nodes
        self._transport, self._spans = transport, spans

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        return _TracedMessage(self._transport.isend(wire, dest, tag), wire, sent(dest), self._spans)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return _TracedMessage(self._transport.irecv(wire, source, tag), wire, received(source), self._spans)


class _TracedMessage:
    """A message that records when it was started and when it was known to have completed."""

    def __init__(self, message: Pending, wire: Wire, name: str, spans: list[Span]) -> None:
        self._message, self._wire, self._name, self._spans = message, wire, name, spans
        self._begun = time.perf_counter()

    def Test(self) -> bool:
        if not self._message.Test():
            return False
        self._spans.append((WIRE, self._begun, time.perf_counter(), self._wire.nbytes, self._name))
        return True

    def __repr__(self) -> str:
        return repr(self._message)


def _realtime_offset() -> int:
    """Return what to add to `time.perf_counter_ns` for nanoseconds since 1970: from the quickest of some readings."""
    readings = []
    for _ in range(10):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def _row(ends: list[int], begun: int, ended: int) -> int:
    """Return the first row whose last span ended before this one begins, and put this one there."""
    row = next((row for row, end in enumerate(ends) if end <= begun), len(ends))
    ends[row:] = [ended, *ends[row + 1 :]]
    return row


def _numbered(row: int) -> str:
    return f" {row + 1}" if row else ""
