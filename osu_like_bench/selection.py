"""Time to find the largest elements of a buffer: every selector, NumPy's, torch's, and passes over memory."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.codecs.sparse.sparsifier import Selection
from compcoll.devices.host import HostDevice
from compcoll.errors import InvalidArgument
from compcoll.sparse import TopK
from compcoll.tools.arguments import given_options

from . import data
from .errors import UsageError
from .report import Progress
from .sizes import sweeps
from .timing import Limits, Times, measure

Array = npt.NDArray[Any]

MOST: Mapping[str, float] = {"ldte": 1.5, "hierarchical": 2.0, "bisection": 2.0}
"""The multiple of k elements that a selector may choose at most, where that is more than k."""

RIVALS = ("argpartition", "topk")

SMALLEST, LARGEST = 64 << 10, 256 << 20
"""The smallest and the largest size in bytes, unless others are asked for."""

ITERATIONS, WARMUP, TIME_CAP = 51, 2, 0.3

_DRAWS, _DRAWN = 8, 16 << 20
"""Buffers of a size, and bytes of all of them: in a single small one a selector may be lucky."""


@dataclass(frozen=True)
class SelectionRecord:
    """One way to choose k of n elements.

    Attributes
    ----------
    method : str
        A selector, ``strom`` (a known threshold) or ``randomk``; ``argpartition`` (NumPy) or ``topk`` (torch); ``copy``
        (memory to memory) or ``read`` (one pass that counts).
    draws : int
        Buffers of that size that it was timed on; the times are the means of each one's.
    chosen : int
        How many were, of the last.
    wrong : int
        Elements among the k largest that were left out, and those beyond what the method allows, of all.
    throughput : float
        In 1e9 bytes of the buffer a second, of the median.
    versus_copy : float
        Copying's median time by this one's.
    """

    method: str
    size: int
    dtype: str
    data: str
    density: float
    draws: int
    chosen: int
    wrong: int
    throughput: float
    median_us: float
    min_us: float
    max_us: float
    iterations: int
    versus_copy: float
    versus: dict[str, float] = field(default_factory=dict)


def _torch_topk(x: Array, k: int, threads: int) -> Callable[[], Array]:
    import torch

    torch.set_num_threads(threads)
    values = torch.from_numpy(x)

    def run() -> Array:
        found: Array = torch.topk(values.abs(), k, sorted=False).indices.numpy()
        return found

    return run


def _random(kernels: Selection, x: Array, k: int) -> Array:
    found, _ = kernels.above(x, math.inf, x.size)
    assert found is not None
    chosen: Array = kernels.union(kernels.random(x.size, k, 1), found)
    return chosen


def methods(kernels: Selection, x: Array, k: int) -> dict[str, Callable[[], Any]]:
    """Everything that can be timed on these values, by name.

    Parameters
    ----------
    kernels : Selection
        compcoll's passes.
    x : numpy.ndarray
        The values.
    k : int
        How many to choose.
    """
    target = np.ones_like(x)
    threshold = float(np.nextafter(np.partition(np.abs(x), x.size - k)[x.size - k], x.dtype.type(0)))
    found: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(target, x),
        "read": lambda: kernels.count(x, threshold),
    }
    found |= {name: partial(selector, kernels, x, k) for name, selector in SELECTORS.items()}
    found["strom"] = lambda: kernels.above(x, threshold, x.size // 16)[0]
    found["randomk"] = lambda: _random(kernels, x, k)
    found["argpartition"] = lambda: np.argpartition(np.abs(x), x.size - k)[x.size - k :]
    if find_spec("torch") is not None:
        found["topk"] = _torch_topk(x, k, 1)
    return found


def _wrong(name: str, x: Array, k: int, indices: Array) -> int:
    """Elements that should have been chosen and were not, and those that are too many."""
    if name == "randomk":
        return abs(indices.size - k)
    chosen = np.zeros(x.size, np.bool_)
    chosen[indices] = True
    magnitude = np.abs(x)
    least = magnitude[chosen].min() if indices.size else np.inf
    smaller = int(np.count_nonzero(magnitude[~chosen] > least))
    most = math.ceil(MOST.get(name, 1.0) * k) + (name in MOST)
    # Of equal magnitudes a known threshold takes all.
    too_many = 0 if name == "strom" else max(indices.size - most, 0)
    return smaller + max(min(k, int(np.count_nonzero(x))) - int(indices.size), 0) + too_many


def run(
    *,
    sizes: Sequence[int],
    density: float,
    dtype: str,
    kind: str,
    seed: int,
    limits: Limits,
    progress: Progress,
) -> list[SelectionRecord]:
    """Measure all methods, in turns, at all sizes.

    Parameters
    ----------
    sizes : sequence of int
        Bytes.
    density : float
        Part of the elements to choose.
    dtype, kind, seed
        Element type, float32 or float64, and values, as `data.make` takes them.
    limits : Limits
        How long.
    progress : Progress
        Prints the rows.
    """
    if dtype not in ("float32", "float64"):
        raise UsageError(f"selection works on float32 and float64, which halves are computed on as: not {dtype}")
    kernels = HostDevice(1).selection(dtype)
    records: list[SelectionRecord] = []
    for size in sizes:
        n = size // np.dtype(dtype).itemsize
        k = math.ceil(density * n)
        draws = max(min(_DRAWS, _DRAWN // size), 1)
        each = Limits(limits.warmup, -(-limits.iterations // draws), limits.seconds / draws)
        times: dict[str, list[Times]] = {}
        chosen: dict[str, int] = {}
        wrong: Counter[str] = Counter()
        progress.step(f"{size} bytes")
        for draw in range(draws):
            x = data.make(kind, n, dtype, (seed, draw))
            ways = methods(kernels, x, k)
            for name, taken in zip(ways, measure(list(ways.values()), each), strict=True):
                times.setdefault(name, []).append(taken)
            for name, action in ways.items():
                if name not in ("copy", "read"):
                    got = action()
                    chosen[name] = int(got.size)
                    wrong[name] += _wrong(name, x, k, got)
        medians = {name: fmean(taken.median for taken in own) for name, own in times.items()}
        for name, own in times.items():
            records.append(
                SelectionRecord(
                    method=name,
                    size=size,
                    dtype=dtype,
                    data=kind,
                    density=density,
                    draws=draws,
                    chosen=chosen.get(name, 0),
                    wrong=wrong[name],
                    throughput=size / medians[name] / 1e9,
                    median_us=medians[name] * 1e6,
                    min_us=fmean(taken.min for taken in own) * 1e6,
                    max_us=fmean(taken.max for taken in own) * 1e6,
                    iterations=sum(taken.iterations for taken in own),
                    versus_copy=medians["copy"] / medians[name],
                    versus={rival: medians[rival] / medians[name] for rival in RIVALS if rival in medians},
                )
            )
            progress.print(row(records[-1]))
    return records


def from_arguments(arguments: argparse.Namespace, about: Mapping[str, Any], itemsize: int) -> list[SelectionRecord]:
    """Measure what the command line asks for.

    Parameters
    ----------
    arguments : argparse.Namespace
        Of the command line.
    about : dict
        What is known of the machine.
    itemsize : int
        Bytes of an element.
    """
    if arguments.codec is not None:
        raise UsageError("selection times every selector: give --density and --data, but no --codec")
    given = given_options(arguments).get("density", 0.001)
    try:
        density = TopK(density=float(given)).density
    except (ValueError, InvalidArgument):
        raise UsageError(f"--density {given} must be a number above 0 and at most 1") from None
    bounds = [(low or SMALLEST, high or max(low or 0, LARGEST)) for low, high in arguments.message_size]
    chosen = sweeps(bounds, itemsize)
    cap = TIME_CAP if arguments.time_cap is None else arguments.time_cap
    warmup = WARMUP if arguments.warmup is None else arguments.warmup
    progress = Progress(len(chosen))
    progress.print(
        f"# Selection of {density:g}, compcoll {about['compcoll']}, {about['cpu']} ({about['instruction_set']})",
        f"# {arguments.dtype}, data {arguments.data}; medians of runs in turns; copy: memory to memory, read: one pass",
        head(),
    )
    try:
        return run(
            sizes=chosen,
            density=density,
            dtype=arguments.dtype,
            kind=arguments.data,
            seed=arguments.seed,
            limits=Limits(warmup, arguments.iterations or ITERATIONS, cap or float("inf")),
            progress=progress,
        )
    finally:
        progress.close()


def head() -> str:
    """The line of column heads."""
    return (
        f"{'# Size':<12}{'Method':<14}{'Median(us)':>12}{'GB/s':>9}{'x copy':>9}{'x argpart.':>12}{'x torch':>10}"
        f"{'Chosen':>10}{'#wrong':>8}"
    )


def row(record: SelectionRecord) -> str:
    """The line of one record."""
    versus = [f"{record.versus[name]:.1f}" if name in record.versus else "-" for name in RIVALS]
    return (
        f"{record.size:<12}{record.method:<14}{record.median_us:>12.1f}{record.throughput:>9.2f}"
        f"{record.versus_copy:>9.2f}{versus[0]:>12}{versus[1]:>10}{record.chosen:>10}{record.wrong:>8}"
    )


def complaints(records: Sequence[SelectionRecord]) -> list[str]:
    """A line for each record with wrong elements."""
    return [
        f"{record.method} at {record.size} bytes: {record.wrong} elements wrongly chosen or left out"
        for record in records
        if record.wrong
    ]
