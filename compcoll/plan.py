"""What a call amounts to, once its arguments are checked against each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import config
from .algorithms import choose
from .algorithms.agree import fingerprint
from .codecs.base import DTYPES, Codec, Coder
from .codecs.cast import Cast
from .errors import InvalidArgument, UnknownAlgorithm, UnsupportedDType

SUMS = ("sum", "mean")
"""The operations that can be compressed."""

HALVES = ("float16", "bfloat16")
"""Element types that MPI's reductions do not know."""

MOVED = ""
"""The operation of collectives that reduce nothing."""


class Call(NamedTuple):
    """The arguments that decide how a collective runs.

    Attributes
    ----------
    n : int
        Elements of the buffer; -1 where ranks may differ in it.
    op : str
        The reduction's name, or `MOVED`.
    detail : str
        What else all ranks must agree on, such as the root.
    """

    collective: str
    n: int
    dtype: str
    itemsize: int
    op: str
    codec: Codec | None
    algorithm: str
    blocking: bool
    detail: str = ""


class Plan(NamedTuple):
    """How a collective runs.

    Attributes
    ----------
    codec : Codec or None
        The codec that will run; None when values travel uncompressed.
    algorithm : str
        The algorithm that will run.
    coder : Coder or None
        Moves the values; None when MPI does.
    raw : Coder or None
        Moves values uncompressed, for the parts of an algorithm that do.
    block, segment : int
        Elements of a block of the codec, and of a segment.
    text, digest : str, int
        One line on the call, and its fingerprint: equal on all ranks when the calls belong together.
    """

    codec: Codec | None
    algorithm: str
    coder: Coder | None
    raw: Coder | None
    block: int
    segment: int
    text: str
    digest: int


def make_plan(call: Call, *, device: Any, size: int, native: bool) -> Plan:
    """Check a call and choose what it leaves open.

    Parameters
    ----------
    call : Call
        The arguments.
    device : Device
        Where the buffer is.
    size : int
        Number of ranks.
    native : bool
        Whether the transport has collectives of MPI's own.

    Raises
    ------
    InvalidArgument, UnknownAlgorithm, UnsupportedDType
        If the call cannot be right.
    """
    choose.check(call.collective, call.algorithm)
    _check_operation(call)
    movable = call.dtype in DTYPES and call.op in (*SUMS, MOVED)
    algorithm, codec = call.algorithm, call.codec
    if algorithm == choose.AUTO:
        # Sums of halves are best made in float32 by our own algorithms, with the halves on the wire.
        own_is_better = movable and call.dtype in HALVES and call.op in SUMS
        nbytes = call.n * call.itemsize
        algorithm = choose.choose(
            call.collective,
            nbytes=nbytes,
            size=size,
            compressed=codec is not None,
            native=native and not (own_is_better and nbytes >= choose.SMALL_NBYTES),
        )
        codec = None if algorithm == choose.NATIVE else codec
    if algorithm == choose.NATIVE:
        _check_native(call, codec, native)
        # MPI's blocking and nonblocking collectives do not match each other.
        text = _line(call, "no codec", "native" if call.blocking else "native nonblocking")
        return Plan(None, algorithm, None, None, 1, 1, text, fingerprint(text))
    if not movable:
        raise UnsupportedDType(
            f"algorithm {algorithm!r} moves {', '.join(DTYPES)} and reduces them by {' or '.join(SUMS)}, not "
            f'{call.op or "values"} of {call.dtype}: use codec=None with algorithm="native", under MPI'
        )
    raw = Cast(call.dtype).coder(device, call.dtype)
    coder = raw if codec is None else codec.coder(device, call.dtype)
    segment = max(config.segment_nbytes() // call.itemsize, 1)
    text = _line(call, "no codec" if codec is None else repr(codec), f"{algorithm} in segments of {segment}")
    return Plan(codec, algorithm, coder, raw, 1 if codec is None else codec.block, segment, text, fingerprint(text))


def _line(call: Call, codec: str, algorithm: str) -> str:
    values = [call.op, "of"] if call.op else []
    values += [str(call.n)] * (call.n >= 0) + [call.dtype]
    parts = [" ".join(values), codec, algorithm, call.detail]
    return f"{call.collective}({', '.join(part for part in parts if part)})"


def _check_operation(call: Call) -> None:
    floating = call.dtype in DTYPES
    if call.op == "mean" and not floating and not call.dtype.startswith("complex"):
        raise UnsupportedDType(f"mean of {call.dtype}: floating-point or complex elements are needed")
    if call.codec is None:
        return
    if not floating:
        raise UnsupportedDType(f"{call.codec!r} compresses {', '.join(DTYPES)}, not {call.dtype}: use codec=None")
    if call.op not in (*SUMS, MOVED):
        raise InvalidArgument(f"op={call.op!r} cannot be compressed: use codec=None, or op {' or '.join(SUMS)}")


def _check_native(call: Call, codec: Codec | None, native: bool) -> None:
    if codec is not None:
        others = [name for name in choose.NAMES[call.collective] if name != choose.NATIVE]
        raise UnknownAlgorithm(
            f'algorithm="native" is MPI\'s own and uncompressed, but codec={codec!r} was given: '
            f"use codec=None, or algorithm {', '.join(others)}"
        )
    if not native:
        raise UnknownAlgorithm(f"{call.collective} of {call.dtype} needs MPI's own; this transport has none")
