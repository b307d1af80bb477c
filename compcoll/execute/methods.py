"""The collectives as methods of a communicator. Each passes its arguments on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..feedback import ErrorFeedback
from .compiled_plan import Asked
from .engine import Request
from .persistent import PersistentRequest


class Methods(ABC):
    """The methods of `Communicator` that are collectives, blocking, nonblocking and persistent."""

    @abstractmethod
    def call(self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked) -> Any:
        """Run a collective.

        Parameters
        ----------
        collective : str
            Its name.
        x, out, feedback
            As of `compcoll.allreduce`.
        param : object
            The operation of a reduction; the pair of operation and root of a reduce; the root of a bcast, gather or
            scatter; the counts of an alltoallv; None otherwise.
        asked : Asked
            Codec, algorithm and options.
        """

    @abstractmethod
    def start(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> Request:
        """Start a collective; the parameters are those of `call`."""

    @abstractmethod
    def prepare(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> PersistentRequest:
        """Prepare a collective that can be started repeatedly; the parameters are those of `call`."""

    def allreduce(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Any:
        """Reduce all ranks' arrays; see `compcoll.allreduce`."""
        return self.call("allreduce", x, op, out, feedback, (codec, algorithm, options))

    def iallreduce(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Request:
        """Start an allreduce; see `compcoll.iallreduce`."""
        return self.start("allreduce", x, op, out, feedback, (codec, algorithm, options))

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Any:
        """Reduce all ranks' arrays and keep one block; see `compcoll.reduce_scatter`."""
        return self.call("reduce_scatter", x, op, out, feedback, (codec, algorithm, options))

    def ireduce_scatter(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Request:
        """Start a reduce_scatter; see `compcoll.reduce_scatter`."""
        return self.start("reduce_scatter", x, op, out, feedback, (codec, algorithm, options))

    def reduce(
        self,
        x: Any,
        root: int = 0,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Any:
        """Reduce all ranks' arrays on the root; see `compcoll.reduce`."""
        return self.call("reduce", x, (op, root), out, feedback, (codec, algorithm, options))

    def ireduce(
        self,
        x: Any,
        root: int = 0,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Request:
        """Start a reduce; see `compcoll.reduce`."""
        return self.start("reduce", x, (op, root), out, feedback, (codec, algorithm, options))

    def allgather(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Stack all ranks' arrays; see `compcoll.allgather`."""
        return self.call("allgather", x, None, out, None, (codec, algorithm, options))

    def iallgather(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start an allgather; see `compcoll.allgather`."""
        return self.start("allgather", x, None, out, None, (codec, algorithm, options))

    def allgatherv(self, x: Any, *, codec: Any = ..., algorithm: str | None = None, **options: Any) -> Any:
        """Join all ranks' arrays; see `compcoll.allgatherv`."""
        return self.call("allgatherv", x, None, None, None, (codec, algorithm, options))

    def iallgatherv(self, x: Any, *, codec: Any = ..., algorithm: str | None = None, **options: Any) -> Request:
        """Start an allgatherv; see `compcoll.allgatherv`."""
        return self.start("allgatherv", x, None, None, None, (codec, algorithm, options))

    def bcast(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Give every rank the root's array; see `compcoll.bcast`."""
        return self.call("bcast", x, root, out, None, (codec, algorithm, options))

    def ibcast(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start a broadcast; see `compcoll.bcast`."""
        return self.start("bcast", x, root, out, None, (codec, algorithm, options))

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Stack all ranks' arrays on the root; see `compcoll.gather`."""
        return self.call("gather", x, root, out, None, (codec, algorithm, options))

    def igather(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start a gather; see `compcoll.gather`."""
        return self.start("gather", x, root, out, None, (codec, algorithm, options))

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Give every rank its block of the root's array; see `compcoll.scatter`."""
        return self.call("scatter", x, root, out, None, (codec, algorithm, options))

    def iscatter(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start a scatter; see `compcoll.scatter`."""
        return self.start("scatter", x, root, out, None, (codec, algorithm, options))

    def alltoall(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Exchange blocks; see `compcoll.alltoall`."""
        return self.call("alltoall", x, None, out, None, (codec, algorithm, options))

    def ialltoall(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start an alltoall; see `compcoll.alltoall`."""
        return self.start("alltoall", x, None, out, None, (codec, algorithm, options))

    def alltoallv(
        self, x: Any, counts: Sequence[int], *, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Exchange blocks of different lengths; see `compcoll.alltoallv`."""
        return self.call("alltoallv", x, counts, None, None, (codec, algorithm, options))

    def ialltoallv(
        self, x: Any, counts: Sequence[int], *, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start an alltoallv; see `compcoll.alltoallv`."""
        return self.start("alltoallv", x, counts, None, None, (codec, algorithm, options))

    def allreduce_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> PersistentRequest:
        """Prepare an allreduce that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("allreduce", x, op, out, feedback, (codec, algorithm, options))

    def reduce_scatter_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> PersistentRequest:
        """Prepare a reduce_scatter that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("reduce_scatter", x, op, out, feedback, (codec, algorithm, options))

    def reduce_init(
        self,
        x: Any,
        root: int = 0,
        *,
        op: Any = "sum",
        out: Any = None,
        feedback: ErrorFeedback | None = None,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> PersistentRequest:
        """Prepare a reduce that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("reduce", x, (op, root), out, feedback, (codec, algorithm, options))

    def allgather_init(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> PersistentRequest:
        """Prepare an allgather that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("allgather", x, None, out, None, (codec, algorithm, options))

    def bcast_init(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> PersistentRequest:
        """Prepare a bcast that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("bcast", x, root, out, None, (codec, algorithm, options))

    def gather_init(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> PersistentRequest:
        """Prepare a gather that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("gather", x, root, out, None, (codec, algorithm, options))

    def scatter_init(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> PersistentRequest:
        """Prepare a scatter that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("scatter", x, root, out, None, (codec, algorithm, options))

    def alltoall_init(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> PersistentRequest:
        """Prepare an alltoall that can be started repeatedly on the same arrays; see `PersistentRequest`."""
        return self.prepare("alltoall", x, None, out, None, (codec, algorithm, options))
