"""Messages as mpi4py's programs specify them, read as arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from ..dtypes import DTYPES
from ..gpu.discovery import as_cupy, gpus
from ..host.foreign import gpu_memory
from ..transports.library import MPI

Array = npt.NDArray[Any]

_REALS = {dtype.numpy: dtype.numpy for dtype in DTYPES.values()}
_REALS |= {np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64)}
"""The element types that codecs take, and complex ones, each with the type of its parts."""

TYPES = tuple(dtype.numpy for dtype in DTYPES.values())
"""The element types that codecs take."""

_OF_MPI: dict[str, np.dtype[Any]] = {dtype.char: dtype for dtype in _REALS if dtype.isbuiltin == 1}
"""The element types of MPI's predefined datatypes that can be compressed, by `MPI.Datatype.typechar`."""

_SEQUENCES = (list, tuple)
"""Looked up by `kind_of`, in half the time of an instance check."""

_ITEMSIZE = {code: dtype.itemsize for code, dtype in _OF_MPI.items()}


class Message(NamedTuple):
    """The values of a message.

    Attributes
    ----------
    nbytes : int
        Their bytes.
    values : array or None
        The values in the order of memory, complex ones as pairs: a view. None if no codec takes them.
    counts, displacements : list of int, or None
        For a message that consists of one block for each rank: the blocks' lengths and places in ``values``.
    """

    nbytes: int
    values: Any
    counts: list[int] | None = None
    displacements: list[int] | None = None

    def joined(self) -> Array:
        """Return the blocks one after the other: a view if they lie so, else a copy."""
        assert self.counts is not None and self.displacements is not None
        begin = self.displacements[0] if self.displacements else 0
        if self.displacements == _after_each_other(self.counts, begin):
            joined: Array = self.values[begin : begin + sum(self.counts)]
            return joined
        parts = zip(self.displacements, self.counts, strict=True)
        return np.concatenate([self.values[at : at + count] for at, count in parts])

    def store(self, joined: Array) -> None:
        """Store blocks that lie one after the other."""
        assert self.counts is not None and self.displacements is not None
        begin = 0
        for at, count in zip(self.displacements, self.counts, strict=True):
            self.values[at : at + count] = joined[begin : begin + count]
            begin += count


def read(spec: Any, least: int = 0, blocks: int = 1) -> Message | None:
    """Read a message: an array, or a sequence ``[data, count, displacement, datatype]`` as mpi4py takes it.

    Parameters
    ----------
    spec : array or sequence
        The message.
    least : int
        A message of fewer bytes is left to mpi4py.
    blocks : int
        The number of blocks that the message has; a count that is given is that of one block.

    Returns
    -------
    Message or None
        None if mpi4py must look at the message itself, and may refuse it.
    """
    if type(spec) is ndarray:
        if spec.nbytes < least:
            return None
        return Message(spec.nbytes, _flat(spec, spec.dtype)) if spec.flags.forc else None
    if is_in_place(spec):
        return None
    try:
        data, count, displacement, datatype = _parts(spec, list | tuple)
        if count is not None and datatype is not None and operator.index(count) * blocks * _extent(datatype) < least:
            return None
        array, dtype, itemsize = _array(data, datatype)
        begin = 0 if displacement is None else operator.index(displacement)
        rest = array.nbytes // itemsize - begin
        n = rest if count is None else operator.index(count) * blocks  # may be more than the rest: see `_at_least`
        if min(n, begin, rest) < 0 or n * itemsize < least:
            return None
        if dtype is None:
            return Message(n * itemsize, None)
        values, factor = _reals(array, dtype)
        values = _at_least(values, (begin + n) * factor)
        return Message(n * itemsize, values[begin * factor : (begin + n) * factor])
    except Exception:  # mpi4py says what is wrong with it
        return None


def is_in_place(spec: Any) -> bool:
    """Return whether an argument says that the other one holds the input; mpi4py takes None for MPI.IN_PLACE."""
    return spec is None or spec is MPI.IN_PLACE


def kind_of(spec: Any, in_blocks: bool = False) -> tuple[int, Any] | None:
    """Return the bytes and the type of a message, fast; None if it has to be read first.

    Parameters
    ----------
    spec : array or sequence
        The message.
    in_blocks : bool
        Whether a count may be that of one block, so that it does not tell the message's size.
    """
    kind = type(spec)
    if kind is ndarray or issubclass(kind, np.generic):
        return spec.nbytes, spec.dtype
    if kind not in _SEQUENCES or len(spec) not in (2, 3):
        return None
    data, count, datatype = spec[0], spec[1], spec[-1]
    if isinstance(datatype, MPI.Datatype):
        code = datatype.typechar
        if datatype is count:
            return (data.nbytes, code) if type(data) is ndarray else None
        return None if in_blocks or type(count) is not int else (count * _ITEMSIZE.get(code, 0), code)
    if in_blocks or type(data) is not ndarray or type(count) is not int or len(spec) == 3:
        return None
    return count * data.itemsize, data.dtype


def is_left(kind: tuple[int, Any], least: int) -> bool:
    """Return whether messages of a kind are left to MPI because they are small or because no codec takes them."""
    nbytes, of = kind
    return nbytes < least or of not in (_OF_MPI if isinstance(of, str) else _REALS)


def _extent(datatype: MPI.Datatype | str) -> int:
    return (MPI.Datatype.fromcode(datatype) if isinstance(datatype, str) else datatype).extent


def read_blocks(spec: Any, blocks: int) -> Message | None:
    """Read a message that has one block for each rank, of its own length, as mpi4py takes it; see `read`."""
    try:
        data, counts, displacements, datatype = _parts(spec, tuple)
        array, dtype, itemsize = _array(data, datatype)
        if dtype is None:
            return Message(array.nbytes, None)
        if counts is None:
            whole, more = divmod(array.nbytes // itemsize, blocks)
            counts = [whole + (more > rank) for rank in range(blocks)]
        counts = _one_each(counts, blocks)
        if displacements is None:
            displacements = _after_each_other(counts)
        elif not isinstance(displacements, Sequence | ndarray):
            displacements = [operator.index(displacements) * rank for rank in range(blocks)]
        displacements = _one_each(displacements, blocks)
        values, factor = _reals(array, dtype)
        if min(*counts, *displacements, 0) < 0:
            return None
        ends = [at + count for at, count in zip(displacements, counts, strict=True)]
        values = _at_least(values, max(ends) * factor)
        nbytes = sum(counts) * itemsize
        return Message(nbytes, values, [factor * n for n in counts], [factor * n for n in displacements])
    except Exception:  # mpi4py says what is wrong with it
        return None


def nbytes_of(spec: Any) -> int:
    """Return the bytes of a message, for statistics; 0 if it has none of its own, such as MPI.IN_PLACE."""
    message = read(spec)
    return 0 if message is None else message.nbytes


def _parts(spec: Any, pairs: Any) -> tuple[Any, Any, Any, Any]:
    """Return the data, count, displacement and datatype of a message; None for each that is not given.

    ``pairs``: the types of a pair of count and displacement. A list is one only if there is a single count.
    """
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    if len(spec) == 4:
        data, count, displacement, datatype = spec
        return data, count, displacement, datatype
    data, count, *rest = spec
    if not rest and isinstance(count, MPI.Datatype | str):
        return data, None, None, count
    (datatype,) = rest or [None]
    displacement = None
    if isinstance(count, pairs):
        count, displacement = count
    return data, count, displacement, datatype


def _array(data: Any, datatype: MPI.Datatype | str | None) -> tuple[Any, np.dtype[Any] | None, int]:
    """Return the array of a message's data, its element type (None if no codec takes it) and bytes of an element."""
    if gpu_memory(data):
        if not _has_gpus():
            raise TypeError
        array = as_cupy(data)
    elif isinstance(data, ndarray):  # a matrix or a masked array is sent like its data
        array = data.view(ndarray)
    else:
        array = _viewed(data)
    if not array.flags.forc:
        raise TypeError
    if datatype is None:
        dtype = np.dtype(array.dtype)
        return array, dtype if dtype in _REALS else None, dtype.itemsize
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    found, extent = _OF_MPI.get(datatype.typechar), datatype.extent
    return array, None if found is None or found.itemsize != extent else found, extent


def _viewed(data: Any) -> Array:
    """View memory of the host as an array: of bytes if it is read by DLPack and does not tell its element type."""
    if not hasattr(data, "__dlpack__"):
        return np.asarray(memoryview(data))
    try:
        memory = np.asarray(MPI.buffer.frombuffer(data))
    except BufferError:
        memory = np.asarray(MPI.buffer.frombuffer(data, readonly=True))
    dtype = getattr(data, "dtype", "uint8")
    try:
        return memory.view(dtype)
    except TypeError:  # another library's
        return memory.view(str(dtype).rpartition(".")[2])


@cache
def _has_gpus() -> bool:
    return bool(gpus()[0])


def _flat(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return the real numbers of a contiguous array in the order of memory; None if no codec takes them."""
    real = _REALS.get(dtype)
    if real is None:
        return None
    if array.ndim == 1 and real is dtype:
        return array
    flat = _in_memory_order(array)
    return flat if real is dtype else flat.view(real)


def _reals(array: Any, dtype: np.dtype[Any]) -> tuple[Any, int]:
    """Return the real numbers of an array that holds elements of another type, and how many an element has: 1 or 2."""
    if array.dtype != dtype:
        array = _in_memory_order(array).view(np.uint8)[: array.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return _flat(array, dtype), dtype.itemsize // _REALS[dtype].itemsize


def _at_least(values: Any, length: int) -> Any:
    """Return at least so many values: like MPI, with those after an array's end if a message's count says so."""
    if values.size >= length:
        return values
    return np.lib.stride_tricks.as_strided(values, (length,), writeable=values.flags.writeable)


def _in_memory_order(array: Any) -> Any:
    """Return a contiguous array with one axis, a view."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1)


def _one_each(numbers: Any, blocks: int) -> list[int]:
    """Return as many numbers as there are blocks: those of a sequence, or one number for all."""
    if not isinstance(numbers, Sequence | ndarray):
        numbers = [numbers] * blocks
    found = [operator.index(number) for number in numbers]
    if len(found) != blocks:
        raise ValueError
    return found


def _after_each_other(counts: Sequence[int], begin: int = 0) -> list[int]:
    """Return where blocks begin of which each follows the one before."""
    return list(accumulate(counts, initial=begin))[:-1]
