"""How a program may end or be interrupted: one way for each name given.

    launch/mpirun -n 2 python tests/reliability/endings.py pending

Each prints "ended" where it should.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import compcoll
from compcoll import Communicator
from compcoll.errors import CommunicatorBroken, CompcollError

X = np.ones(300_000, np.float32)
WORLD = MPI.COMM_WORLD


def pending() -> None:
    """The interpreter ends while some collectives have only begun, in several communicators and a progress thread."""
    comms = [Communicator(WORLD), Communicator(WORLD, progress="thread")]
    kept = [comm.iallreduce(X, codec="zfp", algorithm="ring") for comm in comms for _ in range(3)]
    kept.append(compcoll.iallreduce(X))
    print("ended", flush=True)


def unmatched() -> None:
    """The interpreter ends while a collective waits for a rank that never comes."""
    if WORLD.rank == 0:
        request = Communicator(MPI.COMM_SELF.Dup()).iallreduce(X, codec="zfp")
        request.wait()
    comm = Communicator(WORLD)
    if WORLD.rank == 0:
        comm.iallreduce(X, codec="zfp", algorithm="ring")
    print("ended", flush=True)


def finalized() -> None:
    """MPI ends first; communicators are given back, or not, afterwards."""
    freed, kept = Communicator(WORLD), Communicator(WORLD, progress="thread")
    for comm in (freed, kept):
        comm.allreduce(X, codec="minmax", algorithm="ring")
    compcoll.allreduce(X)
    request = kept.iallreduce(X, codec="minmax")
    MPI.Finalize()
    freed.free()
    assert request.done
    print("ended", flush=True)


def forked() -> None:
    """A child encodes, as its parent does; only the parent talks to MPI."""
    comm = Communicator(WORLD)
    comm.allreduce(X, codec="zfp", algorithm="ring")
    child = os.fork()
    if child == 0:
        wire = compcoll.encode(X, codec="zfp", rate=8)
        os._exit(0 if np.allclose(compcoll.decode(wire, X.shape, X.dtype, codec="zfp", rate=8), X) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (comm.allreduce(X, codec="cast", algorithm="ring") == WORLD.size).all()
    print("ended", flush=True)


def interrupted() -> None:
    """An interrupt in a wait leaves the request; one in a blocking call breaks the communicator, on all ranks."""
    comm = Communicator(WORLD, timeout=20)
    last = WORLD.rank == WORLD.size - 1

    def interrupt_soon() -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    if last:
        time.sleep(0.6)
        assert (comm.allreduce(X, codec="cast", algorithm="ring") == WORLD.size).all()
    else:
        request = comm.iallreduce(X, codec="cast", algorithm="ring")
        interrupt_soon()
        try:
            request.wait()
            raise AssertionError("not interrupted")
        except KeyboardInterrupt:
            pass
        assert (request.wait() == WORLD.size).all()
    error: BaseException | None = None
    if last:
        time.sleep(0.6)
    elif WORLD.rank == 0:
        interrupt_soon()
    started = time.monotonic()
    try:
        comm.allreduce(X, codec="cast", algorithm="ring")
    except (KeyboardInterrupt, CompcollError) as raised:
        error = raised
    assert type(error) is (KeyboardInterrupt if WORLD.rank == 0 else CommunicatorBroken), repr(error)
    assert WORLD.rank == 0 or "rank 0 gave up: KeyboardInterrupt" in str(error), str(error)
    assert time.monotonic() - started < 30
    try:
        comm.allreduce(X)
        raise AssertionError("a broken communicator was used")
    except CommunicatorBroken:
        pass
    WORLD.Barrier()
    assert compcoll.allreduce(np.ones(3))[0] == WORLD.size
    print("ended", flush=True)


def misconfigured() -> None:
    """A setting that one rank alone cannot read is everybody's error, and no rank waits for it."""
    for name in ("COMPCOLL_TIMEOUT", "COMPCOLL_THREADS", "COMPCOLL_INSTRUCTION_SET"):
        if WORLD.rank == 0:
            os.environ[name] = "nonsense"
        text = ""
        try:
            Communicator(WORLD)
        except CompcollError as error:
            text = str(error)
        assert f"{name}='nonsense'" in text, text
        os.environ.pop(name, None)
    assert Communicator(WORLD).allreduce(np.ones(3))[0] == WORLD.size
    print("ended", flush=True)


if __name__ == "__main__":
    ways: dict[str, Callable[[], None]] = {
        way.__name__: way for way in (pending, unmatched, finalized, forked, interrupted, misconfigured)
    }
    for way in sys.argv[1:]:
        ways[way]()
