"""The caller's arrays on a device, and the memory of a collective there."""

from __future__ import annotations

from typing import Any

from ..host.arena import Arena
from ..pending import Pending


class DeviceBuffers:
    """Checks and allocates the device arrays of one call at a time. It has the interface that `Collectives` needs.

    Attributes
    ----------
    caller : Stream
        The stream of the call.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.caller: Any = None
        self.zeros_residual = device.zeros_residual
        self.number_coder = device.number_coder
        self.holds = device.holds

    @staticmethod
    def seal(wire: Any) -> None:
        """Do nothing: `DeviceTransport` stores the checksum in pinned memory."""

    @staticmethod
    def sealed(wire: Any) -> bool:
        """Return True: `DeviceTransport` checks wires before it copies them to the device."""
        return True

    def check_readable(self, x: Any, what: str) -> None:
        self.device.view(x, what)

    def dtype_name(self, x: Any) -> str:
        return str(self.device.view(x, "x")[0])

    def flat(self, x: Any, dtype: str) -> Any:
        return self.device.view(x, "x")[1]

    def empty_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.device.empty_like(x, shape, self.caller)

    def buffers(self, x: Any, shape: tuple[int, ...] | None, out: Any) -> tuple[str, Any, Any, Any]:
        """Prepare the buffers of a call, as `HostDevice.buffers` does."""
        dtype, flat = self.device.view(x, "x")
        shape = tuple(x.shape) if shape is None else shape
        if out is not None:
            return dtype, flat, out, self.device.flat_out(out, x, flat, shape)
        result = self.empty_like(x, shape)
        return dtype, flat, result, self.device.view(result, "out")[1]


_PAGE = 1 << 21
"""Bytes of a page. Slabs consist of whole pages, since CUDA shares whole pages with other processes."""


class DeviceMemory:
    """Memory for a collective's wires, on the device and pinned on the host. Later collectives use it again.

    Attributes
    ----------
    guards : list of Pending
        The requests to wait for before the memory is used again.
    shared : bool
        Whether other processes have opened the device's slabs, which then must not be freed.
    """

    def __init__(self, runtime: Any) -> None:
        self.here = Arena(lambda nbytes: runtime.device_bytes(-(-nbytes // _PAGE) * _PAGE))
        self.pinned = Arena(runtime.pinned_bytes)
        self.guards: list[Pending] = []
        self.shared = False

    def reset(self) -> None:
        if self.shared:
            self.here.rewind()
        else:
            self.here.reset()
        self.pinned.reset()
