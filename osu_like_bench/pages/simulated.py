"""The simulation in networks.md: against what was measured on 2, 4 and 8 hosts, and on a paper's larger clusters."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from compcoll.codecs import ZFP
from compcoll.plan import choose
from compcoll.plan.cost import DEFAULTS, Link, Profile, Speed
from compcoll.simulation import plot as simulation_plot
from compcoll.simulation import run as simulation
from compcoll.simulation.network import Network
from compcoll.simulation.run import Scenario
from compcoll.tools.arguments import amount

from .documents import MET, MIB, table
from .records import Record

MEDIAN_ERROR = 0.15


class Point(NamedTuple):
    """A measured and a simulated time, in seconds."""

    algorithm: str
    compressed: bool
    nbytes: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The simulation's error, relative to what was measured."""
        return self.simulated / self.measured - 1


def points(record: Record, ranks: int) -> Iterator[Point]:
    """Everything that was measured among that many hosts; links, latency and speeds are those of a profile there."""
    for measured in record.cases[f"simulated-{ranks}-profile"].results:
        profile = replace(
            DEFAULTS,
            inside=Link(**measured["inside"]),
            between=Link(**measured["between"]),
            message=measured["message"],
            call=measured["call"],
            speeds=tuple(Speed(**speed) for speed in measured["speeds"]),
        )
        network = Network(profile.inside, profile.between, message=profile.message)
        for row in record.cases[f"simulated-{ranks}"].results:
            algorithm, codec = row["contender"].removesuffix("_uncompressed"), ZFP(rate=8)
            compressed = algorithm == row["contender"]
            scenario = Scenario(ranks, network, row["size"], profile=profile, call=profile.call)
            seconds = simulation.allreduce(scenario, algorithm, codec if compressed else None).seconds
            yield Point(algorithm, compressed, row["size"], row["median_us"] / 1e6, seconds)


def compared(record: Record, ranks: str) -> Iterator[str]:
    """Errors of the simulation's predictions on so many hosts."""
    found = list(points(record, int(ranks)))
    if not found:
        yield f"{ranks} hosts: not measured"
        return
    median = statistics.median(abs(point.error) for point in found)
    verdict = MET[median <= MEDIAN_ERROR]
    yield f"{ranks} hosts: median error {100 * median:.1f} % (goal ≤ {100 * MEDIAN_ERROR:.0f} %: {verdict})"
    yield ""
    sizes = sorted({point.nbytes for point in found})
    lines = []
    for algorithm in choose.ALLREDUCE:
        for compressed in (False, True):
            chosen = {p.nbytes: p for p in found if (p.algorithm, p.compressed) == (algorithm, compressed)}
            cells = [
                f"{1e3 * p.measured:.3g} / {1e3 * p.simulated:.3g} ({100 * p.error:+.0f} %)"
                for size in sizes
                if (p := chosen.get(size))
            ]
            if cells:
                lines.append((_words(algorithm) + ", zfp8" * compressed, *cells))
    yield from table(("measured / simulated", *map(amount, sizes)), lines)


class Cluster(NamedTuple):
    """Nodes with GPUs: ranks of a node, a GPU's memory, links inside a node, and the network, in bytes a second."""

    name: str
    ranks_per_node: int
    memory: float
    inside: Link
    between: Link

    def profile(self, rate: int) -> Profile:
        """The speeds of kernels, all on this GPU: a sum reads two values and writes one."""
        add = SHARE_OF_MEMORY * self.memory / 3
        zfp = Speed("zfp", float(rate or 32), *ZFP_KERNELS)
        return replace(DEFAULTS, speeds=(zfp, Speed("none", 32.0, add, add, add, add)))

    def scenario(self, ranks: int, nbytes: int, rate: int) -> Scenario:
        """An allreduce here, uncompressed if `rate` is 0."""
        network = Network(self.inside, self.between, self.ranks_per_node, message=1e-6)
        return Scenario(ranks, network, nbytes, profile=self.profile(rate))


CLUSTERS = (
    Cluster("v100-edr", 4, 900e9, Link(4e-6, 1 / 60e9), Link(3e-6, 1 / 12.5e9)),
    Cluster("rtx5000-fdr", 4, 448e9, Link(6e-6, 1 / 12e9), Link(3e-6, 1 / 7e9)),
    Cluster("a100-hdr", 2, 1555e9, Link(4e-6, 1 / 200e9), Link(3e-6, 1 / 25e9)),
)
"""Kinds of machines that the paper on collective-level ZFP used, with the memory and links that such machines
have: NVLink or PCIe inside a node; InfiniBand EDR (100 Gb/s), FDR (56) or HDR (200) between nodes."""

SHARE_OF_MEMORY = 0.75
ZFP_KERNELS = (100e9, 100e9, 100e9, 80e9)
"""Supposed speeds of ZFP's kernels, not measured: such as leave the wire the limit, as the paper found."""

SIZES = [MIB // 2 << doubling for doubling in range(0, 11, 2)]
NAMES = ("ring", "recursive_doubling")
GPUS = (16, 64, 256)
PUBLISHED = {("ring", 8): 81.2, ("recursive_doubling", 8): 77.4, ("ring", 16): 61.0, ("recursive_doubling", 16): 57.8}
"""Percent of time saved, at most, against the same algorithm without compression."""
PUBLISHED_OVER_MPI = {"ring": 85.3, "recursive_doubling": 75.5}
"""Percent of time saved at rate 8, against the MPI library's own: ring's with 64 MB on 16 GPUs."""
PUBLISHED_CROSSOVER = 4 * MIB

Seconds = Mapping[tuple[str, int, int, int], float]
"""By algorithm, rate (0: uncompressed), GPUs and bytes."""


def plot(folder: Path) -> None:
    """Draw the clusters: 512 MiB on up to 256 ranks, and 512 KiB to 512 MiB."""
    for cluster in CLUSTERS:
        scenario = cluster.scenario(256, 64 * MIB, 8)
        simulation_plot.plot(folder / f"simulated-{cluster.name}.png", scenario, NAMES, [None, ZFP(rate=8)], SIZES)


def published(record: Record) -> Iterator[str]:
    """Compare what the paper on collective-level ZFP reports, beside what is simulated."""
    found = [_simulated(cluster) for cluster in CLUSTERS]
    lines = [
        (
            f"{_words(name)}, rate {rate}, against itself uncompressed",
            f"up to −{theirs:g} %",
            *(f"−{_saved(each, name, rate, (name,)):.0f} %" for each in found),
        )
        for (name, rate), theirs in PUBLISHED.items()
    ]
    own = "against MPI's own (simulated: the faster uncompressed one of these two)"
    for name, theirs in PUBLISHED_OVER_MPI.items():
        cells = (f"−{_saved(each, name, 8, NAMES):.0f} %" for each in found)
        lines.append((f"{_words(name)}, rate 8, {own}", f"up to −{theirs:g} %", *cells))
    crossover = f"about {amount(PUBLISHED_CROSSOVER)}"
    lines.append(("with rate 8 the ring wins from, on 16 GPUs", crossover, *map(_crossover, found)))
    yield from table(("", "published", *(cluster.name for cluster in CLUSTERS)), lines)


def _simulated(cluster: Cluster) -> Seconds:
    return {
        (name, rate, ranks, nbytes): simulation.allreduce(
            cluster.scenario(ranks, nbytes, rate), name, ZFP(rate=rate) if rate else None
        ).seconds
        for name in NAMES
        for rate in (0, 8, 16)
        for ranks in GPUS
        for nbytes in SIZES
    }


def _saved(found: Seconds, name: str, rate: int, others: Sequence[str]) -> float:
    """Percent of time that compression saves at most, against the fastest of some algorithms uncompressed."""
    return max(
        100 * (1 - found[name, rate, ranks, nbytes] / min(found[other, 0, ranks, nbytes] for other in others))
        for ranks in GPUS
        for nbytes in SIZES
    )


def _crossover(found: Seconds) -> str:
    """The smallest size from which on the ring is faster."""
    ring, doubling = ([found[name, 8, GPUS[0], nbytes] for nbytes in SIZES] for name in NAMES)
    slower = [nbytes for nbytes, one, other in zip(SIZES, ring, doubling, strict=True) if one >= other]
    after = [nbytes for nbytes in SIZES if nbytes > max(slower, default=0)]
    return amount(after[0]) if after else "never"


def _words(name: str) -> str:
    return name.replace("_", " ")
