"""Collectives on one communicator."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NoReturn

from . import config
from .algorithms import choose
from .algorithms.agree import Opening, agree, fingerprint
from .arena import Arena, ArenaPool
from .codecs.base import Codec
from .collectives import Collectives, Means, Prepared, compression
from .devices.host import HostDevice
from .errors import CollectiveMismatch, CommunicatorBroken, CompcollError, InvalidArgument
from .feedback import ErrorFeedback
from .layout import World
from .profile import profile_for
from .request import Engine, Request, Steps, Turn, anything_under_way, keep_forever
from .stats import Stats
from .transports.base import Group, Transport
from .transports.mpi import MPITransport, transport_of

_TAGS = 32768  # MPI promises tags up to 32767
_TAGS_EACH = 4  # a collective's phases may overlap


_MOST_IN_FLIGHT = _TAGS // _TAGS_EACH - 1

_BLOCKING = Means(None, None, None, None)
"""For what MPI does itself, without us."""


class Communicator:
    """Compressed collectives among the ranks of an MPI communicator.

    Every collective is called by all ranks, in the same order, with the same arguments. The first messages of each
    tell whether that is so; when it is not, or when some rank's arguments are refused, every rank raises, no buffer
    is touched, and the communicator stays usable.

    The methods take the arguments of the functions of the same name in `compcoll`, less ``comm``; without ``codec=``
    and ``algorithm=`` they use the communicator's. Those with an i in front return a `Request`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Transport, optional
        Duplicated, collectively; MPI.COMM_WORLD by default. A transport of another kind is taken as it is.
    codec : str or Codec, optional
        What collectives compress with unless they name a codec; nothing by default.
    algorithm : str
        The algorithm of collectives that name none.
    progress : {"wait", "thread"}
        Whether collectives under way advance when the caller waits or tests, or by a thread of their own.
    timeout : float, optional
        Seconds without progress after which a wait gives up; by default COMPCOLL_TIMEOUT, or 1800.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    rank, size : int
        As in MPI.
    stats : Stats or None
        Of the collective that ended last.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        codec: str | Codec | None = None,
        algorithm: str = choose.AUTO,
        progress: str = "wait",
        timeout: float | None = None,
        **codec_options: Any,
    ) -> None:
        if progress not in ("wait", "thread"):
            raise InvalidArgument(f'progress={progress!r} is neither "wait" nor "thread"')
        threaded = progress == "thread"
        seconds = config.timeout(timeout)
        default = compression(codec, codec_options, algorithm)
        self.stats: Stats | None = None
        self._transport: Transport = transport_of(comm, threads=threaded)
        self.rank, self.size = self._transport.rank, self._transport.size
        neighbours = list(self._transport.nodes).count(self._transport.nodes[self.rank])
        device = HostDevice(config.threads(neighbours))
        mpi = self._transport if isinstance(self._transport, MPITransport) else None
        profile = profile_for(self._transport, device.name)
        world = World.of(self._transport.nodes)
        self._collectives = Collectives(device, self.rank, mpi, default, profile, world)
        crowded = neighbours > config.cores()
        self._engine = Engine(seconds, threaded=threaded, crowded=crowded)
        self._arenas = ArenaPool(device.empty_bytes, self.rank, self.size)
        self._opening = Opening(self.rank, self.size)
        self._sequence = 0
        self._broken: BaseException | None = None
        self._turn: Turn | None = None

    def allreduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, feedback: ErrorFeedback | None = None, **compression: Any
    ) -> Any:
        """Reduce all ranks' arrays; see `compcoll.allreduce`."""
        prepared = self._prepare(self._collectives.allreduce, True, x, op, out, feedback, compression)
        return self._run_at_once("allreduce", prepared) if prepared.at_once else self._run("allreduce", prepared).wait()

    def iallreduce(
        self, x: Any, *, op: Any = "sum", out: Any = None, feedback: ErrorFeedback | None = None, **compression: Any
    ) -> Request:
        """Start an allreduce; see `compcoll.iallreduce`."""
        prepare = self._collectives.allreduce
        return self._run("allreduce", self._prepare(prepare, False, x, op, out, feedback, compression))

    def ireduce_scatter(self, x: Any, *, op: Any = "sum", out: Any = None, **compression: Any) -> Request:
        """Start a reduce_scatter; see `compcoll.reduce_scatter`."""
        return self._run("reduce_scatter", self._prepare(self._collectives.reduce_scatter, x, op, out, compression))

    def iallgather(self, x: Any, *, out: Any = None, **compression: Any) -> Request:
        """Start an allgather; see `compcoll.allgather`."""
        return self._run("allgather", self._prepare(self._collectives.allgather, x, out, compression))

    def iallgatherv(self, x: Any, **compression: Any) -> Request:
        """Start an allgatherv; see `compcoll.allgatherv`."""
        return self._run("allgatherv", self._prepare(self._collectives.allgatherv, x, compression))

    def ibcast(self, x: Any, root: int = 0, *, out: Any = None, **compression: Any) -> Request:
        """Start a broadcast; see `compcoll.bcast`."""
        return self._run("bcast", self._prepare(self._collectives.bcast, x, root, out, compression))

    def ialltoall(self, x: Any, *, out: Any = None, **compression: Any) -> Request:
        """Start an alltoall; see `compcoll.alltoall`."""
        return self._run("alltoall", self._prepare(self._collectives.alltoall, x, out, compression))

    def reduce_scatter(self, x: Any, *, op: Any = "sum", out: Any = None, **compression: Any) -> Any:
        """Reduce all ranks' arrays and keep one block; see `compcoll.reduce_scatter`."""
        return self.ireduce_scatter(x, op=op, out=out, **compression).wait()

    def allgather(self, x: Any, *, out: Any = None, **compression: Any) -> Any:
        """Stack all ranks' arrays; see `compcoll.allgather`."""
        return self.iallgather(x, out=out, **compression).wait()

    def allgatherv(self, x: Any, **compression: Any) -> Any:
        """Join all ranks' arrays; see `compcoll.allgatherv`."""
        return self.iallgatherv(x, **compression).wait()

    def bcast(self, x: Any, root: int = 0, *, out: Any = None, **compression: Any) -> Any:
        """Give every rank the root's array; see `compcoll.bcast`."""
        return self.ibcast(x, root, out=out, **compression).wait()

    def alltoall(self, x: Any, *, out: Any = None, **compression: Any) -> Any:
        """Exchange blocks; see `compcoll.alltoall`."""
        return self.ialltoall(x, out=out, **compression).wait()

    def free(self) -> None:
        """Finish what is under way and give the private MPI communicator back, collectively."""
        if self._broken is None:
            self._engine.drain()
            self._transport.free()
        self._engine.close()
        self._broken = CommunicatorBroken("it was freed")

    def _prepare(self, prepare: Callable[..., Prepared], *arguments: Any) -> Prepared:
        """Check the arguments; a refusal is told to all ranks, which wait in the same collective."""
        if self._broken is not None:
            raise CommunicatorBroken(f"this communicator cannot be used any more: {self._broken!r}") from self._broken
        try:
            return prepare(*arguments)
        except Exception as error:
            self._refuse(prepare.__name__, error)

    def _refuse(self, collective: str, error: Exception) -> NoReturn:
        text = f"{collective} refused: {type(error).__name__}: {error}"
        arena, digest = self._arenas.acquire(), fingerprint(f"{text} by rank {self.rank}")
        steps = agree(self._transport, self._next_tag(), text, digest, True, arena.opening)
        request = Request(
            steps,
            Stats(collective, None, "refused"),
            self._engine,
            release=lambda failure: self._settle(arena, failure),
        )
        self._engine.start(request)
        try:
            request.wait()
        except CompcollError as told:
            raise error from told
        raise error

    def _run(self, collective: str, prepared: Prepared) -> Request:
        if len(self._engine.active) >= _MOST_IN_FLIGHT:
            self._engine.drain()
        plan, arena, number, tag = prepared.plan, self._arenas.acquire(), self._sequence, self._next_tag()
        stats = self._account(collective, prepared)
        turn = self._next_turn() if plan.algorithm == choose.NATIVE else None

        def steps() -> Steps:
            yield from agree(self._transport, tag, plan.text, plan.digest, True, arena.opening)
            result = yield from prepared.run(Means(Group(self._transport, tag), arena.take, stats, turn, number))
            return prepared.result if result is None else result

        def release(error: BaseException | None) -> None:
            if turn is not None:
                turn.use()
            self.stats = stats
            self._settle(arena, error, prepared)

        request = Request(steps(), stats, self._engine, release=release)
        self._engine.start(request)
        return request

    def _run_at_once(self, collective: str, prepared: Prepared) -> Any:
        """Run what may block in MPI; it does unless some rank has other collectives to advance meanwhile."""
        started = perf_counter()
        plan, tag = prepared.plan, self._next_tag()

        try:
            opening = self._opening
            self._engine.follow(agree(self._transport, tag, plan.text, plan.digest, anything_under_way(), opening))
            means = _BLOCKING._replace(turn=self._next_turn()) if opening.anybody_busy else _BLOCKING
            self._engine.follow(prepared.run(means))
        except CollectiveMismatch:
            raise
        except BaseException as error:
            self._broken = error
            keep_forever((self._opening, prepared))
            raise
        stats = self.stats = self._account(collective, prepared)
        stats.total_seconds = perf_counter() - started
        return prepared.result

    @staticmethod
    def _account(collective: str, prepared: Prepared) -> Stats:
        plan = prepared.plan
        unknown = -1 if plan.algorithm == choose.NATIVE else 0
        return Stats(
            collective, None if plan.codec is None else repr(plan.codec), plan.algorithm, prepared.nbytes, unknown
        )

    def _settle(self, arena: Arena, error: BaseException | None, *buffers: Any) -> None:
        if error is None or isinstance(error, CollectiveMismatch):
            self._arenas.release(arena)
        else:
            self._broken = error
            keep_forever((arena, *buffers))

    def _next_tag(self) -> int:
        self._sequence += 1
        return self._sequence * _TAGS_EACH % _TAGS

    def _next_turn(self) -> Turn:
        turn = self._turn = Turn(self._turn)
        return turn
