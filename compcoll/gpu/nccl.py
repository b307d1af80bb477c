"""NCCL through CuPy: messages from GPU to GPU in stream order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedDevice
from .runtime import CudaRuntime
from .watchdog import Message, NCCLBase

Array = Any

with warnings.catch_warnings():  # CuPy warns if NCCL is absent
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl

_OLDEST = 21000
"""The oldest supported version, 2.10: the first that can average. It also has point-to-point messages."""


class NCCLTransport(NCCLBase):
    """One rank's NCCL communicator.

    Parameters
    ----------
    runtime : CudaRuntime
        The runtime of this rank's GPU.
    communicator : cupy.cuda.nccl.NcclCommunicator
        The communicator of all ranks.
    """

    def __init__(self, runtime: CudaRuntime, communicator: Any) -> None:
        super().__init__(runtime)
        self._communicator = communicator
        self._types = {
            "float16": nccl.NCCL_FLOAT16,
            "bfloat16": nccl.NCCL_BFLOAT16,
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
        }

    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Any) -> None:
        address, communicator = self._runtime.address, self._communicator
        with self._runtime.current:
            nccl.groupStart()
            try:
                for array, dest in leaving:
                    communicator.send(address(array), array.nbytes, nccl.NCCL_UINT8, dest, stream.ptr)
                for array, source in arriving:
                    communicator.recv(address(array), array.nbytes, nccl.NCCL_UINT8, source, stream.ptr)
            finally:
                nccl.groupEnd()

    def allreduce(self, x: Array, out: Array, dtype: str, *, mean: bool, stream: Any) -> None:
        op = nccl.NCCL_AVG if mean else nccl.NCCL_SUM
        address = self._runtime.address
        with self._runtime.current:
            self._communicator.allReduce(address(x), address(out), x.size, self._types[dtype], op, stream.ptr)

    def _look(self) -> None:
        self._communicator.check_async_error()

    def _abort(self) -> None:
        self._communicator.abort()

    def _leave(self) -> None:
        self._communicator.destroy()


class NCCL:
    """Creates NCCL communicators (the contract is `compcoll.gpu.stream_transport.Bootstrap`).

    Parameters
    ----------
    runtime : CudaRuntime
        The runtime of this rank's GPU.
    """

    name = "NCCL"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def identity(self) -> tuple[int, bytes]:
        if not nccl.available:
            raise UnsupportedDevice("NCCL cannot be loaded: pip install nvidia-nccl-cu13 (or -cu12)")
        version = int(nccl.get_version())
        if version < _OLDEST or int(nccl.get_build_version()) < _OLDEST:
            raise UnsupportedDevice(f"NCCL {version} is older than {_OLDEST} (2.10)")
        return version, self._runtime.place()

    def unique_id(self) -> bytes:
        return bytes(nccl.get_unique_id())

    def join(self, ranks: int, unique_id: bytes, rank: int) -> NCCLTransport:
        with self._runtime.current:
            return NCCLTransport(self._runtime, nccl.NcclCommunicator(ranks, unique_id, rank))
