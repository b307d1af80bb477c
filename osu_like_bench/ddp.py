"""Time a training step of DistributedDataParallel with compcoll's codecs, gloo, and PyTorch's hooks. Needs torch.

A record's times are milliseconds of a step. ``compute_ms`` is the time of the same step without communication;
``exposed_ms`` is the time that communication adds. For compcoll's contenders, ``codec_ms`` and ``communication_ms`` are
times of compcoll's thread in a step, ``sent_megabytes`` is what a rank sends in a step, and ``ratio`` is the
uncompressed megabytes divided by those sent; other contenders have None there. ``error`` is the relative error of the
first step's gradients: the root mean square of their difference from the mean in float64, divided by that of the mean.
``wrong`` counts parameters that differ between ranks after the first step or are not finite. It counts all parameters
if a contender does not compress, but its error is not explained by rounding.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.codecs import Codec
from compcoll.codecs.registry import get_codec
from compcoll.errors import InvalidArgument
from compcoll.torch.low_rank.averaging import Power, Product
from compcoll.torch.low_rank.fusion import Buffer, Wait
from compcoll.torch.training_stats import TrainingStats

from . import UsageError, load
from .machine import describe, describe_mpi
from .report import STATISTICS, Column, Progress, Record, Table
from .timing import Limits, measure
from .training import models
from .training.models import NETWORKS, Synthetic
from .training.processes import Peers, leave, share_cores, start

ITERATIONS, WARMUP, TIME_CAP = 20, 2, 10.0

Loss = Callable[[nn.Module], Tensor]

_FEATURES = 64
_STARTING = 2
"""Steps before the timed ones: PyTorch's PowerSGD begins only after two steps, and may then fail."""

_EXACT = 1e-5
"""Allowed relative error of uncompressed gradients, which are added in other orders."""

_ONE_BUCKET_MB = 1 << 20


def _options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(":") if text else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{part!r}: options are written as name=value, such as rate=8")
        try:
            options[name] = float(value) if not value.isdigit() else int(value)
        except ValueError:
            options[name] = value == "True" if value in ("True", "False") else value
    return options


def codec_of(text: str) -> Codec:
    """Make a codec from a text such as ``minmax:bits=4:block=512``: in a list of contenders, commas separate these."""
    name, colon, options = text.partition(":")
    return get_codec(name + colon + options.replace(":", ","))


def _bf16() -> tuple[Any, Any]:
    # Without NCCL, DDP refuses PyTorch's own hook by its name, although gloo can add bfloat16.
    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        return default_hooks.bf16_compress_hook(state, bucket)

    return None, hook


def _powersgd(hook: Any, rank: int = 1) -> tuple[Any, Any]:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2), hook


HOOKS: Mapping[str, Callable[..., tuple[Any, Any]]] = {
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": _bf16,
    "powersgd": partial(_powersgd, powerSGD_hook.powerSGD_hook),
    "batched_powersgd": partial(_powersgd, powerSGD_hook.batched_powerSGD_hook),
    "quantization": lambda: (None, quantization_hooks.quantization_pertensor_hook),
}
"""PyTorch's own hooks: functions of a hook's options that return its state and the hook."""


def _exact(model: nn.Module, **given: Any) -> Any:
    """Average gradients (S-SGD) with the hooks and buffers of ACP-SGD, but without compression."""
    return compcoll.torch.ACPSGD(model, rank=1, exact_steps=1 << 62, **given)


class _LateRights(Power):
    """Power-SGD that sends all right factors after back-propagation, to measure the gain of sending them earlier."""

    def _start(self, buffer: Buffer) -> Wait:
        return buffer.start(self.sums, self.stats, self.ranks)

    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        waits = []
        for buffer in buffers:
            if (right := self._right_of(buffer)) is not None:
                self._fill(right, buffer)
                waits.append(right.start(self.sums, self.stats, self.ranks))
        for wait in waits:
            wait()
        return super()._products(buffers)


class _LatePowerSGD(compcoll.torch.PowerSGD):
    _method = _LateRights


LOW_RANK: Mapping[str, Callable[..., Any]] = {
    "acpsgd": compcoll.torch.ACPSGD,
    "powersgd": compcoll.torch.PowerSGD,
    "powersgd-late": _LatePowerSGD,
    "ssgd": _exact,
}
"""compcoll's low-rank methods: functions of a model and a method's options. With ``ddp=True`` they hook into DDP."""


@dataclass(frozen=True)
class Contender:
    """A way to average gradients.

    Attributes
    ----------
    make : callable
        Takes a model and the megabytes of a bucket; returns the model that averages gradients, and compcoll's
        compression or None.
    """

    name: str
    compresses: bool
    make: Callable[[nn.Module, float], tuple[nn.Module, Any]]


def parse(text: str, *, feedback: bool, algorithm: str) -> list[Contender]:
    """Make contenders from their names.

    Parameters
    ----------
    text : str
        Names, separated by commas: one of `LOW_RANK`, ``gloo``, ``gloo+HOOK`` with one of `HOOKS`, ``backend``,
        ``compcoll``, ``compcoll+CODEC``, or ``group`` and ``group+CODEC``, which use gloo even under mpirun. Options
        follow after colons, such as ``compcoll+minmax:bits=4:block=512`` or ``acpsgd:rank=4``.
    feedback, algorithm
        Arguments of `compcoll.torch.compress`.
    """
    return [_contender(name.strip(), {"feedback": feedback, "algorithm": algorithm}) for name in text.split(",")]


def _contender(name: str, how: dict[str, Any]) -> Contender:
    base, plus, rest = name.partition("+")
    method, _, options = base.partition(":")
    if method in LOW_RANK and not plus:
        return Contender(name, method != "ssgd", partial(_low_rank, LOW_RANK[method], _options(options)))
    if base in ("compcoll", "group"):
        codec = codec_of(rest) if plus else None
        how |= {"codec": codec, "transport": "auto" if base == "compcoll" else "group"}
        return Contender(name, codec is not None, partial(_compressed, how))
    if name == "backend":
        return Contender(name, False, _on_backend)
    hook, _, options = rest.partition(":")
    if base != "gloo" or (plus and hook not in HOOKS):
        raise UsageError(
            f"there is no contender {name!r}: {', '.join(LOW_RANK)}, gloo, gloo+{', gloo+'.join(HOOKS)}, backend, "
            "compcoll, group, or compcoll+CODEC and group+CODEC such as compcoll+zfp:rate=8"
        )
    return Contender(name, bool(hook), partial(_gloo, hook, _options(options)))


def _gloo(hook: str, options: Mapping[str, Any], model: nn.Module, bucket: float) -> tuple[nn.Module, Any]:
    """Wrap a model in DDP on gloo, with one of `HOOKS` unless ``hook`` is empty."""
    # One bucket for PowerSGD: the collectives of several buckets in flight would mix up on gloo.
    wrapped = _wrapped(model, _ONE_BUCKET_MB if hook.endswith("powersgd") else bucket)
    if hook:
        wrapped.register_comm_hook(*HOOKS[hook](**options))
    return wrapped, None


def _compressed(how: Mapping[str, Any], model: nn.Module, bucket: float) -> tuple[nn.Module, Any]:
    wrapped = _wrapped(model, bucket)
    return wrapped, compcoll.torch.compress(wrapped, **how)


def _low_rank(
    method: Callable[..., Any], options: Mapping[str, Any], model: nn.Module, bucket: float
) -> tuple[nn.Module, Any]:
    own = dict(options)
    if own.pop("ddp", False):
        model = _wrapped(model, bucket)
    else:
        own.setdefault("buffer_mb", bucket)  # both are in MiB
    return model, method(model, **own)


def _on_backend(model: nn.Module, bucket: float) -> tuple[nn.Module, Any]:
    """Wrap a model in DDP on a process group of compcoll's backend, without compression."""
    return _wrapped(model, bucket, dist.new_group(backend="compcoll")), None


def _wrapped(model: nn.Module, bucket: float, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)


class Step:
    """A training step of one contender. Calling the object runs the step.

    Parameters
    ----------
    model : torch.nn.Module
        The contender's copy of the model, possibly wrapped in DDP.
    loss : callable
        Computes the model's loss on this rank's examples.
    compression : optional
        compcoll's compression, whose stats are read.
    """

    def __init__(self, model: nn.Module, loss: Loss, compression: Any = None) -> None:
        self.model = model
        self.compression = compression
        self.steps = 0
        self._loss = loss
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def backward(self) -> None:
        """Compute the gradients of this rank's examples. A wrapped model averages them over all ranks."""
        self._optimizer.zero_grad()
        self._loss(self.model).backward()

    def __call__(self) -> None:
        """Run one training step."""
        self.backward()
        self._optimizer.step()
        self.steps += 1

    def start_account(self) -> None:
        """Reset the counted steps and compcoll's stats."""
        self.steps = 0
        if self.compression is not None:
            self.compression.stats = TrainingStats()

    def gradients(self) -> Tensor:
        """Return all gradients as one vector of float64."""
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()]).double()


def make_model(arguments: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    """Make the model, which is the same on all ranks, and the loss of a rank's examples."""
    torch.manual_seed(arguments.seed)
    if arguments.model == "perceptron":
        model = models.perceptron(int(arguments.parameters), features=_FEATURES)
        torch.manual_seed((arguments.seed << 10) + rank)
        examples = torch.randn(arguments.batch, _FEATURES)
        targets = torch.randint(10, (arguments.batch,))
        return model, lambda model: nn.functional.cross_entropy(model(examples), targets)
    seconds = arguments.backward / 1e3
    model = Synthetic(NETWORKS[arguments.model](), forward_seconds=seconds / 2, backward_seconds=seconds)
    torch.manual_seed((arguments.seed << 10) + rank)
    return model, lambda model: model()


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Run the command, and return its description and records."""
    contenders = parse(arguments.compare, feedback=not arguments.no_feedback, algorithm=arguments.algorithm)
    place = start("gloo")
    threads = share_cores(place, arguments.threads)
    ranks = Peers()
    about = describe() | {"mpi": describe_mpi(), "ranks": place.size, "nodes": ranks.nodes, "threads": threads}
    about["load"] = f"{arguments.loaders} busy loaders beside each rank" if arguments.loaders else ""
    with Progress(len(contenders) + 1, quiet=place.rank != 0) as progress:
        progress.print(*_head(about, arguments))
        try:
            beside, barrier = load.Load(burners=arguments.loaders), partial(ranks.everybody, None)
            with load.under(beside, first_on_node=True, barrier=barrier):
                records = _measured(contenders, *make_model(arguments, place.rank), arguments, ranks, progress)
        except (UsageError, InvalidArgument):  # on every rank
            leave()
            raise
        table = _table(arguments.statistic, records[0]["contender"])
        progress.print(table.head(), *map(table.row, records))
    leave()
    return about, records


def _head(about: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Return the lines above the table."""
    kind = f"perceptron of {arguments.parameters:g} parameters, {arguments.batch} examples a rank"
    if arguments.model != "perceptron":
        kind = f"{arguments.model}'s shapes, back-propagation takes {arguments.backward:g} ms"
    nodes = f"{about['nodes']} node" + "s" * (about["nodes"] > 1)
    threads = f"{about['threads']} thread(s) each"
    beside = f", beside {about['load']}" if about["load"] else ""
    return [
        f"# DistributedDataParallel step, compcoll {about['compcoll']}, torch {torch.__version__}",
        f"# {about['ranks']} ranks on {nodes}, {threads}, {about['mpi']}, {about['cpu']}{beside}",
        f"# {kind}, buckets of {arguments.bucket:g} MB; milliseconds; "
        "exposed: what communication adds to the step; comm, codec: in compcoll's thread",
    ]


def _measured(
    contenders: Sequence[Contender],
    model: nn.Module,
    loss: Loss,
    arguments: argparse.Namespace,
    ranks: Peers,
    progress: Progress,
) -> list[Record]:
    """Verify a step of each contender, then time all contenders alternately."""
    # This step runs before the model is copied, so that the first gradients of all contenders are equal.
    alone = Step(model, loss)
    alone.backward()
    mean = alone.gradients()
    dist.all_reduce(mean)
    mean /= ranks.size
    model.zero_grad()
    steps: list[Step] = []
    quality: list[Record] = []
    for contender in contenders:
        progress.step(f"{contender.name}: first step")
        try:
            wrapped, compression = contender.make(copy.deepcopy(model), arguments.bucket)
        except TypeError as error:  # an option that the method does not have
            raise UsageError(f"{contender.name}: {error}") from error
        steps.append(Step(wrapped, loss, compression))
        try:
            quality.append(_verified(steps[-1], mean, ranks, contender.compresses))
            for _ in range(_STARTING):
                steps[-1]()
        except (AssertionError, IndexError) as error:
            raise UsageError(
                f"{contender.name} fails in this version of PyTorch: {type(error).__name__}: {error}"
            ) from error
    alone()
    for step in steps:
        step.start_account()
    progress.step("timed steps")
    limits = Limits.of(arguments, WARMUP, ITERATIONS, TIME_CAP)
    *times, compute = measure([*steps, alone], limits, barrier=dist.barrier, slowest=ranks.largest)
    about = {"parameters": models.count(model), "batch": arguments.batch, "ranks": ranks.size, "nodes": ranks.nodes}
    first, without = (getattr(each, arguments.statistic) for each in (times[0], compute))
    records = []
    for contender, step, taken, found in zip(contenders, steps, times, quality, strict=True):
        record = {"contender": contender.name, **about, **taken.fields("ms")}
        with_it = getattr(taken, arguments.statistic)
        record |= {"speedup": first / with_it, "compute_ms": without * 1e3, "exposed_ms": (with_it - without) * 1e3}
        records.append(record | _accounted(step) | found)
    return records


def _verified(step: Step, mean: Tensor, ranks: Peers, compresses: bool) -> Record:
    """Return the error of the first averaged gradients, and how many parameters are wrong after a step with them."""
    step()
    error = float((step.gradients() - mean).norm() / mean.norm())
    values = torch.cat([parameter.detach().reshape(-1) for parameter in step.model.parameters()])
    broken = ~values.isfinite()
    if len(set(ranks.everybody(sha256(values.numpy().tobytes()).digest()))) > 1:
        firsts = values.clone()
        dist.broadcast(firsts, 0)
        broken |= values.view(torch.int32) != firsts.view(torch.int32)
    wrong = sum(ranks.everybody(int(broken.sum())))
    if not compresses and not error <= _EXACT:
        wrong = values.numel()
    return {"error": error, "wrong": wrong}


def _accounted(step: Step) -> Record:
    """Return compcoll's stats per step; fields are None for contenders without compcoll."""
    if step.compression is None:
        return {**dict.fromkeys(("codec_ms", "communication_ms", "sent_megabytes", "ratio")), "calls": {}}
    stats = step.compression.stats
    return {
        "codec_ms": (stats.encode_seconds + stats.decode_seconds) / step.steps * 1e3,
        "communication_ms": stats.total_seconds / step.steps * 1e3,
        "sent_megabytes": stats.wire_nbytes / step.steps / 1e6,
        "ratio": stats.ratio,
        "calls": dict(stats.calls),
    }


def _table(statistic: str, first: str) -> Table:
    head, field = STATISTICS[statistic]
    return Table(
        Column("# Contender", "contender", -28),
        Column(f"{head}(ms)", field.replace("_us", "_ms"), 11, ".1f"),
        Column(f"{first}/this", "speedup", len(first) + 8, ".2f"),
        Column("Compute", "compute_ms", 11, ".1f"),
        Column("Exposed", "exposed_ms", 11, ".1f"),
        Column("Comm", "communication_ms", 11, ".1f"),
        Column("Codec", "codec_ms", 11, ".1f"),
        Column("MB sent", "sent_megabytes", 11, ".1f"),
        Column("Ratio", "ratio", 8, ".2f"),
        Column("Rel. error", "error", 12, ".2e"),
        Column("#wrong", "wrong", 10),
    )
