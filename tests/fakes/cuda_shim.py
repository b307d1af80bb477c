"""The CUDA kernels on the CPU: builds cuda_shim.cpp with the machine's C++ compiler, and runs launches on NumPy memory.

As a program, for ThreadSanitizer: ``python -m fakes.cuda_shim LIBRARY DROPPED_LINE`` runs kernels whose threads
cooperate, without the barriers that stand on that line of a source file (0: with all of them; -1: with misaligned
memory).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from kept import kept, kernel_sources

from compcoll.gpu.coder import DeviceCoder
from compcoll.gpu.launches import Launch
from compcoll.gpu.programs import COMPUTED, KERNELS, Program, kernel_names
from compcoll.gpu.quantizer import DeviceIntegers, DeviceNumberCoder, DeviceVotes
from compcoll.gpu.selection import SelectionKernels
from compcoll.gpu.szp import DeviceSzpCoder, SzpStatus
from compcoll.host.encode_options import EncodeOptions

SOURCE = Path(__file__).with_name("cuda_shim.cpp")

STRICT = [
    "-fsanitize=alignment,shift,float-cast-overflow,signed-integer-overflow,bounds",
    "-fsanitize-undefined-trap-on-error",
]
"""What a GPU refuses, or does otherwise than this processor, ends the process by SIGILL: memory that is not aligned as
its type, shifts by all bits or more, conversions of numbers that are too large.
"""


def build(*options: str) -> Path:
    """Compile the library, unless that was done."""
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += [*STRICT, f"-I{KERNELS}", *options, str(SOURCE)]

    def compiled(library: Path) -> None:
        built = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, timeout=280)
        assert built.returncode == 0, built.stderr

    return kept("shim", (command, SOURCE.read_bytes(), kernel_sources()), compiled)


SPECIAL = {
    "integer_quantizer": (
        *("survey_blocks", "encode_integers", "decode_integers", "encode_votes", "decode_votes", "combine_numbers"),
    ),
    "sparse": (
        *("moments_sparse", "sample_sparse", "count_sparse", "place_sparse", "compact_sparse"),
        *("take_sparse", "put_sparse", "add_sparse", "subtract_sparse"),
    ),
    "szp": ("place_szp", "encode_szp", "move_szp", "decode_szp", "largest_szp"),
}
"""The kernels of programs that are not of one codec."""


def functions_of(program: Program) -> list[str]:
    """The names of a program's kernels, by its options."""
    given = [option.removeprefix("-DCOMPCOLL_").lower() for option in program.options]
    computed = COMPUTED["types=2" in given]
    codec = next((each.removeprefix("blocks=") for each in given if each.startswith("blocks=")), "")
    codec = codec or next(each for each in ("cast", "zfp", *SPECIAL) if each in given)
    of_codec = [f"{verb}_{name}" for name in kernel_names(codec, computed) for verb in ("encode", "recode", "decode")]
    return [f"{function}_{computed}" for function in SPECIAL.get(codec, of_codec)]


class Shim:
    """What launches kernels: the library that `build` made."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.launch.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 2, ctypes.c_void_p, *[ctypes.c_int] * 2]

    def drop_barrier(self, line: int) -> None:
        self._library.drop_barrier(line)

    def flush_subnormals(self, yes: bool) -> None:
        self._library.flush_subnormals(yes)

    @staticmethod
    def address(array: np.ndarray | None) -> int:
        return 0 if array is None else array.ctypes.data

    def scratch(self, nbytes: int) -> int:
        self._scratch = np.empty(nbytes, np.uint8)
        return self.address(self._scratch) if nbytes else 0

    launching = None

    @staticmethod
    def pinned_bytes(nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xFF, np.uint8)

    @staticmethod
    def copy(source: np.ndarray, target: np.ndarray, nbytes: int, stream: None) -> None:
        target[:nbytes] = source[:nbytes]

    @staticmethod
    def record(stream: None) -> None:
        """Nothing: kernels are done when they are launched."""

    @staticmethod
    def pending(event: None) -> Any:
        return SimpleNamespace(Test=lambda: True)

    def launch(self, program: Program, launches: Sequence[Launch]) -> None:
        assert all(launch.function in functions_of(program) for launch in launches)
        self.run(launches)

    def run(self, launches: Sequence[Launch], last: int | None = None) -> None:
        """Run all thread blocks, or the ``last`` ones."""
        for function, grid, block, parameters in launches:
            kernel = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
            alone = any(word in function for word in ("_cast_", "_integers_", "_votes_", "_numbers_"))
            alone |= function.startswith("decode_") and "_zfp" not in function
            alone &= block > 128  # shorter ones' warps exchange what they have
            alone |= "_sparse_" in function and not function.startswith(("count_", "place_", "compact_"))
            first = 0 if last is None else grid - last
            self._library.launch(kernel, grid, block, parameters.ctypes.data, alone, first)


class Recorded:
    """Keeps launches. Arrays may be given by their addresses."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    @staticmethod
    def address(array: np.ndarray | int | None) -> int:
        return array if isinstance(array, int) else Shim.address(array)

    def scratch(self, nbytes: int) -> int:
        raise AssertionError("nothing that is recorded needs scratch memory")

    def launch(self, program: Program, launches: Sequence[Launch]) -> None:
        self.launches += launches


class ShimDevice:
    """What codecs need of a device; `known`: with the programs of one configuration."""

    def __init__(self, shim: Shim, *, known: bool = False) -> None:
        self._shim = shim
        self._known = known

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> DeviceCoder:
        return DeviceCoder(self._shim, kernel, dtype, variant=variant, seed=seed, known=self._known)

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> DeviceIntegers:
        return DeviceIntegers(self._shim, bits, levels, block, dtype)

    def votes(self, ranks: int, block: int, dtype: str) -> DeviceVotes:
        return DeviceVotes(self._shim, ranks, block, dtype)

    def szp(self, dtype: str, tolerance: float | None, relative: float | None, ranks: int) -> DeviceSzpCoder:
        return DeviceSzpCoder(self._shim, SzpStatus(self._shim), dtype, tolerance, relative, ranks)

    def largest(self, x: np.ndarray, dtype: str) -> float:
        return SzpStatus(self._shim).find_largest(x, dtype)

    def passes(self, dtype: str) -> SelectionKernels:
        return SelectionKernels(self._shim, dtype)

    def number_coder(self, numbers: np.ndarray, op: str) -> DeviceNumberCoder:
        return DeviceNumberCoder(self._shim, numbers.dtype, op)


TILES = ("fp8", 4, 128)
"""A codec, for whose program of one configuration there is `build_tiles`."""


def build_tiles(*options: str) -> Path:
    known = DeviceCoder(Recorded(), TILES, "float32").program.options
    return build(*(option for option in known if option.startswith("-DCOMPCOLL") and "DIGEST" not in option), *options)


def cooperate_in_tiles(shim: Shim) -> None:
    """Run each way in which a warp cooperates on tiles, one after the other: on arrays that are not aligned."""
    recorded, n = Recorded(), 2 * 2048
    coder = DeviceCoder(recorded, TILES, "float32")
    values = np.random.default_rng(0).standard_normal(n + 1).astype(np.float32)[1:]
    wires, out = np.zeros((2, coder.wire_nbytes(n)), np.uint8), np.zeros(n + 1, np.float32)[1:]
    coder.encode(n, values, [], wires[0])
    coder.encode(n, values, wires[:1], wires[1])
    coder.decode(n, values, wires, out)
    shim.run([launch._replace(grid=1, block=32) for launch in recorded.launches])


def cooperate(shim: Shim) -> None:
    """Run each way in which threads cooperate: within a warp, a thread block, and by tables in shared memory."""
    device: Any = ShimDevice(shim)
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    for kernel, n in [
        (("zfp", 40, 0), 1500),
        (("zfp", 13, 0), 129),
        (("qsgd", 4, 512), 1200),
        (("minmax", 8, 64), 300),
        (("onebit", 2, 1024), 2500),
    ]:
        coder = device.coder(kernel, "float32", variant=1 if kernel[0] == "qsgd" else 0)
        wire = np.zeros(coder.wire_nbytes(n), np.uint8)
        coder.encode(n, values, (), wire)
        out = np.zeros(n, np.float32)
        coder.encode(n, values, (wire.copy(),), wire, EncodeOptions(decoded=out))
        coder.decode(n, values, (wire,), out)
    szp = device.szp("float32", 0.01, None, 1)
    wire = np.zeros(szp.wire_nbytes(600), np.uint8)
    wire = wire[: szp.encode(600, values, (), wire)]
    szp.decode(600, values[:600], (wire,), values[:600].copy())
    device.largest(values, "float32")
    integers = device.integers(16, 1000, 1024, "float32")
    integers.survey(values[:2500], 1.0, None, np.zeros(3, np.uint32))
    indices, count = np.zeros(100, np.uint32), np.zeros(1, np.uint32)
    device.passes("float32").find(values, 2.0, None, 1.0, indices, count)


if __name__ == "__main__":
    racing = Shim(Path(sys.argv[1]))
    if int(sys.argv[2]) < 0:
        values, taken = np.zeros(65, np.uint8)[1:].view(np.float32), np.zeros(1, np.float32)
        ShimDevice(racing).passes("float32").take(values, np.zeros(1, np.uint32), taken)
    racing.drop_barrier(int(sys.argv[2]))
    (cooperate_in_tiles if sys.argv[3:] else cooperate)(racing)
