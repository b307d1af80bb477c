"""The process group "compcoll" for ranks that do not run under MPI.

It uses PyTorch's own backends, gloo on the CPU and NCCL on CUDA devices, and runs compressed collectives over them as
its options say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ...errors import InvalidArgument
from ...plan.choose import AUTO, NAMES
from ...stats import Stats
from .. import private
from ..buffers import COMPRESSIBLE, nbytes_of
from ..failure_detector import board_of
from ..groups import collectives, membership
from ..groups.gloo import make_gloo
from ..handles import CoalescedWork, CompletedWork, Followed
from ..linear import linear
from ..options import Options
from ..untraced import untraced
from . import NAME
from .splitting import SplittingGroup


def _left(name: str) -> Callable[..., Any]:
    """Make the method of a collective, which calls the method `name` of PyTorch's own backend.

    The base class's method does this, too, but could deadlock: called on a Python subclass, it holds the GIL during the
    call. gloo's threads need the GIL to release tensors, and hold the lock that the call waits for (PyTorch 2.13).
    """

    @untraced
    def collective(self: WrappingGroup, *arguments: Any, **more: Any) -> Any:
        first = arguments[0]
        if not isinstance(first, Tensor) and not first:  # a gather has an empty list except at the root
            first = arguments[1]
        while not isinstance(first, Tensor):
            first = first[0]
        return self._followed(getattr(private.backend_of(self, first.device), name)(*arguments, **more), name)

    return collective


def _one_by_one(name: str) -> Callable[..., Any]:
    """Make a coalesced collective that calls `name` for each tensor: PyTorch's own cannot be called from Python."""

    @untraced
    def collective(self: WrappingGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *opts: Any) -> Any:
        one, pairs = getattr(self, name), zip(outputs, inputs, strict=True)
        return CoalescedWork([one(output, source, *opts) for output, source in pairs])

    return collective


class WrappingGroup(SplittingGroup):
    """A process group of PyTorch's own backends that compresses as its options say.

    Parameters
    ----------
    store, rank, size
        As in `SplittingGroup`.
    timeout : datetime.timedelta
        Time-out of an operation.
    options : Options
        What to compress in all_reduce, all_reduce_coalesced and reduce_scatter_tensor.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        super().__init__(store, rank, size, options)
        self._limit = timeout
        kinds = dist.ProcessGroup.BackendType
        self._backends: list[Any] = [make_gloo(board_of(self), dist.PrefixStore("cpu/", store), timeout)]
        private.register_backend(self, "cpu", kinds.GLOO, self._backends[0])
        if torch.cuda.is_available() and dist.is_nccl_available():
            given = private.nccl_options(timeout)
            self._backends.append(dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, given))
            private.register_backend(self, "cuda", kinds.NCCL, self._backends[1])
        private.set_default_backend(self, kinds.GLOO)

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last compressed collective; None before the first."""
        return membership.stats(self)

    @cached_property
    def _others(self) -> set[str]:
        """Device types that use another backend, such as the CPU in ``"cpu:gloo,cuda:compcoll"``: never compressed."""
        asked = "" if private.group_entry(self) is None else dist.get_backend_config(self)
        pairs = [each.partition(":") for each in asked.split(",")]
        return {device for device, _, backend in pairs if backend not in ("", NAME)}

    @property
    def timeout(self) -> float:
        """Seconds that a wait may last."""
        return self._limit.total_seconds()

    @untraced
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        one = lambda tensors, **call: collectives.all_reduce(tensors[0], **call)  # noqa: E731
        return self._reduced("allreduce", one, [given], given, opts or c10d.AllreduceOptions())

    def uncompressed_allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Any:
        """Call PyTorch's own backend; the base class's method would call `allreduce` again."""
        return private.backend_of(self, tensors[0].device).allreduce(list(tensors), opts)

    @untraced
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        given, opts = list(tensors), opts or c10d.AllreduceCoalescedOptions()
        return self._reduced("allreduce_coalesced", collectives.all_reduce_coalesced, [given], given, opts)

    @untraced
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        return self._reduced(
            private.REDUCE_SCATTER_SINGLE, collectives.reduce_scatter_tensor, [output, source], [source], opts
        )

    def _reduced(
        self, name: str, compressed: Callable[..., Any], arguments: list[Any], source: list[Tensor], opts: Any
    ) -> Any:
        """Run a compressed reduction, or the method `name` of PyTorch's own backend if the options exclude this one."""
        if not self._compresses(source, opts.reduceOp):
            return self._followed(getattr(private.backend_of(self, source[0].device), name)(*arguments, opts), name)
        names = NAMES["reduce_scatter" if "scatter" in name else "allreduce"]
        options, algorithm = self.options, self.options.algorithm
        call = {"codec": options.codec, "algorithm": algorithm if algorithm in names else AUTO}
        work = compressed(*arguments, op=opts.reduceOp, group=self, async_op=opts.asyncOp, **call)
        return CompletedWork() if work is None else work

    def _followed(self, work: dist.Work, name: str, finish: Callable[[], list[Tensor]] | None = None) -> Followed:
        """Wrap a backend's handle, so that it raises errors of `compcoll.errors`."""
        return Followed(work, board_of(self), f"the process group's {name.strip('_')}", finish)

    _reduce_scatter_base = reduce_scatter_single

    broadcast, allgather, reduce_scatter = map(_left, ("broadcast", "allgather", "reduce_scatter"))
    all_gather_single = _allgather_base = _left(private.GATHER_SINGLE)
    all_to_all_single = alltoall_base = _left("alltoall_base")
    reduce, gather, scatter = map(_left, ("reduce", "gather", "scatter"))
    send, recv, recv_anysource = map(_left, ("send", "recv", "recv_anysource"))

    all_gather_single_coalesced = allgather_into_tensor_coalesced = _one_by_one("all_gather_single")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _one_by_one("reduce_scatter_single")

    @untraced
    def barrier(self, opts: Any = None) -> Any:
        opts = opts or c10d.BarrierOptions()
        return self._followed(private.backend_of(self, opts.device or torch.device("cpu")).barrier(opts), "barrier")

    @untraced
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Exchange a tensor with each rank. For gloo, all tensors are packed into one, since it exchanges only one."""
        opts, backend = opts or c10d.AllToAllOptions(), private.backend_of(self, outputs[0].device)
        if not outputs[0].is_cpu:
            return self._followed(backend.alltoall(list(outputs), list(inputs), opts), "alltoall")
        arrived = torch.empty(sum(map(nbytes_of, outputs)), dtype=torch.uint8)
        sent = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in inputs])
        sizes = [[nbytes_of(tensor) for tensor in tensors] for tensors in (outputs, inputs)]
        work = backend.alltoall_base(arrived, sent, *sizes, opts)

        def unpacked() -> list[Tensor]:
            for tensor, part in zip(outputs, arrived.split(sizes[0]), strict=True):
                tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))
            return list(outputs)

        return self._followed(work, "alltoall", unpacked)

    def _compresses(self, tensors: Sequence[Tensor], op: Any) -> bool:
        options = self.options
        if options.codec is None or self.size() == 1 or not tensors:
            return False
        if tensors[0].device.type in self._others or tensors[0].dtype not in COMPRESSIBLE:
            return False
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        try:
            linear(op)
        except InvalidArgument:
            return False
        return sum(map(nbytes_of, tensors)) >= max(options.min_bytes, 1)

    def _of_some(
        self, ranks: Sequence[int], store: dist.Store, timeout: timedelta | None, options: Options
    ) -> WrappingGroup:
        return WrappingGroup(store, ranks.index(self.rank()), len(ranks), timeout or self._limit, options)


def create(given: Any, options: object) -> WrappingGroup:
    """Make the process group that PyTorch requests.

    Parameters
    ----------
    given : torch.distributed.distributed_c10d._DistributedBackendOptions
        Store, rank and size.
    options : Options, optional
        What to compress; by default the options of the environment.

    Raises
    ------
    InvalidArgument
        For options of another backend.
    """
    return WrappingGroup(given.store, given.group_rank, given.group_size, given.timeout, Options.given(options))
