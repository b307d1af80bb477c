"""Tensors as MPI buffers, and PyTorch's reduction operations as operations of MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ...errors import InvalidArgument, UnsupportedDType
from ...transports.library import MPI
from .. import private
from ..buffers import nbytes_of

MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    **{
        getattr(torch, f"{kind}{bits}"): getattr(MPI, f"{kind.upper()}{bits}_T")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    torch.bool: MPI.UINT8_T,
}

Memory = MPI.buffer | bytearray
BufferSpec = tuple[Memory, int, MPI.Datatype]
"""A buffer as mpi4py takes it: memory, count, element type."""

_from_address = MPI.buffer.fromaddress
_EMPTY = bytearray(0)


def memory_of(tensor: Tensor, nbytes: int) -> Memory:
    """Return a contiguous tensor's memory; on a GPU, wait first for the work of the current stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows no streams
    return _from_address(tensor.data_ptr(), nbytes) if nbytes else _EMPTY


def bytes_of(tensor: Tensor) -> BufferSpec:
    """Return a contiguous tensor's memory as bytes."""
    nbytes = nbytes_of(tensor)
    return memory_of(tensor, nbytes), nbytes, MPI.BYTE


def elements_of(tensor: Tensor) -> BufferSpec:
    """Return a contiguous tensor's memory as elements that MPI can reduce."""
    count = tensor.numel()
    return memory_of(tensor, count * tensor.element_size()), count, MPI_TYPES[tensor.dtype]


# MPI has no arithmetic for these: they are reduced as a wider type and rounded once.
_WIDER = {torch.complex32: torch.complex64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
_WIDER |= {getattr(torch, f"float8_{kind}"): torch.float32 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}

_OPERATIONS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
# Booleans are bytes with the value 0 or 1. SUM takes the maximum, so that the result is 0 or 1, too.
_OF_BOOLEANS = {"SUM": MPI.MAX, "MAX": MPI.MAX, "BOR": MPI.MAX}
_OF_BOOLEANS |= {"PRODUCT": MPI.MIN, "MIN": MPI.MIN, "BAND": MPI.MIN, "BXOR": MPI.BXOR}
_LINEAR = {"SUM": "sum", "AVG": "mean"}


class ReduceOperation(NamedTuple):
    """How MPI reduces tensors for an operation of PyTorch and an element type.

    Attributes
    ----------
    name : str
        Name of the operation, for error messages.
    operation : mpi4py.MPI.Op
        Operation of MPI.
    linear : str
        ``"sum"`` or ``"mean"``; empty for other operations.
    as_given : bool
        Whether MPI reduces the given elements themselves, without conversion or scaling.
    by_mpi : bool
        Whether MPI does the whole reduction.
    scaled : bool
        Whether each rank multiplies its values by ``factor`` first.
    factor : float or torch.Tensor or None
        That factor; None if not ``scaled``.
    """

    name: str
    operation: MPI.Op
    linear: str
    as_given: bool
    by_mpi: bool
    scaled: bool = False
    factor: float | Tensor | None = None


_known: dict[tuple[int, torch.dtype], ReduceOperation] = {}


def reduce_operation(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOperation:
    """Return how an operation of PyTorch reduces elements of a type.

    Raises
    ------
    InvalidArgument
        If there is no such operation.
    UnsupportedDType
        If it is not defined for that type.
    """
    kind = getattr(op, "op", op)
    key = int(kind), dtype  # the names of PyTorch's operations are slow to hash and to compare
    operation = _known.get(key)
    if operation is None:
        operation = _known[key] = _reduce_operation(kind.name, dtype)
    if not operation.scaled:
        return operation
    return operation._replace(factor=private.factor_of(op))


def _reduce_operation(name: str, dtype: torch.dtype) -> ReduceOperation:
    if name not in _OPERATIONS:
        raise InvalidArgument(f"reduction {name} is not supported: use one of {', '.join(_OPERATIONS)}")
    if dtype is torch.bool:
        if name not in _OF_BOOLEANS:
            raise UnsupportedDType(f"{name} of booleans is not defined: use one of {', '.join(_OF_BOOLEANS)}")
        return ReduceOperation(name, _OF_BOOLEANS[name], "", as_given=True, by_mpi=True)
    floating = dtype.is_floating_point or dtype.is_complex
    if (name in ("BAND", "BOR", "BXOR") and floating) or (name in ("MIN", "MAX") and dtype.is_complex):
        raise UnsupportedDType(f"{name} of {dtype} elements is not defined")
    scaled = name == "PREMUL_SUM"
    if scaled and not floating:
        raise UnsupportedDType(f"{name} of {dtype} elements is not defined: use a floating-point type")
    if dtype not in MPI_TYPES and dtype not in _WIDER:
        raise UnsupportedDType(f"elements of type {dtype} cannot be reduced")
    as_given = dtype in MPI_TYPES and not scaled
    return ReduceOperation(
        name, _OPERATIONS[name], _LINEAR.get(name, ""), as_given, by_mpi=as_given and name != "AVG", scaled=scaled
    )


def reduce_into(
    source: Tensor,
    target: Tensor,
    operation: ReduceOperation,
    size: int,
    run: Callable[[BufferSpec, BufferSpec, MPI.Op], None],
) -> None:
    """Reduce a tensor with MPI; types without arithmetic in MPI are converted to a wider type and back.

    Parameters
    ----------
    source : torch.Tensor
        Contiguous tensor; unchanged unless it is the target.
    target : torch.Tensor
        Contiguous tensor of the same element type: the whole result or, in a reduce_scatter, one rank's share.
    operation : ReduceOperation
        Operation to apply.
    size : int
        Number of ranks, for the mean.
    run : callable
        Called with the send buffer, the receive buffer and MPI's operation. Both buffers are the same if source and
        target are the same tensor.
    """
    same = source is target
    values, result = source, target
    if wider := _WIDER.get(source.dtype):
        values = source.to(wider)
        result = values if same else torch.empty(target.shape, dtype=wider)
    if operation.factor is not None:
        values = values * operation.factor
        result = values if same else result
    outgoing = elements_of(values)
    run(outgoing, outgoing if same else elements_of(result), operation.operation)
    if operation.linear == "mean":
        rounding = None if result.dtype.is_floating_point or result.dtype.is_complex else "trunc"
        # A tensor as divisor: by a number, CUDA multiplies by its reciprocal, and rounds differently than the CPU.
        result.div_(result.new_full((), size) if result.is_cuda else size, rounding_mode=rounding)
    if result is not target:
        target.copy_(result)
