"""mpi4py's communicators, with compressed collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from time import perf_counter
from typing import Any

import numpy as np

from .. import api
from ..codecs.base import Codec
from ..communicator import Communicator
from ..errors import InvalidArgument
from ..execute.compiled_plan import Asked, named_codec
from ..transports.library import MPI
from . import arguments, requests
from .arguments import Call
from .messages import TYPES, Message, is_in_place, is_left, kind_of, nbytes_of
from .settings import Choice, Settings

_MOST_KNOWN = 4096
"""The number of kinds of calls whose choice a communicator remembers."""


def _method(name: str, reader: arguments.Reader, run: Callable[..., Any] | None = None, *, moves: bool = False) -> Any:
    """Return a method that reads its arguments and runs a compressed call, or leaves it to MPI.

    Parameters
    ----------
    name : str
        The method's name.
    reader : callable
        Reads the arguments.
    run : callable, optional
        Starts or prepares the call; None: the method blocks.
    moves : bool
        Whether the method only moves values.
    """
    own = getattr(MPI.Intracomm, name)
    in_blocks = "scatter" in name

    @wraps(own)
    def method(self: Intracomm, *args: Any, **kwargs: Any) -> Any:
        settings = self._settings
        call: Call | None = None
        choice: Choice | None = None
        if settings.moved if moves else settings.sums:
            kind = None
            if not moves and len(args) > 1:
                kind = kind_of(args[1] if is_in_place(args[0]) else args[0], in_blocks)
            if kind is None or (name, kind) not in self._left:
                call = reader(self, *args, **kwargs)
                choice = None if call is None else self._chosen(call, threaded=run is not None)
                if choice is None and kind is not None and (call is not None or is_left(kind, settings.least)):
                    self._leave(name, kind)
        if call is not None and choice is not None and not settings.dry_run:
            return (run or Intracomm._run)(self, name, call, choice)
        if settings.totals is not None:
            return self._counted(name, call, choice, partial(own, self, *args, **kwargs))
        return own(self, *args, **kwargs)

    return method


def _adopting(own: Callable[..., Any]) -> Any:
    """Return a method that creates a communicator, with the settings of this one."""

    @wraps(own)
    def method(self: Intracomm, *args: Any, **kwargs: Any) -> Any:
        return self._adopt(own(self, *args, **kwargs))

    return method


class Intracomm(MPI.Intracomm):
    """An mpi4py communicator whose large sums are compressed; everything else is MPI's own.

    It is used like `mpi4py.MPI.Intracomm`, with arrays, ``[data, count, datatype]``, ``[data, counts, displacements,
    datatype]`` or ``MPI.IN_PLACE``. Compressed are ``Allreduce``, ``Reduce``, ``Reduce_scatter`` (of equal blocks) and
    ``Reduce_scatter_block``, also in their nonblocking and persistent forms, of contiguous float16, bfloat16, float32
    and float64 values, and of complex ones as pairs, if ``op`` is ``MPI.SUM``. Lower-case methods, which pickle, are
    mpi4py's.

    ``Dup``, ``Split``, ``Create_cart`` and all other methods that make a communicator of this one give it the same
    settings.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator, whose handle the new one shares. One with a topology gives one with the same topology.
    codec : str or Codec, optional
        The codec, as in `compcoll.allreduce`; None: nothing is compressed.
    min_bytes : int, optional
        Bytes from which messages are compressed. By default those from 4096 bytes on are compressed if the cost model
        predicts that this is faster.
    moved : bool
        Whether values that are only moved are compressed, too: those of ``Bcast``, ``Allgather(v)``, ``Gather(v)``,
        ``Scatter(v)`` and ``Alltoall(v)``. Before each of these the ranks agree, by an allreduce of 32 bytes, that all
        of them can. Their nonblocking and persistent forms stay MPI's own, since they may not wait for an agreement.
    **codec_options
        Options of a codec given by name.

    Raises
    ------
    InvalidArgument
        If the codec or its options are invalid, or if MPI runs by sessions alone.

    Notes
    -----
    All ranks must give the same codec, ``min_bytes`` and ``moved``.

    A compressed nonblocking call returns a request that all functions of mpi4py complete, such as
    ``MPI.Request.Waitall``. A thread advances the collective, so MPI must have been initialized with
    ``MPI.THREAD_MULTIPLE``, as mpi4py does; otherwise nonblocking calls are MPI's own. The first call of a communicator
    that may be compressed, and the first nonblocking one, wait for all ranks. Requests of persistent calls
    are started by ``Start``, not by ``MPI.Prequest.Startall``.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> comm = compcoll.Intracomm(MPI.COMM_WORLD, codec="zfp", rate=16)
    >>> x, total = np.ones(4096, np.float32), np.empty(4096, np.float32)
    >>> comm.Allreduce(x, total, op=MPI.SUM)
    """

    _settings: Settings
    _choices: dict[tuple[Any, ...], Choice | None]
    _left: set[tuple[Any, ...]]
    _communicator: Communicator | None

    def __new__(
        cls,
        comm: MPI.Intracomm | None = None,
        codec: str | Codec | None = None,
        *,
        min_bytes: int | None = None,
        moved: bool = False,
        **codec_options: Any,
    ) -> Any:
        """Create the communicator. `Dup` and others create it without arguments, and set `_settings` afterwards."""
        if comm is not None and not isinstance(comm, MPI.Intracomm):
            raise InvalidArgument(f"comm={comm!r}: an mpi4py intracommunicator is needed")
        if comm is None and codec is not None:
            raise InvalidArgument(f"codec={codec!r} without a communicator: give one, such as MPI.COMM_WORLD")
        if codec is not None and not MPI.Is_initialized():
            raise InvalidArgument("MPI was not initialized by MPI.Init: communicators of sessions are not supported")
        if min_bytes is not None and (not isinstance(min_bytes, int) or min_bytes < 0):
            raise InvalidArgument(f"min_bytes={min_bytes!r}: a number of bytes is needed, 0 or more")
        named_codec(codec, codec_options)
        if cls is Intracomm and comm is not None:
            cls = next(own for kind, own in _CLASSES.items() if isinstance(comm, kind))
        return cls._with(comm, Settings(codec, codec_options, min_bytes, moved))

    @classmethod
    def _with(cls, comm: MPI.Comm | None, settings: Settings) -> Any:
        # mpi4py's topologies are subclasses of Intracomm, but their own `__new__` refuses this class.
        self = MPI.Intracomm.__new__(cls, comm)
        self._settings, self._choices, self._left, self._communicator = settings, {}, set(), None
        return self

    Dup = _adopting(MPI.Intracomm.Dup)
    Dup_with_info = _adopting(MPI.Intracomm.Dup_with_info)
    Clone = _adopting(MPI.Intracomm.Clone)
    Idup = _adopting(MPI.Intracomm.Idup)
    Idup_with_info = _adopting(MPI.Intracomm.Idup_with_info)
    Create = _adopting(MPI.Intracomm.Create)
    Create_group = _adopting(MPI.Intracomm.Create_group)
    Create_cart = _adopting(MPI.Intracomm.Create_cart)
    Create_graph = _adopting(MPI.Intracomm.Create_graph)
    Create_dist_graph = _adopting(MPI.Intracomm.Create_dist_graph)
    Create_dist_graph_adjacent = _adopting(MPI.Intracomm.Create_dist_graph_adjacent)
    Split = _adopting(MPI.Intracomm.Split)
    Split_type = _adopting(MPI.Intracomm.Split_type)
    Shrink = _adopting(MPI.Intracomm.Shrink)
    Ishrink = _adopting(MPI.Intracomm.Ishrink)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return the communicator of a handle of MPI. It compresses nothing."""
        made = super().fromhandle(handle)
        of_mpi = type(made)  # not one of these for an intercommunicator, and for MPI.COMM_NULL
        return _CLASSES[of_mpi]._with(made, Settings(None, {}, None, moved=False)) if of_mpi in _CLASSES else made

    def free(self) -> None:
        """Free the communicator, unless it is null, or one of mpi4py's constants."""
        if self is not MPI.COMM_WORLD and self is not MPI.COMM_SELF:
            super().free()

    def _adopt(self, made: Any) -> Any:
        """Return a communicator that was made of this one, with its settings; also the first one of a pair."""
        if isinstance(made, tuple):
            return self._adopt(made[0]), *made[1:]
        if isinstance(made, Intracomm):
            made._settings = self._settings
            return made
        return _CLASSES[type(made)]._with(made, self._settings)

    @property
    def _least(self) -> int:
        """The bytes below which messages are left to MPI."""
        return self._settings.least

    def _agree(self, *messages: Message | None, ratio: int | None = 1) -> bool:
        """Return whether all ranks can have a call compressed, as far as each knows from its own arguments. Collective.

        Parameters
        ----------
        *messages : Message or None
            The messages of this rank, as they could be read.
        ratio : int or None
            The size of the second message relative to the first one; None if the sizes are not alike on all ranks.
        """
        known = [message for message in messages if message is not None and message.values is not None]
        types = {message.values.dtype for message in known}
        able = len(known) == len(messages) and len(types) == 1
        if len(known) == 2 and ratio is not None:
            able = able and known[1].nbytes == ratio * known[0].nbytes
        nbytes = max((message.nbytes for message in known), default=0)
        kind = TYPES.index(types.pop()) if able else 0
        facts = np.array([not able, nbytes, kind, -kind], np.int64)
        MPI.Intracomm.Allreduce(self, MPI.IN_PLACE, facts, MPI.MAX)
        unable, most, last, first = facts.tolist()
        return not unable and last == -first and most >= self._least

    def _chosen(self, call: Call, *, threaded: bool) -> Choice | None:
        """Return how a call runs; None if it is left to MPI. ``threaded``: whether a thread advances it.

        The first call creates the `Communicator`, collectively.
        """
        if not 0 <= call.root < self.size:
            return None  # MPI refuses it
        x = call.x
        key = (call.collective, x.size, x.dtype, threaded)  # without the root, on which no cost depends
        if key in self._choices:
            return self._choices[key]
        if self._communicator is None:
            self._communicator = api.get_communicator(self)
        if len(self._choices) >= _MOST_KNOWN:
            self._choices.clear()
        choice = self._settings.choice(self._communicator, call.collective, x, call.root)
        if choice is not None and threaded and self._threaded() is None:
            choice = None
        self._choices[key] = choice
        return choice

    def _leave(self, name: str, kind: tuple[Any, ...]) -> None:
        """Leave calls of a kind to MPI from now on."""
        if len(self._left) >= _MOST_KNOWN:
            self._left.clear()
        self._left.add((name, kind))

    def _run(self, name: str, call: Call, choice: Choice) -> None:
        """Run a compressed call."""
        assert self._communicator is not None
        asked: Asked = (choice.codec, choice.algorithm, {})
        call.end(self._communicator.call(call.collective, call.x, call.param, call.out, None, asked))
        if self._settings.totals is not None and (ran := self._communicator.stats) is not None:
            self._count(name, call, choice, ran.ratio, ran.total_seconds)

    def _start(self, name: str, call: Call, choice: Choice) -> MPI.Request:
        """Start a compressed call, which a thread advances."""
        communicator = self._threaded()
        assert communicator is not None
        asked: Asked = (choice.codec, choice.algorithm, {})
        request = communicator.start(call.collective, call.x, call.param, call.out, None, asked)

        def ended() -> None:
            call.end(request.wait())
            self._count(name, call, choice, request.stats.ratio, request.stats.total_seconds)

        return requests.begun(request, ended)

    def _prepare(self, name: str, call: Call, choice: Choice) -> MPI.Prequest:
        """Return a persistent request of a compressed call."""
        return requests.Prequest(partial(self._start, name, call, choice))

    def _counted(self, name: str, call: Call | None, choice: Choice | None, own: partial[Any]) -> Any:
        """Run a method of mpi4py and count it; in a dry run as the compressed call that it would have been."""
        totals, started = self._settings.totals, perf_counter()
        assert totals is not None
        result = own()
        seconds = perf_counter() - started
        if call is None or choice is None:
            given = (*own.args[1:], *own.keywords.values())  # without the communicator
            totals.left(name, max(map(nbytes_of, given), default=0), seconds)
        else:
            self._count(name, call, choice, choice.ratio, seconds / choice.speedup)
        return result

    def _count(self, name: str, call: Call, choice: Choice, ratio: float, seconds: float) -> None:
        """Count a compressed call, if calls are counted."""
        if self._settings.totals is not None:
            nbytes = call.x.nbytes
            saved = round(nbytes * (1 - 1 / ratio))
            self._settings.totals.compressed(name, nbytes, saved, choice.error, seconds, choice.speedup * seconds)

    def _threaded(self) -> Communicator | None:
        """Return the `Communicator` whose collectives advance in a thread; None without MPI.THREAD_MULTIPLE.

        The first call creates it, collectively.
        """
        kept = self.Get_attr(_keyval())
        if kept is None:
            try:
                kept = Communicator(self, progress="thread")
            except InvalidArgument:  # on all ranks alike
                kept = False
            self.Set_attr(_keyval(), kept)
        return kept if isinstance(kept, Communicator) else None

    Allreduce = _method("Allreduce", arguments.allreduce)
    Reduce = _method("Reduce", arguments.reduce)
    Reduce_scatter = _method("Reduce_scatter", arguments.reduce_scatter)
    Reduce_scatter_block = _method("Reduce_scatter_block", arguments.reduce_scatter_block)
    Bcast = _method("Bcast", arguments.bcast, moves=True)
    Allgather = _method("Allgather", arguments.allgather, moves=True)
    Allgatherv = _method("Allgatherv", arguments.allgatherv, moves=True)
    Gather = _method("Gather", arguments.gather, moves=True)
    Gatherv = _method("Gatherv", arguments.gatherv, moves=True)
    Scatter = _method("Scatter", arguments.scatter, moves=True)
    Scatterv = _method("Scatterv", arguments.scatterv, moves=True)
    Alltoall = _method("Alltoall", arguments.alltoall, moves=True)
    Alltoallv = _method("Alltoallv", arguments.alltoallv, moves=True)

    Iallreduce = _method("Iallreduce", arguments.allreduce, _start)
    Ireduce = _method("Ireduce", arguments.reduce, _start)
    Ireduce_scatter = _method("Ireduce_scatter", arguments.reduce_scatter, _start)
    Ireduce_scatter_block = _method("Ireduce_scatter_block", arguments.reduce_scatter_block, _start)

    Allreduce_init = _method("Allreduce_init", arguments.allreduce, _prepare)
    Reduce_init = _method("Reduce_init", arguments.reduce, _prepare)
    Reduce_scatter_init = _method("Reduce_scatter_init", arguments.reduce_scatter, _prepare)
    Reduce_scatter_block_init = _method("Reduce_scatter_block_init", arguments.reduce_scatter_block, _prepare)


class Cartcomm(Intracomm, MPI.Cartcomm):
    """An mpi4py communicator with a Cartesian topology; see `Intracomm`."""

    Sub = _adopting(MPI.Cartcomm.Sub)


class Graphcomm(Intracomm, MPI.Graphcomm):
    """An mpi4py communicator with a graph topology; see `Intracomm`."""


class Distgraphcomm(Intracomm, MPI.Distgraphcomm):
    """An mpi4py communicator with a distributed graph topology; see `Intracomm`."""


_CLASSES: dict[type, type[Intracomm]] = {
    MPI.Cartcomm: Cartcomm,
    MPI.Graphcomm: Graphcomm,
    MPI.Distgraphcomm: Distgraphcomm,
    MPI.Intracomm: Intracomm,  # last, since the others are subclasses of it
}


def _free(owner: MPI.Comm, key: int, kept: Communicator | bool) -> None:
    if isinstance(kept, Communicator) and not MPI.Is_finalized():
        kept.free()


@cache
def _keyval() -> int:
    """Return the key of a communicator's attribute that holds its `Communicator` with a thread."""
    return MPI.Comm.Create_keyval(delete_fn=_free)
