"""What users see of their calls: warnings, lines in the log, and ranges in profiles."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World
from fakes.threads import on_ranks, world

from compcoll import AccuracyWarning, Communicator, ErrorFeedback, Int8, MinMax
from compcoll.errors import CollectiveFailed, CollectiveMismatch, InvalidArgument
from compcoll.execute import observation
from compcoll.stats import Stats

X = np.linspace(-1, 1, 4096, dtype=np.float32)
COARSE: dict[str, Any] = {"codec": MinMax(bits=2), "algorithm": "ring"}
FINE: dict[str, Any] = {"codec": Int8(), "algorithm": "ring"}
Log = Callable[[int], Callable[[], list[str]]]
NAME = "compcoll::allreduce int8 ring 16 KiB"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """`log(level)`: listen from this level on; gives a function that returns the lines since then."""

    def listen(level: int) -> Callable[[], list[str]]:
        caplog.set_level(level, "compcoll")
        caplog.clear()
        return lambda: caplog.messages

    return listen


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that PyTorch's profiler would have, in the order of their beginnings and ends."""
    ranges: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            ranges.append(f"<{self.name}")

        def __exit__(self, *_: object) -> None:
            ranges.append(f"{self.name}>")

    module = SimpleNamespace(_is_profiler_enabled=True, record_function=Range)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)  # type: ignore[arg-type]
    return ranges


def warned(comms: World, **options: Any) -> list[str]:
    """The texts of the warnings of an allreduce."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        comms.allreduce([X] * comms.size, **options)
    return [str(each.message) for each in found if each.category is AccuracyWarning]


def test_one_warning_for_each_kind_of_call() -> None:
    comms = World(3)
    (text,) = warned(comms, **COARSE)  # by rank 0 alone
    assert "allreduce of float32 with MinMax(bits=2, block=2048) by ring on 3 ranks" in text
    assert warned(comms, **COARSE) == []
    assert len(warned(comms, **COARSE, op="mean")) == 1, "another kind"
    assert warned(comms, **COARSE, max_error=2) == warned(comms, **FINE) == []


def test_the_warning_points_at_the_call() -> None:
    comms = World(2)
    with pytest.warns(AccuracyWarning) as found:
        requests = [comm.iallreduce(X, **COARSE) for comm in comms.comms]
    comms.loopback.run(requests)
    (warning,) = found
    line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert warning.filename == __file__ and "comm.iallreduce(X, **COARSE)" in line


def test_calls_with_feedback_do_not_warn_and_those_without_still_do() -> None:
    comms = World(2)
    kept = [ErrorFeedback(), ErrorFeedback()]

    def with_feedback() -> None:
        comms.loopback.run([comm.iallreduce(X, feedback=own, **COARSE) for comm, own in zip(comms.comms, kept)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_feedback()
        with_feedback()
    assert len(warned(comms, **COARSE)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_feedback()
        comms.allreduce([X, X], **COARSE)


def test_a_warning_that_is_an_error_reaches_all_ranks() -> None:
    comms = World(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own, other = comms.errors([lambda comm: comm.iallreduce(X, **COARSE)] * 2)
    assert isinstance(own, CollectiveFailed) and isinstance(own.__cause__, AccuracyWarning)
    assert isinstance(other, CollectiveFailed | CollectiveMismatch)
    np.testing.assert_allclose(comms.allreduce([X, X])[1], 2 * X)


def test_a_line_for_the_first_call_of_each_kind(log: Log) -> None:
    lines, comms = log(logging.INFO), World(3)
    for _ in range(2):
        comms.allreduce([X] * 3, **FINE)
        assert lines() == [comms.comms[0].explain(X, **FINE).summary], "of rank 0, once"
    comms.run(lambda comm, x: comm.ibcast(x), [X] * 3)
    assert len(lines()) == 2 and lines()[1].startswith("bcast of 16 KiB float32 on 3 ranks: no codec asked for; ")


def test_nothing_is_logged_by_default(log: Log) -> None:
    lines, comms = log(logging.WARNING), World(2)
    comms.allreduce([X, X], **FINE)
    assert lines() == []


def test_a_line_of_each_rank_for_each_call(log: Log) -> None:
    """Blocking, nonblocking and persistent calls, once each."""

    def ended(comm: Communicator) -> None:
        comm.allreduce(X, **FINE)
        comm.iallreduce(X, **FINE).wait()
        request = comm.allreduce_init(X, **FINE)
        for _ in range(2):
            request.start().wait()
        comm.allreduce(X, codec="topk", algorithm="sparse_ring")  # runs as a request

    lines, comms = log(logging.DEBUG), world(2)
    on_ranks(comms, ended)
    for comm in comms:
        own = [line for line in lines() if line.startswith(f"rank {comm.rank}: ")]
        start = f"rank {comm.rank}: allreduce of 16 KiB by"
        dense = f"{start} ring with Int8(block=256): estimated error 8.4e-03, 3.9 × fewer bytes, in "
        assert len(own) == 5 and all(line.startswith(dense) for line in own[:4])
        assert own[4].startswith(f"{start} sparse_ring with TopK(") and ": error unknown, " in own[4]
        assert all(line.endswith(" ms") for line in own)


def test_failed_calls_are_not_logged_as_ended(log: Log) -> None:
    comms = World(2)
    lines = log(logging.DEBUG)
    assert all(comms.errors([lambda comm: comm.iallreduce(X), lambda comm: comm.iallreduce(X[:9])]))
    assert not [line for line in lines() if line.startswith("rank ")]


def test_ranges_of_blocking_calls_and_requests(profiler: list[str]) -> None:
    comms = world(2)

    def own(do: Callable[[Communicator], Any]) -> list[str]:
        """Each rank's calls, one after the other, so that the ranges of two ranks do not mix."""
        profiler.clear()
        on_ranks(comms, do)
        return sorted(profiler)

    assert own(lambda comm: comm.allreduce(X, **FINE)) == sorted([f"<{NAME}", f"{NAME}>"] * 2)
    started = [f"<{NAME} start", f"{NAME} start>"] * 2
    ranges = own(lambda comm: comm.iallreduce(X, **FINE).wait())
    assert set(started) <= set(ranges) <= {*started, f"<{NAME} wait", f"{NAME} wait>"}
    request = [comm.allreduce_init(X, **FINE) for comm in comms]
    ranges = own(lambda comm: request[comm.rank].start().wait())
    assert set(started) <= set(ranges) <= {*started, f"<{NAME} wait", f"{NAME} wait>"}
    assert own(lambda comm: comm.allreduce(X, algorithm="ring"))[-1] == "compcoll::allreduce ring 16 KiB>"


def test_a_wait_has_a_range(profiler: list[str]) -> None:
    comms = World(2)
    first = comms.comms[0].iallreduce(X, **FINE)
    second = comms.comms[1].iallreduce(X, **FINE)
    profiler.clear()
    first.wait()
    assert profiler == [f"<{NAME} wait", f"{NAME} wait>"]
    second.wait()


def test_a_range_ends_with_an_error(profiler: list[str]) -> None:
    def refused(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch):
            comm.allreduce(X[: 9 + comm.rank], algorithm="ring")

    on_ranks(2, refused)
    begun = [name[1:] for name in profiler if name.startswith("<")]
    assert len(begun) == 2 and sorted(begun) == sorted(name[:-1] for name in profiler if name.endswith(">"))


def test_no_ranges_without_a_profiler(profiler: list[str]) -> None:
    comms = World(2)
    sys.modules["torch.autograd.profiler"]._is_profiler_enabled = False  # type: ignore[attr-defined]
    assert not observation.watch._is_profiler_enabled
    comms.allreduce([X, X], **FINE)
    assert profiler == []


def test_the_flag_of_pytorch() -> None:
    """That it is there, and what a profile of PyTorch's shows."""
    torch = pytest.importorskip("torch", "2.12")
    comms = World(2)
    with torch.profiler.profile() as profile:
        assert observation.watch._is_profiler_enabled
        comms.allreduce([X, X], **FINE)
    assert not observation.watch._is_profiler_enabled
    assert {f"{NAME} start"} <= {event.key for event in profile.key_averages()}


PROGRAM = """
import logging
import numpy as np
from compcoll import Communicator
from compcoll.transports.loopback import Loopback
loopback = Loopback(2)
comms = [Communicator(transport) for transport in loopback.transports]
loopback.run([comm.iallreduce(np.ones(9, np.float32), codec="int8", algorithm="ring") for comm in comms])
print(len(logging.getLogger("compcoll").handlers))
"""


@pytest.mark.parametrize(("level", "lines", "handlers"), [("", 0, 0), ("INFO", 1, 1), ("DEBUG", 3, 1)])
def test_the_environment_needs_no_code(level: str, lines: int, handlers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_LOG", level)
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout == f"{handlers}\n", ended.stderr
    assert len(ended.stderr.splitlines()) == lines and ended.stderr.count(" compcoll: ") == lines


def test_other_levels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_LOG", "verbose")
    with pytest.raises(InvalidArgument, match="COMPCOLL_LOG='verbose' in the environment: INFO or DEBUG is needed"):
        World(2)


def test_the_program_decides_before_the_environment(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    lines = log(logging.WARNING)
    monkeypatch.setenv("COMPCOLL_LOG", "DEBUG")
    World(2).allreduce([X, X], **FINE)
    assert lines() == [] and logging.getLogger("compcoll").handlers == []


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (Stats("allreduce", None, "native", 1 << 20, -1, 0, total_seconds=0.5), "native, uncompressed, in 500 ms"),
        (
            Stats("allreduce", "Sign()", "native", 1 << 20, -1, 0, error=None, total_seconds=2e-3),
            "native with Sign(): error unknown, in 2 ms",
        ),
        (
            Stats("allreduce", "Int8()", "ring", 1 << 20, 25, 100, error=0.0123, total_seconds=1e-6),
            "ring with Int8(): estimated error 1.2e-02, 4.0 × fewer bytes, in 0.001 ms",
        ),
    ],
)
def test_statistics_on_a_line(stats: Stats, line: str) -> None:
    assert str(stats) == f"allreduce of 1 MiB by {line}"
