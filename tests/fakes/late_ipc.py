"""Memory and events of the deferred device that several ranks have, with CUDA's rules."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
from fakes.deferred import DeferredWorld, SharedEvent, Site, memory_of
from fakes.deferred_kernels import DeviceArray


class LateIPC:
    """What the ranks' GPUs have in common.

    Attributes
    ----------
    opened : Counter
        How often each handle was opened, by rank, less how often it was closed.
    memory : dict
        By handle the rank that allocated it, and what.
    freed_too_early : list of bytes
        Handles of memory that was freed while another rank had it.
    """

    def __init__(self) -> None:
        self.opened: Counter[tuple[int, bytes]] = Counter()
        self.memory: dict[bytes, tuple[int, Any]] = {}
        self.events: dict[bytes, tuple[int, SharedEvent]] = {}
        self.freed_too_early: list[bytes] = []
        self._numbers = iter(range(1, 10**9))

    def handle(self) -> bytes:
        return next(self._numbers).to_bytes(64, "little")

    def freed(self, handle: bytes) -> None:
        """Note that memory was freed: its content is lost."""
        self.memory.pop(handle)[1][:] = 0xEE
        if any(count for (_, opened), count in self.opened.items() if opened == handle):
            self.freed_too_early.append(handle)


class LateSharing:
    """One rank's (the contract is `compcoll.gpu.ipc.CudaIPC`)."""

    name = "late IPC"

    def __init__(self, common: LateIPC, rank: int) -> None:
        self._common = common
        self._rank = rank
        self.refused: Exception | None = None
        """What handshake memory ends with."""

    def memory_handle(self, memory: Any) -> bytes:
        handle = self._common.handle()
        self._common.memory[handle] = self._rank, memory_of(memory)
        weakref.finalize(memory, self._common.freed, handle).atexit = False
        return handle

    def event(self) -> tuple[SharedEvent, bytes]:
        event, handle = SharedEvent(), self._common.handle()
        self._common.events[handle] = self._rank, event
        return event, handle

    def open_memory(self, handle: bytes, nbytes: int) -> DeviceArray:
        if self.refused is not None:
            raise self.refused
        rank, memory = self._common.memory.get(handle, (self._rank, None))
        if rank == self._rank:  # so does CUDA, of what the process has made itself
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        assert nbytes == memory.nbytes
        self._common.opened[self._rank, handle] += 1
        return DeviceArray(memory)

    def open_event(self, handle: bytes) -> SharedEvent:
        rank, event = self._common.events.get(handle, (self._rank, None))
        if rank == self._rank or event is None:
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        return event

    def close(self) -> None:
        for key in [key for key in self._common.opened if key[0] == self._rank]:
            del self._common.opened[key]


class SharingWorld(DeferredWorld):
    """Ranks of one machine whose GPUs read each other's memory."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.ipc = LateIPC()
        self.ways = [LateSharing(self.ipc, rank) for rank in range(size)]
        super().__init__(size, **{"direct": False, "sharing": self.ways.__getitem__, **settings})

    def sum_of(self, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
        return self.download(self.allreduce(self.upload(inputs), **options))

    @property
    def carriers(self) -> set[str]:
        return {comm.stats.gpu_transport for comm in self.comms if comm.stats}

    @property
    def reasons(self) -> set[str]:
        return {comm._gpu._gpu_group.why for comm in self.comms if comm._gpu}

    def leave_out(self, site: Site | None) -> None:
        """Leave a wait out from now on."""
        for device in filter(None, self.devices):
            device.runtime.leave_out(site)
