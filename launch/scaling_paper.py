"""The ACP-SGD paper's cluster and trainings, simulated by `osu_like_bench.pages.scaling`, and what was published.

L. Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from compcoll.simulation.network import Network
from osu_like_bench.scaling import GPU, METHODS, Cluster, Work, link, step
from osu_like_bench.training.networks import NETWORKS

S_SGD, POWER, POWER_OVERLAP, ACP = METHODS
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
    "10 Gb/s Ethernet": link(10, TCP_LATENCY, efficiency=0.94),
    "100 Gb/s InfiniBand": link(100, 3e-6, efficiency=0.97),
}
"""Ethernet carries 94 % of its rate as TCP's data, in packets of 1500 bytes."""

PAPERS = "10 Gb/s Ethernet"


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


class Finding(NamedTuple):
    """A figure that the paper reports outside of table III.

    Attributes
    ----------
    where, what : str
        Network and circumstances, and what is divided by what.
    published, simulated : float
        The ratio.
    """

    where: str
    what: str
    published: float
    simulated: float


def findings() -> Iterator[Finding]:
    """The paper's other figures, all of them ratios of times of steps, on 32 GPUs at 10 Gb/s unless said otherwise."""
    trained = works()
    resnet152, base, large = trained["resnet152"], trained["bert-base"], trained["bert-large"]

    def seconds(method: str, work: Work, between: str = PAPERS, ranks: int = 32) -> float:
        return step(method, work, cluster(ranks, between)).total

    slow, fast = "1 Gb/s Ethernet", "100 Gb/s InfiniBand"
    for name, published in (
        ("resnet50", {ACP: 7.1, POWER_OVERLAP: 5.7}),
        ("bert-base", {ACP: 23.9, POWER_OVERLAP: 11.2}),
    ):
        for method, ratio in published.items():
            simulated = seconds(S_SGD, trained[name], slow) / seconds(method, trained[name], slow)
            yield Finding(f"{name}, {slow}", f"S-SGD / {method}", ratio, simulated)
    simulated = seconds(S_SGD, base, fast) / seconds(ACP, base, fast)
    yield Finding(f"bert-base, {fast}", "S-SGD / ACP-SGD", 1.4, simulated)
    for method, ratio in {S_SGD: 1.10, POWER_OVERLAP: 1.24, ACP: 1.08}.items():
        simulated = seconds(method, resnet152, ranks=64) / seconds(method, resnet152, ranks=8)
        yield Finding("resnet152", f"{method}: 64 GPUs / 8 GPUs", ratio, simulated)
    high = {method: seconds(method, replace(large, rank=256)) for method in (POWER_OVERLAP, ACP)}
    for method, ratio in {POWER_OVERLAP: 3.4, ACP: 2.4}.items():
        yield Finding("bert-large", f"{method}: rank 256 / rank 32", ratio, high[method] / seconds(method, large))
    yield Finding("bert-large, rank 256", f"{POWER_OVERLAP} / ACP-SGD", 2.7, high[POWER_OVERLAP] / high[ACP])
    yield Finding("bert-large, rank 256", "S-SGD / ACP-SGD", 3.9, seconds(S_SGD, large) / high[ACP])
    half = replace(resnet152, forward=resnet152.forward / 2, backward=resnet152.backward / 2)
    for method, ratio in {S_SGD: 2.4, POWER_OVERLAP: 1.5}.items():
        simulated = seconds(method, half) / seconds(ACP, half)
        yield Finding("resnet152, batch 16", f"{method} / ACP-SGD", ratio, simulated)
