"""Training steps on the ACP-SGD paper's cluster, simulated: computing takes given times, allreduces simulated ones.

L. Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023.
Gradients are fused by compcoll's own rules, which need torch; nothing is computed. A GPU does one thing after the
other, and so does the network, as NCCL's stream does: a buffer is sent when its gradients are ready and the one before
it has been sent, while back-propagation goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import NamedTuple

import torch

from compcoll.plan.cost import DEFAULTS, Link, Speed
from compcoll.simulation import run as simulation
from compcoll.simulation.network import Network
from compcoll.simulation.run import Scenario
from compcoll.torch.low_rank.factors import Gradient, worthwhile
from compcoll.torch.low_rank.fusion import Buffer, Kind, fuse, numbers_of

from ..training.models import NETWORKS, Layer
from .documents import MIB
from .records import Row
from .scaling import ACP, PAPERS, POWER, POWER_OVERLAP, S_SGD


class GPU(NamedTuple):
    """A GPU, by what its kernels take.

    Attributes
    ----------
    bandwidth : float
        Bytes of memory a second, read or written.
    flops : float
        Operations a second in products of matrices.
    matrix, column : float
        Seconds for a matrix in ACP-SGD, and for each column of its factor, beyond what bytes and products take:
        launches, and a QR decomposition.
    parameter : float
        Seconds for a parameter in Power-SGD, likewise: launches.
    batch_column : float
        Seconds for each column of the matrices of one shape that Power-SGD makes orthonormal together.
    """

    bandwidth: float
    flops: float
    matrix: float
    column: float
    parameter: float
    batch_column: float

    def products(self, count: int, rank: int, values: int) -> float:
        """Seconds of so many products of matrices of so many values with factors of that rank."""
        return 2 * count * rank * values / self.flops


@dataclass(frozen=True)
class Cluster:
    """GPUs and a network.

    Parameters
    ----------
    gpu : GPU
        One for each rank.
    network : Network
        Between them.
    ranks : int
        How many.
    call : float
        Seconds of a host before an allreduce begins.
    """

    gpu: GPU
    network: Network
    ranks: int
    call: float = 0.0


@cache
def _allreduce(cluster: Cluster, nbytes: int) -> float:
    """Seconds of an allreduce in a ring, which NCCL uses, too."""
    if cluster.ranks == 1:
        return 0.0
    # Adding up reads two and writes one.
    rate = cluster.gpu.bandwidth / 3
    profile = replace(DEFAULTS, speeds=(Speed("none", 32, rate, rate, rate, rate),))
    scenario = Scenario(cluster.ranks, cluster.network, nbytes, profile=profile, call=cluster.call)
    return simulation.allreduce(scenario, "ring").seconds


@dataclass(frozen=True)
class Work:
    """A network, and how it is trained.

    Parameters
    ----------
    layers : tuple of Layer
        In the order of the forward pass.
    forward, backward : float
        Seconds of a step on one GPU, which layers share as they share the work.
    rank : int
        Columns of factors.
    """

    layers: tuple[Layer, ...]
    forward: float
    backward: float
    rank: int


class StepTimes(NamedTuple):
    """Seconds of a step.

    Attributes
    ----------
    total : float
        All of it.
    compute : float
        Forward pass and back-propagation.
    compression : float
        What else the GPU does.
    exposed : float
        When it waits for the network.
    """

    total: float
    compute: float
    compression: float
    exposed: float


class _Clock:
    """A GPU's time, and the network's."""

    def __init__(self, allreduce: Callable[[int], float]) -> None:
        self.now = 0.0
        self.compression = 0.0
        self._allreduce = allreduce
        self._network = 0.0
        self._later: deque[tuple[float, float, Callable[[], None]]] = deque()  # means come in the order of sending

    def work(self, seconds: float) -> None:
        """Spend a forward pass's or back-propagation's time; what waited for a mean that has come goes first."""
        while self._later and self._later[0][0] <= self.now:
            self._next()
        self.now += seconds

    def compress(self, seconds: float) -> None:
        self.now += seconds
        self.compression += seconds

    def send(self, nbytes: int) -> float:
        """Send what is there now; return when its mean will have come."""
        if nbytes:
            self._network = max(self.now, self._network) + self._allreduce(nbytes)
        return self._network

    def when(self, time: float, seconds: float, then: Callable[[], None]) -> None:
        """Compress for so long when a mean has come."""
        self._later.append((time, seconds, then))

    def end(self) -> None:
        """Wait for all."""
        while self._later:
            self._next()
        self.now = max(self.now, self._network)

    def _next(self) -> None:
        time, seconds, then = self._later.popleft()
        self.now = max(self.now, time)
        self.compress(seconds)
        then()


def step(method: str, work: Work, cluster: Cluster, *, buffer_mb: float = 25.0, overlap: bool = True) -> StepTimes:
    """The times of a training step.

    Parameters
    ----------
    method : str
        One of `scaling.METHODS`.
    work : Work
        What is trained.
    cluster : Cluster
        Where.
    buffer_mb : float
        Uncompressed MiB of fusion buffers; 0 for every gradient on its own.
    overlap : bool
        Whether S-SGD and ACP-SGD send while back-propagation goes on.
    """
    if method in (POWER, POWER_OVERLAP):
        return _times(work, cluster, partial(_power, work, cluster.gpu, buffer_mb, method == POWER_OVERLAP))
    # ACP-SGD's factors by turns.
    kinds = [Kind.LEFT, Kind.RIGHT] if method == ACP else [Kind.EXACT]
    found = [_times(work, cluster, partial(_at_once, work, cluster.gpu, kind, buffer_mb, overlap)) for kind in kinds]
    return StepTimes(*(fmean(column) for column in zip(*found, strict=True)))


def _times(work: Work, cluster: Cluster, run: Callable[[_Clock], None]) -> StepTimes:
    clock = _Clock(partial(_allreduce, cluster))
    clock.work(work.forward)
    run(clock)
    compute = work.forward + work.backward
    return StepTimes(clock.now, compute, clock.compression, clock.now - compute - clock.compression)


def _gradients(work: Work, rank: int, factors: int) -> list[list[Gradient]]:
    """The layers' gradients, in the order of back-propagation; without memory. So many factors a step."""

    def gradient(name: str, shape: torch.Size) -> Gradient:
        compressed = rank and worthwhile(shape, rank, 1.0, factors)
        return Gradient(name, shape, torch.float32, torch.device("meta"), rank if compressed else 0, feedback=False)

    return [
        [gradient(f"{number}.{place}", torch.Size(shape)) for place, shape in enumerate(layer.shapes)]
        for number, layer in enumerate(reversed(work.layers))
    ]


def _buffers(layers: Sequence[Sequence[Gradient]], kind: Kind, buffer_mb: float) -> list[Buffer]:
    flat = [gradient for layer in layers for gradient in layer]
    return fuse(flat, kind, buffer_mb * MIB, torch.device("meta"), flagged=False)


def _shares(work: Work) -> list[float]:
    """Seconds of back-propagation of each layer, the last one first."""
    whole = sum(layer.work for layer in work.layers)
    return [work.backward * layer.work / whole for layer in reversed(work.layers)]


def _traffic(gpu: GPU, passes: float, values: int) -> float:
    return passes * 4 * values / gpu.bandwidth


def _at_once(work: Work, gpu: GPU, kind: Kind, buffer_mb: float, overlap: bool, clock: _Clock) -> None:
    """Simulate S-SGD and ACP-SGD: a buffer is one allreduce, which nothing waits for.

    S-SGD's gradients are copied into buckets and back (4 passes). Of ACP-SGD's authors' code M + E takes 3 passes over
    a matrix, a factor 1, the product 1, and E 6; afterwards the product 1, its copy 2, and the division 2.
    """
    layers = _gradients(work, 0 if kind is Kind.EXACT else work.rank, 1)
    buffers = _buffers(layers, kind, buffer_mb)
    due = iter(buffers)
    buffer = next(due)
    for layer, seconds in zip(layers, _shares(work), strict=True):
        clock.work(seconds)
        for gradient in layer:
            if gradient.rank:
                orthogonal = gpu.matrix + gpu.column * gradient.rank
                products = gpu.products(2, gradient.rank, gradient.size)
                clock.compress(orthogonal + products + _traffic(gpu, 11, gradient.size))
            else:
                clock.compress(_traffic(gpu, 2, gradient.size))
            buffer.due.discard(gradient.name)
            if overlap and not buffer.due:
                clock.send(4 * buffer.wire.numel())
                buffer = next(due, buffer)
    if not overlap:
        for buffer in buffers:
            clock.send(4 * buffer.wire.numel())
    clock.end()
    for gradient in (gradient for layer in layers for gradient in layer):
        clock.compress(gpu.products(1, gradient.rank, gradient.size))
        clock.compress(_traffic(gpu, 5 if gradient.rank else 2, gradient.size))


def _power(work: Work, gpu: GPU, buffer_mb: float, overlap: bool, clock: _Clock) -> None:
    """Simulate PyTorch's hook for Power-SGD: vectors, left, then right factors, of each bucket; or of all at the end.

    M + E takes 3 passes over a matrix and each factor 1; the product takes 1, and what was lost 5.
    """
    layers = _gradients(work, work.rank, 2)
    buckets = _buffers(layers, Kind.EXACT, buffer_mb if overlap else 1e12)
    due = iter(buckets)
    bucket = next(due)
    for layer, seconds in zip(layers, _shares(work), strict=True):
        clock.work(seconds)
        for gradient in layer:
            bucket.due.discard(gradient.name)
            if not bucket.due:
                _power_bucket(clock, bucket.gradients, gpu, work.rank)
                bucket = next(due, bucket)
    clock.end()


def _power_bucket(clock: _Clock, members: Sequence[Gradient], gpu: GPU, rank: int) -> None:
    low = [gradient for gradient in members if gradient.rank]
    values = sum(gradient.size for gradient in low)
    launches = gpu.parameter * len(members)
    clock.compress(launches / 2 + gpu.products(1, rank, values) + _traffic(gpu, 4, values))
    clock.send(4 * sum(gradient.size for gradient in members if not gradient.rank))
    lefts = clock.send(4 * sum(numbers_of(gradient, Kind.LEFT) for gradient in low))
    shapes = len({gradient.rows for gradient in low})

    def second() -> None:
        rights = clock.send(4 * sum(numbers_of(gradient, Kind.RIGHT) for gradient in low))
        clock.when(rights, launches / 2 + gpu.products(1, rank, values) + _traffic(gpu, 6, values), lambda: None)

    orthogonal = shapes * rank * gpu.batch_column
    clock.when(lefts, orthogonal + gpu.products(1, rank, values) + _traffic(gpu, 1, values), second)


def link(gigabits: float, latency: float, *, efficiency: float = 1.0) -> Link:
    """A link of so many Gb/s, of which a part carries data."""
    return Link(latency, 8 / (gigabits * 1e9 * efficiency))


TABLE_III = {
    "resnet50": {S_SGD: 266, POWER: 302, POWER_OVERLAP: 286, ACP: 248},
    "resnet152": {S_SGD: 500, POWER: 423, POWER_OVERLAP: 404, ACP: 316},
    "bert-base": {S_SGD: 805, POWER: 236, POWER_OVERLAP: 292, ACP: 193},
    "bert-large": {S_SGD: 2307, POWER: 392, POWER_OVERLAP: 516, ACP: 245},
}
"""Milliseconds of a step: 32 RTX 2080 Ti, 10 Gb/s Ethernet."""

BATCHES = {"resnet50": 64, "resnet152": 32, "bert-base": 32, "bert-large": 8}
"""Examples of a GPU, and `RANKS`: the scripts that the paper's authors published with it."""

RANKS = {"resnet50": 4, "resnet152": 4, "bert-base": 32, "bert-large": 32}
IMAGES_A_SECOND = {"resnet50": 294, "resnet152": 110}
"""Training on one RTX 2080 Ti, FP32: Lambda, "RTX 2080 Ti Deep Learning Benchmarks with TensorFlow", 2019."""

TOKENS = 64
"""Tokens of a sentence, in the authors' scripts."""

BERT_FLOPS = 0.7 * 13.4e12
"""Seven tenths of an RTX 2080 Ti's peak: an assumption."""

TURING = GPU(
    bandwidth=0.75 * 616e9, flops=BERT_FLOPS, matrix=0.2e-3, column=8e-6, parameter=0.26e-3, batch_column=80e-6
)
"""Three quarters of the memory's speed; the last four were fitted to the published times of compressed training."""

HOST_GBITS = 31
"""Gb/s between GPUs of a node, which have no access to each other's memory: fitted to BERT-Base at 100 Gb/s."""

TCP_LATENCY = 150e-6
"""Seconds of latency, fitted to what is published at 1 Gb/s and of 8 and 64 GPUs."""

INSIDE = link(HOST_GBITS, 10e-6)
NETWORKS_BETWEEN = {
    "1 Gb/s Ethernet": link(1, TCP_LATENCY, efficiency=0.94),
    PAPERS: link(10, TCP_LATENCY, efficiency=0.94),
    "100 Gb/s InfiniBand": link(100, 3e-6, efficiency=0.97),
}
"""Ethernet carries 94 % of its rate as TCP's data, in packets of 1500 bytes."""


def works() -> dict[str, Work]:
    """List all trainings. A back-propagation takes twice as long as a forward pass, as it has twice the arithmetic."""
    found = {}
    for name, layers in NETWORKS.items():
        made = tuple(layers())
        if name in IMAGES_A_SECOND:
            seconds = BATCHES[name] / IMAGES_A_SECOND[name]
        else:
            # Three passes, 2 operations for each parameter and token; the words' embedding counts as the output layer.
            parameters = sum(layer.parameters for layer in made)
            seconds = 6 * parameters * BATCHES[name] * TOKENS / BERT_FLOPS
        found[name] = Work(made, seconds / 3, 2 * seconds / 3, RANKS[name])
    return found


def cluster(ranks: int, between: str) -> Cluster:
    """The paper's machines: four GPUs a node, with a NIC of the node."""
    network = Network(inside=INSIDE, between=NETWORKS_BETWEEN[between], ranks_per_node=4)
    return Cluster(TURING, network, ranks, call=20e-6)


def findings() -> Iterator[Row]:
    """The paper's other figures, all of them ratios of times of steps, on 32 GPUs at 10 Gb/s unless said otherwise."""
    trained = works()
    resnet152, large = trained["resnet152"], trained["bert-large"]
    wide = replace(large, rank=256)
    half = replace(resnet152, forward=resnet152.forward / 2, backward=resnet152.backward / 2)
    slow, fast = "1 Gb/s Ethernet", "100 Gb/s InfiniBand"

    def seconds(method: str, work: Work, between: str = PAPERS, ranks: int = 32) -> float:
        return step(method, work, cluster(ranks, between)).total

    def finding(where: str, what: str, published: float, simulated: float) -> Row:
        return {"where": where, "what": what, "published": published, "simulated": simulated}

    def gain(where: str, first: str, method: str, published: float, work: Work, between: str = PAPERS) -> Row:
        simulated = seconds(first, work, between) / seconds(method, work, between)
        return finding(where, f"{first} / {method}", published, simulated)

    for name, of in (("resnet50", {ACP: 7.1, POWER_OVERLAP: 5.7}), ("bert-base", {ACP: 23.9, POWER_OVERLAP: 11.2})):
        for method, ratio in of.items():
            yield gain(f"{name}, {slow}", S_SGD, method, ratio, trained[name], slow)
    yield gain(f"bert-base, {fast}", S_SGD, ACP, 1.4, trained["bert-base"], fast)
    for method, ratio in {S_SGD: 1.10, POWER_OVERLAP: 1.24, ACP: 1.08}.items():
        simulated = seconds(method, resnet152, ranks=64) / seconds(method, resnet152, ranks=8)
        yield finding("resnet152", f"{method}: 64 GPUs / 8 GPUs", ratio, simulated)
    for method, ratio in {POWER_OVERLAP: 3.4, ACP: 2.4}.items():
        simulated = seconds(method, wide) / seconds(method, large)
        yield finding("bert-large", f"{method}: rank 256 / rank 32", ratio, simulated)
    for first, ratio in {POWER_OVERLAP: 2.7, S_SGD: 3.9}.items():
        yield gain("bert-large, rank 256", first, ACP, ratio, wide)
    for first, ratio in {S_SGD: 2.4, POWER_OVERLAP: 1.5}.items():
        yield gain("resnet152, batch 16", first, ACP, ratio, half)
