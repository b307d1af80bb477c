"""The szp codec by CUDA kernels (see `compcoll.host.szp`). This module needs neither a GPU nor CuPy."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import config
from ..dtypes import DTYPES, computed_on
from ..errors import WireCorrupted
from ..host.encode_options import PLAIN, EncodeOptions
from ..host.szp import SzpCoder
from ..pending import wait_for
from .launches import MOST_WIRES, Launch, Parameters, grid_of
from .programs import program

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any

# Of kernels/szp.h and kernels/device_szp.h.
_BLOCK, _LANES, _GROUP = 512, 16, 16
_HEADER_NBYTES = 8
_THREADS = 64  # per thread block, of kernels that have a block's values in registers
_PLACED_AT_ONCE = MOST_WIRES // 2  # a launch takes two numbers for each wire
_MOST_WARPS = 2048


class SzpStatus:
    """Pinned memory that kernels write and the host reads.

    Parameters
    ----------
    runtime : CudaRuntime
        The device's runtime.

    Attributes
    ----------
    length : array of int64
        The bytes of the wire that was encoded last.
    corrupted : array of int64
        1 if a kernel has found a corrupted wire. It may have done so after its call returned.
    largest : array of uint8
        The largest magnitudes of parts of an array.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        memory = runtime.pinned_bytes(16 + 8 * _MOST_WARPS)
        memory[:16] = 0
        self.length, self.corrupted = memory[:8].view(np.int64), memory[8:16].view(np.int64)
        self.largest = memory[16:]

    def wait(self) -> None:
        """Wait for the kernels that were launched last."""
        event = self._runtime.record(self._runtime.launching)
        wait_for(self._runtime.pending(event), config.DEFAULT_TIMEOUT, "the device has not finished its kernels")

    def check(self) -> None:
        """Raise `WireCorrupted` if a kernel has found a corrupted wire."""
        if self.corrupted[0]:
            self.corrupted[0] = 0
            raise WireCorrupted("an szp wire on the device has an impossible width, length or step")

    def find_largest(self, add: Array, dtype: str, how: EncodeOptions = PLAIN, *, finite: bool = True) -> float:
        """Return the largest magnitude of an array; with a residual, of the values that are encoded.

        Only finite ones count, unless ``finite`` is False.
        """
        blocks, threads = grid_of(add.size, 8)
        warps = min(blocks * threads // 32, _MOST_WARPS)
        if not warps:
            return 0.0
        address, computed = self._runtime.address, computed_on(dtype)
        told = Parameters(
            add.size,
            add=address(add),
            scale=how.scale,
            residual=address(how.residual),
            feed=how.feed,
            add_storage=DTYPES[dtype].precision,
            variant=finite,
            out=address(self.largest),
        )
        launch = Launch(f"largest_szp_{computed.name}", warps * 32 // threads, threads, told.packed())
        self._runtime.launch(program("szp", computed.name), [launch])
        self.wait()
        return float(self.largest.view(computed.numpy)[:warps].max())


class DeviceSzpCoder(SzpCoder):
    """A coder of multiples of a step on a device, as `compcoll.host.szp.SzpCoder`.

    Encoding waits for the device, because it returns the wire's length. If a decoded wire is corrupted, the values are
    NaN, and a later call raises `WireCorrupted`.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        status: SzpStatus,
        dtype: str,
        tolerance: float | None,
        relative: float | None,
        ranks: int,
    ) -> None:
        super().__init__(dtype, 0, tolerance, relative, ranks)
        self._runtime, self._status = runtime, status
        self._name = computed_on(dtype).name
        self.program = program("szp", self._name)

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        self._check(n, wires)
        address = self._runtime.address
        blocks = -(-n // _BLOCK)
        slots = blocks * _BLOCK * (8 if self._name == "float64" else 4)
        rows, row, slot = self._scratch(len(wires) * self._row_nbytes(n), self._row_nbytes(n), slots)
        how = how if add is not None else how._replace(residual=None)
        terms = self._terms(add, wires, how)
        launches = self._placed(n, wires, terms, rows)
        residual = {"residual": address(how.residual), "residual_scale": how.residual_scale, "feed": how.feed}
        encode = {**terms, **residual, "scale": how.scale, "wires": (rows, slot)}
        launches.append(self._of_blocks("encode", n, out=address(wire), **encode))
        new = {"wires": (address(wire), 0), "variant": 1, "out": row, "decoded": address(self._status.length)}
        launches.append(self._launch("place", (1, 256), n, **new))
        if n:
            launches.append(self._of_blocks("move", n, wires=(row, slot)))
            if how.decoded is not None:
                given = {"first": 1, "seed": terms["seed"], "wires": (row,), "out_storage": terms["out_storage"]}
                launches.append(self._of_blocks("decode", n, out=address(how.decoded), **given))
        self._runtime.launch(self.program, launches)
        self._status.wait()
        self._status.check()
        length = int(self._status.length[0])
        if add is None or not self._saves_nothing(length, n, wire):
            return length
        if math.isfinite(self._status.find_largest(add, self._dtype, finite=False)):
            self._warn()
        return length

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        self._check(n, wires)
        (rows,) = self._scratch(len(wires) * self._row_nbytes(n))
        terms = self._terms(add, wires, EncodeOptions(scale=scale))
        launches = self._placed(n, wires, terms, rows)
        if n:
            given = {**terms, "scale": scale, "wires": (rows,), "out": self._runtime.address(out)}
            launches.append(self._of_blocks("decode", n, **given))
        self._runtime.launch(self.program, launches)

    def _check(self, n: int, wires: Sequence[Array]) -> None:
        """Raise an error if a wire is too short for the table of its blocks, or an earlier one was corrupted."""
        self._status.check()
        blocks = -(-n // _BLOCK)
        for wire in wires:
            if wire.nbytes < _HEADER_NBYTES + 4 * blocks + -(-blocks // 4) * 4:
                raise WireCorrupted(f"an szp wire of {n} values, of {wire.nbytes} bytes: it is too short")

    def _terms(self, add: Array | None, wires: Sequence[Array], how: EncodeOptions) -> dict[str, Any]:
        """Return the parameters of a sum. A step of 0 means that of the first wire."""
        fed = how.residual is not None
        scale = 1.0 if fed else how.scale
        step = self._step
        if step is None and not wires:
            assert add is not None and self._relative is not None
            largest = self._status.find_largest(add, self._dtype, how)
            step = self._step_of(self._relative * largest)
        elif step is None:
            step = 0.0 if add is None else self._step_there(wires[0])
        limit = self._limit(step, scale) if step else 0.0
        return {
            "add": self._runtime.address(add),
            "add_storage": DTYPES[self._dtype].precision,
            "out_storage": DTYPES[self._dtype].precision,
            "first": len(wires),
            "seed": _bits(step),
            "rng_counter": _bits(scale / step) if step else 0,
            "position": int(np.asarray(limit, self._computed).view(f"u{self._computed.itemsize}")),
        }

    def _step_there(self, wire: Array) -> float:
        copy = self._status.largest[:_HEADER_NBYTES]
        self._runtime.copy(wire, copy, _HEADER_NBYTES, self._runtime.launching)
        self._status.wait()
        return float(copy.view(np.float64)[0])

    def _row_nbytes(self, n: int) -> int:
        return 8 * (1 + -(-n // (_BLOCK * _GROUP)))

    def _scratch(self, *nbytes: int) -> list[int]:
        """Return the addresses of pieces of scratch memory."""
        ends = list(accumulate(-(-each // 256) * 256 for each in nbytes))
        begin = self._runtime.scratch(ends[-1])
        return [begin + before for before in (0, *ends[:-1])]

    def _placed(self, n: int, wires: Sequence[Array], terms: dict[str, Any], rows: int) -> list[Launch]:
        """Return launches that find the places of the wires' blocks."""
        address, launches = self._runtime.address, []
        for begin in range(0, len(wires), _PLACED_AT_ONCE):
            some = wires[begin : begin + _PLACED_AT_ONCE]
            given: dict[str, Any] = {
                "wires": [*(address(wire) for wire in some), *(wire.nbytes for wire in some)],
                "variant": len(some),
                "add": address(wires[0]),
                "seed": terms["seed"],
                "out": rows + begin * self._row_nbytes(n),
                "decoded": address(self._status.corrupted),
            }
            launches.append(self._launch("place", (len(some), 256), n, **given))
        return launches

    def _of_blocks(self, verb: str, n: int, **given: Any) -> Launch:
        grid = grid_of(max(-(-n // _BLOCK), 1), 1, _THREADS // _LANES)[0]
        return self._launch(verb, (grid, _THREADS), n, **given)

    def _launch(self, verb: str, grid: tuple[int, int], n: int, **given: Any) -> Launch:
        return Launch(f"{verb}_szp_{self._name}", *grid, Parameters(n, -(-n // _BLOCK), **given).packed())


def _bits(number: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", number))[0])
