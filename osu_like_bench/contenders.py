"""Ways to run a collective, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from compcoll import config
from compcoll.codecs import Codec
from compcoll.collectives import choose
from compcoll.devices.host import HostDevice
from compcoll.sparse import Sparsifier

from . import naive, peers
from .cases import Case, Ranks
from .errors import UsageError
from .on_gpu import Buffers

Array = npt.NDArray[Any]

UNCOMPRESSED = "_uncompressed"
ONE_THREAD = "_one_thread"
"""Ends of names: without the codec; with one thread for each kernel, whatever number it would have."""

_SHORT = {"p2p": "p2p_ring"}


@dataclass(frozen=True)
class Ran:
    """The account of what a call did.

    Attributes
    ----------
    algorithm : str
        The algorithm that ran.
    compressed : bool
        Whether values were encoded on their way.
    ratio : float
        Bytes that this rank would have sent uncompressed, by bytes sent; 1 if that is not known.
    seconds : dict
        compcoll's account of the time: encode, decode, wait.
    codec : Codec or None
        What values were encoded with, if it is not the codec of the command line.
    """

    algorithm: str
    compressed: bool
    ratio: float
    seconds: dict[str, float]
    codec: Codec | None = None


@dataclass(frozen=True)
class Contender:
    """A way to run a collective on buffers of one size.

    Attributes
    ----------
    name : str
        As on the command line.
    run : callable
        Runs it once.
    ran : callable
        What the last run did.
    same_bits : bool
        Whether it promises all ranks the same bits.
    """

    name: str
    run: Callable[[], Any]
    ran: Callable[[], Ran]
    same_bits: bool


def names(collective: str) -> list[str]:
    """All contenders of a collective."""
    algorithms = [choose.AUTO, *(name for name in choose.NAMES[collective] if name != choose.NATIVE)]
    dense = [name + UNCOMPRESSED for name in algorithms if name not in choose.SPARSE]
    own = [*algorithms, *dense]
    special = [choose.SHARED_MEMORY, *naive.ALLREDUCE, *peers.names()] if collective == "allreduce" else []
    return [choose.NATIVE, *own, *special, *(name + ONE_THREAD for name in own)]


def _is_plain(name: str) -> bool:
    """Tell whether one of compcoll's contenders sends values as they are, whatever the codec of the command line."""
    return name == choose.SHARED_MEMORY or name.removesuffix(ONE_THREAD).endswith(UNCOMPRESSED)


def _algorithm(name: str) -> str:
    """The algorithm that a contender of compcoll's is named after."""
    return name.removesuffix(ONE_THREAD).removesuffix(UNCOMPRESSED)


def parse(text: str, collective: str, codec: Codec | None) -> list[str]:
    """Names of contenders, separated by commas.

    Parameters
    ----------
    text : str
        The argument.
    collective : str
        Which collective they run.
    codec : Codec or None
        What they compress with.
    """
    known = names(collective)
    chosen = [_SHORT.get(name, name) for name in (part.strip() for part in text.split(",")) if name]
    for name in chosen:
        if name not in known:
            raise UsageError(f"{collective} has no contender {name!r}: there are {', '.join(known)}")
        if name in peers.names():
            continue
        sparse = isinstance(codec, Sparsifier)
        goes_with_all = _algorithm(name) in (choose.NATIVE, choose.AUTO) or _is_plain(name)
        if collective == "allreduce" and not goes_with_all and (_algorithm(name) in choose.SPARSE) != sparse:
            allowed = ", ".join(choose.SPARSE)
            raise UsageError(f"{name} and codec {codec!r} do not go together: sparse codecs go by {allowed}")
        if codec is None and name in naive.ALLREDUCE:
            raise UsageError(f"{name} is about compression: it needs a --codec other than none")
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"{text!r}: different names, separated by commas, are needed, such as {','.join(known[:3])}")
    return chosen


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
    """Make a contender of one of `names`.

    Parameters
    ----------
    name : str
        Which.
    case : Case
        The collective.
    ranks : Ranks
        Who takes part.
    x, out : numpy.ndarray
        Its buffers.
    codec : Codec or None
        What it compresses with, if it does.
    mean : bool
        Whether sums are divided by the number of ranks.
    there : Buffers, optional
        The buffers in GPU memory, if these are what the collective runs on.
    """
    scale = 1.0 / ranks.comm.size if mean and case.reduces else None
    if name == choose.NATIVE:
        return _native(case, ranks.comm, x, out, scale, there)
    if name in naive.ALLREDUCE:
        assert codec is not None
        if codec.additive:
            raise UsageError(f"--compare {name}: {codec.name} has no wire of its own to send: leave {name} out")
        return _point_to_point(name, ranks, x, out, codec, scale)
    if name in peers.names():
        return _peer(name, ranks, x, out, scale, there)
    algorithm = _algorithm(name)
    comm = ranks.one_thread if name.endswith(ONE_THREAD) else ranks.compcoll
    options: dict[str, Any] = {"algorithm": algorithm, "codec": None if _is_plain(name) else codec}
    if case.reduces:
        options["op"] = "mean" if mean else "sum"

    def ran() -> Ran:
        stats = comm.stats
        assert stats is not None
        seconds = {"encode": stats.encode_seconds, "decode": stats.decode_seconds, "wait": stats.wait_seconds}
        return Ran(stats.algorithm, stats.codec is not None, stats.ratio, seconds)

    if there is None:
        return Contender(name, case.compressed(comm, x, out, **options), ran, same_bits=True)
    call = case.compressed(comm, there.x, there.out, **options)
    return Contender(name, there.timed(call), ran, same_bits=True)


def _native(
    case: Case, comm: MPI.Intracomm, x: Array, out: Array, scale: float | None, there: Buffers | None
) -> Contender:
    """mpi4py's call; for buffers on a GPU between copies from there and back.

    Halves are added in float32, since MPI does not know them, and otherwise moved as they are.
    """
    halves = x.itemsize == 2
    staged = halves and case.reduces

    def for_mpi(array: Array) -> Array:
        if staged:
            return np.empty(array.shape, np.float32)
        return array.view(np.uint16) if halves else array

    sent, got = for_mpi(x), for_mpi(out)

    def run() -> None:
        if there is not None:
            there.fetch(x)
        if staged:
            np.copyto(sent, x, casting="unsafe")
        case.native(comm, sent, got)
        if scale is not None:
            np.multiply(got, got.dtype.type(scale), out=got)
        if staged:
            np.copyto(out, got, casting="unsafe")
        if there is not None:
            there.upload()

    run = run if there is None else there.timed(run)
    return Contender(choose.NATIVE, run, lambda: Ran(choose.NATIVE, False, 1.0, {}), same_bits=False)


def _point_to_point(name: str, ranks: Ranks, x: Array, out: Array, codec: Codec, scale: float | None) -> Contender:
    flat, result = x[0], out[0]
    coder = codec.coder(HostDevice(config.threads(ranks.cores)), x.dtype.name)
    allreduce = naive.ALLREDUCE[name](ranks.comm, coder, codec.block, flat)

    def run() -> None:
        allreduce(flat, result)
        if scale is not None:
            np.multiply(result, result.dtype.type(scale), out=result)

    def ran() -> Ran:
        sent = allreduce.messages
        return Ran(name, ranks.comm.size > 1, sent.raw_nbytes / sent.wire_nbytes if sent.wire_nbytes else 1.0, {})

    return Contender(name, run, ran, same_bits=False)


def _peer(name: str, ranks: Ranks, x: Array, out: Array, scale: float | None, there: Buffers | None) -> Contender:
    """Make a contender that an entry point names."""
    if there is not None:
        raise UsageError(f"--device cuda: contender {name} is for host memory")
    peer = peers.load(name)
    assert peer is not None
    flat, result = x[0], out[0]
    allreduce, codec = peer(ranks.comm, flat, result), peers.codec_of(peer)

    def run() -> None:
        allreduce()
        if scale is not None:
            np.multiply(result, result.dtype.type(scale), out=result)

    ran = Ran(name, codec is not None, 1.0, {}, codec)
    return Contender(name, run, lambda: ran, same_bits=False)
