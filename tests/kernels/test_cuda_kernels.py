"""The CUDA kernels, run on the CPU, against zfpy and the host's kernels, which have tests of their own."""

from __future__ import annotations

import mmap
import platform
from typing import Any

import numpy as np
import pytest
import zfpy
from fakes.cuda_shim import Recorded, Shim, ShimDevice
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from oracles.codecs import BLOCKS, random_codecs
from oracles.device_values import DTYPES, KINDS, bits, memory, untouched_around, values_of
from promises import FIXED
from properties import examples

from compcoll import QSGD, ZFP, IntSum, Sign
from compcoll.gpu.coder import DeviceCoder
from compcoll.gpu.launches import MOST_WIRES
from compcoll.host.arrays import load
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions

SMALLEST = {"float32": 2.0**-97, "float64": 2.0**-961}

NAMES = sorted({codec.name for codec in FIXED})


@st.composite
def sizes(draw: st.DrawFn, block: int) -> int:
    around = draw(st.sampled_from([0, block, 2 * block, 1024]))
    return max(0, draw(st.sampled_from([around - 1, around, around + 1, around + 3, around + 5]) | st.integers(0, 600)))


@pytest.mark.parametrize("name", NAMES)
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_same_bytes_as_on_the_host(name: str, shim: Shim, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    codec = data.draw(random_codecs(name, dtype), "codec")
    n = data.draw(sizes(codec.block), "n")
    kind = data.draw(st.sampled_from(KINDS), "kind")
    wire_count = data.draw(st.sampled_from([0, 1, 1, 2, 5]), "wires")
    with_add = wire_count == 0 or data.draw(st.booleans(), "add")
    scale = data.draw(st.sampled_from([1.0, 1.0, 0.25, 1 / 3]), "scale")
    feed, residual_scale = data.draw(st.sampled_from([(None, 1.0), (True, 1.0), (True, 0.7), (False, 0.5)]), "residual")
    with_decoded = data.draw(st.booleans(), "decoded")
    counted = {
        "rng_counter": data.draw(st.integers(0, 2**64 - 1), "draw"),
        "position": 8 * data.draw(st.integers(0, 2**50)),
    }
    aligned = data.draw(st.booleans(), "aligned")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "rng"))

    host, device = HostDevice(1), ShimDevice(shim)
    on_host, on_device = codec.coder(host, dtype), codec.coder(device, dtype)
    nbytes = on_host.wire_nbytes(n)
    assert on_device.wire_nbytes(n) == nbytes
    computed = np.float64 if dtype == "float64" else np.float32
    item = 0 if aligned else 1  # elements off alignment; wires other than the cast codec's, bytes
    byte = 0 if aligned else 8 if name == "cast" else data.draw(st.integers(1, 7), "byte")

    def stored(what: str) -> np.ndarray:
        x = host.flat(values_of(what, n, dtype, rng), dtype)
        return memory(x, item * x.itemsize)

    def empty_wire() -> np.ndarray:
        return memory(np.full(nbytes, 0x5A, np.uint8), byte)

    x = stored(kind)
    expected, wire = empty_wire(), empty_wire()
    with np.errstate(all="ignore"):
        on_host.encode(n, x, (), expected, EncodeOptions(**counted))
        on_device.encode(n, x, (), wire, EncodeOptions(**counted))
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
                EncodeOptions(
                    residual=None if feed is None else residual,
                    feed=bool(feed),
                    residual_scale=residual_scale,
                    decoded=decoded if with_decoded else None,
                    scale=scale,
                    **counted,
                ),
            )
            results.append((recoded, decoded, residual))
    (recoded, decoded, residual), (recoded2, decoded2, residual2) = results
    computed_name = np.dtype(computed).name
    if name == "cast":  # carries which NaN it is
        wire_dtype = codec.dtype
        np.testing.assert_array_equal(bits(recoded2, wire_dtype), bits(recoded, wire_dtype))
    else:
        np.testing.assert_array_equal(recoded2, recoded)
    np.testing.assert_array_equal(bits(decoded2, dtype), bits(decoded, dtype))
    np.testing.assert_array_equal(bits(residual2, computed_name), bits(residual, computed_name))
    for array in (wire, sums[1], recoded2, decoded2, residual2):
        assert untouched_around(array)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows how to flush subnormal numbers on x86-64 only")
@pytest.mark.parametrize("name", NAMES)
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_codecs_do_not_depend_on_subnormal_arithmetic(name: str, shim: Shim, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32"]), "dtype")
    codec = data.draw(random_codecs(name, dtype), "codec")
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
        ShimDevice(shim).coder(("cast", 24, 0), "float32").decode(4, smallest[0], (), smallest[1], scale=2.0)
        assert not smallest[1].any()  # they are flushed, here in a product that a GPU's kernel makes exactly
    finally:
        shim.flush_subnormals(False)
    np.testing.assert_array_equal(wire, expected)
    # Sums keep subnormal numbers on a GPU by instructions that the stand-in lacks: ZFP decodes some to 2**-127.
    values = abs(load(out, dtype))
    kept = (values == 0) | (values >= np.finfo(np.float32).tiny)
    got_bits, out_bits = (bits(array, dtype).reshape(n, x.itemsize) for array in (got, out))
    np.testing.assert_array_equal(got_bits[kept], out_bits[kept])
    kept_or_flushed = (load(got, dtype) == 0) | (got_bits == out_bits).all(axis=1)
    assert kept_or_flushed.all()


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_numbers_that_are_added_are_the_hosts(shim: Shim, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(BLOCKS), "block")
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
        bound = codec.quantizer(device, dtype, ranks)
        add = memory(x, 0)
        residual = memory(np.full(n, 1e-5, computed), 0) if fed and isinstance(codec, IntSum) else None
        shared_scale = memory(np.full(bound.shared_scale(n), 7, bound.shared_scale_dtype), 0)
        numbers = memory(np.full(bound.numbers(n), 7, bound.number_dtype), 0)
        with np.errstate(all="ignore"):
            bound.survey(add, scale, residual, shared_scale)
            bound.encode(add, scale, residual, shared_scale, numbers)
            bound.decode(numbers, shared_scale, add)
        kept = np.zeros(0, computed) if residual is None else residual
        results.append((bits(shared_scale, computed), numbers, bits(kept, computed), bits(add, dtype)))
        assert all(untouched_around(array) for array in (add, shared_scale, numbers))
    for ours, hosts in zip(*results):
        np.testing.assert_array_equal(ours, hosts)


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        coder.encode(n, add, sent, wire, EncodeOptions(decoded=seen))
        coder.decode(n, add, sent, out)
        assert untouched_around(out) and untouched_around(wire) and untouched_around(seen)
        results.append((wire, seen, out))
    for ours, hosts in zip(*results):
        np.testing.assert_array_equal(ours, hosts)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
            coder.encode(n, out.copy(), wires[:count], wire, EncodeOptions(decoded=out, scale=0.5))
        np.testing.assert_array_equal(sums[1], sums[0])
        np.testing.assert_array_equal(recoded[1], recoded[0])


@pytest.mark.parametrize("begin", [6144 * (2**31 // 6144 + 1), 6144 * (2**35 // 6144 + 1)])
@pytest.mark.parametrize(
    ("kernel", "encoded_at_once"),
    [(("cast", 11, 0), 2048), (("zfp", 32, 0), 1024), (("zfp", 40, 0), 1024), (("minmax", 8, 24), 1536)],
)
def test_far_ends_of_large_buffers(kernel: tuple[str, int, int], encoded_at_once: int, begin: int, shim: Shim) -> None:
    """Memory that is only promised: the thread blocks at the end, from `begin` on, are all that runs."""
    tail = 1029
    n = begin + tail  # `begin` is at the beginning of a thread block and of a codec's block
    on_host, recorded = HostDevice(1).coder(kernel, "float32"), Recorded()
    on_device = DeviceCoder(recorded, kernel, "float32", known=False)

    def promised(nbytes: int) -> np.ndarray:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)

    x, wire = promised(4 * n).view(np.float32), promised(on_host.wire_nbytes(n))
    x[begin:] = np.random.default_rng(2).standard_normal(tail)
    on_device.encode(n, x, [], wire)
    on_device.decode(n, x, [wire], x)
    encode, decode = recorded.launches
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
