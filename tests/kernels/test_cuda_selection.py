"""Selection on a GPU, its kernels run on the CPU: what the host finds, which has tests of its own."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes.cuda_shim import Shim, ShimDevice
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from oracles.device_values import KINDS, bits, memory, untouched_around, values_of
from properties import examples

from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.dtypes import DTYPES
from compcoll.gpu import launches as launches
from compcoll.gpu.programs import COMPUTED
from compcoll.gpu.selection import DeviceSelection, SelectionKernels
from compcoll.host.device import HostDevice


class AtOnce:
    """What `StagedCopies` is for, where kernels are done when they are launched."""

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
    cast = device.coder(("cast", DTYPES[dtype].precision, 0), dtype)
    return host.selection(dtype), DeviceSelection(host.selection(dtype), device.passes(dtype), cast, AtOnce())


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


MANY_PASSES = ("bisection", "trimmed")
SEVERAL = (
    *((9001, "normal", 0.01), (20_001, "smooth", 0.001), (6000, "specials", 0.02)),
    *((5000, "scales", 0.1), (5000, "constant", 0.01), (300, "normal", 0.5)),
)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("select", "cases"),
    [
        *(pytest.param(name, SEVERAL, marks=pytest.mark.slow if name in MANY_PASSES else ()) for name in SELECTORS),
        pytest.param("ldte", ((70_001, "normal", 0.01),), marks=pytest.mark.slow),
    ],
)
def test_selectors_choose_what_they_choose_on_the_host(
    shim: Shim, select: str, cases: Sequence[tuple[int, str, float]], dtype: str
) -> None:
    host, device = selections(shim, dtype)
    for n, kind, density in cases:
        x = values_of(kind, n, dtype, np.random.default_rng(n))
        k = math.ceil(density * n)
        with np.errstate(all="ignore"):
            expected = SELECTORS[select](host, x, k)
            np.testing.assert_array_equal(SELECTORS[select](device, x.view(InDevice), k), expected)


def test_selection_at_the_far_end_of_a_large_buffer(shim: Shim) -> None:
    """As above: the last tile alone, whose indices take all 32 bits."""
    ran: list[Any] = []

    class Recording(Shim):
        def __init__(self) -> None:
            pass

        def scratch(self, nbytes: int) -> int:
            assert nbytes == scratch.nbytes
            return self.address(scratch)

        def launch(self, program: Any, launches: Any) -> None:
            ran.extend(launches)

    n = (1 << 32) - 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    x = np.frombuffer(mmap.mmap(-1, 4 * n, flags=flags), np.float32)
    tiles = -(-n // launches.TILE_VALUES)
    scratch = np.frombuffer(mmap.mmap(-1, tiles * (4 + launches.TILE_VALUES // 8), flags=flags), np.uint8)
    counts = scratch[: 4 * tiles].view(np.uint32)
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
