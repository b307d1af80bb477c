"""Arrays of the caller's on a device, as collectives ask for them, and the memory of a collective there."""

from __future__ import annotations

from typing import Any

from ..host.arena import Arena
from ..pending import Pending


class DeviceBuffers:
    """The buffers of a device as `Collectives` asks for them, for the arrays of one call at a time.

    Attributes
    ----------
    caller : Stream
        Of the call.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.caller: Any = None
        self.zeros_residual = device.zeros_residual
        self.number_coder = device.number_coder
        self.holds = device.holds

    @staticmethod
    def seal(wire: Any) -> None:
        """Do nothing: `DeviceTransport` does it, in pinned memory."""

    @staticmethod
    def sealed(wire: Any) -> bool:
        """Tell whether a wire that has come to the device is whole: others do not come there."""
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
        """Prepare like `HostDevice.buffers`."""
        dtype, flat = self.device.view(x, "x")
        shape = tuple(x.shape) if shape is None else shape
        if out is not None:
            return dtype, flat, out, self.device.flat_out(out, x, flat, shape)
        result = self.empty_like(x, shape)
        return dtype, flat, result, self.device.view(result, "out")[1]


_PAGE = 1 << 21
"""CUDA shares whole pages with other processes, whatever else is on them: so slabs are whole pages."""


class DeviceMemory:
    """A collective's wires on the device and in pinned host memory, kept for the next one.

    Attributes
    ----------
    guards : list of Pending
        What must be done before it is used again.
    shared : bool
        Whether other processes have the slabs on the device, which therefore stay.
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
