"""Compressed all-to-all and point-to-point messages over any process group.

They carry, for example, tokens of a mixture of experts, or activations of a pipeline. This module encodes and decodes;
the group's own all_to_all, send and recv transfer the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.base import Codec
from ...encoding import decode, encode
from ...errors import CollectiveMismatch, InvalidArgument, InvalidBuffer
from ...host.device import HostDevice
from ..buffers import array_of, overlap, split_counts
from ..failure_detector import board_of
from ..handles import Followed
from ..untraced import untraced
from . import operators
from .membership import Group, check_fixed, check_tensors, coding
from .operators import traced_by

_HOST = HostDevice()
_Splits: TypeAlias = list[int]
_Codecs: TypeAlias = tuple[Codec, Codec]
"""Codecs of values and of gradients."""


@traced_by(operators.all_to_all_single)
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    **codec_options: Any,
) -> Followed | None:
    """Send some rows of a tensor to each rank, compressed: equal shares, or as many as the split sizes say.

    A mixture of experts uses split sizes. Rows are encoded separately for each destination. A rank also encodes the
    rows that it keeps, so an element has the same error on every destination.

    Parameters
    ----------
    output, input : torch.Tensor
        Contiguous tensors of float16, bfloat16, float32 or float64.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows along the first axis that come from, and go to, each rank; equal shares by default.
    group, async_op, codec, **codec_options
        As in `compcoll.torch.all_reduce`. The size of the encoded bytes must not depend on the values.

    Raises
    ------
    InvalidBuffer, InvalidArgument, UnsupportedDType, UnsupportedDevice
        If tensors, split sizes or codec are invalid.
    CollectiveMismatch
        On every rank, if some rank sends another number of rows than the receiver expects. Only tensors on the CPU are
        checked, because on a GPU the host would have to wait for the check. There, such a call fails or hangs like the
        group's own all_to_all_single.

    Examples
    --------
    >>> ranks = dist.get_world_size()
    >>> sent, received = torch.ones(ranks, 1024), torch.empty(ranks, 1024)
    >>> compcoll.torch.all_to_all_single(received, sent, codec="int8")
    >>> bool((received == 1).all())
    True
    """
    group, chosen = check_tensors(group, output, input), check_fixed(coding(codec, codec_options))
    if not (output.is_contiguous() and input.is_contiguous()) or overlap(output, input):
        raise InvalidBuffer("all_to_all_single: input and output must be contiguous, and share no memory")
    ranks = group.size()
    rows_out = split_counts(list(input_split_sizes or ()), input, ranks, "input")
    rows_in = split_counts(list(output_split_sizes or ()), output, ranks, "output")
    if output.is_cpu:
        _check_alike(group, f"all_to_all_single({output.dtype}, {chosen!r})", rows_out, rows_in)
    wires = [encoded(part, chosen) for part in input.reshape(-1).split(rows_out)]
    lengths = [wire_nbytes(n, output, chosen) for n in rows_in]
    arrived = torch.empty(sum(lengths), dtype=torch.uint8, device=output.device)
    work = dist.all_to_all_single(
        arrived, torch.cat(wires), lengths, [wire.numel() for wire in wires], group=group, async_op=True
    )

    def finish() -> list[Tensor]:
        for wire, part in zip(arrived.split(lengths), output.view(-1).split(rows_in), strict=True):
            if part.numel():
                part.copy_(decoded(wire, part, chosen))
        return [output]

    handle = Followed(work, board_of(group), "all_to_all_single", finish)
    if async_op:
        return handle
    handle.wait()
    return None


class _AllToAll(torch.autograd.Function):
    """Exchange of rows; gradients go back along the same path, with a codec of their own."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, splits: _Splits, back: _Splits, group: dist.ProcessGroup, codecs: _Codecs
    ) -> Tensor:
        ctx.how = back, splits, group, codecs[::-1]
        output = rows.new_empty(sum(back) if back else len(rows), *rows.shape[1:])
        all_to_all_single(output, rows.detach().contiguous(), back, splits, group, codec=codecs[0])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllToAll.apply(gradient, *ctx.how), None, None, None, None


@traced_by(operators.all_to_all_single_autograd)
def all_to_all_single_autograd(
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    **codec_options: Any,
) -> Tensor:
    """Exchange rows as `all_to_all_single` does; gradients go back along the same path, with a codec of their own.

    A mixture of experts calls this to dispatch its tokens, and again to combine them.

    Parameters
    ----------
    input : torch.Tensor
        One row for each token, of float16, bfloat16, float32 or float64.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows that come from, and go to, each rank; equal shares by default.
    group, codec, **codec_options
        As in `compcoll.torch.all_to_all_single`.
    backward_codec : str or Codec, optional
        Codec of gradients; ``codec`` by default.

    Returns
    -------
    torch.Tensor
        The received rows, rank by rank.

    Raises
    ------
    InvalidBuffer, InvalidArgument, UnsupportedDType, UnsupportedDevice, CollectiveMismatch
        As in `all_to_all_single`. The backward codec is checked at once, too.

    Examples
    --------
    >>> tokens = torch.ones(dist.get_world_size(), 1024, requires_grad=True)
    >>> came = compcoll.torch.all_to_all_single_autograd(tokens, codec="fp8", backward_codec=compcoll.MinMax(bits=8))
    >>> came.sum().backward()
    >>> tokens.grad.shape == tokens.shape
    True
    """
    group, chosen = check_tensors(group, input), check_fixed(coding(codec, codec_options))
    back = chosen if backward_codec is None else check_fixed(coding(backward_codec, {}))
    if not input.dim():
        raise InvalidBuffer("all_to_all_single: a tensor with rows is needed, not a single value")
    rows, coming = list(input_split_sizes or ()), list(output_split_sizes or ())
    split_counts(rows, input, group.size(), "input")
    if bool(rows) != bool(coming) or len(coming) not in (0, group.size()) or min(coming, default=0) < 0:
        raise InvalidArgument(
            f"split sizes {coming} of the output and {rows} of the input: give {group.size()} numbers for both, or for "
            "neither"
        )
    result: Tensor = _AllToAll.apply(input, rows, coming, group, (chosen, back))
    return result


def encoded(part: Tensor, codec: Codec) -> Tensor:
    """Encode a flat tensor on its device."""
    if not part.numel():
        return torch.empty(0, dtype=torch.uint8, device=part.device)
    return torch.as_tensor(encode(array_of(part), codec))


def decoded(wire: Tensor, part: Tensor, codec: Codec) -> Tensor:
    """Decode a wire to as many values as a flat tensor has, and to its element type."""
    values = decode(array_of(wire), part.numel(), array_of(part).dtype, codec)
    return values if isinstance(values, Tensor) else torch.from_numpy(values.view(np.uint8)).view(part.dtype)


def wire_nbytes(n: int, like: Tensor, codec: Codec) -> int:
    """Return the bytes of a wire of `n` values of a tensor's element type."""
    return codec.coder(_HOST, str(like.dtype).removeprefix("torch.")).wire_nbytes(n) if n else 0


def _check_alike(group: dist.ProcessGroup, call: str, rows_out: list[int], rows_in: list[int]) -> None:
    """Check that all ranks make this call, and that each expects the elements that the others send. Collective."""
    own = torch.tensor([zlib.crc32(call.encode()), *rows_out, *rows_in])
    every = [torch.empty_like(own) for _ in range(group.size())]
    with board_of(group).waits("all_to_all_single"):
        dist.all_gather(every, own, group=group)
    calls, sent, expected = np.split(torch.stack(every).numpy(), [1, 1 + group.size()], axis=1)
    others = np.flatnonzero(calls != calls[group.rank()])
    if others.size:
        raise CollectiveMismatch(f"rank {', '.join(map(str, others))} did not call {call} as this rank did")
    for source, dest in np.argwhere(sent != expected.T)[:1]:
        raise CollectiveMismatch(
            f"all_to_all_single: rank {source} sends {sent[source, dest]} elements to rank {dest}, which expects "
            f"{expected[dest, source]}"
        )


@untraced
def send(
    tensor: Tensor, dst: int, group: Group = None, tag: int = 0, *, codec: str | Codec = "int8", **codec_options: Any
) -> None:
    """Send a tensor to one rank, compressed.

    A pipeline sends activations to the next stage, and gradients back, each with a codec of its own. As with
    `torch.distributed.send`, autograd does not send gradients back: the pipeline's schedule does.

    Parameters
    ----------
    tensor : torch.Tensor
        float16, bfloat16, float32 or float64.
    dst : int
        Destination rank in the default group.
    group, codec, **codec_options
        As in `compcoll.torch.all_reduce`. The size of the encoded bytes must not depend on the values.
    tag : int
        Tag that matches a receive with its send.

    Raises
    ------
    InvalidBuffer, InvalidArgument, UnsupportedDType, UnsupportedDevice
        If tensor, rank or codec are invalid. Nothing has been sent then.

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
    tensor: Tensor, src: int, group: Group = None, tag: int = 0, *, codec: str | Codec = "int8", **codec_options: Any
) -> None:
    """Receive a tensor that another rank sent by `compcoll.torch.send`.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor to receive into, with as many elements as were sent, and of their type.
    src : int
        Source rank in the default group.
    group, tag, codec, **codec_options
        As in the sender's call.

    Raises
    ------
    CollectiveMismatch
        If the sender's number of elements, element type or codec differs; ``tensor`` is unchanged. Only tensors on the
        CPU are checked, as in `all_to_all_single`.

    Examples
    --------
    >>> gradients = torch.empty(8, 1024)
    >>> if dist.get_rank() + 1 < dist.get_world_size():
    ...     compcoll.torch.recv(gradients, dist.get_rank() + 1, codec="minmax", bits=8)
    """
    group, chosen = _checked(tensor, src, group, codec, codec_options)
    n = tensor.numel()
    wire = torch.empty(wire_nbytes(n, tensor, chosen), dtype=torch.uint8, device=tensor.device)
    waits = partial(board_of(group).waits, f"a message from rank {src}", dist.get_group_rank(group, src))
    if tensor.is_cpu:
        own = _head(tensor, chosen, wire.numel())
        came = torch.empty_like(own)
        with waits():
            dist.recv(came, src, group, tag)
        if not torch.equal(came, own):
            if came[1]:
                with waits():  # discard the wire, so that the next call gets the next message
                    dist.recv(torch.empty(int(came[1]), dtype=torch.uint8), src, group, tag)
            raise CollectiveMismatch(
                f"rank {src} did not send the {n} elements of {tensor.dtype} with {chosen!r} that this call expects: "
                f"it sent {int(came[1])} bytes, and {wire.numel()} were expected"
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
        raise InvalidArgument(f"rank {other!r}: give one of the group's ranks {ranks}, but not this process's own")
    return group, chosen


def _head(tensor: Tensor, codec: Codec, nbytes: int) -> Tensor:
    """Make the header of a wire: a fingerprint of its contents, and its length in bytes."""
    return torch.tensor([zlib.crc32(f"{tensor.numel()} {tensor.dtype} {codec!r}".encode()), nbytes])
