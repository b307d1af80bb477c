"""launch/train_ddp.py --elastic, on ranks some of which are killed.

    launch/mpirun --with-ft ulfm -n 4 python tests/reliability/elastic.py 0:40,2:90 --codec minmax ...

Each rank that is named, as MPI numbered it at first, dies when it is about to send that message of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI
from replayed import Replayed

from compcoll.pending import Pending
from compcoll.transports.base import Persistent, Wire
from compcoll.transports.mpi import MPITransport

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train_ddp.py"
SEND, SEND_INIT, RELEASE = MPITransport.isend, MPITransport.send_init, MPITransport.release
OPENING_TAG = 0


def mortal(messages: int) -> None:
    left = iter(range(messages))

    def count() -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def isend(self: MPITransport, *arguments: Any) -> Pending:
        count()
        return SEND(self, *arguments)

    def send_init(self: MPITransport, wire: Wire, dest: int, tag: int) -> Persistent:
        message = SEND_INIT(self, wire, dest, tag)
        return message if tag == OPENING_TAG else Replayed(message, count)

    def release(self: MPITransport, message: Persistent) -> None:
        RELEASE(self, message.message if isinstance(message, Replayed) else message)

    MPITransport.isend = isend  # type: ignore[method-assign]
    MPITransport.send_init = send_init  # type: ignore[method-assign]
    MPITransport.release = release  # type: ignore[method-assign]


if __name__ == "__main__":
    deaths = dict(map(int, death.split(":")) for death in sys.argv[1].split(","))
    if MPI.COMM_WORLD.rank in deaths:
        mortal(deaths[MPI.COMM_WORLD.rank])
    sys.argv = [str(TRAIN), "--elastic", *sys.argv[2:]]
    sys.path.insert(0, str(TRAIN.parent))  # as if it had been started by its name
    runpy.run_path(str(TRAIN), run_name="__main__")
