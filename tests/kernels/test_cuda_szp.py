"""The CUDA kernels of szp, run on the CPU, against the host's kernels, which have tests of their own."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from fakes.cuda_shim import Shim, ShimDevice
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from oracles.device_values import DTYPES, KINDS, bits, memory, untouched_around, values_of
from properties import examples

from compcoll import SZP, errors
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.host.szp import _warn_that_nothing_is_saved

SIZES = [0, 1, 15, 16, 17, 511, 512, 513, 700, 1024, 1500, 2300]
CODECS = [SZP(), *(SZP(tolerance=tolerance) for tolerance in (0.3, 1e-3, 1e-6, 1e-30, 1e-308))]


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_same_bytes_as_on_the_host(shim: Shim, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    codec, ranks = data.draw(st.sampled_from(CODECS), "codec"), data.draw(st.sampled_from([1, 2, 8]), "ranks")
    n, kind = data.draw(st.sampled_from(SIZES), "n"), data.draw(st.sampled_from(KINDS), "kind")
    wire_count = data.draw(st.sampled_from([0, 1, 1, 2, 9]), "wires")
    with_add = wire_count == 0 or data.draw(st.booleans(), "add")
    scale = data.draw(st.sampled_from([1.0, 0.25, 1 / 3]), "scale")
    feed, residual_scale = data.draw(st.sampled_from([(None, 1.0), (True, 1.0), (True, 0.7), (False, 0.5)]), "residual")
    with_decoded = data.draw(st.booleans(), "decoded")
    item, byte = data.draw(st.integers(0, 1), "item"), data.draw(st.integers(0, 7), "byte")  # off alignment
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "rng"))
    host, device = HostDevice(1), ShimDevice(shim)
    of_host: Any = codec.coder_of_sum(host, dtype, ranks)
    of_device: Any = codec.coder_of_sum(device, dtype, ranks)
    most = of_host.wire_nbytes(n)
    assert of_device.wire_nbytes(n) == most

    def stored(what: str) -> np.ndarray:
        x = host.flat(values_of(what, n, dtype, rng), dtype)
        return memory(x, item * x.itemsize)

    def empty_wire() -> np.ndarray:
        return memory(np.full(most, 0x5A, np.uint8), byte)

    x = stored(kind)
    computed = "float64" if dtype == "float64" else "float32"
    start = memory(values_of("normal", n, computed, rng), item * np.dtype(computed).itemsize)
    with np.errstate(all="ignore"):
        terms, made = [], of_host
        for _ in range(wire_count):
            wire = empty_wire()
            length = made.encode(n, stored(data.draw(st.sampled_from(KINDS), "term")), (), wire)
            terms.append(memory(wire[:length], byte))
            if codec.tolerance is None:  # all wires of a sum have one step
                made._step = float(wire[:8].copy().view(np.float64)[0])
        made._step = of_device._step
        results = []
        for coder in (of_host, of_device):
            alone, recoded = empty_wire(), empty_wire()
            sums, decoded, residual = memory(x, item * x.itemsize), memory(x, item * x.itemsize), memory(start, 0)
            plain = coder.encode(n, x, (), alone)
            coder.decode(n, sums if with_add else None, terms, sums, scale=scale)
            how = EncodeOptions(
                residual=None if feed is None else residual,
                feed=bool(feed),
                residual_scale=residual_scale,
                decoded=decoded if with_decoded else None,
                scale=scale,
            )
            own = (decoded if with_decoded else x) if with_add else None  # encoded in place, too
            length = coder.encode(n, own, terms, recoded, how)
            assert all(untouched_around(array) for array in (alone, recoded, sums, decoded, residual))
            results.append(
                (alone[:plain], bits(sums, dtype), recoded[:length], bits(decoded, dtype), bits(residual, computed))
            )
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_sums_of_many_wires(shim: Shim) -> None:
    """More than a launch takes; some blocks are raw, whose order of additions counts."""
    n, rng, results = 1100, np.random.default_rng(0), []
    host = SZP(tolerance=1e-2).coder_of_sum(HostDevice(1), "float32", 19)
    terms = []
    for rank in range(19):
        x = rng.standard_normal(n).astype(np.float32)
        x[600:700:7] *= 1e20 if rank % 3 == 0 else 1
        wire = np.zeros(host.wire_nbytes(n), np.uint8)
        terms.append(wire[: host.encode(n, x, (), wire)])
    for coder in (host, SZP(tolerance=1e-2).coder_of_sum(ShimDevice(shim), "float32", 19)):
        wire, sums = np.zeros(host.wire_nbytes(n), np.uint8), np.zeros(n, np.float32)
        length = coder.encode(n, None, terms, wire)
        coder.decode(n, None, terms, sums)
        results.append((wire[:length], sums))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


def corrupted(n: int) -> dict[str, np.ndarray]:
    """Wires of n values that no encoder writes."""
    coder = SZP(tolerance=1e-3).coder(HostDevice(1), "float32")
    wire = np.zeros(coder.wire_nbytes(n), np.uint8)
    wire = wire[: coder.encode(n, np.random.default_rng(0).standard_normal(n).astype(np.float32), (), wire)]
    widths = 8 + 4 * -(-n // 512)
    wrong = {"step": (3, 0x77), "an impossible width": (widths, 33), "another width": (widths + 1, 32)}
    found = {"too short": wire[:-4].copy(), "too long": np.append(wire, np.zeros(4, np.uint8))}
    for what, (place, value) in wrong.items():
        found[what] = wire.copy()
        found[what][place] = value
    return found


@pytest.mark.parametrize("what", corrupted(2000))
def test_corrupted_wires(shim: Shim, what: str) -> None:
    """Decoded to NaN, and refused by a later call; encoding waits, and refuses at once."""
    n, wire = 2000, memory(corrupted(2000)[what], 0)
    coder = SZP(tolerance=1e-3).coder(ShimDevice(shim), "float32")
    out, again = memory(np.zeros(n, np.float32), 0), memory(np.zeros(coder.wire_nbytes(n), np.uint8), 0)
    coder.decode(n, None, (wire,), out)
    assert np.isnan(out).all() and untouched_around(out)
    with pytest.raises(errors.WireCorrupted, match="impossible"):
        coder.decode(n, out, (), out)
    with pytest.raises(errors.WireCorrupted, match="impossible"):
        coder.encode(n, None, (wire,), again)
    assert untouched_around(again)
    with pytest.raises(errors.WireCorrupted, match="too short"):
        coder.decode(n, None, (wire[:20],), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 9000])
def test_largest(shim: Shim, dtype: str, n: int) -> None:
    device: Any = ShimDevice(shim)
    for kind in ("normal", "specials", "tiny"):
        x = HostDevice.flat(values_of(kind, n, dtype, np.random.default_rng(n)), dtype)
        assert device.largest(x, dtype) == HostDevice(1).largest(x, dtype)


def test_a_warning_if_nothing_is_saved(shim: Shim, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    coder = SZP(tolerance=1e-9).coder(ShimDevice(shim), "float32")
    wire = np.zeros(coder.wire_nbytes(x.size), np.uint8)
    _warn_that_nothing_is_saved.cache_clear()
    with caplog.at_level(logging.WARNING, logger="compcoll"):
        coder.encode(x.size, np.full_like(x, np.nan), (), wire)
        assert not caplog.records
        coder.encode(x.size, x, (), wire)
    assert "szp saves nothing" in caplog.text
