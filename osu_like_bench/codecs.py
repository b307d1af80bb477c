"""Measure the throughput of codecs in one process, on the host or on a GPU, and compare it with copies and rivals.

A record is one operation of one implementation: an instruction set of compcoll's kernels, ``cuda``, ``memcpy``, or a
library of `RIVALS`. Operations are encode, decode, accumulate (decode and add) and feedback (add the residual, encode,
store the new residual). On GPUs, and for homomorphic codecs, there is recode (decode, add an array, encode); for the
latter also add (of two wires). Fields of a record: ``throughput`` is in 1e9 uncompressed bytes per second, by the
median time; ``versus`` is this throughput divided by that of each other implementation; ``wrong`` is the number of
decoded elements outside the codec's bound; ``copy_fraction`` is the bytes that the kernel moves per second, divided by
those of a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from compcoll.codecs import ALL, SZP, ZFP, Cast, Codec, MinMax
from compcoll.codecs.registry import get_codec, list_codecs
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.tools.arguments import chosen_codec

from . import UsageError, data, on_gpu
from .bounds import bound_of, of_blocks, spread_out
from .data import Array
from .machine import describe
from .parser import known_names
from .report import Column, Progress, Record, Table
from .timing import Limits, elapsed, measure

Operation = Callable[[], Any]
Operations = Mapping[str, Operation]

_FIRST = [cls(**cls.examples[0].options) for cls in ALL]
_MORE = [get_codec("cast", dtype="bfloat16"), get_codec("zfp", rate=16)]
USUAL = (*(codec for codec in _FIRST if not (codec.additive or codec.needs_reference)), *_MORE)
"""The codecs that are measured by default."""

MEMCPY, COPY = "memcpy", "copy"
"""A copy on the host, and in GPU memory."""

ITERATIONS, WARMUP, TIME_CAP = 51, 2, 0.4

_CHECKED = 1 << 22
"""Number of a GPU's values that are verified. To verify all would take longer than the rest of the benchmark."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of a codec's operations on some values.

    Attributes
    ----------
    operations : mapping
        The operations, by name.
    moved : mapping
        The least number of bytes that each operation reads and writes, if known.
    quality : mapping
        Ratio, relative error and wrong elements; empty unless the implementation is compcoll's.
    """

    operations: Operations
    moved: Mapping[str, int] = field(default_factory=dict)
    quality: Mapping[str, Any] = field(default_factory=dict)


Implementations = Callable[[Codec, Array], dict[str, Implementation]]
"""Makes all implementations of a codec. The first one is a copy of the values."""


def on_host(instruction_sets: Sequence[str], rivals: Sequence[str], threads: int) -> Implementations:
    """Return a function for `compare` that makes compcoll's kernels of some instruction sets, and the rivals."""

    def implementations(codec: Codec, x: Array) -> dict[str, Implementation]:
        found = {MEMCPY: _copy(x.view(np.uint8), np)}
        found |= {name: _kernels(codec, x, HostDevice(threads, name), np) for name in instruction_sets}
        makers = {name: maker for name in rivals if (maker := RIVALS[name].get(codec.name))}
        return found | {name: Implementation(maker(codec, x)) for name, maker in makers.items()}

    return implementations


def on_cuda(codec: Codec, x: Array) -> dict[str, Implementation]:
    """Make a copy in GPU memory and compcoll's kernels there, for `compare`."""
    import cupy

    from compcoll.gpu.device import CudaDevice

    device: Any = CudaDevice(cupy.cuda.runtime.getDevice())
    device.runtime.launching = cupy.cuda.Stream.null
    return {COPY: _copy(cupy.asarray(x.view(np.uint8)), cupy), "cuda": _kernels(codec, x, device, cupy)}


def _copy(source: Any, arrays: Any) -> Implementation:
    """Make an implementation that copies bytes; ``arrays`` is the module NumPy or CuPy."""
    target = source.copy()
    return Implementation({"": lambda: arrays.copyto(target, source)}, {"": 2 * source.nbytes})


def _kernels(codec: Codec, x: Array, device: Any, arrays: Any) -> Implementation:
    """Make compcoll's implementation on a device; ``arrays`` is the module NumPy or CuPy."""
    n, name = x.size, x.dtype.name
    coder = codec.for_largest(_largest(x)).coder(device, name)
    stored = arrays.asarray(HostDevice.flat(x, name))
    decoded, sums, residual = arrays.empty_like(stored), stored.copy(), device.zeros_residual(n, name)
    buffer, again = (arrays.empty(coder.wire_nbytes(n), np.uint8) for _ in range(2))
    wire = buffer[: coder.encode(n, stored, (), buffer)]
    coder.decode(n, None, (wire,), decoded)
    operations: dict[str, Operation] = {
        "encode": lambda: coder.encode(n, stored, (), again),
        "decode": lambda: coder.decode(n, None, (wire,), decoded),
        "accumulate": lambda: coder.decode(n, sums, (wire,), sums),
        "feedback": lambda: coder.encode(n, stored, (), again, EncodeOptions(residual=residual)),
    }
    raw, short = stored.nbytes, wire.nbytes
    moved = {"encode": raw + short, "decode": short + raw, "accumulate": short + 2 * raw}
    moved |= {"feedback": raw + short + 2 * residual.nbytes, "recode": raw + 2 * short, "add": 3 * short}
    if codec.homomorphic:
        operations["add"] = lambda: coder.encode(n, None, (wire, wire), again)
    if codec.homomorphic or arrays is not np:
        operations["recode"] = lambda: coder.encode(n, stored, (wire,), again)
    if arrays is np:
        checked, values = n, decoded
    else:
        checked, values = min(n, _CHECKED // codec.block * codec.block), arrays.asnumpy(decoded)
    found = quality(codec, x[:checked], values.view(x.dtype)[:checked], x.nbytes / wire.nbytes)
    return Implementation(operations, moved, found)


def quality(codec: Codec, x: Array, decoded: Array, ratio: float) -> dict[str, Any]:
    """Return ratio, relative error, and the number of elements outside the codec's bound."""
    exact, got = x.astype(np.float64), decoded.astype(np.float64)
    bound = bound_of(codec, x.dtype.name)
    difference = np.abs(got - exact)
    size = float(np.sqrt(np.sum(exact**2)))
    # 16-bit results are rounded once more.
    allowed = spread_out(bound, of_blocks(bound, exact), x.size) + (np.abs(got) * 2.0**-8 if x.itemsize == 2 else 0.0)
    error = float(np.sqrt(np.sum(difference**2))) / size if size else 0.0
    return {"ratio": ratio, "error": error, "wrong": int(np.count_nonzero(~(difference <= allowed)))}


def compare(
    codecs: Sequence[Codec],
    x: Array,
    implementations: Implementations,
    about: Mapping[str, Any],
    limits: Limits,
    table: Table,
    progress: Progress,
    clock: Callable[[Operation], float] = elapsed,
) -> list[Record]:
    """Measure codecs. All implementations of one codec are timed alternately.

    Parameters
    ----------
    codecs : sequence of Codec
        The codecs.
    x : numpy.ndarray
        The values.
    implementations : callable
        `on_cuda`, or a function from `on_host`.
    about : mapping
        Fields of all records.
    limits : Limits
        Limits of each measurement.
    table, progress
        Format and print the rows of compcoll's implementations.
    clock : callable
        The clock of `timing.measure`.
    """
    progress.print(table.head())
    records: list[Record] = []
    for codec in codecs:
        progress.step(repr(codec))
        made = implementations(codec, x)
        actions = {(name, do): run for name, each in made.items() for do, run in each.operations.items()}
        times = dict(zip(actions, measure(list(actions.values()), limits, clock=clock), strict=True))
        copy = next(iter(made))
        for (name, operation), taken in times.items():
            versus = {
                other: seconds.median / taken.median
                for (other, done), seconds in times.items()
                if other != name and not made[other].quality and done in ("", operation)
            }
            moved = made[name].moved.get(operation, 0) / made[copy].moved[""]
            record = {"codec": codec.label, "operation": operation, "implementation": name, **about, **taken.fields()}
            record |= {"throughput": x.nbytes / taken.median / 1e9, "versus": versus}
            record |= {"ratio": 1.0, "error": 0.0, "wrong": 0, **made[name].quality}
            record |= {"copy_fraction": moved * times[copy, ""].median / taken.median}
            if name != COPY:
                records.append(record)
            if made[name].quality:
                progress.print(table.row(record))
    return records


def _operations(encode: Operation, decode: Callable[[Any], Any], add: Callable[[Any], Any]) -> Operations:
    """Return the operations ``encode``, ``decode`` and ``accumulate``. The last two read a wire from ``encode``."""
    wire = encode()
    return {"encode": encode, "decode": lambda: decode(wire), "accumulate": lambda: add(wire)}


def _largest(x: Array) -> float:
    return float(np.abs(x.astype(np.float64)).max(initial=0.0))


def _zfpy(codec: ZFP, x: Array) -> Operations:
    modes = {"rate": codec.rate, "tolerance": codec.tolerance, "precision": codec.precision}
    return _by_zfpy({name: value for name, value in modes.items() if value is not None}, x)


def _zfpy_as_szp(codec: SZP, x: Array) -> Operations:
    tolerance = codec.for_largest(_largest(x)).tolerance
    assert tolerance is not None
    return _by_zfpy({"tolerance": tolerance}, x)


def _by_zfpy(mode: Mapping[str, float], x: Array) -> Operations:
    if x.dtype not in (np.float32, np.float64):
        return {}
    import zfpy

    element, sums = zfpy.dtype_to_ztype(x.dtype), x.copy()

    def decode(stream: bytes) -> Any:
        return zfpy._decompress(stream, element, x.shape, **mode)

    return _operations(
        lambda: zfpy.compress_numpy(x, write_header=False, **mode),
        decode,
        lambda stream: np.add(sums, decode(stream), out=sums),
    )


def _numpy_cast(codec: Cast, x: Array) -> Operations:
    wire, sums = DTYPES[codec.dtype].numpy, x.copy()
    return _operations(
        lambda: x.astype(wire),
        lambda coded: coded.astype(x.dtype),
        lambda coded: np.add(sums, coded.astype(x.dtype), out=sums),
    )


def _numpy_minmax(codec: MinMax, x: Array) -> Operations:
    blocks = x[: x.size // codec.block * codec.block].reshape(-1, codec.block)
    # With fewer than 8 bits, NumPy would have to pack codes into bytes, which would be another codec.
    if not blocks.size or codec.bits != 8:
        return {}
    sums = blocks.copy()

    def encode() -> tuple[Array, Array, Array]:
        lowest, highest = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
        step = np.maximum((highest - lowest) / 255, np.finfo(np.float32).tiny)
        return np.rint((blocks - lowest) / step).astype(np.uint8), lowest, step

    def decode(wire: tuple[Array, Array, Array]) -> Array:
        codes, lowest, step = wire
        values: Array = lowest + codes * step
        return values

    return _operations(encode, decode, lambda wire: np.add(sums, decode(wire), out=sums))


def _torch_cast(codec: Cast, x: Array) -> Operations:
    import torch

    if x.dtype.name == "bfloat16":
        return {}
    values, wire = torch.from_numpy(x), getattr(torch, codec.dtype)
    sums = values.clone()
    return _operations(lambda: values.to(wire), lambda coded: coded.to(values.dtype), sums.add_)


def _torch_minmax(codec: MinMax, x: Array) -> Operations:
    import torch

    if x.dtype.name == "bfloat16" or codec.bits != 8 or x.size < codec.block:
        return {}
    blocks = torch.from_numpy(x)[: x.size // codec.block * codec.block].reshape(-1, codec.block)
    sums = blocks.clone()

    def encode() -> tuple[Any, Any, Any]:
        lowest, highest = torch.aminmax(blocks, dim=1, keepdim=True)
        step = ((highest - lowest) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        return ((blocks - lowest) / step).round().to(torch.uint8), lowest, step

    def decode(wire: tuple[Any, Any, Any]) -> Any:
        codes, lowest, step = wire
        return lowest + codes * step

    return _operations(encode, decode, lambda wire: sums.add_(decode(wire)))


RIVALS: Mapping[str, Mapping[str, Callable[[Any, Array], Operations]]] = {
    "zfpy": {"zfp": _zfpy, "szp": _zfpy_as_szp},
    "numpy": {"cast": _numpy_cast, "minmax": _numpy_minmax},
    "torch": {"cast": _torch_cast, "minmax": _torch_minmax},
}
"""Other libraries' implementations: functions that make the operations, by library and codec."""


def available(threads: int) -> tuple[str, ...]:
    """Return the names of the installed `RIVALS`, and set torch's number of threads."""
    found = tuple(name for name in RIVALS if find_spec(name) is not None)
    if "torch" in found:
        import torch

        torch.set_num_threads(threads)
    return found


def _versus(name: str) -> Column:
    return Column(f"x {name}", lambda record: record["versus"].get(name), 10, ".2f")


_WHAT = Column("# Codec", "codec", -20), Column("Operation", "operation", -12)
_QUALITY = Column("Ratio", "ratio", 9, ".2f"), Column("Rel. error", "error", 12, ".2e"), Column("#wrong", "wrong", 8)
_SPEED_ON_GPU = (
    Column("GB/s", "throughput", 10, ".1f"),
    Column("Median us", "median_us", 12, ".2f"),
    Column("x copy", "copy_fraction", 10, ".2f"),
)
TABLE_ON_GPU = Table(*_WHAT, *_SPEED_ON_GPU, *_QUALITY)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Run the command, and return its description and records."""
    if arguments.codec == "none":
        raise UsageError(
            f"--codec none has no speed: give {', '.join(list_codecs())}, or leave --codec out for the usual ones"
        )
    codec, itemsize = chosen_codec(arguments), DTYPES[arguments.dtype].itemsize
    if arguments.size < itemsize or arguments.size % itemsize:
        raise UsageError(f"size {arguments.size} is not a multiple of the {itemsize} bytes of a {arguments.dtype}")
    cuda, threads = arguments.device == "cuda", arguments.threads
    about = describe() | ({"gpu": on_gpu.check("codecs")} if cuda else {})
    implementations: Implementations = on_cuda
    if cuda:
        table, place, threads = TABLE_ON_GPU, about["gpu"], 0
    else:
        supported = HostDevice.instruction_sets()
        sets = {"best": supported[-1:], "all": supported}.get(arguments.instruction_set) or known_names(
            arguments.instruction_set,
            supported,
            "this CPU cannot run instruction set {name!r}: best, all, or of {known}",
        )
        rivals = available(threads)
        implementations, place = on_host(sets, rivals, threads), f"{about['cpu']}, {threads} thread(s)"
        speed = Column("Kernels", "implementation", -10), Column("GB/s", "throughput", 8, ".2f")
        table = Table(*_WHAT, *speed, *map(_versus, (MEMCPY, *rivals)), *_QUALITY)
    chosen = USUAL if codec is None else [codec]
    with Progress(len(chosen)) as progress:
        progress.print(
            f"# Codecs, compcoll {about['compcoll']}, {place}",
            f"# {arguments.size} bytes of {arguments.dtype}, data {arguments.data}; "
            "GB/s of uncompressed bytes, medians of runs in turns; accumulate: decode and add",
        )
        records = compare(
            chosen,
            data.make(arguments.data, arguments.size // itemsize, arguments.dtype, (arguments.seed, 0)),
            implementations,
            {"dtype": arguments.dtype, "data": arguments.data, "size": arguments.size, "threads": threads},
            Limits.of(arguments, WARMUP, ITERATIONS, TIME_CAP),
            table,
            progress,
            on_gpu.seconds_of_kernels if cuda else elapsed,
        )
        if cuda:
            copy_us = records[0]["versus"][COPY] * records[0]["median_us"]
            progress.print(f"# copy: {2 * arguments.size / copy_us / 1e3:.0f} GB/s read and written")
    return about, records
