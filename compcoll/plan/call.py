"""A call and its setting: the inputs of every decision."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ..algorithms import native
from ..algorithms.record import REDUCTIONS
from ..codecs.base import Codec
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..host.device import HostDevice
from ..layout import World
from .cost import Profile

SUMS = ("sum", "mean")
"""The reductions that can be compressed."""

OPERATIONS = (*SUMS, "max", "min", "prod", "land", "band", "lor", "bor", "lxor", "bxor")
"""The names of all reductions."""

NO_REDUCTION = ""
"""The ``op`` of collectives that do not reduce."""

_UNEVEN_NBYTES = 1 << 20
"""The buffer size assumed if ranks do not know each other's sizes."""


def operation_name(op: Any) -> str:
    """Return the name of a reduction, given by name or as one of MPI's predefined operations.

    Raises
    ------
    InvalidArgument
        If there is no such reduction.
    """
    if op == "avg":  # PyTorch's name
        return "mean"
    if isinstance(op, str) and op in OPERATIONS:
        return op
    if "mpi4py.MPI" in sys.modules:
        from ..transports.mpi import predefined

        if (name := predefined(op)) is not None:
            return name
    raise InvalidArgument(f"op={op!r} is none of {', '.join(OPERATIONS)}, nor a predefined MPI.Op, such as MPI.SUM")


class Call(NamedTuple):
    """The arguments that decide how a collective runs. They are equal on all ranks that make the same call.

    Attributes
    ----------
    collective : str
        Such as ``"allreduce"``.
    n : int
        Elements of a rank's buffer; 0 for an allgatherv or alltoallv, where ranks may have different numbers.
    dtype, itemsize : str, int
        Element type.
    op : str
        The reduction's name, or `NO_REDUCTION`.
    codec : Codec or None
        The requested codec; None for no compression, or if ``tolerance`` is given.
    algorithm : str
        The requested algorithm, or ``"auto"``.
    root : int or None
        The root, if the collective has one.
    rows : tuple of int, or None
        The shape of a row of an allgatherv or alltoallv.
    tolerance : float or None
        With ``codec="auto"``: the largest relative error of the result.
    checksum : bool
        Whether wires carry checksums.
    max_error : float or None
        The largest relative error that the result may have by estimate; a call above it is refused.
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
    max_error: float | None = None

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of a rank's buffer; an assumed size if ranks' sizes may differ."""
        return self.n * self.itemsize if self.rows is None else _UNEVEN_NBYTES

    @property
    def movable(self) -> bool:
        """Whether our own algorithms can run the call: they move all types, but reduce only types that codecs take."""
        return self.collective not in REDUCTIONS or (self.dtype in DTYPES and self.op in (*SUMS, NO_REDUCTION))


class Setting(NamedTuple):
    """The environment of a call, equal on all ranks.

    Attributes
    ----------
    world : World
        The ranks.
    device : HostDevice
        The host, to which codecs are bound, even if arrays are on a GPU.
    profile : Profile
        The machines' speeds.
    library : str
        The library whose own collectives the transport offers, such as MPI; empty if it offers none.
    shared : bool
        Whether all ranks share memory.
    gpus : bool
        Whether all ranks' arrays are on GPUs.
    streamed : tuple of str
        The algorithms whose messages go from GPU to GPU in stream order, as by NCCL. If not empty, only these may run.
    blocks : bool
        Whether messages can only be waited for, not tested, as with gloo.
    between_gpus : Profile or None
        The profile of GPUs of one node that read wires from each other's memory; None if they do not.
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
        """Return the count of elements to pass to MPI's own collective; 0 if NCCL runs it, or if sizes may differ."""
        gathers = call.collective in ("allgather", "gather")
        return 0 if self.streamed else call.n * (self.world.size if gathers else 1)

    def countable(self, call: Call) -> bool:
        """Return whether MPI's own collective can count the elements of a call."""
        return self.counted(call) <= native.MOST

    @property
    def own(self) -> str:
        """The library's name in messages about its own collectives: "MPI's own", for example."""
        return f"{self.library or 'MPI'}'s own"
