"""Contenders: ways to run a collective, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from compcoll import config
from compcoll.codecs import Codec
from compcoll.host.device import HostDevice
from compcoll.plan import choose
from compcoll.sparse import Sparsifier

from . import UsageError, naive, peers
from .cases import CASES, Case, Ranks
from .data import Array
from .on_gpu import Buffers
from .parser import known_names

UNCOMPRESSED = "_uncompressed"
ONE_THREAD = "_one_thread"
"""Suffixes of a contender's name: it runs without the codec; it uses one thread for each kernel."""


@dataclass(frozen=True)
class Ran:
    """A record of what a call did.

    Attributes
    ----------
    algorithm : str
        The algorithm that ran.
    codec : Codec or None
        The codec that was used.
    ratio : float
        Uncompressed bytes divided by bytes sent; 1 if unknown.
    seconds : dict
        Seconds that compcoll spent in encode, decode and wait.
    """

    algorithm: str
    codec: Codec | None = None
    ratio: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A way to run a collective on buffers of one size.

    Attributes
    ----------
    name : str
        The name on the command line.
    run : callable
        Runs the collective once.
    ran : callable
        Returns the record of the last run.
    same_bits : bool
        Whether all ranks must get the same bits.
    """

    name: str
    run: Callable[[], Any]
    ran: Callable[[], Ran]
    same_bits: bool = False


def names(collective: str) -> list[str]:
    """List all contenders of a collective."""
    algorithms = [choose.AUTO, *(name for name in choose.NAMES[collective] if name != choose.NATIVE)]
    dense = [name + UNCOMPRESSED for name in algorithms if name not in choose.SPARSE]
    own = [*algorithms, *dense]
    special = [choose.SHARED_MEMORY, *naive.ALLREDUCE, *peers.names()] if collective == "allreduce" else []
    return [choose.NATIVE, *own, *special, *(name + ONE_THREAD for name in own)]


def _is_plain(name: str) -> bool:
    """Return whether one of compcoll's contenders never compresses, even if the command line has a codec."""
    return name == choose.SHARED_MEMORY or name.removesuffix(ONE_THREAD).endswith(UNCOMPRESSED)


def _algorithm(name: str) -> str:
    """Return the algorithm in the name of one of compcoll's contenders."""
    return name.removesuffix(ONE_THREAD).removesuffix(UNCOMPRESSED)


def parse(text: str, collective: str, codec: Codec | None) -> list[str]:
    """Parse the names of contenders, and check that they work with the codec.

    Parameters
    ----------
    text : str
        The names, separated by commas.
    collective : str
        The collective to run.
    codec : Codec or None
        The codec of the command line.
    """
    known = names(collective)
    full = ",".join("p2p_ring" if name.strip() == "p2p" else name for name in text.split(","))
    chosen = known_names(full, known, f"{collective} has no contender {{name!r}}: there are {{known}}")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{text!r} has a name twice: different names are needed, such as {','.join(known[:3])}")
    if codec is not None and CASES[collective].spread:
        raise UsageError(
            f"{collective} is measured without a codec only, to compare results of any length bit by bit: "
            "leave --codec out"
        )
    for name in chosen if collective == "allreduce" else ():
        _check_codec(name, codec)
    return chosen


def _check_codec(name: str, codec: Codec | None) -> None:
    """Raise `UsageError` if a contender of allreduce does not work with the codec."""
    if name in naive.ALLREDUCE:
        if codec is None:
            raise UsageError(f"{name} always compresses: it needs a --codec other than none")
        if codec.additive:
            raise UsageError(f"--compare {name}: {codec.name} has no wire of its own to send: leave {name} out")
    with_any_codec = _algorithm(name) in (choose.NATIVE, choose.AUTO, *peers.names()) or _is_plain(name)
    if not with_any_codec and (_algorithm(name) in choose.SPARSE) != isinstance(codec, Sparsifier):
        allowed = ", ".join(choose.SPARSE)
        raise UsageError(
            f"{name} and codec {codec!r} do not go together: {allowed} are for sparse codecs, and only those"
        )


def make(
    name: str,
    case: Case,
    ranks: Ranks,
    x: Array,
    out: Array,
    *,
    codec: Codec | None,
    mean: bool,
    there: Buffers | None = None,
) -> Contender:
    """Make a contender.

    Parameters
    ----------
    name : str
        One of `names`.
    case : Case
        The collective.
    ranks : Ranks
        The ranks.
    x, out : numpy.ndarray
        Input and output on the host.
    codec : Codec or None
        The codec of the command line.
    mean : bool
        Whether sums are divided by the number of ranks.
    there : Buffers, optional
        Input and output in GPU memory, if the collective runs there.
    """
    scale = 1.0 / ranks.comm.size if mean and case.reduces else 1.0
    if name == choose.NATIVE:
        return _native(case, ranks, x, out, scale, there)
    if name in naive.ALLREDUCE:
        assert codec is not None
        return _point_to_point(name, ranks, x, out, codec, scale)
    if name in peers.names():
        return _peer(name, ranks, x, out, scale, there)
    comm = ranks.one_thread if name.endswith(ONE_THREAD) else ranks.compcoll
    options: dict[str, Any] = {"algorithm": _algorithm(name), "codec": None if _is_plain(name) else codec}
    if case.reduces:
        options["op"] = "mean" if mean else "sum"

    def ran() -> Ran:
        stats = comm.stats
        assert stats is not None
        seconds = {"encode": stats.encode_seconds, "decode": stats.decode_seconds, "wait": stats.wait_seconds}
        return Ran(stats.algorithm, None if stats.codec is None else codec, stats.ratio, seconds)

    if there is None:
        run = case.compressed(comm, x, out, **options)
    else:
        run = there.timed(case.compressed(comm, there.x, there.out, **options))
    return Contender(name, run, ran, same_bits=True)


def _scaled(run: Callable[[], Any], out: Array, scale: float) -> Callable[[], Any]:
    """Wrap a call so that it multiplies its output by ``scale``, for a mean."""

    def both() -> None:
        run()
        np.multiply(out, out.dtype.type(scale), out=out)

    return run if scale == 1.0 else both


def _native(case: Case, ranks: Ranks, x: Array, out: Array, scale: float, there: Buffers | None) -> Contender:
    """Make the contender that calls mpi4py. Buffers on a GPU are copied to the host before, and back afterwards.

    MPI has no 16-bit floats: they are added in float32, and moved as 16-bit integers.
    """
    halves = x.itemsize == 2
    staged = halves and case.reduces

    def for_mpi(array: Array) -> Array:
        if staged:
            return np.zeros(array.shape, np.float32)
        return array.view(np.uint16) if halves else array

    sent, got = for_mpi(x), for_mpi(out)
    native = _scaled(case.native(ranks.comm, sent, got), got, scale)

    def run() -> None:
        if there is not None:
            there.fetch(x)
        if staged:
            np.copyto(sent, x, casting="unsafe")
        native()
        if staged:
            np.copyto(out, got, casting="unsafe")
        if there is not None:
            there.upload()

    return Contender(choose.NATIVE, run if there is None else there.timed(run), lambda: Ran(choose.NATIVE))


def _point_to_point(name: str, ranks: Ranks, x: Array, out: Array, codec: Codec, scale: float) -> Contender:
    """Make the contender whose allreduce compresses inside send and receive."""
    coder = codec.coder(HostDevice(config.threads(ranks.cores)), x.dtype.name)
    allreduce = naive.ALLREDUCE[name](ranks.comm, coder, codec.block, x[0])

    def ran() -> Ran:
        sent = allreduce.messages
        if not sent.wire_nbytes:
            return Ran(name)
        return Ran(name, codec, sent.raw_nbytes / sent.wire_nbytes)

    return Contender(name, _scaled(partial(allreduce, x[0], out[0]), out, scale), ran)


def _peer(name: str, ranks: Ranks, x: Array, out: Array, scale: float, there: Buffers | None) -> Contender:
    """Make a contender from the allreduce of an entry point."""
    if there is not None:
        raise UsageError(f"--device cuda: contender {name} is for host memory")
    peer = peers.load(name)
    codec = peers.codec_of(peer)
    return Contender(name, _scaled(peer(ranks.comm, x[0], out[0]), out, scale), lambda: Ran(name, codec))
