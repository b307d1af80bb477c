"""Throughput of codecs in one process, against copying memory and other implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.codecs import ALL, Codec
from compcoll.devices.encode_options import EncodeOptions
from compcoll.devices.host import HostDevice
from compcoll.dtypes import DTYPES
from compcoll.registry import get_codec

from . import data
from .bounds import bound_of, of_blocks, spread_out
from .errors import UsageError
from .report import Progress
from .rivals import OPERATIONS, Operation, available, rival_operations
from .timing import Limits, Times, measure

Array = npt.NDArray[Any]

_FIRST = [cls(**cls.examples[0].options) for cls in ALL]
_MORE = [get_codec("cast", dtype="bfloat16"), get_codec("zfp", rate=16)]
USUAL = (*(codec for codec in _FIRST if not codec.additive), *_MORE)
"""The codecs that are measured unless one is asked for."""

MEMCPY = "memcpy"

ITERATIONS, WARMUP, TIME_CAP = 51, 2, 0.4

_CHECKED = 1 << 22
"""Values of a GPU's result whose error is looked at: all would take the host longer than everything else together."""


@dataclass(frozen=True)
class CodecRecord:
    """One operation of one implementation. Throughput in 1e9 uncompressed bytes a second, of the median.

    Attributes
    ----------
    implementation : str
        An instruction set of compcoll's kernels, or memcpy, zfpy, numpy or torch.
    operation : str
        encode, decode, accumulate (decode and add) or feedback (add what was lost, encode, keep what is lost).
    versus : dict
        This throughput by that of each other implementation.
    wrong : int
        Decoded elements outside the codec's bound.
    copy_fraction : float
        On a GPU: bytes that the kernel reads and writes at least, each second, by those of a copy there.
    """

    codec: str
    operation: str
    implementation: str
    dtype: str
    data: str
    size: int
    threads: int
    throughput: float
    avg_us: float
    median_us: float
    min_us: float
    max_us: float
    iterations: int
    ratio: float = 1.0
    error: float = 0.0
    wrong: int = 0
    versus: dict[str, float] = field(default_factory=dict)
    copy_fraction: float = 0.0


def _speed(size: int, taken: Times) -> dict[str, Any]:
    """The fields of a record that tell how fast an operation is."""
    return {
        "throughput": size / taken.median / 1e9,
        "avg_us": taken.mean * 1e6,
        "median_us": taken.median * 1e6,
        "min_us": taken.min * 1e6,
        "max_us": taken.max * 1e6,
        "iterations": taken.iterations,
    }


def chosen_sets(text: str) -> list[str]:
    """Names of instruction sets, separated by commas; ``best`` and ``all`` are understood.

    Parameters
    ----------
    text : str
        The argument.
    """
    supported = HostDevice.instruction_sets()
    if text in ("best", "all"):
        return supported[-1:] if text == "best" else supported
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in supported:
            raise UsageError(f"this CPU cannot run instruction set {name!r}: best, all, or of {', '.join(supported)}")
    return chosen


@dataclass(frozen=True)
class Own:
    """compcoll's kernels of one instruction set on some values."""

    operations: Mapping[str, Operation]
    ratio: float
    error: float
    wrong: int


def _own(codec: Codec, x: Array, instruction_set: str, threads: int) -> Own:
    name = x.dtype.name
    coder = codec.coder(HostDevice(threads, instruction_set), name)
    stored = HostDevice.flat(x, name)
    decoded, sums, residual = np.empty_like(stored), stored.copy(), HostDevice.zeros_residual(x.size, name)
    buffer = np.empty(coder.wire_nbytes(x.size), np.uint8)
    wire = buffer[: coder.encode(x.size, stored, (), buffer)]
    coder.decode(x.size, None, (wire,), decoded)
    operations: dict[str, Operation] = {
        "encode": lambda: coder.encode(x.size, stored, (), buffer),
        "decode": lambda: coder.decode(x.size, None, (wire,), decoded),
        "accumulate": lambda: coder.decode(x.size, sums, (wire,), sums),
        "feedback": lambda: coder.encode(x.size, stored, (), buffer, EncodeOptions(residual=residual)),
    }
    return Own(operations, *_quality(codec, x, decoded.view(x.dtype), wire.nbytes))


def _quality(codec: Codec, x: Array, decoded: Array, wire_nbytes: int) -> tuple[float, float, int]:
    """Ratio, relative error, and elements outside the codec's bound."""
    exact, got = x.astype(np.float64), decoded.astype(np.float64)
    bound = bound_of(codec, x.dtype.name)
    difference = np.abs(got - exact)
    size = float(np.sqrt(np.sum(exact**2)))
    # Half-precision results are rounded once more.
    allowed = spread_out(bound, of_blocks(bound, exact), x.size) + (np.abs(got) * 2.0**-8 if x.itemsize == 2 else 0.0)
    return (
        x.nbytes / wire_nbytes,
        float(np.sqrt(np.sum(difference**2))) / size if size else 0.0,
        int(np.count_nonzero(~(difference <= allowed))),
    )


def _memcpy(x: Array) -> Operation:
    source, target = x.view(np.uint8), np.ones(x.nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def run(
    codecs: Sequence[Codec],
    *,
    size: int,
    dtype: str,
    kind: str,
    seed: int,
    instruction_sets: Sequence[str],
    threads: int,
    limits: Limits,
    progress: Progress,
) -> list[CodecRecord]:
    """Measure some codecs, all implementations of a codec in turns.

    Parameters
    ----------
    codecs : sequence of Codec
        Which.
    size : int
        Uncompressed bytes.
    dtype, kind, seed
        Element type and values, as `data.make` takes them.
    instruction_sets : sequence of str
        Of compcoll's kernels.
    threads : int
        Threads of each kernel, and torch's.
    limits : Limits
        How long.
    progress : Progress
        Prints the table's rows.
    """
    itemsize = DTYPES[dtype].itemsize
    if size < itemsize or size % itemsize:
        raise UsageError(f"size {size} is not a multiple of the {itemsize} bytes of a {dtype}")
    rivals = available(threads)
    progress.print(head(list(rivals)))
    records: list[CodecRecord] = []
    for codec in codecs:
        progress.step(repr(codec))
        x = data.make(kind, size // itemsize, dtype, (seed, 0))
        own = {name: _own(codec, x, name, threads) for name in instruction_sets}
        others = {name: rival_operations(name, codec, x) for name in rivals}
        actions: dict[tuple[str, str], Callable[[], Any]] = {(MEMCPY, ""): _memcpy(x)}
        for name, operations in {**{name: o.operations for name, o in own.items()}, **others}.items():
            actions |= {(name, operation): operations[operation] for operation in OPERATIONS if operation in operations}
        times = dict(zip(actions, measure(list(actions.values()), limits), strict=True))

        def record(name: str, operation: str, times: Mapping[tuple[str, str], Times], **more: Any) -> CodecRecord:
            taken = times[name, operation]
            versus = {
                other: seconds.median / taken.median
                for (other, done), seconds in times.items()
                if other not in instruction_sets and other != name and done in ("", operation)
            }
            return CodecRecord(
                codec=more.pop("label"),
                operation=operation,
                implementation=name,
                dtype=dtype,
                data=kind,
                size=size,
                threads=threads,
                **_speed(size, taken),
                versus=versus,
                **more,
            )

        for name, operation in actions:
            quality = {}
            if name in own:
                quality = {key: getattr(own[name], key) for key in ("ratio", "error", "wrong")}
            records.append(record(name, operation, times, label=codec.label, **quality))
            if name in own:
                progress.print(row(records[-1], list(rivals)))
    return records


def run_on_gpu(
    codecs: Sequence[Codec], *, size: int, dtype: str, kind: str, seed: int, limits: Limits, progress: Progress
) -> list[CodecRecord]:
    """Measure some codecs in GPU memory, against a copy there; the arguments are those of `run`."""
    from . import on_gpu

    progress.print(_GPU_HEAD)
    records: list[CodecRecord] = []
    x = data.make(kind, size // DTYPES[dtype].itemsize, dtype, (seed, 0))
    work, moved = on_gpu.copy_of(x)
    copied = on_gpu.measure(work, limits)
    per_second = moved / copied.median
    for codec in codecs:
        progress.step(repr(codec))
        kernels = on_gpu.Kernels(codec, x)
        checked = min(x.size, _CHECKED // codec.block * codec.block)
        _, error, wrong = _quality(codec, x[:checked], kernels.decoded[:checked], kernels.wire.nbytes)
        ratio = x.nbytes / kernels.wire.nbytes
        for operation, (work, moved) in kernels.operations.items():
            taken = on_gpu.measure(work, limits)
            record = CodecRecord(
                codec=codec.label,
                operation=operation,
                implementation="cuda",
                dtype=dtype,
                data=kind,
                size=size,
                threads=0,
                **_speed(size, taken),
                ratio=ratio,
                error=error,
                wrong=wrong,
                versus={"copy": copied.median / taken.median},
                copy_fraction=moved / taken.median / per_second,
            )
            records.append(record)
            progress.print(
                f"{record.codec:<20}{operation:<12}{record.throughput:>10.1f}{record.median_us:>12.2f}"
                f"{record.copy_fraction:>10.2f}{ratio:>9.2f}{error:>12.2e}{wrong:>8}"
            )
    progress.print(f"# copy: {per_second / 1e9:.0f} GB/s read and written")
    return records


_GPU_HEAD = (
    f"{'# Codec':<20}{'Operation':<12}{'GB/s':>10}{'Median us':>12}{'x copy':>10}{'Ratio':>9}{'Rel. error':>12}"
    f"{'#wrong':>8}"
)


def head(rivals: Sequence[str]) -> str:
    """The line of column heads."""
    versus = "".join(f"{'x ' + name:>10}" for name in (MEMCPY, *rivals))
    return (
        f"{'# Codec':<20}{'Operation':<12}{'Kernels':<10}{'GB/s':>8}{versus}{'Ratio':>9}{'Rel. error':>12}{'#wrong':>8}"
    )


def row(record: CodecRecord, rivals: Sequence[str]) -> str:
    """The line of one record."""
    versus = "".join(
        f"{record.versus[name]:>10.2f}" if name in record.versus else f"{'-':>10}" for name in (MEMCPY, *rivals)
    )
    return (
        f"{record.codec:<20}{record.operation:<12}{record.implementation:<10}{record.throughput:>8.2f}{versus}"
        f"{record.ratio:>9.2f}{record.error:>12.2e}{record.wrong:>8}"
    )


def complaints(records: Sequence[CodecRecord]) -> list[str]:
    """A line for each record with wrong elements."""
    return [
        f"{record.codec}, {record.implementation}: {record.wrong} decoded elements outside the codec's bound"
        for record in records
        if record.wrong and record.operation == OPERATIONS[0]
    ]
