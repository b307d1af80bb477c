"""What launch/training_steps.py measures: each page's cases, their commands and goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

PERCEPTRON = "ddp --threads 1 --parameters 25e6 --batch 1 --statistic median"
RESNET = "ddp --threads 1 --model resnet50 --statistic median"
ACPSGD, POWERSGD, HOOK = "acpsgd:rank=4", "powersgd:rank=4", "gloo+powersgd:rank=4"
ZFP, MINMAX = "compcoll+zfp:rate=8", "compcoll+minmax:bits=8"
BLOCKING, ASYNCHRONOUS, MPI = "inline", "async", "mpi4py"
"""Contenders of the benchmark."""
SPEED = "launch/optimizer_speed.py"
ALONE, DDP, ONE_BIT, DILOCO = "alone", "ddp", "onebit-adam", "diloco"
"""A program of its own, and its contenders."""
RATE = "examples_per_second"
"""Its figure of each."""

Record = dict[str, Any]
Results = dict[str, Record]
"""Of a record, by contender."""


class Goal(NamedTuple):
    """What is wanted, the figure that tells, its limit, and whether more is better."""

    text: str
    figure: Callable[[Results], float]
    limit: float
    more: bool

    def met(self, results: Results) -> bool:
        """Tell whether it is reached."""
        return self.figure(results) >= self.limit if self.more else self.figure(results) <= self.limit


@dataclass(frozen=True)
class Case:
    """A command that is measured, and its section of a page.

    Attributes
    ----------
    title, text : str
        For people.
    where : str
        What starts the ranks: a launcher's words, or hosts and a rate for netlab.
    words : str
        For osu_like_bench, or a program of launch/ and words for it.
    goals : tuple of Goal
        What is expected of the figures.
    """

    title: str
    text: str
    where: str | tuple[int, str]
    words: str
    goals: tuple[Goal, ...] = ()

    @property
    def program(self) -> list[str]:
        """Words for Python."""
        if self.words.startswith("launch/"):
            return self.words.split()
        calls = self.words.startswith("backends")
        return ["-m", *(f"osu_like_bench.{self.words}" if calls else f"osu_like_bench {self.words}").split()]

    @property
    def started(self) -> str:
        """The command, but for Python's words."""
        return self.where if isinstance(self.where, str) else f"launch/netlab run -n {self.where[0]} --"


def _faster(what: str, than: str, times: float) -> Goal:
    text = f"`{what}` ≥ {times:g} × as fast as `{than}`"
    return Goal(text, lambda results: results[than]["median_ms"] / results[what]["median_ms"], times, True)


def _less_work(what: str, than: str, most: float) -> Goal:
    text = f"`{what}` compresses in ≤ {most:g} of what `{than}` takes"

    def share(results: Results) -> float:
        own_copies = results["gloo"]["exposed_ms"] if than.startswith("gloo") else 0.0
        return float(results[what]["exposed_ms"] / (results[than]["exposed_ms"] - own_copies))

    return Goal(text, share, most, False)


def _over(contender: str, most: float) -> Goal:
    text = f"`{contender}` ≤ {most:g} µs over `{MPI}`"
    return Goal(text, lambda results: results[contender]["median_us"] - results[MPI]["median_us"], most, False)


def _at_most(contender: str, than: str, times: float) -> Goal:
    text = f"`{contender}` ≤ {times:g} × `{than}`"
    return Goal(text, lambda results: results[contender]["median_us"] / results[than]["median_us"], times, False)


def _more_examples(contender: str, than: str, times: float) -> Goal:
    text = f"`{contender}` ≥ {times:g} × `{than}`"
    return Goal(text, lambda rates: rates[contender][RATE] / rates[than][RATE], times, True)


_UNDER_WAY = Goal(
    "a step with an average under way ≤ 1.05 × one without, medians",
    lambda rates: float(rates[DILOCO]["under_way_median"]),
    1.05,
    False,
)
_FOUR, _TWO, _SLOW_FOUR = (4, "1gbit"), (2, "10gbit"), (4, "100mbit")
_MPIRUN = "launch/mpirun -n 2"
_TCP = f"{_MPIRUN} --mca pml ob1 --mca btl tcp,self"
CASES: dict[str, Case] = {
    "ddp/1g-4hosts": Case(
        "4 hosts, 1 Gb/s",
        "",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,{ZFP},{MINMAX}",
        (_faster(ZFP, "gloo", 2.5),),
    ),
    "ddp/1g-4hosts-no-feedback": Case(
        "The same without feedback",
        "",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --no-feedback --compare gloo,{ZFP},{MINMAX}",
    ),
    "ddp/10g-2hosts": Case(
        "2 hosts, 10 Gb/s",
        "`compcoll` without a codec is exact.",
        _TWO,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,gloo+fp16,compcoll,{ZFP},{MINMAX}",
        tuple(_faster(name, "gloo", 1) for name in ("compcoll", ZFP, MINMAX)),
    ),
    "ddp/latency-memory": Case(
        "Calls of the backend: 4 bytes, one node",
        "`inline` is a blocking `dist.all_reduce`, `async` one that is waited for afterwards.",
        _MPIRUN,
        "backends -m 4:4 -x 500 -i 6000 --time-cap 2 --compare mpi4py,inline,async",
        (_over(BLOCKING, 10), _over(ASYNCHRONOUS, 30)),
    ),
    "ddp/large-memory": Case(
        "25 MiB, one node",
        "",
        _MPIRUN,
        "backends -m 25M -x 3 -i 40 --time-cap 3 --compare mpi4py,inline,async",
        (_at_most(BLOCKING, MPI, 1.05), _at_most(ASYNCHRONOUS, MPI, 1.05)),
    ),
    "ddp/latency-tcp": Case(
        "4 bytes, MPI over TCP",
        "",
        _TCP,
        "backends -m 4:4 -x 100 -i 2000 --time-cap 2",
        (_over(BLOCKING, 10), _over(ASYNCHRONOUS, 30), _at_most(ASYNCHRONOUS, "gloo", 1)),
    ),
    "ddp/large-tcp": Case(
        "25 MiB, MPI over TCP",
        "These do not take TCP: inside a node exact sums go through shared memory, whatever MPI does.",
        _TCP,
        "backends -m 25M -x 2 -i 20 --time-cap 2",
        (_at_most(ASYNCHRONOUS, "gloo", 1),),
    ),
    "low-rank/1g-4hosts": Case(
        "4 hosts, 1 Gb/s, 25 million parameters",
        "One example a rank, so that communication dominates.",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,{HOOK},{ACPSGD}",
        (_faster(ACPSGD, "gloo", 5), _faster(ACPSGD, HOOK, 1.4)),
    ),
    "low-rank/1g-ablation": Case(
        "What overlap and fusion do",
        "`overlap=False` sends after back-propagation, `buffer_mb=0` every tensor on its own; `ddp=True` is a hook of "
        "DistributedDataParallel, which copies every gradient into its buckets.",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 8 --compare "
        f"{ACPSGD},{ACPSGD}:overlap=False,{ACPSGD}:buffer_mb=0,{ACPSGD}:ddp=True,{POWERSGD}",
    ),
    "low-rank/1g-resnet50": Case(
        "ResNet-50's shapes",
        "161 tensors; back-propagation sleeps for 200 ms and the forward pass for 100.",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare gloo,{ACPSGD},{ACPSGD}:overlap=False,{ACPSGD}:buffer_mb=0",
    ),
    "low-rank/1g-buffers": Case(
        "The same by the size of fusion buffers",
        "In MiB of uncompressed gradients, which are 98 MiB in all: the last three are one buffer.",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare "
        + ",".join(f"{ACPSGD}:buffer_mb={size}" for size in (0, 1, 5, 25, 100, 500, 1500)),
    ),
    "low-rank/1g-ranks": Case(
        "And by rank",
        "",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare "
        + ",".join(["gloo", *(f"acpsgd:rank={rank}" for rank in (1, 2, 4, 8, 16, 32)), POWERSGD, "powersgd:rank=32"]),
    ),
    "low-rank/1g-right-factors": Case(
        "Right factors at once",
        "`PowerSGD` sends each buffer's right factors as soon as the mean of the left ones has come; `powersgd-late` "
        "is the same but for all right factors leaving when back-propagation has ended.",
        _FOUR,
        f"{RESNET} --backward 200 -x 1 -i 8 --compare "
        "powersgd-late:rank=4,powersgd:rank=4,powersgd-late:rank=32,powersgd:rank=32",
    ),
    "low-rank/10g-2hosts": Case(
        "2 hosts, 10 Gb/s",
        "`ssgd` is exact gradients by compcoll's hooks.",
        _TWO,
        f"{PERCEPTRON} -x 1 -i 8 --compare gloo,ssgd,{HOOK},{POWERSGD},{ACPSGD}",
        (_faster(ACPSGD, "gloo", 1), _faster(POWERSGD, "gloo", 1)),
    ),
    "low-rank/work-perceptron": Case(
        "Work: 25 million parameters",
        "One rank: nothing is sent, so that *exposed* is compression, and with gloo DistributedDataParallel's own "
        "copies.",
        "launch/mpirun -n 1",
        f"{PERCEPTRON} -x 0 -i 10 --compare gloo,{HOOK},{POWERSGD},{ACPSGD}",
        (_less_work(ACPSGD, HOOK, 0.5), _less_work(ACPSGD, POWERSGD, 0.5)),
    ),
    "low-rank/work-resnet50": Case(
        "Work: ResNet-50's shapes",
        "",
        "launch/mpirun -n 1",
        f"{RESNET} --backward 0 -x 0 -i 10 --compare gloo,{HOOK},{POWERSGD},{ACPSGD}",
        (_less_work(ACPSGD, HOOK, 0.5), _less_work(ACPSGD, POWERSGD, 0.5)),
    ),
    "local-steps/4hosts": Case(
        "4 hosts, 8 examples a rank",
        "",
        _SLOW_FOUR,
        SPEED,
        (
            _more_examples(DILOCO, DDP, 50),
            _more_examples(DILOCO, ALONE, 0.95),
            _more_examples(ONE_BIT, DDP, 10),
            _UNDER_WAY,
        ),
    ),
    **{
        f"local-steps/{hosts}hosts-batch{batch}": Case(
            f"{hosts} hosts, {batch} example{'s' * (batch > 1)} a rank",
            "",
            (hosts, "100mbit"),
            f"{SPEED} --batch {batch}",
        )
        for hosts, batch in ((4, 16), (4, 4), (4, 1), (2, 8), (2, 1))
    },
}
"""By the record's name, whose folder is the page."""

HEADS = {
    "ddp": (
        "# Training steps of DistributedDataParallel",
        "",
        "Made by `python launch/training_steps.py --only 'ddp/*'`. A perceptron of 25 million parameters, one example",
        "a rank, buckets of 25 MB, medians in milliseconds, contenders in turns",
        "([columns](../benchmark.md#training-steps)). Hosts are [netlab](../launching/netlab.md)'s, which share this",
        "machine's cores, one thread a rank. What codecs cost in accuracy: [digits](study.md), [text](study-text.md).",
    ),
    "low-rank": (
        "# Low rank, measured",
        "",
        "Made by `python launch/training_steps.py --only 'low-rank/*'`. Medians in milliseconds, contenders in turns",
        "([columns](../benchmark.md#training-steps)). Hosts are [netlab](../launching/netlab.md)'s, which share this",
        "machine's cores, one thread a rank. All results agree between ranks bit by bit. PyTorch's `powerSGD_hook`",
        "(`gloo+powersgd`) gets a single bucket, so that nothing of it overlaps: with several it crashes on gloo.",
        "`acpsgd` and `powersgd` are `compcoll.torch.ACPSGD` and `PowerSGD`. [Accuracy](../low-rank.md#what-it-loses).",
        "",
        "Not measured: GPUs and NCCL (ResNets and BERTs on them are [simulated](scaling.md)); PyTorch's batched hook,",
        "which fails on CPUs in torch 2.13; BERT's shapes between processes.",
    ),
    "local-steps": (
        "# 1-bit Adam and local steps, measured",
        "",
        "Made by `python launch/training_steps.py --only 'local-steps/*'`. A perceptron of 25 million parameters,",
        "links of 100 Mb/s; examples a second of all ranks, contenders in turns. Hosts are",
        "[netlab](../launching/netlab.md)'s, which share this machine's cores, one thread a rank. Steps wait for",
        "memory that ranks share, and scatter. What these methods cost in accuracy: [text](study-text.md).",
        "",
        "`ddp` is DistributedDataParallel on gloo, `onebit-adam` 1-bit Adam after its warm-up, `alone` AdamW without",
        "any traffic, `unfused` the same without `fused=True`, and `diloco` streaming DiLoCo: H = 50, four fragments,",
        "a delay of ten steps, outer gradients by min-max in 4 bits. All but `unfused` take PyTorch's fused AdamW.",
    ),
}
"""What stands above a page's cases."""
