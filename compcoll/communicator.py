"""Collectives on one communicator."""

from __future__ import annotations

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
from .plan import Plan
from .profile import profile_for
from .request import Engine, Request, Steps, Turn, anything_under_way, keep_forever
from .stats import Stats
from .transports.base import Group, Transport
from .transports.mpi import MPITransport, transport_of

_OPENING_TAG = 0
_TAGS_EACH = 4  # a collective's phases may overlap
_MOST_IN_FLIGHT = 32768 // _TAGS_EACH - 1  # MPI promises tags up to 32767


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
    progress : {"wait", "nap", "thread"}
        Whether collectives under way advance when the caller waits or tests, or by a thread of their own. With
        ``"nap"`` a wait leaves the core to other threads, for a little more latency.
    timeout : float, optional
        Seconds without progress after which a wait gives up; by default COMPCOLL_TIMEOUT, or 1800.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    rank, size : int
        As in MPI.
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
        if progress not in ("wait", "nap", "thread"):
            raise InvalidArgument(f'progress={progress!r} is none of "wait", "nap" and "thread"')
        threaded = progress == "thread"
        seconds = config.timeout(timeout)
        default = compression(codec, codec_options, algorithm)
        self._stats: Stats | None = None
        self._at_once: tuple[str, Plan, int, float] | None = None
        self._transport: Transport = transport_of(comm, threads=threaded)
        self.rank, self.size = self._transport.rank, self._transport.size
        neighbours = list(self._transport.nodes).count(self._transport.nodes[self.rank])
        device = HostDevice(config.threads(neighbours))
        mpi = self._transport if isinstance(self._transport, MPITransport) else None
        profile = profile_for(self._transport, device.name)
        world = World.of(self._transport.nodes)
        self._collectives = Collectives(device, self.rank, mpi, default, profile, world)
        crowded = neighbours > config.cores()
        self._engine = Engine(seconds, threaded=threaded, crowded=crowded, naps=progress == "nap")
        self._arenas = ArenaPool(device.empty_bytes)
        self._opening = Opening(self._transport, _OPENING_TAG)
        self._sequence = 0
        self._broken: BaseException | None = None
        self._turn: Turn | None = None

    @property
    def stats(self) -> Stats | None:
        """Account of the collective that ended last; None before the first."""
        if self._at_once is not None:  # an account that nobody reads is not made
            collective, plan, nbytes, seconds = self._at_once
            self._stats, self._at_once = _account(collective, plan, nbytes), None
            self._stats.total_seconds = seconds
        return self._stats

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

    def allgather(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Stack all ranks' arrays; see `compcoll.allgather`."""
        return self.call("allgather", x, out, (codec, algorithm, options))

    def iallgather(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start an allgather; see `compcoll.allgather`."""
        return self.start("allgather", x, out, (codec, algorithm, options))

    def allgatherv(self, x: Any, *, codec: Any = ..., algorithm: str | None = None, **options: Any) -> Any:
        """Join all ranks' arrays; see `compcoll.allgatherv`."""
        return self.call("allgatherv", x, (codec, algorithm, options))

    def iallgatherv(self, x: Any, *, codec: Any = ..., algorithm: str | None = None, **options: Any) -> Request:
        """Start an allgatherv; see `compcoll.allgatherv`."""
        return self.start("allgatherv", x, (codec, algorithm, options))

    def bcast(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Give every rank the root's array; see `compcoll.bcast`."""
        return self.call("bcast", x, root, out, (codec, algorithm, options))

    def ibcast(
        self, x: Any, root: int = 0, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start a broadcast; see `compcoll.bcast`."""
        return self.start("bcast", x, root, out, (codec, algorithm, options))

    def alltoall(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Any:
        """Exchange blocks; see `compcoll.alltoall`."""
        return self.call("alltoall", x, out, (codec, algorithm, options))

    def ialltoall(
        self, x: Any, *, out: Any = None, codec: Any = ..., algorithm: str | None = None, **options: Any
    ) -> Request:
        """Start an alltoall; see `compcoll.alltoall`."""
        return self.start("alltoall", x, out, (codec, algorithm, options))

    def free(self) -> None:
        """Finish what is under way and give the private MPI communicator back, collectively."""
        if self._broken is None:
            self._engine.drain()
            self._transport.free()
        self._engine.close()
        self._broken = CommunicatorBroken("it was freed")

    def call(self, collective: str, *arguments: Any) -> Any:
        """Run a collective with the arguments that `Collectives` takes."""
        prepared = self._prepare(collective, arguments)
        if prepared.recipe.block is None:
            return self._run(collective, prepared).wait()
        return self._run_at_once(collective, prepared)

    def start(self, collective: str, *arguments: Any) -> Request:
        """Start a collective with the arguments that `Collectives` takes."""
        return self._run(collective, self._prepare(collective, arguments))

    def _prepare(self, collective: str, arguments: tuple[Any, ...]) -> Prepared:
        """Check the arguments; a refusal is told to all ranks, which wait in the same collective."""
        if self._broken is not None:
            raise CommunicatorBroken(f"this communicator cannot be used any more: {self._broken!r}") from self._broken
        try:
            prepared: Prepared = getattr(self._collectives, collective)(*arguments)
        except Exception as error:
            self._refuse(collective, error)
        return prepared

    def _refuse(self, collective: str, error: Exception) -> NoReturn:
        text = f"{collective} refused: {type(error).__name__}: {error}"
        arena, turn = self._arenas.acquire(), self._next_turn()
        request = Request(
            self._open(turn, text, fingerprint(f"{text} by rank {self.rank}"), self._next_tag()),
            Stats(collective, None, "refused"),
            self._engine,
            release=lambda failure: self._settle(turn, arena, failure),
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
        number = self._sequence
        plan, arena, tag, turn = prepared.recipe.plan, self._arenas.acquire(), self._next_tag(), self._next_turn()
        stats = _account(collective, plan, prepared.x.nbytes)

        def steps() -> Steps:
            yield from self._open(turn, plan.text, plan.digest, tag)
            if plan.algorithm not in choose.BY_MPI:
                turn.use()
            means = Means(Group(self._transport, tag), arena.take, stats, turn, number)
            result = yield from prepared.recipe.run(prepared, means)
            return prepared.result if result is None else result

        def release(error: BaseException | None) -> None:
            self._stats, self._at_once = stats, None
            self._settle(turn, arena, error, prepared)

        request = Request(steps(), stats, self._engine, release=release)
        self._engine.start(request)
        return request

    def _open(self, turn: Turn, text: str, digest: int, tag: int) -> Steps:
        yield turn
        yield from agree(self._opening, text, digest, True, tag)

    def _run_at_once(self, collective: str, prepared: Prepared) -> Any:
        """Run what may block in MPI; it does unless some rank has other collectives to advance meanwhile."""
        started = perf_counter()
        plan, run, block, _, _ = prepared.recipe
        opening, engine, tag = self._opening, self._engine, self._next_tag()
        try:
            if self._turn is not None:
                engine.drive(Turn(self._turn).Test, None, lambda: "the openings before")
                self._turn = None
            engine.follow(agree(opening, plan.text, plan.digest, anything_under_way(), tag))
            if block is None or opening.anybody_busy:
                engine.follow(run(prepared, Means(None, None, None, Turn(None))))
            else:
                block(prepared.x, prepared.out)
        except CollectiveMismatch:
            raise
        except BaseException as error:
            self._broken = error
            keep_forever((opening, prepared))
            raise
        self._at_once = collective, plan, prepared.x.nbytes, perf_counter() - started
        return prepared.result

    def _settle(self, turn: Turn, arena: Arena, error: BaseException | None, *buffers: Any) -> None:
        turn.use()
        if error is None or isinstance(error, CollectiveMismatch):
            self._arenas.release(arena)
        else:
            self._broken = error
            keep_forever((self._opening, arena, *buffers))

    def _next_tag(self) -> int:
        self._sequence += 1
        return (self._sequence % _MOST_IN_FLIGHT + 1) * _TAGS_EACH

    def _next_turn(self) -> Turn:
        turn = self._turn = Turn(self._turn)
        return turn


def _account(collective: str, plan: Plan, nbytes: int) -> Stats:
    unknown = -1 if plan.algorithm in choose.BY_MPI else 0
    return Stats(collective, None if plan.codec is None else repr(plan.codec), plan.algorithm, nbytes, unknown)
