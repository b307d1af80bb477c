"""A device that does everything at once, in memory that other processes can open: what MPI carries between such."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Any

import numpy as np
from fakes import deferred
from fakes.deferred import DeviceArray, SharedEvent, memory_of

from compcoll.gpu.streams import Streams


class Runtime(deferred.Runtime):
    """Streams that are never late; memory is files'."""

    def __init__(self) -> None:
        super().__init__(early=True)
        self.paths: dict[int, str] = {}

    def device_bytes(self, nbytes: int) -> DeviceArray:
        file, path = tempfile.mkstemp(prefix="compcoll-", dir="/dev/shm")
        os.ftruncate(file, nbytes)
        array = DeviceArray(np.frombuffer(mmap.mmap(file, nbytes), np.uint8))
        os.close(file)
        memory_of(array)[:] = 0xFF
        self.paths[self.address(array)] = path
        weakref.finalize(array, os.unlink, path)
        return array


class Sharing:
    """What processes share of it (the contract is `compcoll.gpu.ipc.CudaIPC`)."""

    name = "files"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._numbers = iter(range(10**9))

    def memory_handle(self, memory: Any) -> bytes:
        return self._runtime.paths[self._runtime.address(memory)].encode().ljust(64, b"\0")

    def event(self) -> tuple[SharedEvent, bytes]:
        return SharedEvent(), next(self._numbers).to_bytes(64, "little")

    def open_memory(self, handle: bytes, nbytes: int) -> DeviceArray:
        with open(handle.rstrip(b"\0"), "r+b") as file:
            return DeviceArray(np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8))

    def open_event(self, handle: bytes) -> SharedEvent:
        return SharedEvent()  # it has come: whoever recorded it has done everything before

    def close(self) -> None:
        """Nothing: what is mapped goes with the last array on it."""


class Device(deferred.Device):
    """The device of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime()
        self.streams = Streams(self.runtime)
        self.shares = Sharing(self.runtime)

    def upload(self, values: np.ndarray) -> DeviceArray:
        array = super().upload(values)
        self.current.run_up_to(self.current.added)
        return array
