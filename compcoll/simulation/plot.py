"""Plots of simulated times against ranks and against size, with the sizes from which another curve is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..codecs import Codec
from ..dtypes import DTYPES
from ..errors import CompcollError, InvalidArgument
from ..tools.arguments import doubling
from . import run as simulation
from .run import Scenario, resized

_COLOURS = ("C0", "C1", "C2", "C3")


def check(path: Path, option: str = "--plot") -> None:
    """Check that a plot can be written, before anything is computed.

    Parameters
    ----------
    path : Path
        The image file.
    option : str
        The command's option that names the file, for error texts.

    Raises
    ------
    InvalidArgument
        If matplotlib is not installed or does not support the file's suffix.
    CompcollError
        If the folder does not exist.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidArgument(f"{option} needs matplotlib: pip install matplotlib") from None
    supported = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in supported:
        raise InvalidArgument(f"{option} {path}: the suffix must be one of {', '.join(sorted(supported))}")
    if not path.parent.is_dir():
        raise CompcollError(f"{option} {path}: there is no folder {path.parent}")


def plot(
    path: Path,
    scenario: Scenario,
    names: Sequence[str],
    ways: Sequence[Codec | None],
    sizes: Sequence[int],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Draw time against ranks at the largest size, and time against size at all ranks.

    Parameters
    ----------
    path : Path
        The image file.
    scenario : Scenario
        The scenario, whose size is not used.
    names, ways : sequence
        Names of algorithms, and codecs.
    sizes : sequence of int
        Sizes in bytes, increasing. From a single size, a range is made.
    progress : callable, optional
        As in `compcoll.simulation.run.allreduce`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    by_ranks, by_size = figure.subplots(1, 2)
    contenders = [(name, way) for name in names for way in ways]
    labels = [name if way is None else f"{name}, {way.name}" for name, way in contenders]
    first = max(scenario.network.ranks_per_node, 2)
    counts = sorted({*doubling(first, scenario.ranks), scenario.ranks})
    largest = sizes[-1]
    if len(sizes) == 1:
        sizes = sorted({*doubling(max(largest >> 10, DTYPES[scenario.dtype].itemsize), 4 * largest), 4 * largest})

    def milliseconds(name: str, way: Codec | None, **change: int) -> float:
        return 1e3 * simulation.allreduce(resized(scenario, **change), name, way, progress=progress).seconds

    curves = []
    for (name, way), label in zip(contenders, labels, strict=True):
        style: dict[str, Any] = {"color": _COLOURS[names.index(name) % len(_COLOURS)], "label": label}
        style |= {"linestyle": "--", "marker": "."} if way is None else {"linestyle": "-", "marker": "o"}
        curves.append([milliseconds(name, way, nbytes=nbytes) for nbytes in sizes])
        times = [milliseconds(name, way, ranks=ranks, nbytes=largest) for ranks in counts]
        by_ranks.plot(counts, times, markersize=4, **style)
        by_size.plot(sizes, curves[-1], markersize=4, **style)
    best = [min(range(len(curves)), key=lambda index: curves[index][column]) for column in range(len(sizes))]
    for (_, first), (high, second) in pairwise(zip(sizes, best, strict=True)):
        if first != second:
            by_size.axvline(high, color="gray", linewidth=0.8)
            place = {"transform": by_size.get_xaxis_transform(), "fontsize": 7}
            by_size.text(high, 0.02, f" {labels[second]}", rotation=90, **place)
    bound = [resized(scenario, ranks=ranks, nbytes=largest).bound * 1e3 for ranks in counts]
    by_ranks.plot(counts, bound, color="gray", linewidth=1.2, label="bound, uncompressed")
    by_size.plot(sizes, [resized(scenario, nbytes=n).bound * 1e3 for n in sizes], color="gray", linewidth=1.2)
    by_ranks.set(xlabel="ranks", title=f"{largest / 2**20:g} MiB")
    by_size.set(xlabel="bytes", title=f"{scenario.ranks} ranks")
    by_ranks.legend(fontsize=8)
    for axes in (by_ranks, by_size):
        axes.set(ylabel="ms", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    figure.savefig(path)
