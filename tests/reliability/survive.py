"""Ranks are killed in the middle of collectives, one after the other; those that are left go on without them.

    launch/mpirun --with-ft ulfm -n 6 python tests/reliability/survive.py wait allreduce.ring:0:3 bcast.native:-1:2ms

First comes what makes collectives advance. Each case is a collective ("blocking": an allreduce that is waited for at
once) and its algorithm, the rank that dies, and when: at so many messages of its own, sent or received, or so many
milliseconds after it began. The rank is one of those that are still there. Every survivor has collectives pending then,
all of which must end with the same PeerFailed or PeerTimeout; it must shrink, and get right sums. Every survivor prints
one line of JSON a case: which error came, and how many seconds after the death.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from replayed import Replayed

from compcoll import Communicator, ErrorFeedback, Request
from compcoll.errors import CommunicatorBroken, PeerFailed, PeerTimeout
from compcoll.pending import Pending
from compcoll.plan.choose import ALLREDUCE
from compcoll.transports.base import Persistent, Wire
from compcoll.transports.mpi import MPITransport

sys.path.append(str(Path(__file__).resolve().parents[1]))

from oracles.collectives import arguments

N = 70 * 840  # parts of equal size for up to 8 ranks
TIMEOUT = 5.0
OPENING_TAG = 0
SHARING = "shared_memory" in " ".join(sys.argv)
DEATH = Path(tempfile.gettempdir()) / f"compcoll-death-{os.environ.get('PMIX_NAMESPACE', '').replace('/', '-')}"


def die() -> None:
    DEATH.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


class Killable(MPITransport):
    """MPI among ranks of which every two make a node, unless memory is to be shared; this one dies when it is about to
    send one message too many.

    Attributes
    ----------
    messages : int or None
        That it may still send.
    """

    messages: int | None = None

    def __init__(self, comm: MPI.Intracomm, **settings: Any) -> None:
        super().__init__(comm, **settings)
        if not SHARING:
            self.nodes = [rank // 2 for rank in range(self.size)]

    def _count(self) -> None:
        if self.messages is not None:
            self.messages -= 1
            if self.messages < 0:
                die()

    def isend(self, *arguments: Any) -> Pending:
        self._count()
        return super().isend(*arguments)

    def irecv(self, *arguments: Any) -> Pending:
        self._count()
        return super().irecv(*arguments)

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        message = super().send_init(wire, dest, tag)
        return message if tag == OPENING_TAG else Replayed(message, self._count)

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent:
        message = super().recv_init(wire, source, tag)
        return message if tag == OPENING_TAG else Replayed(message, self._count)

    def release(self, message: Persistent) -> None:
        super().release(message.message if isinstance(message, Replayed) else message)


def options_of(algorithm: str) -> dict[str, Any]:
    if algorithm in ("native", "shared_memory"):
        return {"algorithm": algorithm, "codec": None}
    if algorithm.startswith("sparse"):
        return {"algorithm": algorithm, "codec": "topk", "density": 0.05}
    return {"algorithm": algorithm, "codec": "minmax"}


class Later:
    """A blocking call, made when it is waited for."""

    def __init__(self, call: Callable[..., Any], x: np.ndarray, **options: Any) -> None:
        self.wait = partial(call, x, **options)


def outcome(request: Request | Later) -> Exception | None:
    try:
        request.wait()
    except (PeerFailed, PeerTimeout) as error:
        return error
    return None


def check_sums(comm: Communicator) -> None:
    """By every algorithm, within the codec's bound."""
    for algorithm in (*ALLREDUCE, "native", *["shared_memory"] * SHARING):
        x = np.full(1000, 1.0 + comm.rank, np.float32)
        exact = comm.size * (comm.size + 1) / 2
        result = comm.allreduce(x, **options_of(algorithm))
        assert np.abs(result - exact).max() <= 1e-3 * exact, (algorithm, result, exact)


def endure(
    comm: Communicator, transport: Killable, case: str, feedback: ErrorFeedback
) -> tuple[Communicator, Killable]:
    what, who, when = case.split(":")
    collective, algorithm = what.split(".")
    victim = int(who) % comm.size
    options = options_of(algorithm) | arguments(collective, N, comm.size, comm.rank)
    if collective in ("allreduce", "blocking") and algorithm not in ("native", "shared_memory"):
        options["feedback"] = feedback
    blocking = collective == "blocking"
    start = partial(Later, comm.allreduce) if blocking else getattr(comm, f"i{collective}")
    x = np.random.default_rng(comm.rank).standard_normal(N).astype(np.float32)
    check_sums(comm)
    start(x.copy(), **options).wait()
    if comm.rank == victim:
        if when.endswith("ms"):
            threading.Timer(float(when[:-2]) / 1000, die).start()
        else:
            transport.messages = int(when)
    errors: list[Exception] = []
    received = x.copy()  # of a broadcast
    while not errors:
        given = received if collective == "bcast" else x
        before = x.tobytes()
        pending = [start(given, **options)]
        if not blocking:
            with contextlib.suppress(CommunicatorBroken):  # the first may know of the death already
                pending.append(start(given, **options))
        # What the victim was not needed for may have ended; all the others end with one error.
        errors = [error for error in map(outcome, pending) if error is not None]
        assert x.tobytes() == before
    seconds = time.time() - float(DEATH.read_text())
    assert len({id(error) for error in errors}) == 1, errors
    try:
        comm.allreduce(x)
        raise AssertionError("a broken communicator was used")
    except CommunicatorBroken:
        pass
    size = comm.size
    kept = feedback.residual
    comm = comm.shrink()
    assert comm.size == size - 1
    check_sums(comm)
    assert feedback.residual is kept
    if "feedback" in options and algorithm != "hierarchical":  # there, leaders alone have lost something
        assert kept is not None and np.abs(kept).max() > 0
    transport = comm._transport  # type: ignore[assignment]
    error = errors[0]
    line = {"case": case, "error": type(error).__name__, "seconds": round(seconds, 3), "left": comm.size}
    print(json.dumps({**line, "text": str(error)}), flush=True)
    comm.allreduce(np.zeros(1))  # all have read the time of death
    return comm, transport


def main() -> None:
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    transport = Killable(MPI.COMM_WORLD)
    comm = Communicator(transport, timeout=TIMEOUT, progress=sys.argv[1])
    feedback = ErrorFeedback()
    for case in sys.argv[2:]:
        comm, transport = endure(comm, transport, case, feedback)
    comm.free()
    # Open MPI 5.0's MPI_Finalize sometimes waits for ranks that have died.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
