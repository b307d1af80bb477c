"""Simulate training steps on the cluster of the ACP-SGD paper, with given computing times and simulated allreduces.

The paper is L. Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS
2023. Gradients are fused by compcoll's rules, which need torch; nothing is computed. A GPU does one thing after the
other. So does the network, like NCCL's stream: a buffer is sent, during back-propagation, when its gradients are ready
and the previous buffer has been sent.
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
    """The speed of a GPU's kernels.

    Attributes
    ----------
    bandwidth : float
        Bytes of memory that are read or written per second.
    flops : float
        Operations per second in products of matrices.
    matrix, column : float
        Additional seconds of ACP-SGD for each matrix, and for each column of its factor, for launches and a QR
        decomposition.
    parameter : float
        Additional seconds of Power-SGD for each parameter, for launches.
    batch_column : float
        Seconds per column to orthonormalize all of Power-SGD's matrices of one shape together.
    """

    bandwidth: float
    flops: float
    matrix: float
    column: float
    parameter: float
    batch_column: float

    def products(self, count: int, rank: int, values: int) -> float:
        """Return the seconds of ``count`` products of matrices, of ``values`` values together, with factors."""
        return 2 * count * rank * values / self.flops


@dataclass(frozen=True)
class Cluster:
    """GPUs and a network.

    Parameters
    ----------
    gpu : GPU
        The GPU of each rank.
    network : Network
        The network between them.
    ranks : int
        Number of ranks.
    call : float
        Host seconds before an allreduce begins.
    """

    gpu: GPU
    network: Network
    ranks: int
    call: float = 0.0


@cache
def _allreduce(cluster: Cluster, nbytes: int) -> float:
    """Return the seconds of a ring allreduce, which NCCL also uses."""
    if cluster.ranks == 1:
        return 0.0
    # A sum reads two values and writes one.
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
        The layers, in the order of the forward pass.
    forward, backward : float
        Seconds of a step on one GPU. Each layer takes a part in proportion to its work.
    rank : int
        Number of columns of the factors.
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
        The whole step.
    compute : float
        Forward pass and back-propagation.
    compression : float
        Other work of the GPU.
    exposed : float
        Time in which the GPU waits for the network.
    """

    total: float
    compute: float
    compression: float
    exposed: float


class _Clock:
    """The simulated time of a GPU and of the network."""

    def __init__(self, allreduce: Callable[[int], float]) -> None:
        self.now = 0.0
        self.compression = 0.0
        self._allreduce = allreduce
        self._network = 0.0
        self._later: deque[tuple[float, float, Callable[[], None]]] = deque()  # means arrive in the order of sending

    def work(self, seconds: float) -> None:
        """Spend time on the forward pass or back-propagation, after the work on means that have arrived."""
        while self._later and self._later[0][0] <= self.now:
            self._next()
        self.now += seconds

    def compress(self, seconds: float) -> None:
        self.now += seconds
        self.compression += seconds

    def send(self, nbytes: int) -> float:
        """Send bytes that are ready now; return the time when their mean arrives."""
        if nbytes:
            self._network = max(self.now, self._network) + self._allreduce(nbytes)
        return self._network

    def when(self, time: float, seconds: float, then: Callable[[], None]) -> None:
        """Schedule ``seconds`` of compression, followed by ``then``, for when a mean has arrived."""
        self._later.append((time, seconds, then))

    def end(self) -> None:
        """Wait for all means and the work that depends on them."""
        while self._later:
            self._next()
        self.now = max(self.now, self._network)

    def _next(self) -> None:
        time, seconds, then = self._later.popleft()
        self.now = max(self.now, time)
        self.compress(seconds)
        then()


def step(method: str, work: Work, cluster: Cluster, *, buffer_mb: float = 25.0, overlap: bool = True) -> StepTimes:
    """Return the times of a training step.

    Parameters
    ----------
    method : str
        One of `scaling.METHODS`.
    work : Work
        The trained network.
    cluster : Cluster
        The GPUs and the network between them.
    buffer_mb : float
        Uncompressed MiB of fusion buffers; 0 to send each gradient separately.
    overlap : bool
        Whether S-SGD and ACP-SGD send during back-propagation.
    """
    if method in (POWER, POWER_OVERLAP):
        return _times(work, cluster, partial(_power, work, cluster.gpu, buffer_mb, method == POWER_OVERLAP))
    # ACP-SGD sends left and right factors in alternate steps: use the mean of both.
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
    """Return each layer's gradients (without memory), in the order of back-propagation, for ``factors`` per step."""

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
    """Return the seconds of back-propagation of each layer, from the last to the first."""
    whole = sum(layer.work for layer in work.layers)
    return [work.backward * layer.work / whole for layer in reversed(work.layers)]


def _traffic(gpu: GPU, passes: float, values: int) -> float:
    return passes * 4 * values / gpu.bandwidth


def _at_once(work: Work, gpu: GPU, kind: Kind, buffer_mb: float, overlap: bool, clock: _Clock) -> None:
    """Simulate S-SGD or ACP-SGD: each buffer is one allreduce, for which the GPU waits only at the end.

    S-SGD copies gradients into buckets and back, which takes 4 passes over memory. In the code of ACP-SGD's authors,
    M + E takes 3 passes over a matrix, the factor 1, the product 1, and E 6; after the allreduce, the product takes 1,
    its copy 2, and the division 2.
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
    """Simulate PyTorch's Power-SGD hook. It sends vectors, then left, then right factors of each bucket.

    Without overlap, there is one bucket, which is sent at the end. M + E takes 3 passes over a matrix, each factor 1,
    the product 1, and the residual 5.
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
    """Return a link of ``gigabits`` Gb/s, of which the part ``efficiency`` carries data."""
    return Link(latency, 8 / (gigabits * 1e9 * efficiency))


TABLE_III = {
    "resnet50": {S_SGD: 266, POWER: 302, POWER_OVERLAP: 286, ACP: 248},
    "resnet152": {S_SGD: 500, POWER: 423, POWER_OVERLAP: 404, ACP: 316},
    "bert-base": {S_SGD: 805, POWER: 236, POWER_OVERLAP: 292, ACP: 193},
    "bert-large": {S_SGD: 2307, POWER: 392, POWER_OVERLAP: 516, ACP: 245},
}
"""Published milliseconds of a step on 32 RTX 2080 Ti with 10 Gb/s Ethernet."""

BATCHES = {"resnet50": 64, "resnet152": 32, "bert-base": 32, "bert-large": 8}
"""Examples per GPU. Like `RANKS`, they are from the scripts that the paper's authors published."""

RANKS = {"resnet50": 4, "resnet152": 4, "bert-base": 32, "bert-large": 32}
IMAGES_A_SECOND = {"resnet50": 294, "resnet152": 110}
"""Training on one RTX 2080 Ti in FP32: Lambda, "RTX 2080 Ti Deep Learning Benchmarks with TensorFlow", 2019."""

TOKENS = 64
"""Tokens per sentence in the authors' scripts."""

BERT_FLOPS = 0.7 * 13.4e12
"""Operations per second for BERT: 70 % of an RTX 2080 Ti's peak, an assumption."""

TURING = GPU(
    bandwidth=0.75 * 616e9, flops=BERT_FLOPS, matrix=0.2e-3, column=8e-6, parameter=0.26e-3, batch_column=80e-6
)
"""An RTX 2080 Ti with 75 % of its memory's bandwidth. The last four values are fitted to published compressed steps."""

HOST_GBITS = 31
"""Gb/s between GPUs of a node without access to each other's memory, fitted to BERT-Base at 100 Gb/s."""

TCP_LATENCY = 150e-6
"""Seconds of latency over TCP, fitted to published times at 1 Gb/s and with 8 and 64 GPUs."""

INSIDE = link(HOST_GBITS, 10e-6)
NETWORKS_BETWEEN = {
    "1 Gb/s Ethernet": link(1, TCP_LATENCY, efficiency=0.94),
    PAPERS: link(10, TCP_LATENCY, efficiency=0.94),
    "100 Gb/s InfiniBand": link(100, 3e-6, efficiency=0.97),
}
"""Links between nodes. With packets of 1500 bytes, 94 % of an Ethernet's rate carries TCP's data."""


def works() -> dict[str, Work]:
    """Return the trained networks. Back-propagation takes twice the time of a forward pass, since it computes more."""
    found = {}
    for name, layers in NETWORKS.items():
        made = tuple(layers())
        if name in IMAGES_A_SECOND:
            seconds = BATCHES[name] / IMAGES_A_SECOND[name]
        else:
            # 3 passes (forward 1, backward 2) with 2 operations per parameter and token. The word embedding is counted,
            # too, in place of the output layer.
            parameters = sum(layer.parameters for layer in made)
            seconds = 6 * parameters * BATCHES[name] * TOKENS / BERT_FLOPS
        found[name] = Work(made, seconds / 3, 2 * seconds / 3, RANKS[name])
    return found


def cluster(ranks: int, between: str) -> Cluster:
    """Return the paper's cluster, with four GPUs and one NIC in each node."""
    network = Network(inside=INSIDE, between=NETWORKS_BETWEEN[between], ranks_per_node=4)
    return Cluster(TURING, network, ranks, call=20e-6)


def findings() -> Iterator[Row]:
    """Yield the paper's other figures. They are ratios of step times, on 32 GPUs at 10 Gb/s unless stated otherwise."""
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
