"""Show which kernels, copies and messages overlap in an allreduce of GPU memory, on one clock.

    python launch/gpu_timeline.py --ranks 2 --json timeline.json     # in this process
    launch/mpirun -n 2 python launch/gpu_timeline.py --json timeline.json

For each segment length, the program prints a picture of rank 0, and for each rank how much of kernel time or wire time,
whichever is shorter, overlaps with the other. Wire time consists of copies to and from pinned memory or from another
process's memory, and of messages, from the post until `Test` reports completion. Processes that share a GPU use it in
time slices, so overlap on the GPU is visible only with --ranks: then all ranks are in one process, and messages are
copies in memory. The JSON file opens in chrome://tracing and Perfetto; a PNG picture is written beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from compcoll import Communicator, Request, config
from compcoll.transports.loopback import Loopback

LANES = ("encode", "decode", "copy", "send")
KERNELS, WIRE = LANES[:2], LANES[2:]
SEGMENTS = (1 << 20, 4 << 20, 16 << 20)

_WARM_UP = 3
_PATIENCE = 10**8  # rounds without progress before Loopback reports a deadlock
_COLUMNS = 100

Interval = tuple[float, float]


class Span(NamedTuple):
    """A kernel, copy or message: one of `LANES`, and its begin and end in seconds of `perf_counter`."""

    lane: str
    begin: float
    end: float


def union(spans: Iterable[Span], lanes: Sequence[str]) -> list[Interval]:
    """Return the intervals in which at least one of these lanes was busy, in order and without overlaps."""
    found: list[Interval] = []
    for _, begin, end in sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals."""
    return sum(end - begin for begin, end in intervals)


def both(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return for how long two sequences of intervals overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def hidden(spans: Sequence[Span]) -> float:
    """Return which part of the shorter of kernel time and wire time overlaps with the other."""
    kernels, wire = union(spans, KERNELS), union(spans, WIRE)
    shorter = min(length(kernels), length(wire))
    return both(kernels, wire) / shorter if shorter else 0.0


def picture(spans: Sequence[Span]) -> list[str]:
    """Return a text line per lane: ``#`` where it was busy for at least half of a column's time, ``.`` for less."""
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    column = max((last - first) / _COLUMNS, 1e-9)
    lines = []
    for lane in LANES:
        busy = union(spans, (lane,))
        edges = [first + column * place for place in range(_COLUMNS + 1)]
        parts = [both(busy, [pair]) / column for pair in pairwise(edges)]
        lines.append(f"{lane:<8}" + "".join("#" if part >= 0.5 else "." if part else " " for part in parts))
    return lines


def plot(timelines: Sequence[tuple[str, Sequence[Span]]], path: str) -> None:
    """Draw timelines, each with its title, one above the other.

    Parameters
    ----------
    timelines : sequence of (str, sequence of Span)
        The titles and timelines.
    path : str
        The picture's file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(timelines), squeeze=False, figsize=(10, 2 * len(timelines)), layout="tight")
    for axis, (title, spans) in zip(axes[:, 0], timelines, strict=True):
        first = min(span.begin for span in spans)
        for row, lane in enumerate(LANES):
            bars = [((span.begin - first) * 1e3, (span.end - span.begin) * 1e3) for span in spans if span.lane == lane]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
        axis.set(title=title, xlabel="ms", yticks=range(len(LANES)), yticklabels=LANES)
        axis.invert_yaxis()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


class _Sent:
    """The request of a send that records its time."""

    def __init__(self, message: Any, spans: list[Span]) -> None:
        self._message, self._spans = message, spans
        self._begin, self._done = perf_counter(), False

    def Test(self) -> bool:
        if not self._done and self._message.Test():
            self._done = True
            self._spans.append(Span("send", self._begin, perf_counter()))
        return self._done


class Recorder:
    """Context manager that records a communicator's kernels, copies and sent messages.

    Parameters
    ----------
    communicator : Communicator
        A communicator that has already run a collective of GPU arrays.

    Attributes
    ----------
    spans : list of Span
        The recorded spans, after the block.
    """

    def __init__(self, communicator: Communicator) -> None:
        import cupy

        assert communicator._gpu is not None
        self._cuda = cupy.cuda
        self._runtime, self._transport = communicator._gpu._here.runtime, communicator._gpu._transport
        self._events: list[tuple[str, Any, Any]] = []
        self.spans: list[Span] = []

    def __enter__(self) -> Recorder:
        runtime, transport = self._runtime, self._transport
        launch, copy, isend = runtime.launch, runtime.copy, transport.isend

        def launched(program: Any, launches: Any) -> None:
            if launches:
                lane = "decode" if launches[-1].function.startswith("decode") else "encode"
                self._timed(lane, runtime.launching, lambda: launch(program, launches))

        def copied(source: Any, target: Any, nbytes: int, stream: Any) -> None:
            self._timed("copy", stream, lambda: copy(source, target, nbytes, stream))

        runtime.launch, runtime.copy = launched, copied
        transport.isend = lambda *message: _Sent(isend(*message), self.spans)
        runtime.device.synchronize()
        self._origin = self._event(self._cuda.Stream.null)
        self._origin.synchronize()
        self._started = perf_counter()
        return self

    def _event(self, stream: Any) -> Any:
        with self._runtime.current:
            event = self._cuda.Event()
            event.record(stream)
            return event

    def _timed(self, lane: str, stream: Any, work: Any) -> None:
        begin = self._event(stream)
        work()
        self._events.append((lane, begin, self._event(stream)))

    def __exit__(self, *_: object) -> None:
        del self._runtime.launch, self._runtime.copy, self._transport.isend
        self._runtime.device.synchronize()
        for lane, *ends in self._events:
            begin, end = (self._cuda.get_elapsed_time(self._origin, event) / 1e3 for event in ends)
            self.spans.append(Span(lane, self._started + begin, self._started + end))


class Recorded(NamedTuple):
    """One call on one rank.

    Attributes
    ----------
    seconds : float
        Time until the GPU had finished.
    host_seconds : float
        Time until the call returned; with several ranks in one process, until all calls had returned.
    messages : int
        Number of messages that this rank sent, including those of the handshake.
    spans : list of Span
        Kernels, copies and messages of this rank.
    """

    seconds: float
    host_seconds: float
    messages: int
    spans: list[Span]


def record(
    ranks: Sequence[Communicator], n: int, wait: Callable[[list[Request]], object], **options: Any
) -> list[Recorded]:
    """Record one allreduce of ``n`` float32 values on the ranks in this process."""
    import cupy

    rngs = [np.random.default_rng(communicator.rank) for communicator in ranks]
    arrays = [cupy.asarray(rng.standard_normal(n, dtype=np.float32)) for rng in rngs]
    results = [cupy.empty_like(x) for x in arrays]

    def run() -> None:
        wait([each.iallreduce(x, out=out, **options) for each, x, out in zip(ranks, arrays, results, strict=True)])

    for _ in range(_WARM_UP):
        run()
    with ExitStack() as stack:
        recorders = [stack.enter_context(Recorder(communicator)) for communicator in ranks]
        started = perf_counter()
        run()
        returned = perf_counter()
        recorders[0]._runtime.device.synchronize()
        ended = perf_counter()
    return [
        Recorded(ended - started, returned - started, sum(span.lane == "send" for span in each.spans), each.spans)
        for each in recorders
    ]


def record_here(ranks: int, n: int, **options: Any) -> list[Recorded]:
    """Record an allreduce of several ranks, all in this process."""
    world = Loopback(ranks)
    communicators = [Communicator(transport) for transport in world.transports]
    return record(communicators, n, lambda requests: world.run(requests, _PATIENCE), **options)


def record_there(n: int, **options: Any) -> list[Recorded] | None:
    """Record an allreduce of MPI's ranks. Return all records on rank 0, and None on other ranks."""
    from mpi4py import MPI

    communicator = Communicator()
    (own,) = record([communicator], n, lambda requests: [request.wait() for request in requests], **options)
    communicator.free()
    recorded: list[Recorded] | None = MPI.COMM_WORLD.gather(own)
    return recorded


def main() -> None:
    """Record allreduces for several segment lengths; print the results, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=64 << 20, help="bytes of each rank's array (default: 64 MB)")
    parser.add_argument("--ranks", type=int, default=0, help="run this many ranks in this process, instead of MPI's")
    parser.add_argument("--json", help="write the trace to this file, and a picture beside it")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"codec": "zfp", "rate": 8, "algorithm": "ring"}
    results: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    timelines: list[tuple[str, list[Span]]] = []
    for segment in SEGMENTS:
        os.environ[config.SEGMENT] = str(segment)
        n = arguments.size // 4
        recorded = record_here(arguments.ranks, n, **options) if arguments.ranks else record_there(n, **options)
        for rank, (seconds, host_seconds, messages, spans) in enumerate(recorded or []):
            results.append(
                {
                    "segment": segment,
                    "rank": rank,
                    "processes": 1 if arguments.ranks else len(recorded or []),
                    "ms": seconds * 1e3,
                    "host_ms": host_seconds * 1e3,
                    "messages": messages,
                    "kernels_ms": length(union(spans, KERNELS)) * 1e3,
                    "wire_ms": length(union(spans, WIRE)) * 1e3,
                    "hidden": hidden(spans),
                    "picture": picture(spans),
                }
            )
            for lane, begin, end in spans:
                place = {"pid": f"segments of {segment}, rank {rank}", "tid": lane}
                trace.append({"name": lane, "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6, **place})
            if rank == 0:
                print(f"segments of {segment}:", *picture(spans), sep="\n")
                timelines.append((f"segments of {segment >> 20} MiB, {hidden(spans):.0%} hidden", spans))
            print(
                "rank {rank}: {ms:.2f} ms, of the host {host_ms:.2f} for {messages} messages, kernels "
                "{kernels_ms:.2f}, wire {wire_ms:.2f}, hidden {hidden:.0%}".format(**results[-1])
            )
    if results and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"traceEvents": trace, "results": results}, file)
        plot(timelines, os.path.splitext(arguments.json)[0] + ".png")


if __name__ == "__main__":
    main()
