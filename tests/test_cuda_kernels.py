"""The CUDA kernels without a GPU: compiled for real architectures, run on the CPU, and searched for races.

The oracles are zfpy and the host's kernels, which have tests of their own.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cuda_shim
import ml_dtypes
import numpy as np
import nvrtc
import pytest
import zfpy
from cuda_shim import Shim, ShimDevice
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compcoll import FP8, QSGD, ZFP, Cast, Codec, IntSum, MinMax, OneBit, Sign, TernGrad, errors
from compcoll.devices import launches
from compcoll.devices.device_selection import DeviceSelection, SelectionKernels
from compcoll.devices.host import HostDevice
from compcoll.devices.launches import COMPUTED, KERNELS, MOST_WIRES, PROGRAMS, CodecLaunches, program
from compcoll.sparse.selectors import SELECTORS

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SMALLEST = {"float32": 2.0**-97, "float64": 2.0**-961}
BARRIERS = [
    (path.name, number)
    for path in sorted(KERNELS.glob("device*.h"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if re.search(r"__sync(threads|warp)\(\)", line)
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    cuda_shim.build(library)
    return Shim(library)


# ---- compilation ----


@pytest.mark.timeout(200)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_every_kernel(architecture: str) -> None:
    library = nvrtc.library()
    if library is None and "CI" not in os.environ:
        pytest.skip("nvidia-cuda-nvrtc is not installed: pip install 'compcoll[test]'")
    assert library is not None

    def compiled(which: tuple[str, str]) -> tuple[bytes, str]:
        one = program(*which)
        # As CuPy does: it adds the architecture, the flushing of subnormal numbers, and whose functions are.
        added = [f"-arch={architecture}", "-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v"]
        return nvrtc.compile_to_cubin(library, one.source, [*one.options, *added])

    programs = [(codec, computed) for codec in PROGRAMS for computed in COMPUTED]
    with ThreadPoolExecutor(2) as pool:
        for which, (cubin, log) in zip(programs, pool.map(compiled, programs), strict=True):
            functions = program(*which).functions
            assert cubin[:4] == b"\x7fELF"
            assert sorted(re.findall(r"Compiling entry function '(\w+)'", log)) == sorted(functions)
            spills = [int(nbytes) for nbytes in re.findall(r"(\d+) bytes spill stores", log)]
            assert len(spills) == len(functions)
            assert max(spills) <= (0 if which[1] == "float32" else 64), log


def test_programs_name_all_functions_once() -> None:
    parts = [name for codec in PROGRAMS for computed in COMPUTED for name in program(codec, computed).functions]
    assert sorted(parts) == sorted(program().functions) and len(set(parts)) == len(parts) == 78
    used = {
        CodecLaunches((codec.name, maxbits, 0), dtype).encode(100, 8, scale, [], 16)[0].function
        for codec, dtype in [(ZFP(), "float32"), (ZFP(), "float64")]
        for maxbits in (16, 32, 33, 64, 65, 128)
        for scale in (1.0, 0.5)
    }
    assert used < set(parts) and len(used) == 12


def test_digest_covers_included_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = program("zfp", "float32").options  # kept: not asked for while the sources are others
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    monkeypatch.setattr(launches, "KERNELS", copy)
    before = launches._source.__wrapped__()
    with (copy / "zfp.h").open("a") as header:
        header.write("// changed\n")
    after = launches._source.__wrapped__()
    assert before[0] == after[0] and before[1] != after[1]
    assert f"-DCOMPCOLL_DIGEST=0x{before[1]}" in options


# ---- the same bytes as on the host ----


def memory(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins so many bytes after a multiple of 64, with room around it that nobody may touch."""
    raw = np.full(array.nbytes + 256, 0xA5, np.uint8)
    begin = -raw.ctypes.data % 64 + 64 + offset
    view = raw[begin : begin + array.nbytes].view(array.dtype)
    view[:] = array
    return view


def untouched_around(view: np.ndarray) -> bool:
    raw = view.base if view.base.dtype == np.uint8 else view.base.base
    begin = view.ctypes.data - raw.ctypes.data
    return bool((raw[:begin] == 0xA5).all() and (raw[begin + view.nbytes :] == 0xA5).all())


def bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """What must agree: all bits, but which NaN it is (the order of operands decides that on processors)."""
    values = array.view(DTYPES[dtype])
    return np.where(np.isnan(values), values.dtype.type(np.nan), values).view(np.uint8)


def values_of(kind: str, n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(n)
    wide = dtype == "float64"
    with np.errstate(over="ignore", under="ignore"):
        x = {
            "normal": lambda: normal * 1e-3,
            "smooth": lambda: np.cumsum(normal) * 1e-2 + 3,
            "scales": lambda: normal * 2.0 ** rng.integers(*((-1070, 1020) if wide else (-149, 127)), n),
            "tiny": lambda: normal * 2.0 ** rng.integers(*((-1074, -880) if wide else (-149, -75)), n),
            "huge": lambda: normal * np.finfo(np.float64 if wide else np.float32).max / 3,
            "constant": lambda: np.full(n, -1.5),
            "zeros": lambda: np.where(normal > 0, 0.0, -0.0),
            "specials": lambda: np.where(rng.random(n) < 0.01, rng.choice([np.nan, np.inf, -np.inf], n), normal),
        }[kind]()
        return x.astype(np.float64 if wide else np.float32).astype(DTYPES[dtype])


KINDS = ["normal", "smooth", "scales", "tiny", "huge", "constant", "zeros", "specials"]
BLOCKS = st.sampled_from([8, 16, 24, 64, 72, 128, 512, 1000, 2048, 2056])
BITS = st.integers(1, 8)
FAMILIES: dict[str, st.SearchStrategy[Codec]] = {
    "cast": st.builds(Cast, st.sampled_from(["float16", "bfloat16", "float32"])),
    "zfp": st.builds(ZFP, rate=st.sampled_from([3, 3.75, 4, 8, 8, 16, 16]) | st.integers(12, 128).map(lambda q: q / 4)),
    "minmax": st.builds(MinMax, BITS, BLOCKS),
    "qsgd": st.builds(
        QSGD,
        BITS,
        BLOCKS,
        st.sampled_from(["max", "l2"]),
        st.sampled_from(["stochastic", "nearest"]),
        st.integers(0, 2**64 - 1),
    )
    | st.builds(TernGrad),
    "onebit": st.builds(OneBit, BLOCKS),
    "fp8": st.builds(FP8, st.sampled_from(["e4m3", "e5m2"]), BLOCKS),
}


@st.composite
def sizes(draw: st.DrawFn, block: int) -> int:
    around = draw(st.sampled_from([0, block, 2 * block, 1024]))
    return max(0, draw(st.sampled_from([around - 1, around, around + 1, around + 3, around + 5]) | st.integers(0, 600)))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_same_bytes_as_on_the_host(family: str, shim: Shim, data: st.DataObject) -> None:
    codec = data.draw(FAMILIES[family], "codec")
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    n = data.draw(sizes(codec.block), "n")
    kind = data.draw(st.sampled_from(KINDS), "kind")
    wire_count = data.draw(st.sampled_from([0, 1, 1, 2, 5]), "wires")
    with_add = wire_count == 0 or data.draw(st.booleans(), "add")
    scale = data.draw(st.sampled_from([1.0, 1.0, 0.25, 1 / 3]), "scale")
    feed, residual_scale = data.draw(st.sampled_from([(None, 1.0), (True, 1.0), (True, 0.7), (False, 0.5)]), "residual")
    with_decoded = data.draw(st.booleans(), "decoded")
    counted = {"draw": data.draw(st.integers(0, 2**64 - 1), "draw"), "position": 8 * data.draw(st.integers(0, 2**50))}
    aligned = data.draw(st.booleans(), "aligned")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "rng"))

    host, device = HostDevice(1), ShimDevice(shim)
    on_host, on_device = codec.coder(host, dtype), codec.coder(device, dtype)
    nbytes = on_host.wire_nbytes(n)
    assert on_device.wire_nbytes(n) == nbytes
    computed = np.float64 if dtype == "float64" else np.float32
    item = 0 if aligned else 1  # elements off alignment; wires other than the cast codec's, bytes
    byte = 0 if aligned else 8 if family == "cast" else data.draw(st.integers(1, 7), "byte")

    def stored(what: str) -> np.ndarray:
        x = host.flat(values_of(what, n, dtype, rng), dtype)
        return memory(x, item * x.itemsize)

    def empty_wire() -> np.ndarray:
        return memory(np.full(nbytes, 0x5A, np.uint8), byte)

    x = stored(kind)
    expected, wire = empty_wire(), empty_wire()
    with np.errstate(all="ignore"):
        on_host.encode(n, x, (), expected, **counted)
        on_device.encode(n, x, (), wire, **counted)
        np.testing.assert_array_equal(wire, expected)

        wires = []
        for _ in range(wire_count):
            wires.append(empty_wire())
            on_host.encode(n, stored(data.draw(st.sampled_from(KINDS), "term")), (), wires[-1])
        add = x if with_add else None
        sums = [memory(x, item * x.itemsize) for _ in range(2)]
        on_host.decode(n, add, wires or [expected], sums[0], scale=scale)
        on_device.decode(n, add, wires or [expected], sums[1], scale=scale)
        np.testing.assert_array_equal(bits(sums[1], dtype), bits(sums[0], dtype))

        results = []
        start = memory(values_of("normal", n, np.dtype(computed).name, rng), item * np.dtype(computed).itemsize)
        for coder in (on_host, on_device):
            recoded, residual = empty_wire(), memory(start, item * start.itemsize)
            decoded = memory(x, item * x.itemsize)  # may be the array itself: encoded in place
            coder.encode(
                n,
                (decoded if with_decoded else x) if with_add else None,
                wires,
                recoded,
                residual=None if feed is None else residual,
                feed=bool(feed),
                residual_scale=residual_scale,
                decoded=decoded if with_decoded else None,
                scale=scale,
                **counted,
            )
            results.append((recoded, decoded, residual))
    (recoded, decoded, residual), (recoded2, decoded2, residual2) = results
    name = np.dtype(computed).name
    if family == "cast":  # carries which NaN it is
        wire_dtype = codec.dtype if np.dtype(DTYPES[codec.dtype]).itemsize <= np.dtype(computed).itemsize else name
        np.testing.assert_array_equal(bits(recoded2, wire_dtype), bits(recoded, wire_dtype))
    else:
        np.testing.assert_array_equal(recoded2, recoded)
    np.testing.assert_array_equal(bits(decoded2, dtype), bits(decoded, dtype))
    np.testing.assert_array_equal(bits(residual2, name), bits(residual, name))
    for array in (wire, sums[1], recoded2, decoded2, residual2):
        assert untouched_around(array)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows how to flush subnormal numbers on x86-64 only")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_codecs_do_not_depend_on_subnormal_arithmetic(family: str, shim: Shim, data: st.DataObject) -> None:
    codec = data.draw(FAMILIES[family], "codec")
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32"]), "dtype")
    kind = data.draw(st.sampled_from(["tiny", "scales", "huge", "normal"]), "kind")
    n = data.draw(sizes(codec.block), "n")
    host = HostDevice(1)
    on_host, on_device = codec.coder(host, dtype), codec.coder(ShimDevice(shim), dtype)
    x = host.flat(values_of(kind, n, dtype, np.random.default_rng(data.draw(st.integers(0, 1000)))), dtype)
    expected, out = np.zeros(on_host.wire_nbytes(n), np.uint8), np.empty_like(x)
    wire, got = np.zeros_like(expected), np.empty_like(x)
    on_host.encode(n, x, (), expected)
    on_host.decode(n, None, (expected,), out)
    smallest = [np.full(4, 2.0**-149, np.float32) for _ in range(2)]
    try:
        shim.flush_subnormals(True)
        on_device.encode(n, x, (), wire)
        on_device.decode(n, None, (expected,), got)
        ShimDevice(shim).coder(("cast", 2, 0), "float32").decode(4, smallest[0], (), smallest[1], scale=2.0)
        assert not smallest[1].any()  # they are flushed, here in a product that a GPU's kernel makes exactly
    finally:
        shim.flush_subnormals(False)
    np.testing.assert_array_equal(wire, expected)
    np.testing.assert_array_equal(got.view(np.uint8), out.view(np.uint8))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_numbers_that_are_added_are_the_hosts(shim: Shim, data: st.DataObject) -> None:
    block = data.draw(BLOCKS, "block")
    codec = data.draw(
        st.builds(IntSum, st.sampled_from([8, 16, 32]), st.just(block)) | st.just(Sign(block=block)), "codec"
    )
    ranks = data.draw(st.sampled_from([1, 2, 3, 7, 8, 100, 127]) | st.just(40000 if codec == Sign(block=block) else 5))
    dtype, n = data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(sizes(block), "n")
    scale, fed = data.draw(st.sampled_from([1.0, 1 / 3]), "scale"), data.draw(st.booleans(), "fed")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "rng"))
    x = HostDevice.flat(values_of(data.draw(st.sampled_from(KINDS), "kind"), n, dtype, rng), dtype)
    computed = "float64" if dtype == "float64" else "float32"
    results = []
    for device in (HostDevice(1), ShimDevice(shim)):
        bound = codec.summands(device, dtype, ranks)
        add = memory(x, 0)
        residual = memory(np.full(n, 1e-5, computed), 0) if fed and isinstance(codec, IntSum) else None
        agreed = memory(np.full(bound.agreed(n), 7, bound.agreed_dtype), 0)
        numbers = memory(np.full(bound.numbers(n), 7, bound.number_dtype), 0)
        with np.errstate(all="ignore"):
            bound.survey(add, scale, residual, agreed)
            bound.encode(add, scale, residual, agreed, numbers)
            bound.decode(numbers, agreed, add)
        kept = np.zeros(0, computed) if residual is None else residual
        results.append((bits(agreed, computed), numbers, bits(kept, computed), bits(add, dtype)))
        assert all(untouched_around(array) for array in (add, agreed, numbers))
    for ours, hosts in zip(*results):
        np.testing.assert_array_equal(ours, hosts)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["int8", "int16", "int32", "uint8", "uint16", "uint32 max", "uint64 max"]),
    n=st.integers(0, 70) | st.integers(5000, 5040),
    offset=st.integers(0, 3),
    wires=st.sampled_from([0, 1, 2, 16, 17, 40]),
    with_add=st.booleans(),
    in_place=st.booleans(),
)
def test_numbers_combine_as_on_the_host(
    shim: Shim, dtype: str, n: int, offset: int, wires: int, with_add: bool, in_place: bool
) -> None:
    number, op = np.dtype(dtype.split()[0]), "max" if "max" in dtype else "sum"
    rng = np.random.default_rng(n + wires)
    terms = [rng.integers(0, 3, n).astype(number) for _ in range(wires + 1)]
    terms[0][::3] += number.type(50)
    results = []
    for device in (HostDevice(1), ShimDevice(shim)):
        coder = device.number_coder(terms[0], op)
        add = memory(terms[0], offset * number.itemsize) if with_add or not wires else None
        sent = [memory(term.view(np.uint8), offset * number.itemsize) for term in terms[1:]]
        out = add if in_place and add is not None else memory(np.zeros(n, number), offset * number.itemsize)
        wire, seen = memory(np.zeros(n * number.itemsize, np.uint8), 0), memory(np.zeros(n, number), 0)
        coder.encode(n, add, sent, wire, decoded=seen)
        coder.decode(n, add, sent, out)
        assert untouched_around(out) and untouched_around(wire) and untouched_around(seen)
        results.append((wire, seen, out))
    for ours, hosts in zip(*results):
        np.testing.assert_array_equal(ours, hosts)


class AtOnce:
    """What `Exchange` is for, where kernels are done when they are launched."""

    def launching(self) -> None:
        pass

    def room(self, n: int, dtype: Any) -> np.ndarray:
        return memory(np.full(n * np.dtype(dtype).itemsize, 0x5A, np.uint8), 0).view(dtype)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array.view(InDevice)


class InDevice(np.ndarray):
    """An array that selection takes to be in a device's memory."""


def selections(shim: Shim, dtype: str) -> tuple[Any, Any]:
    """The host's, and that of the kernels."""
    host, device = HostDevice(1), ShimDevice(shim)
    cast = device.coder(("cast", launches.STORAGE.index(dtype), 0), dtype)
    return host.selection(dtype), DeviceSelection(host.selection(dtype), device.passes(dtype), cast, AtOnce())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(COMPUTED),
    n=st.integers(0, 70) | st.sampled_from([2047, 2048, 2049, 6001, 16384, 20001]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
    offset=st.integers(0, 3),
    part=st.sampled_from([0.0, 0.001, 0.05, 0.9, 1.0]),
)
def test_selection_finds_what_the_host_finds(
    shim: Shim, dtype: str, n: int, kind: str, seed: int, offset: int, part: float
) -> None:
    rng = np.random.default_rng(seed)
    host, device = selections(shim, dtype)
    x = memory(values_of(kind, n, dtype, rng), offset * np.dtype(dtype).itemsize)
    there = x.view(InDevice)
    variances = np.abs(values_of("normal", n, dtype, rng)) * np.abs(x)
    magnitudes = np.sort(np.abs(x[np.isfinite(x)]))[::-1]
    threshold = float(magnitudes[min(int(part * n), magnitudes.size - 1)]) if magnitudes.size else 1.0
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(device.moments(there), host.moments(x))
        assert device.count(there, threshold) == host.count(x, threshold)
        for most in (n, n // 16):
            for ours, hosts in zip(device.above(there, threshold, most), host.above(x, threshold, most), strict=True):
                np.testing.assert_array_equal(ours, hosts)
        for bound in (0.0, threshold):
            expected = host.unambiguous(x, variances, 1.5, bound)
            np.testing.assert_array_equal(device.unambiguous(there, variances.view(InDevice), 1.5, bound), expected)
        if n >= 16:
            np.testing.assert_array_equal(device.sample(there, n // 32 * 16), host.sample(x, n // 32 * 16))
        if n:
            np.testing.assert_array_equal(device.largest(there, n // 3), host.largest(x, n // 3))
            assert device.kth_largest(there, n // 3 + 1) == host.kth_largest(x, n // 3 + 1) or np.isnan(x).any()
        indices = np.flatnonzero(rng.random(n) < part).astype(np.uint32)
        sent = np.ascontiguousarray(device.take(there, indices))
        np.testing.assert_array_equal(bits(sent, dtype), bits(host.take(x, indices), dtype))
        second = values_of("normal", n, dtype, rng)
        results = []
        for kernels in (host, device):
            out = memory(x, offset * x.itemsize)
            given = out if kernels is host else out.view(InDevice)
            kernels.subtract(indices, (sent * out.dtype.type(0.75)).astype(dtype), given)
            kernels.add(indices, sent, given)
            kernels.multiply(given, 1 / 3)
            kernels.put(indices[::2].copy(), None, given)
            kernels.put(indices[1::2].copy(), sent[1::2].copy(), given)
            kernels.plus(given, second, 0.1)
            assert untouched_around(out)
            results.append(bits(out, dtype))
            kernels.clear(given)
            assert not out.any() and not np.asarray(kernels.zeros(n)).any()
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("select", SELECTORS)
def test_selectors_choose_what_they_choose_on_the_host(shim: Shim, select: str, dtype: str) -> None:
    host, device = selections(shim, dtype)
    for n, kind, density in (
        *((70_001 if (select, dtype) == ("ldte", "float32") else 9001, "normal", 0.01), (20_001, "smooth", 0.001)),
        *((6000, "specials", 0.02), (5000, "scales", 0.1), (5000, "constant", 0.01), (300, "normal", 0.5)),
    ):
        x = values_of(kind, n, dtype, np.random.default_rng(n))
        k = math.ceil(density * n)
        with np.errstate(all="ignore"):
            expected = SELECTORS[select](host, x, k)
            np.testing.assert_array_equal(SELECTORS[select](device, x.view(InDevice), k), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_zfp_has_the_streams_of_zfpy(dtype: str, shim: Shim, data: st.DataObject) -> None:
    rate = data.draw(
        st.sampled_from([3.25, 4, 8, 16]) | st.integers(12, 128 if dtype == "float32" else 256).map(lambda q: q / 4)
    )
    n = data.draw(st.sampled_from([1, 2, 3, 4, 5, 127, 128, 129, 1025]) | st.integers(1, 700), "n")
    kind = data.draw(st.sampled_from(["normal", "smooth", "scales", "constant", "zeros"]), "kind")
    x = values_of(kind, n, dtype, np.random.default_rng(data.draw(st.integers(0, 1000))))
    blocks = np.pad(x, (0, -n % 4), mode="edge").reshape(-1, 4)
    largest = np.repeat(np.abs(blocks).max(axis=1), 4)[:n]
    x[(largest < SMALLEST[dtype]) | (largest > np.finfo(x.dtype).max / 8)] = 0  # where libzfp overflows
    coder = ZFP(rate=rate).coder(ShimDevice(shim), dtype)
    wire = np.full(coder.wire_nbytes(n), 0xA5, np.uint8)
    coder.encode(n, x, (), wire)
    stream = bytes(zfpy.compress_numpy(x, rate=rate, write_header=False))
    assert wire.tobytes() == stream
    out = np.empty_like(x)
    coder.decode(n, None, (wire,), out)
    expected = zfpy._decompress(stream + bytes(64), zfpy.dtype_to_ztype(x.dtype), (n,), rate=rate)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_decode_as_on_the_host(shim: Shim, data: st.DataObject) -> None:
    """Foreign streams of ZFP: the rare ways of the decoder."""
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    codec = ZFP(rate=data.draw(st.integers(12, 128)) / 4)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n = 401
    on_host = codec.coder(HostDevice(1), dtype)
    wire = rng.integers(0, 256, on_host.wire_nbytes(n)).astype(np.uint8)
    wire &= rng.integers(0, 256, wire.size).astype(np.uint8)
    wire[rng.random(wire.size) < data.draw(st.sampled_from([0.0, 0.3, 0.7]))] = 0
    wire[:: max(1, round(codec.rate / 2))] |= 1  # most blocks hold something
    expected, out = np.zeros(n, dtype), np.zeros(n, dtype)
    on_host.decode(n, None, (wire,), expected)
    codec.coder(ShimDevice(shim), dtype).decode(n, None, (wire,), out)
    np.testing.assert_array_equal(bits(out, dtype), bits(expected, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("codec", [QSGD(block=64), ZFP(rate=8), Sign(block=64)])
def test_sums_of_more_wires_than_a_launch_takes(codec: Any, dtype: str, shim: Shim) -> None:
    n, rng = 333, np.random.default_rng(5)
    if isinstance(codec, Sign):
        kernel = ("onebit", 1, codec.block)
        on_host, on_device = HostDevice(1).coder(kernel, dtype), ShimDevice(shim).coder(kernel, dtype)
    else:
        on_host, on_device = codec.coder(HostDevice(1), dtype), codec.coder(ShimDevice(shim), dtype)
    wires = []
    for _ in range(2 * MOST_WIRES + 5):
        wires.append(np.zeros(on_host.wire_nbytes(n), np.uint8))
        on_host.encode(n, rng.standard_normal(n).astype(dtype).view(f"u{np.dtype(dtype).itemsize}"), (), wires[-1])
    for count in (MOST_WIRES, MOST_WIRES + 1, len(wires)):
        sums = [np.zeros(n, dtype) for _ in range(2)]
        recoded = [np.zeros_like(wires[0]) for _ in range(2)]
        for coder, out, wire in zip((on_host, on_device), sums, recoded, strict=True):
            coder.decode(n, None, wires[:count], out)
            coder.encode(n, out.copy(), wires[:count], wire, decoded=out, scale=0.5)
        np.testing.assert_array_equal(sums[1], sums[0])
        np.testing.assert_array_equal(recoded[1], recoded[0])


@pytest.mark.parametrize("begin", [6144 * (2**31 // 6144 + 1), 6144 * (2**35 // 6144 + 1)])
@pytest.mark.parametrize(
    ("kernel", "encoded_at_once"),
    [(("cast", 0, 0), 2048), (("zfp", 32, 0), 1024), (("zfp", 40, 0), 1024), (("minmax", 8, 24), 1536)],
)
def test_far_ends_of_large_buffers(kernel: tuple[str, int, int], encoded_at_once: int, begin: int, shim: Shim) -> None:
    """Memory that is only promised: the thread blocks at the end, from `begin` on, are all that runs."""
    tail = 1029
    n = begin + tail  # `begin` is at the beginning of a thread block and of a codec's block
    on_host, on_device = HostDevice(1).coder(kernel, "float32"), CodecLaunches(kernel, "float32")

    def promised(nbytes: int) -> np.ndarray:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)

    x, wire = promised(4 * n).view(np.float32), promised(on_host.wire_nbytes(n))
    x[begin:] = np.random.default_rng(2).standard_normal(tail)
    (encode,) = on_device.encode(n, Shim.address(x), 1.0, [], Shim.address(wire))
    (decode,) = on_device.decode(n, Shim.address(x), 1.0, [Shim.address(wire)], Shim.address(x))
    # As many thread blocks as one turn of each needs.
    shim.run([encode._replace(grid=-(-n // encoded_at_once))], last=-(-tail // encoded_at_once))
    expected = np.zeros(on_host.wire_nbytes(tail), np.uint8)
    on_host.encode(tail, x[begin:], (), expected)
    np.testing.assert_array_equal(wire[on_host.wire_nbytes(begin) :], expected)
    sums = np.zeros(tail, np.float32)
    on_host.decode(tail, x[begin:], (expected,), sums)
    decoded_at_once = 1024 if kernel[0] == "zfp" else 2048
    shim.run([decode._replace(grid=-(-n // decoded_at_once))], last=-(-tail // decoded_at_once))
    np.testing.assert_array_equal(x[begin:], sums)


def test_selection_at_the_far_end_of_a_large_buffer(shim: Shim) -> None:
    """As above: the last tile alone, whose indices take all 32 bits."""
    ran: list[Any] = []

    class Recording(Shim):
        def __init__(self) -> None:
            pass

        def scratch(self, nbytes: int) -> int:
            return self.address(counts[: nbytes // 4])

        def launch(self, program: Any, launches: Any) -> None:
            ran.extend(launches)

    n = (1 << 32) - 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    x = np.frombuffer(mmap.mmap(-1, 4 * n, flags=flags), np.float32)
    counts = np.zeros(-(-n // launches.TILE_VALUES), np.uint32)
    indices, count = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    x[[n - 1, n - 2000, n - 7]] = [1, -2, np.nan]
    SelectionKernels(Recording(), "float32").find(x, 0.5, None, 1.0, indices, count)
    shim.run(ran[:1], last=1)
    assert counts[-1] == 3 and not counts[:-1].any()
    counts[5:9] = 1
    shim.run(ran[1:2])
    assert count[0] == 7 and counts[[0, 5, 6, 9, -1]].tolist() == [0, 0, 1, 4, 4]
    counts[-1] = 0  # as if this were all: there is room for two
    shim.run(ran[2:], last=1)
    assert indices.tolist() == [n - 2000, n - 7]


def test_launches_refuse_what_cannot_be() -> None:
    zfp = CodecLaunches(("zfp", 32, 0), "float32")
    assert zfp.encode(0, 8, 1.0, [], 16) == zfp.decode(0, 8, 1.0, [], 16) == []
    with pytest.raises(errors.InvalidArgument, match="nothing to sum"):
        zfp.encode(4, 0, 1.0, [], 16)
    with pytest.raises(errors.InvalidArgument, match="17 wires needs scratch memory"):
        zfp.decode(4, 8, 1.0, [16] * 17, 16)
    assert (zfp.scratch_nbytes(10, 16), zfp.scratch_nbytes(10, 17)) == (0, 40)
    with pytest.raises(ValueError, match="bits per block must be in"):
        CodecLaunches(("zfp", 8, 0), "float32")
    with pytest.raises(ValueError, match="block must be a multiple of 8"):
        CodecLaunches(("minmax", 8, 12), "float32")


# ---- races ----


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("sanitized") / "shim.so"
    cuda_shim.build(library, "-fsanitize=thread", "-g1", "-DCOMPCOLL_TYPES=1")
    return library


def under_thread_sanitizer(library: Path, dropped_line: int) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, timeout=20)
    sanitizer = Path(found.stdout.strip())
    assert sanitizer.is_absolute(), "g++ has no ThreadSanitizer"
    environment = {**os.environ, "LD_PRELOAD": str(sanitizer), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [sys.executable, cuda_shim.__file__, str(library), str(dropped_line)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)


def test_no_races(sanitized: Path) -> None:
    ran = under_thread_sanitizer(sanitized, 0)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("header", "line"), BARRIERS)
def test_every_barrier_is_needed(header: str, line: int, sanitized: Path) -> None:
    """The proof that races are found: without a barrier there is one."""
    assert len(BARRIERS) == 5 == len(dict(reversed(barrier) for barrier in BARRIERS))
    ran = under_thread_sanitizer(sanitized, line)
    assert ran.returncode == 66 and "ThreadSanitizer: data race" in ran.stderr, ran.stderr
    assert header in ran.stderr
