"""Compressed messages from rank to rank over any process group, such as activations of a pipeline."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.base import Codec
from ...errors import CollectiveMismatch, InvalidArgument
from ..roll_call import board_of
from ..untraced import untraced
from .all_to_all import decoded, encoded, wire_nbytes
from .member import check_fixed, check_tensors, coding
from .membership import Group


@untraced
def send(
    tensor: Tensor, dst: int, group: Group = None, tag: int = 0, *, codec: str | Codec = "zfp", **codec_options: Any
) -> None:
    """Send a tensor to one rank, compressed: activations to the next stage of a pipeline, or gradients back, each with
    a codec of its own.

    As `torch.distributed.send`: no gradient comes back by itself; the schedule of a pipeline sends them.

    Parameters
    ----------
    tensor : torch.Tensor
        float16, bfloat16, float32 or float64.
    dst : int
        The other's rank in the default group.
    group, codec, **codec_options
        As of `compcoll.torch.all_reduce`; of the codecs those whose wires have a size that is known before.
    tag : int
        To match a receive with its send.

    Raises
    ------
    InvalidBuffer, InvalidArgument, UnsupportedDType, UnsupportedDevice
        If tensor, rank or codec cannot be right; before anything is sent.

    Examples
    --------
    >>> rank, ranks = dist.get_rank(), dist.get_world_size()
    >>> activations = torch.ones(8, 1024)
    >>> if rank > 0:
    ...     compcoll.torch.recv(activations, rank - 1, codec="fp8")
    >>> if rank + 1 < ranks:
    ...     compcoll.torch.send(activations, rank + 1, codec="fp8")
    """
    group, chosen = _checked(tensor, dst, group, codec, codec_options)
    wire = encoded(tensor.detach().reshape(-1), chosen) if tensor.numel() else None
    with board_of(group).waits(f"a message to rank {dst}", dist.get_group_rank(group, dst)):
        if tensor.is_cpu:
            dist.send(_head(tensor, chosen, 0 if wire is None else wire.numel()), dst, group, tag)
        if wire is not None:
            dist.send(wire, dst, group, tag)


@untraced
def recv(
    tensor: Tensor, src: int, group: Group = None, tag: int = 0, *, codec: str | Codec = "zfp", **codec_options: Any
) -> None:
    """Receive a tensor that another rank sent by `compcoll.torch.send`, whose other parameters these are.

    Parameters
    ----------
    tensor : torch.Tensor
        Where it goes; of as many elements as were sent, and of their type.
    src : int
        The other's rank in the default group.
    group, tag, codec, **codec_options
        As the sender's.

    Raises
    ------
    CollectiveMismatch
        If the sender sent another number of elements, or another type, or by another codec: ``tensor`` is unchanged. On
        a GPU, where the host would have to wait for that, such a call ends as the group's own does.

    Examples
    --------
    >>> gradients = torch.empty(8, 1024)
    >>> if dist.get_rank() + 1 < dist.get_world_size():
    ...     compcoll.torch.recv(gradients, dist.get_rank() + 1, codec="minmax", bits=8)
    """
    group, chosen = _checked(tensor, src, group, codec, codec_options)
    n = tensor.numel()
    wire = torch.empty(wire_nbytes(n, tensor, chosen) if n else 0, dtype=torch.uint8, device=tensor.device)
    waits = partial(board_of(group).waits, f"a message from rank {src}", dist.get_group_rank(group, src))
    if tensor.is_cpu:
        own = _head(tensor, chosen, wire.numel())
        came = torch.empty_like(own)
        with waits():
            dist.recv(came, src, group, tag)
        if not torch.equal(came, own):
            if came[1]:
                with waits():  # so that the next one fits
                    dist.recv(torch.empty(int(came[1]), dtype=torch.uint8), src, group, tag)
            raise CollectiveMismatch(
                f"rank {src} sent other values than the {n} of {tensor.dtype} by {chosen!r} that are received here: "
                f"{int(came[1])} bytes on the wire instead of {wire.numel()}"
            )
    if not n:
        return
    with waits():
        dist.recv(wire, src, group, tag)
    with torch.no_grad():
        tensor.copy_(decoded(wire, tensor.new_empty(n), chosen).view(tensor.shape))


def _checked(
    tensor: Tensor, other: int, group: Group, codec: str | Codec, options: dict[str, Any]
) -> tuple[dist.ProcessGroup, Codec]:
    group = check_tensors(group, tensor)
    chosen = check_fixed(coding(codec, options))
    ranks = dist.get_process_group_ranks(group)
    if not isinstance(other, int) or other not in ranks or other == dist.get_rank():
        raise InvalidArgument(f"rank {other!r}: another one of the group's ranks {ranks} is needed than this one's")
    return group, chosen


def _head(tensor: Tensor, codec: Codec, nbytes: int) -> Tensor:
    """Make what goes before a wire: a fingerprint of what it holds, and its length."""
    return torch.tensor([zlib.crc32(f"{tensor.numel()} {tensor.dtype} {codec!r}".encode()), nbytes])
