"""The ranks of an MPI job as a `promises.World`: every rank knows all results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from mpi4py import MPI

from compcoll import Communicator, CompcollError, Request
from compcoll.transports.nodes import find_nodes


def raised(call: Callable[[], Any]) -> Exception | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def nodes_apart() -> Any:
    """As long as this lasts, communicators are made as if this rank were alone on its node."""

    def alone(connection: Any, name: str, progress: Any) -> None:
        find_nodes(connection, f"{name} {connection.rank}", progress)

    return mock.patch("compcoll.transports.mpi.find_nodes", alone)


class MPIWorld:
    """This rank's communicator, beside those of the job's other ranks; made and used by all of them together."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.size, self._comm = comm.size, comm
        self.comms = [Communicator(comm, timeout=50)]
        self.nodes = len(set(self.comms[0]._transport.nodes))

    def run(self, start: Callable[[Communicator, Any], Request], inputs: Sequence[Any]) -> list[Any]:
        """Start a collective on this rank's input; all ranks' results, which travel where they differ."""
        mine = start(self.comms[0], inputs[self._comm.rank]).wait()
        digests = self._comm.allgather(hashlib.sha256(mine.tobytes()).digest())
        return [mine] * self.size if len(set(digests)) == 1 else self._comm.allgather(mine)

    def errors(self, starts: Sequence[Callable[[Communicator], Request]]) -> list[CompcollError | None]:
        """What each rank's collective raises."""
        mine: CompcollError | None = None
        try:
            starts[self._comm.rank](self.comms[0]).wait(timeout=20)
        except CompcollError as error:
            mine = error
        return self._comm.allgather(mine)

    def fresh(self) -> MPIWorld:
        """Another like this, in which nothing has happened yet."""
        return MPIWorld(self._comm)

    def free(self) -> None:
        """Give the communicator back, on all ranks."""
        self.comms[0].free()
