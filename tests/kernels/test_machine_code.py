"""The CUDA kernels' sm_90 machine code, executed without a GPU: the host's bytes, and what a value costs.

Instructions a value and 32-byte sectors asked for, as a multiple of the bytes that have to move, are what a GPU's speed
follows from. They are printed (``pytest -s -m "slow or not slow"``), and bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.cuda_shim import Recorded
from kept import machine_code
from oracles import sass, sass_machine
from oracles.codecs import Instructions, references

from compcoll import FP8, QSGD, SZP, ZFP, Cast, Codec, MinMax
from compcoll.gpu.coder import DeviceCoder
from compcoll.gpu.cubins import nvrtc
from compcoll.gpu.programs import Program, program
from compcoll.gpu.selection import SelectionKernels
from compcoll.gpu.szp import DeviceSzpCoder, SzpStatus
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions

Kernels = Callable[[Program], sass.Cubin]

# Instructions a value and sectors, at most: the goals of the kernels that reach them, and for others what they take.
CASES = [case for one in references().values() for case in one.instructions.items()]
# The same of a value more, where a limited grid's thread blocks do something once, such as copying tables.
OF_MORE: dict[Codec, Instructions] = {
    ZFP(rate=8): {"encode": (34, 1.01), "accumulate": (48, 1.01), "recode": (83, 1.01), "feedback": (95, 1.01)},
    ZFP(rate=16): {"encode": (46, 1.01), "accumulate": (63, 1.01), "recode": (109, 1.01), "feedback": (119, 1.01)},
}
QUICK = Cast("float16")
MISALIGNED = 1.3  # sectors, of arrays that begin 4 bytes after a multiple of 16

cases = pytest.mark.parametrize(
    ("codec", "bounds"),
    [pytest.param(*case, id=str(case[0]), marks=() if case[0] == QUICK else pytest.mark.slow) for case in CASES],
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Compile a program, once."""
    compiler, cuobjdump = nvrtc(), sass.disassembler()
    if compiler is None or cuobjdump is None:
        pytest.skip("nvidia-cuda-nvrtc or nvidia-cuda-cuobjdump is not installed: make install")
    folder, known = tmp_path_factory.mktemp("cubins"), {}

    def compiled(program: Program) -> sass.Cubin:
        if program not in known:
            cubin, log = machine_code(compiler, program, "90")
            assert "bytes spill stores" in log and log.count(" 0 bytes spill stores") == log.count("spill stores"), log
            path = Path(folder / f"{len(known)}.cubin")
            path.write_bytes(cubin)
            known[program] = sass.read(cuobjdump, path)
        return known[program]

    return compiled


def run(kernels: Kernels, codec: Codec, operation: str, x: np.ndarray, offset: int = 0) -> tuple[float, float]:
    """Hold results against the host's; return instructions a value and sectors as a multiple of the least."""
    n, recorded = x.size, Recorded()
    coder: Any = codec.coder(SimpleNamespace(coder=partial(DeviceCoder, recorded)), "float32")  # type: ignore[arg-type]
    host = codec.coder(HostDevice(1), "float32")
    rng = np.random.default_rng(2)
    other, lost = (rng.standard_normal((2, n)) * [[1e-3], [1e-5]]).astype(np.float32)
    wire = np.zeros(host.wire_nbytes(n), np.uint8)
    host.encode(n, x, (), wire)
    cubin = kernels(coder.program)
    memory = sass_machine.Memory(cubin, 32 * n + 65536)
    at_x, at_other, at_lost = (memory.put(array, offset) for array in (x, other, lost))
    at_wire, expected = memory.put(wire), np.zeros_like(wire)
    at_result, kept, seen = memory.put(np.zeros_like(wire)), lost.copy(), np.zeros_like(x)
    at_seen = memory.put(seen, offset)
    if operation == "encode":
        coder.encode(n, at_x, [], at_result)
        moved, expected = x.nbytes, wire
    elif operation == "accumulate":
        at_result, expected, moved = at_other, np.zeros_like(x), 2 * x.nbytes
        coder.decode(n, at_other, [at_wire], at_other)
        host.decode(n, other, (wire,), expected)
    elif operation == "recode":
        coder.encode(n, at_other, [at_wire], at_result)
        host.encode(n, other, (wire,), expected)
        moved = x.nbytes + wire.nbytes
    elif operation == "decoded":  # all at once
        how = EncodeOptions(residual=at_lost, feed=False, residual_scale=0.25, decoded=at_seen, scale=0.5)
        coder.encode(n, at_other, [at_wire, at_wire], at_result, how)
        host.encode(n, other, (wire, wire), expected, how._replace(residual=kept, decoded=seen))
        moved = 4 * x.nbytes + wire.nbytes
    else:
        coder.encode(n, at_x, [], at_result, EncodeOptions(residual=at_lost))
        host.encode(n, x, (), expected, EncodeOptions(residual=kept))
        moved = 3 * x.nbytes
    (launch,) = recorded.launches
    # A grid that is limited goes round: what is done once is little then.
    grid = min(launch.grid, 2) if codec.name == "zfp" else launch.grid
    with np.errstate(all="ignore"):
        kernel = cubin.kernels[launch.function]
        counts = sass_machine.run(kernel, memory, grid, launch.block, launch.argument.tobytes())
    np.testing.assert_array_equal(memory.get(at_result, expected.nbytes), expected.view(np.uint8))
    np.testing.assert_array_equal(memory.get(at_lost, lost.nbytes), kept.view(np.uint8))
    np.testing.assert_array_equal(memory.get(at_seen, seen.nbytes).view(np.float32), seen)
    return counts.instructions * 32 / n, counts.sectors * 32 / (moved + wire.nbytes)


def values(n: int) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(n) * 1e-3).astype(np.float32)


@cases
def test_costs_of_a_value(kernels: Kernels, codec: Codec, bounds: Instructions) -> None:
    def check(found: tuple[float, float], most: tuple[float, float], what: str) -> None:
        print(f"{codec!s:60} {what:20} {found[0]:6.1f} instructions {found[1]:5.2f} x sectors (most: {most})")
        assert found[0] <= most[0] and found[1] <= most[1], what

    n, of_more = 8192, OF_MORE.get(codec, {})
    for operation, most in bounds.items():
        found = run(kernels, codec, operation, values(2 * n if of_more else n))
        check(found, most, operation)
        if of_more:
            half = run(kernels, codec, operation, values(n))
            check((2 * found[0] - half[0], 2 * found[1] - half[1]), of_more[operation], f"{operation}, a value more")


@cases
def test_arrays_off_alignment(kernels: Kernels, codec: Codec, bounds: Instructions) -> None:
    for operation in bounds:
        found = run(kernels, codec, operation, values(16384 if codec.name == "zfp" else 8192), offset=4)
        print(f"{codec!s:60} {operation:11} {found[1]:5.2f} x sectors off alignment")
        assert found[1] <= MISALIGNED, operation
        run(kernels, codec, operation, values(3000), offset=4)  # of which a block is cut short


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [*(codec for codec, _ in CASES), FP8("e5m2", 512), MinMax(2, 128), MinMax(1, 1024), QSGD(2, 256)],
    ids=str,
)
@pytest.mark.parametrize("n", [3, 4099])
def test_the_hosts_bytes(kernels: Kernels, codec: Codec, n: int) -> None:
    """With an infinity, and a block that is cut short."""
    x = values(n)
    for special in (np.inf, np.nan, np.float32(3.4e38), np.float32(1e-42)):
        x[n // 2] = special
        for operation in ("encode", "accumulate", "recode", "feedback", "decoded"):
            run(kernels, codec, operation, x)


class Launcher:
    """Runs the machine code, in memory that it puts arrays into."""

    def __init__(self, kernels: Kernels, memory_nbytes: int) -> None:
        self._kernels = kernels
        self._cubin = kernels(program("sparse", "float32"))
        self.memory = sass_machine.Memory(self._cubin, memory_nbytes)
        self.sectors: dict[str, float] = {}

    def address(self, array: Any) -> int:
        return array or 0

    def scratch(self, nbytes: int) -> int:
        return self.memory.put(np.zeros(nbytes, np.uint8))

    def launch(self, _: Program, launches: Any) -> None:
        for one in launches:
            kernel, told = self._cubin.kernels[one.function], one.argument.tobytes()
            counts = sass_machine.run(kernel, self.memory, one.grid, one.block, told)
            self.sectors[one.function.split("_")[0]] = counts.sectors


class At(int):
    """An address that has a size."""

    size: int
    nbytes: int

    @classmethod
    def of(cls, address: int, array: np.ndarray) -> At:
        made = cls(address)
        made.size, made.nbytes = array.size, array.nbytes
        return made


def test_selection_reads_values_once(kernels: Kernels) -> None:
    """A second pass over what was found reads one bit a value."""
    x, indices, count = values(8192), np.zeros(4096, np.uint32), np.zeros(1, np.uint32)
    launcher = Launcher(kernels, 1 << 20)
    at_x, at_indices, at_count = (At.of(launcher.memory.put(array), array) for array in (x, indices, count))
    SelectionKernels(launcher, "float32").find(at_x, 3e-3, None, 1.0, at_indices, at_count)
    expected = np.flatnonzero(np.abs(x) > 3e-3).astype(np.uint32)
    assert launcher.memory.get(at_count, 4).view(np.uint32)[0] == expected.size > 10
    np.testing.assert_array_equal(launcher.memory.get(at_indices, expected.nbytes).view(np.uint32), expected)
    assert launcher.sectors["count"] * 32 < 1.05 * (x.nbytes + x.size / 8)
    assert launcher.sectors["compact"] * 32 < 0.25 * x.nbytes


def test_moments_have_many_loads_under_way(kernels: Kernels) -> None:
    """Few threads add, so that each must not wait for one value after the other."""
    kernel = kernels(program("sparse", "float32")).kernels["moments_sparse_float32"]
    most = under_way = 0
    for one in kernel.instructions:
        under_way = 0 if one.name == "FADD" else under_way + (one.name == "LDG")
        most = max(most, under_way)
    assert most >= 8


class SzpLauncher:
    """Runs the machine code of szp, on arrays that are parts of its memory."""

    launching = None

    def __init__(self, kernels: Kernels) -> None:
        self._cubin = kernels(program("szp", "float32"))
        self._memory = sass_machine.Memory(self._cubin, 1 << 22)
        self.instructions = self.nbytes = 0

    def put(self, array: np.ndarray, offset: int = 0) -> np.ndarray:
        begin = self._memory.put(array, offset) - sass_machine.BASE
        return self._memory.data[begin : begin + array.nbytes].view(array.dtype)

    def address(self, array: np.ndarray | None) -> int:
        return 0 if array is None else array.ctypes.data - self._memory.data.ctypes.data + sass_machine.BASE

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        return self.put(np.zeros(nbytes, np.uint8))

    def scratch(self, nbytes: int) -> int:
        return self._memory.put(np.full(nbytes, 0xFF, np.uint8))

    def record(self, _: None) -> None:
        """Nothing: kernels are done when they are launched."""

    def pending(self, _: None) -> Any:
        return SimpleNamespace(Test=lambda: True)

    def launch(self, _: Program, launches: Any) -> None:
        for one in launches:
            kernel, told = self._cubin.kernels[one.function], one.argument.tobytes()
            with np.errstate(all="ignore"):
                counts = sass_machine.run(kernel, self._memory, one.grid, one.block, told)
            self.instructions += 32 * counts.instructions
            self.nbytes += 32 * counts.sectors


# Instructions a value, and bytes of the sectors a value, at most.
SZP_COSTS = {
    "encode": (36, 8),
    "add an array": (52, 10),
    "add wires": (57, 8),
    "decode": (35, 6),
    "accumulate": (46, 10),
    "feedback": (85, 24),
}


def run_szp(kernels: Kernels, operation: str, x: np.ndarray, offset: int = 0) -> tuple[float, float]:
    """Hold results against the host's; return instructions a value, and bytes a value."""
    n, tolerance, launcher = x.size, 0.05, SzpLauncher(kernels)
    host: Any = SZP(tolerance=tolerance).coder_of_sum(HostDevice(1), "float32", 2)
    coder: Any = DeviceSzpCoder(launcher, SzpStatus(launcher), "float32", tolerance, None, 2)  # type: ignore[arg-type]
    y, lost = (np.random.default_rng(2).standard_normal((2, n)) * [[1], [0.01]]).astype(np.float32)
    expected, got = np.zeros((2, host.wire_nbytes(n)), np.uint8)
    first = expected[: host.encode(n, x, (), expected)].copy()
    second = expected[: host.encode(n, y, (), expected)].copy()
    at_x, at_y, at_lost = (launcher.put(array, offset) for array in (x, y, lost))
    at_first, at_second, at_got = (launcher.put(array, offset) for array in (first, second, got))
    if operation in ("decode", "accumulate"):
        sums = np.zeros_like(y) if operation == "decode" else y
        own, at_own = (None, None) if operation == "decode" else (y, at_y)
        host.decode(n, own, (first,), sums)
        coder.decode(n, at_own, (at_first,), at_y)
        np.testing.assert_array_equal(at_y.view(np.uint8), sums.view(np.uint8))
    else:
        add, wires = {"add an array": ("y", 1), "add wires": (None, 2)}.get(operation, ("x", 0))
        feed = operation == "feedback"
        terms, at_terms = (first, second)[:wires], (at_first, at_second)[:wires]
        length = host.encode(
            n, {"x": x, "y": y}.get(add), terms, expected, EncodeOptions(residual=lost if feed else None)
        )
        how = EncodeOptions(residual=at_lost if feed else None)
        assert coder.encode(n, {"x": at_x, "y": at_y}.get(add), at_terms, at_got, how) == length
        np.testing.assert_array_equal(at_got[:length], expected[:length])
        np.testing.assert_array_equal(at_lost, lost)
    return launcher.instructions / n, launcher.nbytes / n


@pytest.mark.slow
@pytest.mark.parametrize("operation", SZP_COSTS)
def test_szp(kernels: Kernels, operation: str) -> None:
    """With 8 bits a value; a block that is cut short, off alignment, and with values that are not integers."""
    rng = np.random.default_rng(1)
    found, most = run_szp(kernels, operation, rng.standard_normal(65536).astype(np.float32)), SZP_COSTS[operation]
    print(f"{'szp':60} {operation:20} {found[0]:6.1f} instructions {found[1]:5.2f} bytes (most: {most})")
    assert found[0] <= most[0] and found[1] <= most[1]
    for n in (3, 4099):
        x = rng.standard_normal(n).astype(np.float32)
        run_szp(kernels, operation, x, offset=4)
        for special in (np.inf, np.nan, np.float32(3e38), np.float32(1e-42)):
            x[n // 2] = special
            run_szp(kernels, operation, x)
