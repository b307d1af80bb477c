"""What goes wrong around a collective, each by its name: when a communicator is made, by foreign bytes, by a fork.

    launch/mpirun -n 3 python tests/reliability/attacks.py late_first_call other_version

Each prints a line of JSON: its name, what this rank was told, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from ends import ENDS
from mpi4py import MPI
from told import SOON, TIMEOUT, WORLD, X, told

import compcoll
from compcoll import Communicator
from compcoll.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CommunicatorBroken,
    CompcollError,
    PeerTimeout,
    WireCorrupted,
)
from compcoll.execute import handshake, planned_steps
from compcoll.transports import construction, mpi, nodes
from compcoll.transports.base import Wire

RANK, LAST = WORLD.rank, WORLD.size - 1
LATE = 5.0


def everybody_works() -> None:
    WORLD.Barrier()
    comm = Communicator(WORLD)
    assert (comm.allreduce(X, codec="cast", algorithm="ring") == WORLD.size).all()
    comm.free()


def raising(error: BaseException) -> Callable[..., Any]:
    def raise_it(*arguments: Any, **options: Any) -> Any:
        raise error

    return raise_it


def only_on(rank: int, target: Any, name: str, value: Any) -> Any:
    """A patch of one rank's."""
    return mock.patch.object(target, name, value if WORLD.rank == rank else getattr(target, name))


# While a communicator is made.


def late_first_call() -> str:
    """A program's first call has a time-out, and one rank comes late."""
    if WORLD.rank == 0:
        time.sleep(LATE)
    return told(lambda: compcoll.allreduce(X, timeout=TIMEOUT), PeerTimeout)


def late_communicator() -> str:
    if WORLD.rank == LAST:
        time.sleep(LATE)
    return told(lambda: Communicator(WORLD, timeout=TIMEOUT), PeerTimeout)


def halfway() -> str:
    """One rank hangs between two steps."""

    def slowly(offered: Any) -> None:
        time.sleep(LATE)

    with only_on(LAST, nodes, "accept", slowly):
        within = LATE + SOON if WORLD.rank == LAST else SOON
        return told(lambda: Communicator(WORLD, timeout=TIMEOUT), PeerTimeout, CommunicatorBroken, within=within)


def profile_that_raises() -> str:
    """A profile that rank 0 cannot use, with warnings as errors."""
    with mock.patch.dict(os.environ, COMPCOLL_PROFILE="/nonexistent/profile.json"), warnings.catch_warnings():
        warnings.simplefilter("error")
        text = told(lambda: Communicator(WORLD), CollectiveFailed if WORLD.rank == 0 else CommunicatorBroken)
    assert "RuntimeWarning: profile /nonexistent/profile.json" in text and "rank 0" in text, text
    return text


def no_memory() -> str:
    """Rank 0 has none for what the node's ranks share."""
    with only_on(0, nodes, "offer", raising(MemoryError("none left"))):
        text = told(lambda: Communicator(WORLD), CollectiveFailed if WORLD.rank == 0 else CommunicatorBroken)
    assert "MemoryError: none left" in text and "rank 0" in text, text
    return text


def no_thread() -> str:
    """One rank can start no thread for progress."""
    start = threading.Thread.start
    names: list[str] = []

    def noting(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "compcoll-progress":
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", noting):
        Communicator(WORLD, progress="thread").free()
    assert names == ["compcoll-progress"], names  # no other is needed to make a communicator
    with only_on(LAST, threading.Thread, "start", refuse):
        kind = CollectiveFailed if WORLD.rank == LAST else CommunicatorBroken
        text = told(lambda: Communicator(WORLD, progress="thread", timeout=60), kind)
    assert "can't start new thread" in text and f"rank {LAST}" in text, text
    return text


def no_node() -> str:
    """One rank cannot tell the name of its node."""
    with only_on(LAST, mpi, "host_name", raising(OSError("no node"))):
        kind = CollectiveFailed if WORLD.rank == LAST else CommunicatorBroken
        text = told(lambda: Communicator(WORLD, timeout=60), kind)
    assert "OSError: no node" in text and f"rank {LAST}" in text, text
    return text


def profile_that_is_no_file() -> str:
    """A pipe that nobody writes to is not waited for."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        os.mkfifo(path)
        with mock.patch.dict(os.environ, COMPCOLL_PROFILE=path), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            Communicator(WORLD, timeout=60).free()
    texts = [str(warning.message) for warning in warned]
    assert WORLD.rank or any(f"profile {path} cannot be read: it is no regular file" in text for text in texts), texts
    return "a warning"


def other_version() -> str:
    with only_on(LAST, construction, "__version__", "0.0.9"):
        text = told(lambda: Communicator(WORLD), CollectiveMismatch)
    assert f"0.0.9 on rank {LAST}" in text and f"{compcoll.__version__} on rank 0" in text, text
    return text


# Foreign bytes: the last rank sends what no rank sends.


def another_length(change: Callable[[Any], Any], *, handshakes: bool = False) -> Any:
    """A patch of the last rank's: messages of collectives, or of their handshakes, have other lengths."""

    def changed(send: Callable[..., Any]) -> Callable[..., Any]:
        def send_changed(self: Any, wire: Wire, dest: int, tag: int) -> Any:
            return send(self, Wire(change(wire.content)) if (tag < 4) == handshakes else wire, dest, tag)

        return send_changed

    return mock.patch.multiple(
        mpi.MPITransport,
        **{
            name: changed(getattr(mpi.MPITransport, name)) if WORLD.rank == LAST else getattr(mpi.MPITransport, name)
            for name in ("isend", "send_init")
        },
    )


def shorter(content: Any) -> Any:
    return content[: content.nbytes // 2]


def longer(content: Any) -> Any:
    return np.concatenate([np.asarray(content), np.zeros(8, np.uint8)])


def longer_opening(content: Any) -> Any:
    """The memory that it is the beginning of has more."""
    return memoryview(content.obj)[: content.nbytes + 8]


def foreign(change: Callable[[Any], Any], *kinds: type[CompcollError], **options: Any) -> str:
    """An allreduce in which the last rank sends such messages: who sees it tells the others. The last rank itself may
    have got all that it needed.
    """
    comm = Communicator(WORLD, timeout=20)
    x = np.random.default_rng(WORLD.rank).standard_normal(X.size).astype(np.float32)
    exact = WORLD.allreduce(x.astype(np.float64))
    with another_length(change):
        begin = time.monotonic()
        try:
            result = comm.allreduce(x, **options)
        except CompcollError as error:
            text = f"{type(error).__name__}: {error}"
        else:
            assert WORLD.rank == LAST and np.linalg.norm(result - exact) < 0.1 * np.linalg.norm(exact)
            text = "none: its own part was right"
    assert time.monotonic() - begin < 10
    every = WORLD.allgather(text)
    assert any(each.startswith(tuple(kind.__name__ for kind in kinds)) for each in every), every
    return text


def short_message() -> str:
    """Half of what is expected, in a collective that is replayed: never the bytes of a call before."""
    return foreign(shorter, WireCorrupted, codec="qsgd", bits=8, algorithm="recursive_doubling")


def short_message_once() -> str:
    """The same in one that is not replayed."""
    return foreign(shorter, WireCorrupted, codec="minmax", algorithm="hierarchical")


def changed_handshake(change: Callable[[Any], Any]) -> str:
    """The handshakes of the last rank, which nodes send each other by MPI, have another length."""
    nowhere = mock.patch.object(nodes, "offer", return_value=None)
    with nowhere, another_length(change, handshakes=True):
        comm = Communicator(WORLD, timeout=20)
        text = told(lambda: comm.allreduce(X, codec="minmax", algorithm="ring"), WireCorrupted, CommunicatorBroken)
    every = WORLD.allgather(text)
    assert any(each.startswith("WireCorrupted: a handshake's message") for each in every), every
    return text


def short_opening() -> str:
    return changed_handshake(shorter)


def long_opening() -> str:
    return changed_handshake(longer_opening)


def changed_agreement() -> str:
    """The ranks' calls differ, and a bit of the last rank's line on its call has changed."""
    comm = Communicator(WORLD, timeout=20)
    comm.allreduce(X, codec="minmax", algorithm="ring")
    of = handshake._checksum
    with only_on(LAST, handshake, "_checksum", lambda line: bytes([of(line)[0] ^ 4]) + of(line)[1:]):
        x = X[:-1] if WORLD.rank == LAST else X
        text = told(
            lambda: comm.allreduce(x, codec="minmax", algorithm="ring"),
            *(WireCorrupted, CommunicatorBroken, CollectiveMismatch),
            within=6,
        )
    every = WORLD.allgather(text)
    assert all(each.startswith("WireCorrupted") or f"rank {LAST}" in each for each in every[:LAST]), every
    return text


CONSTRUCTION = (
    late_first_call,
    late_communicator,
    halfway,
    profile_that_raises,
    no_memory,
    no_thread,
    no_node,
    profile_that_is_no_file,
    other_version,
)


def long_message() -> str:
    """Eight bytes more than are expected: MPI truncates."""
    return foreign(longer, CollectiveFailed, codec="minmax", algorithm="ring")


def long_message_once() -> str:
    return foreign(longer, CollectiveFailed, codec="minmax", algorithm="hierarchical")


def rows(count: int) -> str:
    """The last rank says, with a right checksum, that it has so many rows."""
    comm = Communicator(WORLD, timeout=20)
    real = planned_steps._COUNT
    packer = mock.Mock(wraps=real, pack=lambda _: struct.pack("<q", count), unpack=real.unpack)
    with only_on(LAST, planned_steps, "_COUNT", packer):
        text = told(lambda: comm.allgatherv(X), CollectiveFailed, CommunicatorBroken, WireCorrupted, within=10)
    every = WORLD.allgather(text)
    assert any("allgatherv" in each or "rows" in each for each in every), every
    return text


def absurd_rows() -> str:
    return rows(1 << 60)


def huge_rows() -> str:
    return rows((1 << 63) - 1)


def negative_rows() -> str:
    return rows(-1)


def no_memory_for_a_call() -> str:
    """One rank has none halfway through."""
    comm = Communicator(WORLD, timeout=20)
    with only_on(LAST, type(comm._collectives), "_empty", raising(MemoryError("none left"))):
        text = told(lambda: comm.allgatherv(X), CollectiveFailed if WORLD.rank == LAST else CommunicatorBroken)
    assert "MemoryError: none left" in text and f"rank {LAST}" in text and "allgatherv" in text, text
    return text


def shared_by_threads() -> str:
    """Two threads use one communicator at once, which they must not: nothing but errors of ours, and no hang."""
    comm = Communicator(WORLD, timeout=3)
    others: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                comm.allreduce(X, codec="minmax", algorithm="ring")
        except BaseException as error:
            others.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert all(isinstance(error, CompcollError) for error in others), others
    return ", ".join(sorted({type(error).__name__ for error in others})) or "no error"


FOREIGN = (
    short_message,
    short_message_once,
    short_opening,
    long_opening,
    changed_agreement,
    long_message,
    long_message_once,
    absurd_rows,
    huge_rows,
    negative_rows,
    no_memory_for_a_call,
    shared_by_threads,
)


def main() -> None:
    cases = {case.__name__: case for case in (*CONSTRUCTION, *FOREIGN, *ENDS)}
    for name in sys.argv[1:]:
        begin = time.monotonic()
        text = cases[name]()
        seconds = round(time.monotonic() - begin, 2)
        if not MPI.Is_finalized():
            everybody_works()
        print(json.dumps({"case": name, "rank": RANK, "told": text, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
