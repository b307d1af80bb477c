"""Messages among the ranks of a PyTorch process group of any backend: to compare settings and to gather bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ..errors import CollectiveMismatch
from . import private
from .failure_detector import board_of


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that a process group waits; PyTorch's default if its backend does not report them."""
    if isinstance(seconds := getattr(group, "timeout", None), float):  # compcoll's own backend
        return seconds
    given = private.timeout_of(private.backend_of(group, device))
    return (default_pg_timeout if given is None else given).total_seconds()


def check_alike(group: dist.ProcessGroup, device: torch.device, lines: list[str]) -> None:
    """Check that all ranks have the same lines of text. Collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Group of any backend.
    device : torch.device
        Device of the group's tensors.
    lines : list of str
        Lines of this rank.

    Raises
    ------
    CollectiveMismatch
        On every rank, with the first line that differs.
    """
    compare(gathered("\n".join(lines).encode(), group, device))


def compare(texts: Sequence[bytes]) -> None:
    """Check that the texts of all ranks are equal.

    Raises
    ------
    CollectiveMismatch
        With the first line that differs.
    """
    all_lines = [text.decode().split("\n") for text in texts]
    for number in range(max(map(len, all_lines))):
        lines = [each[number] if number < len(each) else "(nothing)" for each in all_lines]
        if len(set(lines)) > 1:
            table = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(lines))
            raise CollectiveMismatch(f"the ranks' models or settings differ. The first difference is:\n{table}")


def gathered(data: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Return the bytes of all ranks, in rank order. Their lengths may differ. Collective.

    Parameters
    ----------
    data : bytes
        Bytes of this rank; not empty.
    group : torch.distributed.ProcessGroup
        Group of any backend.
    device : torch.device
        Device of the group's tensors.
    """
    return gather_bytes(data, lambda values: _gathered(values, group, device))


def gather_bytes(data: bytes, all_gather: Callable[[Tensor], list[Tensor]]) -> list[bytes]:
    """Return the bytes of all ranks, whose lengths may differ. `all_gather` gathers tensors of equal length."""
    sizes = [int(size) for size in all_gather(torch.tensor([len(data)]))]
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    return [bytes(one[:size].tolist()) for one, size in zip(all_gather(padded), sizes, strict=True)]


def _gathered(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    parts = [torch.empty_like(values, device=device) for _ in range(group.size())]
    with board_of(group).waits("a gather of settings"):
        dist.all_gather(parts, values.to(device), group=group)
        return [part.cpu() for part in parts]
