"""A process that is forked, ends MPI, or drops communicators; each case by its name, for attacks.py."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI
from told import WORLD, X, told

import compcoll
from compcoll import Communicator
from compcoll.errors import CommunicatorBroken


def in_child(work: Callable[[], None]) -> None:
    """Run this in a forked child, which must end well in time."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            atexit._run_exitfuncs()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert ended[1] == 0, ended


def fork(progress: str) -> str:
    """A child uses its parent's communicators, makes one, and ends, while the parent has a collective under way."""
    comm = Communicator(WORLD, progress=progress, timeout=20)
    comm.allreduce(X, codec="minmax", algorithm="ring")
    compcoll.allreduce(X)
    pending = [comm.iallreduce(X, codec="zfp", algorithm="ring") for _ in range(2)]

    def work() -> None:
        calls = [
            lambda: comm.allreduce(X, codec="minmax", algorithm="ring"),
            lambda: comm.iallreduce(X).wait(),
            lambda: compcoll.allreduce(X),
            lambda: Communicator(WORLD),
        ]
        for call in [*calls, *(each.wait for each in pending), comm.shrink]:
            if "was forked" not in told(call, CommunicatorBroken, within=10):
                raise AssertionError("not broken by name")
        comm.free()

    in_child(work)
    for request in pending:
        assert np.allclose(request.wait(), WORLD.size, rtol=1e-2)
    assert (comm.allreduce(X, codec="cast", algorithm="ring") == WORLD.size).all()
    comm.free()
    return "CommunicatorBroken in the child, the parent's sums right"


def fork_waiting() -> str:
    return fork("wait")


def fork_thread() -> str:
    return fork("thread")


def after_finalize() -> str:
    """Everything is used once more after the end of MPI."""
    kept = Communicator(WORLD)
    compcoll.allreduce(X)
    MPI.Finalize()
    calls = [
        lambda: kept.allreduce(X),
        lambda: kept.iallreduce(X, codec="zfp"),
        lambda: compcoll.allreduce(X),
        lambda: compcoll.allreduce(X, comm=MPI.COMM_SELF),
        lambda: Communicator(WORLD),
    ]
    texts = [told(call, CommunicatorBroken) for call in calls]
    kept.free()
    assert all("finalized" in text for text in texts), texts
    return texts[0]


def dropped(progress: str, count: int) -> str:
    """So many communicators are made, used and dropped without `free`, more than MPICH can have at once."""
    for number in range(count):
        comm = Communicator(WORLD, progress=progress)
        if number % 50 == 0:
            assert (comm.allreduce(X, codec="cast", algorithm="ring") == WORLD.size).all()
            comm.iallreduce(X).wait()
    del comm
    gc.collect()
    time.sleep(0.2)
    names = [thread.name for thread in threading.enumerate()]
    assert "compcoll-progress" not in names, names
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:compcoll" in line]
    files = [name for name in os.listdir("/proc/self/fd") if "memfd:compcoll" in linked(f"/proc/self/fd/{name}")]
    assert not maps and not files, (len(maps), len(files))
    return f"none: {count} dropped, no thread, file or map left"


def linked(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def dropped_threads() -> str:
    return dropped("thread", 200)


def dropped_many() -> str:
    return dropped("wait", 2200)


ENDS = (dropped_threads, dropped_many, fork_waiting, fork_thread, after_finalize)
