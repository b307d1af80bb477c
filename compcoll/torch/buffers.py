"""Tensors as MPI sees them: memory, element types, reductions. All that depends on the device is in here.

Memory is handed to MPI as it is (``data_ptr``), never by ``Tensor.numpy()``, which marks a storage as not resizable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import InvalidArgument, InvalidBuffer, UnsupportedDevice, UnsupportedDType

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.UINT8_T,
}
# MPI has no arithmetic for these: they are reduced in float32 and rounded once.
_NARROW = {
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}
COMPRESSIBLE = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

_SUM, _AVG = ReduceOp.RedOpType.SUM, ReduceOp.RedOpType.AVG
_PREMUL = ReduceOp.RedOpType.PREMUL_SUM
_OPERATIONS = {
    _SUM: MPI.SUM,
    _AVG: MPI.SUM,
    _PREMUL: MPI.SUM,
    ReduceOp.RedOpType.PRODUCT: MPI.PROD,
    ReduceOp.RedOpType.MIN: MPI.MIN,
    ReduceOp.RedOpType.MAX: MPI.MAX,
    ReduceOp.RedOpType.BAND: MPI.BAND,
    ReduceOp.RedOpType.BOR: MPI.BOR,
    ReduceOp.RedOpType.BXOR: MPI.BXOR,
}
_BITWISE = {ReduceOp.RedOpType.BAND, ReduceOp.RedOpType.BOR, ReduceOp.RedOpType.BXOR}
_ORDERED = {ReduceOp.RedOpType.MIN, ReduceOp.RedOpType.MAX}
# Of bytes that are 0 or 1, so that a sum of booleans is true where any is.
_OF_BOOLEANS = {
    _SUM: MPI.MAX,
    ReduceOp.RedOpType.MAX: MPI.MAX,
    ReduceOp.RedOpType.BOR: MPI.MAX,
    ReduceOp.RedOpType.PRODUCT: MPI.MIN,
    ReduceOp.RedOpType.MIN: MPI.MIN,
    ReduceOp.RedOpType.BAND: MPI.MIN,
    ReduceOp.RedOpType.BXOR: MPI.BXOR,
}

Message = list[Any]
"""What mpi4py takes: memory, count, element type."""

_from_address = MPI.buffer.fromaddress
_EMPTY = bytearray(0)


def check(tensor: Any) -> None:
    """Refuse what MPI cannot reach.

    Raises
    ------
    InvalidBuffer
        If it is no dense tensor.
    UnsupportedDevice
        If it is not in host memory.
    """
    if isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
        return
    if not isinstance(tensor, Tensor):
        raise InvalidBuffer(f"a {type(tensor).__name__} was given: a torch.Tensor is needed")
    if not tensor.is_cpu:
        raise UnsupportedDevice(
            f"a tensor on {tensor.device} was given, but compcoll has no device layer for {tensor.device.type} yet: "
            "move it to the CPU, or make a group of another backend for it"
        )
    if tensor.layout != torch.strided:
        raise InvalidBuffer(
            f"a tensor of layout {tensor.layout} was given: a dense one is needed, see Tensor.to_dense()"
        )


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel()) * int(tensor.element_size())


def bytes_of(tensor: Tensor) -> Message:
    """A contiguous tensor's memory, as bytes."""
    nbytes = nbytes_of(tensor)
    return [_from_address(tensor.data_ptr(), nbytes) if nbytes else _EMPTY, nbytes, MPI.BYTE]


def elements_of(tensor: Tensor) -> Message:
    """A contiguous tensor's memory, as elements that MPI can reduce."""
    count = tensor.numel()
    memory = _from_address(tensor.data_ptr(), count * tensor.element_size()) if count else _EMPTY
    return [memory, count, _MPI_TYPES[tensor.dtype]]


def array_of(tensor: Tensor) -> Any:
    """A contiguous tensor's memory as a NumPy array, one-dimensional."""
    memory: Any = _from_address(tensor.data_ptr(), nbytes_of(tensor))
    return np.frombuffer(memory, COMPRESSIBLE[tensor.dtype])


def compressible(tensor: Tensor) -> bool:
    """Whether compcoll's codecs know its element type."""
    return tensor.dtype in COMPRESSIBLE


class Packed:
    """Several tensors as one contiguous piece of memory: their own, where they lie side by side in this order.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Of one element type.
    filled : bool
        Whether the memory starts with their values.
    """

    def __init__(self, tensors: Sequence[Tensor], *, filled: bool) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.sizes = [int(tensor.numel()) for tensor in tensors]
        self.offsets = [0, *np.cumsum(self.sizes)[:-1].tolist()]
        own = len(tensors) == 1 and tensors[0].is_contiguous()
        self.shared = own or _side_by_side(tensors)
        if own:
            self.memory = self.tensors[0].view(-1)
        elif self.shared:
            self.memory = torch.as_strided(self.tensors[0], (sum(self.sizes),), (1,))
        elif filled:
            self.memory = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        else:
            self.memory = self.tensors[0].new_empty(sum(self.sizes))

    def unpack(self) -> None:
        """Copy the memory's values to the tensors."""
        if not self.shared:
            for tensor, offset, size in zip(self.tensors, self.offsets, self.sizes, strict=True):
                tensor.copy_(self.memory[offset : offset + size].view(tensor.shape))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether contiguous tensors share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return bool(start < other_start + nbytes_of(other) and other_start < start + nbytes_of(one))


def _side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors of one storage follow each other in memory."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != address:
            return False
        address += nbytes_of(tensor)
    return len(tensors) > 1


class Reduction(NamedTuple):
    """How tensors are reduced.

    Attributes
    ----------
    name : str
        Of the operation, for messages.
    operation : mpi4py.MPI.Op
        What MPI does.
    kind : object
        PyTorch's name of it.
    factor : float or torch.Tensor or None
        What each rank's values are multiplied by first.
    """

    name: str
    operation: Any
    kind: Any
    factor: Any = None

    @property
    def linear(self) -> bool:
        """Whether it is a sum or a mean."""
        return self.kind in (_SUM, _AVG)

    @property
    def mean(self) -> bool:
        return bool(self.kind == _AVG)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """What an operation of PyTorch does with elements of some type.

    Raises
    ------
    InvalidArgument
        If there is no such operation.
    UnsupportedDType
        If it cannot be done with them.
    """
    kind = getattr(op, "op", op)
    if kind == _PREMUL:
        return _reduction(kind, dtype)._replace(factor=op.factor)
    return _reduction(kind, dtype)


@cache
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if kind not in _OPERATIONS:
        raise InvalidArgument(f"{kind} is no reduction: there are {', '.join(kind.name for kind in _OPERATIONS)}")
    name = kind.name
    floating = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool:
        if kind not in _OF_BOOLEANS:
            raise UnsupportedDType(f"{name} of booleans: there are {', '.join(k.name for k in _OF_BOOLEANS)}")
        return Reduction(name, _OF_BOOLEANS[kind], kind)
    if (kind in _BITWISE and floating) or (kind in _ORDERED and dtype.is_complex):
        raise UnsupportedDType(f"{name} of {dtype} elements is not defined")
    if kind == _PREMUL and not floating:
        raise UnsupportedDType(f"{name} of {dtype} elements: floating-point ones are needed")
    if dtype not in _MPI_TYPES and dtype not in _NARROW and dtype is not torch.complex32:
        raise UnsupportedDType(f"elements of type {dtype} cannot be reduced")
    return Reduction(name, _OPERATIONS[kind], kind)


def reduce_into(
    source: Tensor, target: Tensor, reduction: Reduction, size: int, run: Callable[[Message, Message, Any], None]
) -> None:
    """Reduce memory in elements that MPI knows.

    Parameters
    ----------
    source : torch.Tensor
        Contiguous; not changed unless it is the target.
    target : torch.Tensor
        Contiguous, of the same element type: all of the result or, in a reduce_scatter, one rank's share.
    reduction : Reduction
        What to do.
    size : int
        Ranks, for the mean.
    run : callable
        Gets the message to send, the one to receive, and MPI's operation. Source and target are one message if both
        are the same tensor.
    """
    same = source is target
    if source.dtype is torch.complex32:
        source, target = torch.view_as_real(source), torch.view_as_real(target)
    values, result = source, target
    if source.dtype in _NARROW:
        values = source.float()
        result = values if same else torch.empty(target.shape, dtype=torch.float32)
    if reduction.factor is not None:
        values = values * reduction.factor
        result = values if same else result
    outgoing = elements_of(values)
    run(outgoing, outgoing if same else elements_of(result), reduction.operation)
    if reduction.mean:
        if result.dtype.is_floating_point or result.dtype.is_complex:
            result.div_(size)
        else:
            result.div_(size, rounding_mode="trunc")
    if result is not target:
        target.copy_(result)


def split_counts(sizes: Sequence[int], tensor: Tensor, ranks: int, which: str) -> list[int]:
    """Elements for each rank, from rows along the first axis; equal shares if no sizes are given.

    Raises
    ------
    InvalidArgument
        If they do not add up to the tensor's first axis.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    row = math.prod(tensor.shape[1:])
    if not sizes:
        if rows % ranks:
            raise InvalidArgument(
                f"{which}: tensor's dim 0 does not divide equally across group size: {rows} rows for {ranks} ranks"
            )
        return [rows // ranks * row] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise InvalidArgument(f"{which}: split sizes {list(sizes)} do not make {rows} rows for {ranks} ranks")
    return [size * row for size in sizes]
