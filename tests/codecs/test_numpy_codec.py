"""Codecs of two NumPy methods: all that the library does around them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes.deferred import DeferredWorld
from fakes.deferred_checks import check_losses_are_fed_back
from fakes.loopback import World, exact_sum, normals
from promises import ALGORITHMS, DTYPES, Case, check_codec

import compcoll
from compcoll import ErrorFeedback, NumpyCodec
from compcoll.codecs.base import ErrorBound
from compcoll.errors import CodecError, CollectiveFailed, WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions

Values = np.ndarray
HOST = HostDevice()


@dataclass(frozen=True)
class Half(NumpyCodec):
    """Wires of one length."""

    name: ClassVar[str] = "half"

    def encode(self, x: Values, rng: np.random.Generator) -> bytes:
        return x.astype(np.float16).tobytes()

    def decode(self, wire: bytes, n: int, dtype: np.dtype[Any]) -> Values:
        return np.frombuffer(wire, np.float16)

    def error_bound(self, dtype: str) -> ErrorBound:
        return ErrorBound(1, 2.0**-11, absolute=2.0**-25)


@dataclass(frozen=True)
class Packed(NumpyCodec):
    """Multiples of a step, packed: the length depends on the values, and some wires would be longer than those."""

    step: float = 0.05
    name: ClassVar[str] = "packed"

    def encode(self, x: Values, rng: np.random.Generator) -> bytes:
        return zlib.compress(np.rint(x / self.step).astype(np.int32).tobytes())

    def decode(self, wire: bytes, n: int, dtype: np.dtype[Any]) -> Values:
        return np.frombuffer(zlib.decompress(wire), np.int32) * self.step

    def error_bound(self, dtype: str) -> ErrorBound:
        return ErrorBound(absolute=0.5001 * self.step)


@dataclass(frozen=True)
class Dithered(NumpyCodec):
    """Multiples of a step, rounded at random."""

    seed: int = 0
    name: ClassVar[str] = "dithered"
    stochastic = True

    def encode(self, x: Values, rng: np.random.Generator) -> bytes:
        return np.floor(x / 0.1 + rng.random(x.size)).astype(np.int16).tobytes()

    def decode(self, wire: bytes, n: int, dtype: np.dtype[Any]) -> Values:
        return np.frombuffer(wire, np.int16) * 0.1


def encoded(codec: NumpyCodec, x: Values, **how: Any) -> Values:
    coder = codec.coder(HOST, x.dtype.name)
    wire = np.zeros(coder.wire_nbytes(x.size), np.uint8)
    return wire[: coder.encode(x.size, x, (), wire, EncodeOptions(**how))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_promise(algorithm: str) -> None:
    for size, per_node, dtype in zip((2, 3, 4, 3), (1, 2, 2, 1), DTYPES):
        check_codec(Case(Half(), algorithm, 5001, dtype), World(size, ranks_per_node=per_node))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", [Half(), Packed(), Dithered()], ids=repr)
def test_sums_of_several_segments(codec: NumpyCodec, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With feedback two results and what is kept are what all ranks gave: nothing is lost."""
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")
    world, inputs = World(4, ranks_per_node=2, checksum=True), normals(4, 3001)
    kept = [ErrorFeedback() for _ in inputs]
    total = np.zeros(3001)
    for _ in range(2):
        turns = iter(kept)
        start = lambda comm, x: comm.iallreduce(x, codec=codec, algorithm=algorithm, feedback=next(turns))  # noqa: B023, E731
        results = world.run(start, inputs)
        assert len({result.tobytes() for result in results}) == 1
        assert world.comms[0].stats is not None and world.comms[0].stats.codec == repr(codec)
        total += results[0]
        lost = exact_sum([each.residual for each in kept])
        assert 0 < np.abs(lost).max() < 1
    np.testing.assert_allclose(total + lost, 2 * exact_sum(inputs), rtol=0, atol=1e-5)


def test_wires_are_of_any_length() -> None:
    codec, few, many = Packed(), np.zeros(4096, np.float32), normals(1, 5)[0]
    assert encoded(codec, few).size < 100
    assert encoded(codec, many).tobytes() == b"\1" + many.tobytes()  # zlib would write more
    assert encoded(codec, few[:0]).tobytes() == b"\1"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_author_sees_finite_values_that_cannot_be_written(dtype: str) -> None:
    seen = []

    class Seeing(Half):
        def encode(self, x: Values, rng: np.random.Generator) -> bytes:
            seen.append(x)
            return super().encode(x, rng)

    x = np.linspace(-1, 1, 9).astype(dtype)
    encoded(Seeing(), x)
    odd = np.append(x, np.nan).astype(dtype)
    np.testing.assert_array_equal(compcoll.decode(compcoll.encode(odd, Seeing()), 10, dtype, codec=Seeing()), odd)
    (only,) = seen
    assert only.dtype == dtype and only.tolist() == x.tolist() and not only.flags.writeable and x.flags.writeable


def test_random_numbers_go_by_seed_call_rank_and_place() -> None:
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    wires = [
        encoded(Dithered(seed), x, rng_counter=rng_counter, position=place).tobytes()
        for seed in (0, 1)
        for rng_counter in (0, 1 << 32)
        for place in (0, 4096)
    ]
    assert len(set(wires)) == 8
    assert encoded(Dithered(), x).tobytes() == wires[0]
    got = np.mean(
        [
            compcoll.decode(encoded(Dithered(), x, rng_counter=rng_counter), 500, "f4", codec=Dithered())
            for rng_counter in range(400)
        ],
        0,
    )
    assert np.abs(got - x).max() < 0.02  # without bias: 0.05 / 20 is the deviation


@pytest.mark.parametrize(
    ("method", "result", "said"),
    [
        ("encode", np.zeros(3), "encode returned ndarray: return bytes"),
        ("decode", np.zeros(3), r"decode returned an array of float64 of shape \(3,\): for n=4, return real .*\(4,\)"),
        ("decode", np.zeros(4, complex), "decode returned an array of complex128"),
        ("decode", 1.5, r"of shape \(\)"),
    ],
)
def test_what_an_author_returns_is_looked_at(method: str, result: Any, said: str) -> None:
    codec = type("Odd", (Half,), {method: lambda *_: result})()
    with pytest.raises(CodecError, match=said):
        compcoll.decode(compcoll.encode(np.ones(4, np.float32), codec), 4, "f4", codec=codec)


def test_an_authors_error_names_rank_and_call() -> None:
    class Failing(Half):
        def encode(self, x: Values, rng: np.random.Generator) -> bytes:
            raise ZeroDivisionError("no step")

    with pytest.raises(CollectiveFailed, match=r"rank 0, allreduce.*ZeroDivisionError: no step") as raised:
        World(2).allreduce(normals(2, 100), codec=Failing(), algorithm="ring")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("wire", [b"", b"\2abcdefgh", b"\1abc"])
def test_wires_that_no_encoder_writes(wire: bytes) -> None:
    out = np.full(2, 7, np.float32)
    with pytest.raises(WireCorrupted, match=f"{len(wire)} bytes for 2 values"):
        Half().coder(HOST, "float32").decode(2, None, (np.frombuffer(wire, np.uint8),), out)
    assert out.tolist() == [7, 7]


def test_arrays_on_a_device_go_through_the_host() -> None:
    check_losses_are_fed_back(World(3), DeferredWorld(3, direct=False), 500, codec=Packed(), algorithm="ring")
