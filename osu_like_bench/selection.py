"""Time methods to find the largest elements of a buffer: compcoll's selectors, NumPy, torch, and passes over memory.

A record's ``method`` is a selector, ``strom`` (a known threshold) or ``randomk``; ``argpartition`` (NumPy) or ``topk``
(torch); ``copy`` (memory to memory) or ``read`` (one pass that counts). Times are means over ``draws`` buffers.
``chosen`` is the number of elements chosen in the last buffer. ``wrong`` counts errors in all buffers: elements of the
k largest that are missing, and elements in excess of the method's limit. ``versus_copy`` and ``versus`` are the median
times of the copy, and of NumPy and torch, divided by this method's.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import numpy as np

from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.codecs.sparse.sparsifier import Selection
from compcoll.dtypes import DTYPES
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.sparse import TopK
from compcoll.tools.arguments import given_options

from . import UsageError, data
from .data import Array
from .machine import describe
from .parser import sweeps
from .report import Column, Progress, Record, Table
from .timing import Limits, measure

MOST: Mapping[str, float] = {"ldte": 1.5, "hierarchical": 2.0, "bisection": 2.0}
"""Limits of selectors that may choose more than k elements, as a multiple of k."""

RIVALS = ("argpartition", "topk")

SMALLEST, LARGEST = 64 << 10, 256 << 20
"""The default smallest and largest size in bytes."""

ITERATIONS, WARMUP, TIME_CAP = 51, 2, 0.3

_DRAWS, _DRAWN = 8, 16 << 20
"""Number of buffers of one size, and limit of their total bytes. In a single small buffer a selector may be lucky."""


def _torch_topk(x: Array, k: int) -> Callable[[], Array]:
    import torch

    torch.set_num_threads(1)
    values = torch.from_numpy(x)
    return lambda: torch.topk(values.abs(), k, sorted=False).indices.numpy()


def _random(kernels: Selection, x: Array, k: int) -> Array:
    found, _ = kernels.above(x, math.inf, x.size)
    assert found is not None
    chosen: Array = kernels.union(kernels.random(x.size, k, 1), found)
    return chosen


def methods(kernels: Selection, x: Array, k: int) -> dict[str, Callable[[], Any]]:
    """Return the methods to time on these values, by name.

    Parameters
    ----------
    kernels : Selection
        compcoll's kernels.
    x : numpy.ndarray
        The values.
    k : int
        Number of elements to choose.
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
        found["topk"] = _torch_topk(x, k)
    return found


def _wrong(name: str, x: Array, k: int, indices: Array) -> int:
    """Count missing elements, and elements in excess of the method's limit."""
    if name == "randomk":
        return abs(indices.size - k)
    chosen = np.zeros(x.size, np.bool_)
    chosen[indices] = True
    magnitude = np.abs(x)
    least = magnitude[chosen].min() if indices.size else np.inf
    smaller = int(np.count_nonzero(magnitude[~chosen] > least))
    most = math.ceil(MOST.get(name, 1.0) * k) + (name in MOST)
    # A known threshold selects all elements of equal magnitude.
    too_many = 0 if name == "strom" else max(indices.size - most, 0)
    return smaller + max(min(k, int(np.count_nonzero(x))) - int(indices.size), 0) + too_many


def _of_size(kernels: Selection, size: int, density: float, arguments: argparse.Namespace) -> list[Record]:
    """Measure all methods alternately on buffers of ``size`` bytes."""
    n = size // DTYPES[arguments.dtype].itemsize
    k = math.ceil(density * n)
    draws = max(min(_DRAWS, _DRAWN // size), 1)
    limits = Limits.of(arguments, WARMUP, ITERATIONS, TIME_CAP)
    each = Limits(limits.warmup, -(-limits.iterations // draws), limits.seconds / draws)
    times: dict[str, list[Record]] = {}
    chosen: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for draw in range(draws):
        x = data.make(arguments.data, n, arguments.dtype, (arguments.seed, draw))
        ways = methods(kernels, x, k)
        for name, taken in zip(ways, measure(list(ways.values()), each), strict=True):
            times.setdefault(name, []).append(taken.fields())
        for name in [name for name in ways if name not in ("copy", "read")]:
            got = ways[name]()
            chosen[name] = int(got.size)
            wrong[name] += _wrong(name, x, k, got)
    means = {name: {field: fmean(taken[field] for taken in own) for field in own[0]} for name, own in times.items()}
    medians = {name: mean["median_us"] for name, mean in means.items()}
    about = {"size": size, "dtype": arguments.dtype, "data": arguments.data, "density": density, "draws": draws}
    return [
        {
            **{"method": name, **about, "chosen": chosen[name], "wrong": wrong[name], **mean},
            "iterations": sum(taken["iterations"] for taken in times[name]),
            "throughput": size / medians[name] / 1e3,
            "versus_copy": medians["copy"] / medians[name],
            "versus": {rival: medians[rival] / medians[name] for rival in RIVALS if rival in medians},
        }
        for name, mean in means.items()
    ]


_TABLE = Table(
    Column("# Size", "size", -12),
    Column("Method", "method", -14),
    Column("Median(us)", "median_us", 12, ".1f"),
    Column("GB/s", "throughput", 9, ".2f"),
    Column("x copy", "versus_copy", 9, ".2f"),
    Column("x argpart.", lambda record: record["versus"].get("argpartition"), 12, ".1f"),
    Column("x torch", lambda record: record["versus"].get("topk"), 10, ".1f"),
    Column("Chosen", "chosen", 10),
    Column("#wrong", "wrong", 8),
)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Run the command, and return its description and records."""
    if arguments.codec is not None:
        raise UsageError("selection times every selector: give --density and --data, but no --codec")
    if arguments.dtype not in ("float32", "float64"):
        raise UsageError(
            f"--dtype {arguments.dtype}: give float32 or float64 (selection converts 16-bit floats to float32)"
        )
    given = given_options(arguments).get("density", 0.001)
    try:
        density = TopK(density=float(given)).density
    except (ValueError, InvalidArgument):
        raise UsageError(f"--density {given} must be a number above 0 and at most 1") from None
    about = describe()
    sizes = sweeps(arguments.message_size, DTYPES[arguments.dtype].itemsize, SMALLEST, LARGEST)
    kernels = HostDevice(1).selection(arguments.dtype)
    records: list[Record] = []
    with Progress(len(sizes)) as progress:
        progress.print(
            f"# Selection of {density:g}, compcoll {about['compcoll']}, {about['cpu']} ({about['instruction_set']})",
            f"# {arguments.dtype}, data {arguments.data}; medians of runs in turns; "
            "copy: memory to memory, read: one pass",
            _TABLE.head(),
        )
        for size in sizes:
            progress.step(f"{size} bytes")
            of_size = _of_size(kernels, size, density, arguments)
            progress.print(*map(_TABLE.row, of_size))
            records += of_size
    return about, records
