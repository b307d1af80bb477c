"""The collectives of a process group of gloo's, as `compcoll.collectives` takes a library's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidArgument
from ...kernels._host import Function
from ...progress import Pending

Waiting = Callable[[dist.Work, str], None]

_UNKNOWN = -1  # bytes that gloo sent
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # multiplied by 1/p afterwards
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class _Started:
    """One of gloo's collectives under way, which can only be waited for."""

    __slots__ = ("_end", "_waiting", "_what", "_work")

    def __init__(self, work: dist.Work, waiting: Waiting, what: str, end: Callable[[], object] | None = None) -> None:
        self._work: dist.Work | None = work
        self._waiting, self._what, self._end = waiting, f"gloo's {what}", end

    def Test(self) -> bool:
        if self._work is not None:
            self._waiting(self._work, self._what)
            self._work = None
            if self._end is not None:
                self._end()
        return True


class GlooCollectives:
    """A gloo group's own collectives, on NumPy arrays (the contract is `compcoll.transports.base.Native`).

    Parameters
    ----------
    gloo : torch.distributed.ProcessGroupGloo
        The group.
    rank, size : int
        Of this process in it, and of all.
    waiting : callable
        Waits for an operation, in time.
    """

    library = "gloo"

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int, waiting: Waiting) -> None:
        self._gloo, self._rank, self._size, self._waiting = gloo, rank, size, waiting

    def reductions(self, collective: str, op: str) -> tuple[Function, Callable[[Any, Any], Pending]]:
        if op not in _OPERATIONS:
            raise InvalidArgument(f"op={op!r} over a process group of gloo's: there are {', '.join(_OPERATIONS)}")
        start = partial(self._iallreduce if collective == "allreduce" else self._ireduce_scatter, _OPERATIONS[op])
        return Function(lambda x, out: start(x, out).Test(), _UNKNOWN), start

    def _iallreduce(self, op: Any, x: Any, out: Any) -> Pending:
        if out is not x:
            out[...] = x
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return _Started(self._gloo.allreduce([torch.from_numpy(out)], options), self._waiting, "allreduce")

    def _ireduce_scatter(self, op: Any, x: Any, out: Any) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        given = torch.from_numpy(out).view(-1), torch.from_numpy(x).view(-1)
        return _Started(self._gloo._reduce_scatter_base(*given, options), self._waiting, "reduce_scatter")

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        itemsize = x.itemsize
        own, counts = _bytes(x), [count * itemsize for count in counts]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in counts]

        def joined() -> None:
            torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)], out=_bytes(out))

        return _Started(self._gloo.allgather([parts], [padded]), self._waiting, "allgather", joined)

    def ibcast(self, x: Any, root: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return _Started(self._gloo.broadcast([_bytes(x)], options), self._waiting, "broadcast")

    def ialltoall(self, x: Any, out: Any) -> Pending:
        work = self._gloo.alltoall_base(_bytes(out), _bytes(x), [], [])
        return _Started(work, self._waiting, "alltoall")


def _bytes(array: Any) -> Tensor:
    """View an array's memory as bytes: of every element type, those that PyTorch does not know, too."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
