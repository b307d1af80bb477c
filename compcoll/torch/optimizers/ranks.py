"""The communicator of an optimizer, hooks that leave gradients local, and loss scaling."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...communicator import Communicator
from ...errors import InvalidArgument
from ...plan import choose
from ...plan.signature import Signature
from ..agreement import check_alike, compare, gather_bytes
from ..groups.membership import check_group, communicator_of, device_of
from ..hooks import register_hook

Ranks: TypeAlias = dist.ProcessGroup | Communicator
"""A process group of any backend, or a compcoll communicator that is used for nothing else."""


def join(
    ranks: Ranks | None, lines: Sequence[str], timeout: float | None, transport: str, algorithm: str
) -> Communicator:
    """Check that all ranks have the same model and settings, and return their communicator. Collective.

    Parameters
    ----------
    ranks : ProcessGroup or Communicator, optional
        Default: the default process group. A communicator is used as it is.
    lines : sequence of str
        Settings that must be equal on all ranks.
    timeout, transport
        As for `compcoll.torch.compress`. A communicator has its own.
    algorithm : str
        Algorithm of the averages. ``"auto"`` needs measurements of the links.

    Raises
    ------
    InvalidArgument
        If there is no such group, or timeout or transport is given together with a communicator.
    CollectiveMismatch
        On every rank, if ``lines`` differ. The error shows the first difference.
    """
    own = [*lines, f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"]
    if isinstance(ranks, Communicator):
        if timeout is not None or transport != "auto":
            raise InvalidArgument(
                f"timeout={timeout!r}, transport={transport!r}: a communicator that is given has its own"
            )
        gather = lambda values: list(torch.from_numpy(ranks.allgather(values.numpy(), codec=None)))  # noqa: E731
        compare(gather_bytes("\n".join(own).encode(), gather))
        return ranks
    group = check_group(ranks)
    device = device_of(group)
    check_alike(group, device, own)
    return communicator_of(group, device, timeout, transport, measured=algorithm == choose.AUTO)


def broadcast_object(root: int, communicator: Communicator, value: dict[str, Any]) -> dict[str, Any]:
    """Broadcast a dict from ``root`` to all ranks. Collective."""
    memory = io.BytesIO()
    if communicator.rank == root:
        torch.save(value, memory)
    data = np.frombuffer(memory.getvalue(), np.uint8).copy()
    (nbytes,) = communicator.bcast(np.array([data.size]), root, codec=None)
    data = communicator.bcast(data if communicator.rank == root else np.empty(nbytes, np.uint8), root, codec=None)
    received: dict[str, Any] = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
    return received


def any_rank(communicator: Communicator, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has set it. Collective."""
    return [bool(flag) for flag in communicator.allreduce(np.array(flags, np.int64), op="max", codec=None)]


def check_together(communicator: Communicator, line: str) -> None:
    """Check that all ranks call this with the same line, for example after loading a state. Collective.

    Raises
    ------
    CollectiveMismatch
        On every rank, if a rank has another line or makes another call.
    """
    sequence_number = communicator.sequence_number
    communicator._agree(Signature(line))
    communicator.sequence_number = sequence_number  # codecs draw by it


def module_of(model: nn.Module) -> nn.Module:
    """Return the module without its DistributedDataParallel wrapper."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def keep_gradients(model: nn.Module, name: str) -> None:
    """Register a DistributedDataParallel hook, called ``name``, that leaves each rank its own gradients."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(bucket: dist.GradBucket) -> Future[Tensor]:
        own = bucket.buffer()
        future: Future[Tensor] = Future(devices=[own.device] if own.is_cuda else [])
        future.set_result(own)
        return future

    register_hook(model, hook, name)


SUPPORTED = "_step_supports_amp_scaling"
"""Name of the attribute that stops `torch.amp.GradScaler` from skipping an optimizer's step on one rank alone.

If it is set, the scaler sets ``found_inf`` and ``grad_scale`` on the optimizer while ``step()`` runs, and deletes them
afterwards.
"""


class Scaling(NamedTuple):
    """The result of a GradScaler.

    Attributes
    ----------
    overflowed : bool
        Whether a gradient of this rank contains Inf or NaN.
    scale : float
        Factor by which the gradients must still be divided.
    """

    overflowed: bool
    scale: float


@contextmanager
def scaling_of(optimizer: torch.optim.Optimizer) -> Iterator[Scaling | None]:
    """Return the result of the GradScaler that calls ``step()``; None without a scaler.

    After an error, the scaler does not delete its attributes, and would multiply its next scale by the old one. So this
    context manager deletes them.
    """
    found = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    try:
        yield None if found is None else Scaling(bool(float(found)), 1.0 if scale is None else float(scale))
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise


def unscale(parameters: Iterable[Tensor], scale: float) -> None:
    """Divide the parameters' gradients by a scale.

    Raises
    ------
    InvalidArgument
        If a gradient is float16, which would lose small values. `torch.amp.GradScaler.unscale_` rejects it, too.
    """
    if scale == 1.0:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise InvalidArgument("gradients of float16 cannot be unscaled: keep parameters in float32 under autocast")
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).div_(scale)
