"""The ranks among which an optimizer averages, models whose gradients stay each rank's own, and loss scaling."""

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
from ..groups.membership import check_group, communicator_of, device_of
from ..hooks import register_hook
from ..membership import check_alike, compare

Ranks: TypeAlias = dist.ProcessGroup | Communicator
"""A process group of any backend, or a communicator of compcoll's that is used for nothing else."""


def join(
    ranks: Ranks | None, lines: Sequence[str], timeout: float | None, transport: str, algorithm: str
) -> Communicator:
    """Make a communicator of the ranks, which have the same models and settings. Collective.

    Parameters
    ----------
    ranks : ProcessGroup or Communicator, optional
        The default process group by default. A communicator is taken as it is.
    lines : sequence of str
        What must be alike on all ranks.
    timeout, over
        As of `compcoll.torch.compress`; a communicator has its own.
    algorithm : str
        Of the averages: ``"auto"`` goes by what links carry.

    Raises
    ------
    InvalidArgument
        If there is no such group, or a communicator has a time-out or a way given.
    CollectiveMismatch
        On every rank, with the first line in which they differ.
    """
    own = [*lines, f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"]
    if isinstance(ranks, Communicator):
        if timeout is not None or transport != "auto":
            raise InvalidArgument(
                f"timeout={timeout!r}, transport={transport!r}: a communicator that is given has its own"
            )
        compare(_gathered("\n".join(own).encode(), ranks))
        return ranks
    group = check_group(ranks)
    device = device_of(group)
    check_alike(group, device, own)
    return communicator_of(group, device, timeout, transport, measured=algorithm == choose.AUTO)


def _gathered(data: bytes, communicator: Communicator) -> list[bytes]:
    """Gather what each rank has to tell. Collective."""
    sizes = communicator.allgather(np.array([len(data)]), codec=None).ravel()
    whole = communicator.allgatherv(np.frombuffer(data, np.uint8), codec=None)
    return [bytes(part) for part in np.split(whole, np.cumsum(sizes)[:-1])]


def broadcast_object(root: int, communicator: Communicator, value: dict[str, Any]) -> dict[str, Any]:
    """Give all ranks what one of them has. Collective."""
    memory = io.BytesIO()
    if communicator.rank == root:
        torch.save(value, memory)
    data = np.frombuffer(memory.getvalue(), np.uint8).copy()
    (nbytes,) = communicator.bcast(np.array([data.size]), root, codec=None)
    data = communicator.bcast(data if communicator.rank == root else np.empty(nbytes, np.uint8), root, codec=None)
    told: dict[str, Any] = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
    return told


def any_rank(communicator: Communicator, flags: Sequence[bool]) -> list[bool]:
    """Find which of some flags any rank has set. Collective."""
    return [bool(flag) for flag in communicator.allreduce(np.array(flags, np.int64), op="max", codec=None)]


def check_together(communicator: Communicator, line: str) -> None:
    """Make sure that all ranks do the same, such as to go on from a state of the same step. Collective.

    Raises
    ------
    CollectiveMismatch
        On every rank, if a rank has another line, or makes another call.
    """
    sequence_number = communicator.sequence_number
    communicator._agree(Signature(line))
    communicator.sequence_number = sequence_number  # codecs draw by it: as without this call


def module_of(model: nn.Module) -> nn.Module:
    """The module itself, without DistributedDataParallel around it."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def keep_gradients(model: nn.Module, name: str) -> None:
    """Have DistributedDataParallel leave each rank its own gradients: `name` averages something else."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(bucket: dist.GradBucket) -> Future[Tensor]:
        own = bucket.buffer()
        future: Future[Tensor] = Future(devices=[own.device] if own.is_cuda else [])
        future.set_result(own)
        return future

    register_hook(model, hook, name)


SUPPORTED = "_step_supports_amp_scaling"
"""The attribute by which `torch.amp.GradScaler` sees that it must not skip an optimizer's steps itself: a rank alone
would skip them. It sets ``found_inf`` and ``grad_scale`` then, while ``step()`` runs, and deletes them afterwards.
"""


class Scaling(NamedTuple):
    """What a GradScaler found.

    Attributes
    ----------
    overflowed : bool
        Whether a gradient of this rank holds Inf or NaN.
    scale : float
        What the gradients are still to be divided by.
    """

    overflowed: bool
    scale: float


@contextmanager
def scaling_of(optimizer: torch.optim.Optimizer) -> Iterator[Scaling | None]:
    """Read what the GradScaler that calls ``step()`` has found; None without a scaler.

    After an error the scaler deletes nothing, and would multiply its next scale by what is left: it is deleted here.
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
        If one is of float16, in which small gradients would be lost, as `torch.amp.GradScaler.unscale_` refuses it.
    """
    if scale == 1.0:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise InvalidArgument("gradients of float16 cannot be unscaled: keep parameters in float32 under autocast")
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).div_(scale)
