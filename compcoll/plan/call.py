"""The call and its setting: all that a decision goes by."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ..algorithms import native
from ..codecs.base import Codec
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..host.device import HostDevice
from ..layout import World
from .cost import Profile

SUMS = ("sum", "mean")
"""The operations that can be compressed."""

OPERATIONS = (*SUMS, "max", "min", "prod", "land", "band", "lor", "bor", "lxor", "bxor")
"""The names of all operations."""

REDUCTIONS = ("allreduce", "reduce_scatter")
"""The collectives that have an operation."""

NO_REDUCTION = ""
"""The operation of collectives that reduce nothing."""

_UNEVEN_NBYTES = 1 << 20
"""The size that is supposed where ranks need not know the others' sizes."""


def operation_name(op: Any) -> str:
    """The name of a reduction given by name or as one of MPI's predefined operations.

    Raises
    ------
    InvalidArgument
        If there is none of that name.
    """
    if op == "avg":  # PyTorch's name
        return "mean"
    if isinstance(op, str) and op in OPERATIONS:
        return op
    if "mpi4py.MPI" in sys.modules:
        from ..transports.mpi import predefined

        if (name := predefined(op)) is not None:
            return name
    raise InvalidArgument(f"op={op!r} is none of {', '.join(OPERATIONS)}, nor MPI's operation of that name")


class Call(NamedTuple):
    """The arguments that decide how a collective runs: equal on all ranks if these make the same call.

    Attributes
    ----------
    collective : str
        Such as ``"allreduce"``.
    n : int
        Elements of a rank's buffer; 0 for an allgatherv, whose ranks may differ in it.
    dtype, itemsize : str, int
        Element type.
    op : str
        The reduction's name, or `NO_REDUCTION`.
    codec : Codec or None
        The one to compress with; None for none, or if it is to be chosen.
    algorithm : str
        The one to use, or ``"auto"``.
    root : int or None
        Of a broadcast.
    rows : tuple of int, or None
        The shape of a row of an allgatherv.
    tolerance : float or None
        With codec="auto": the relative error that the result may have.
    checksum : bool
        Whether wires carry checksums.
    """

    collective: str
    n: int
    dtype: str
    itemsize: int
    op: str
    codec: Codec | None
    algorithm: str
    root: int | None = None
    rows: tuple[int, ...] | None = None
    tolerance: float | None = None
    checksum: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's buffer, uncompressed, as far as all ranks know."""
        return self.n * self.itemsize if self.rows is None else _UNEVEN_NBYTES

    @property
    def movable(self) -> bool:
        """Tell whether our own algorithms can run it: they move everything, but reduce values that codecs know."""
        return self.collective not in REDUCTIONS or (self.dtype in DTYPES and self.op in (*SUMS, NO_REDUCTION))


class Setting(NamedTuple):
    """The setting in which a call is made: what all ranks know alike.

    Attributes
    ----------
    world : World
        The ranks.
    device : HostDevice
        Binds codecs; of arrays on a GPU the host's, too.
    profile : Profile
        What is known of the machines.
    library : str
        Whose own collectives the transport has, such as MPI; empty where it has none.
    shared : bool
        Whether all ranks have memory in common.
    gpus : bool
        Whether all ranks' arrays are on GPUs.
    streamed : tuple of str
        The algorithms whose messages go from GPU to GPU in a stream's order, as NCCL's; all others do not then.
    blocks : bool
        Whether messages can only be waited for, as gloo's.
    between_gpus : Profile or None
        What is known of wires that GPUs of one node read from each other's memory; None where they do not.
    """

    world: World
    device: HostDevice
    profile: Profile
    library: str
    shared: bool
    gpus: bool = False
    streamed: tuple[str, ...] = ()
    blocks: bool = False
    between_gpus: Profile | None = None

    def counted(self, call: Call) -> int:
        """Tell how many elements of a call MPI's own must count, as far as all ranks know; 0 where it is not MPI's."""
        return 0 if self.streamed else call.n * (self.world.size if call.collective == "allgather" else 1)

    def countable(self, call: Call) -> bool:
        """Tell whether MPI's own can."""
        return self.counted(call) <= native.MOST

    @property
    def own(self) -> str:
        """Name the library whose own collectives are meant, for people."""
        return f"{self.library or 'MPI'}'s own"
