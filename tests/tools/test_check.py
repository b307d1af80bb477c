"""`check_codec`: codecs of compcoll's own keep every promise, and each promise that is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from promises import EVERY, one_of_each

import compcoll
from compcoll import Codec
from compcoll.codecs.base import Coder, Device
from compcoll.codecs.numpy_codec import NumpyCoder
from compcoll.errors import CodecError, UnsupportedDType
from compcoll.host.encode_options import PLAIN, EncodeOptions
from compcoll.tools.check import PROMISES

FEW = one_of_each(EVERY)


@pytest.mark.parametrize(
    "codec", [pytest.param(codec, marks=() if codec in FEW else pytest.mark.slow) for codec in EVERY], ids=repr
)
def test_every_codec_keeps_its_promises(codec: Codec) -> None:
    compcoll.check_codec(codec)


class Sound(NumpyCoder):
    """Halves: the coder in which one thing at a time is put wrong."""

    def __init__(self) -> None:
        super().__init__(
            "float32",
            lambda x, how: x.astype("f2").tobytes(),
            lambda wire, n, dtype: np.frombuffer(wire, "f2").astype(dtype),
        )


@dataclass(frozen=True)
class Tried(Codec):
    """The codec of a coder."""

    coder_class: type[NumpyCoder] = Sound
    name: ClassVar[str] = "tried"
    fixed_size = False

    def coder(self, device: Device, dtype: str) -> Coder:
        if dtype != "float32":
            raise UnsupportedDType(dtype)
        return self.coder_class()


class Anonymous(Tried):
    __repr__ = object.__repr__


class FixedSize(Tried):
    fixed_size = True


class Random(Sound):
    def _write(self, values: Any, wire: Any, how: EncodeOptions) -> int:
        noise = np.random.default_rng().standard_normal(values.size).astype("f4")
        return super()._write(values + noise / 1000, wire, how)


class Unfinished(Sound):
    def decode(self, n: int, add: Any, wires: Any, out: Any, *, scale: float = 1.0) -> None:
        last = out[-1:].copy()
        super().decode(n, add, wires, out, scale=scale)
        out[-1:] = last


class Cleaning(Sound):
    def decode(self, n: int, add: Any, wires: Any, out: Any, *, scale: float = 1.0) -> None:
        super().decode(n, add, wires, out, scale=scale)
        np.nan_to_num(out, copy=False)


class InPlace(Sound):
    def encode(self, n: int, add: Any, wires: Any, wire: Any, how: EncodeOptions = PLAIN) -> int:
        length = super().encode(n, add, wires, wire, how)
        add[:] = 0
        return length


class Forgetful(Sound):
    """A codec that encodes and decodes right, and does no more."""

    def encode(self, n: int, add: Any, wires: Any, wire: Any, how: EncodeOptions = PLAIN) -> int:
        return super().encode(n, add, wires, wire, how._replace(decoded=None))


class Unshared(Sound):
    def encode(self, n: int, add: Any, wires: Any, wire: Any, how: EncodeOptions = PLAIN) -> int:
        return super().encode(n, add, wires, wire, how._replace(residual_scale=1.0))


class Unscaled(Sound):
    def decode(self, n: int, add: Any, wires: Any, out: Any, *, scale: float = 1.0) -> None:
        super().decode(n, add, wires, out)


class Early(Sound):
    def decode(self, n: int, add: Any, wires: Any, out: Any, *, scale: float = 1.0) -> None:
        if add is None:
            out[:] = 0
        super().decode(n, add, wires, out, scale=scale)


def wrong_where(there: Callable[[int, EncodeOptions], bool]) -> type[NumpyCoder]:
    class Wrong(Sound):
        def _write(self, values: Any, wire: Any, how: EncodeOptions) -> int:
            return super()._write(values * 0.7 if there(values.size, how) else values, wire, how)

    return Wrong


class Leaking(Sound):
    def encode(self, n: int, add: Any, wires: Any, wire: Any, how: EncodeOptions = PLAIN) -> int:
        length = super().encode(n, add, wires, wire, how)
        if how.residual is not None and 7 < n < 200:
            how.residual *= 0.5
        return length


BROKEN: dict[str, Codec] = {
    "configuration": Anonymous(),
    "wire size": FixedSize(),
    "decoding": Tried(Unfinished),
    "special values": Tried(Cleaning),
    "inputs": Tried(InPlace),
    "same bytes": Tried(Random),
    "decoded copy": Tried(Forgetful),
    "residual": Tried(Unshared),
    "sums": Tried(Unscaled),
    "failed decoding": Tried(Early),
    "allreduce": Tried(wrong_where(lambda n, how: 0 < how.position < 1000)),
    "long buffers": Tried(wrong_where(lambda n, how: how.position > 100_000)),
    "error feedback": Tried(Leaking),
    "other collectives": Tried(wrong_where(lambda n, how: n == 259 + 5)),  # a part of allgatherv alone
}


def test_a_sound_codec_passes() -> None:
    compcoll.check_codec(Tried())
    assert set(BROKEN) == set(PROMISES)


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_named(promise: str) -> None:
    with pytest.raises(CodecError, match=f"\n  {promise}: float32: ") as raised:
        compcoll.check_codec(BROKEN[promise])
    assert promise in raised.value.broken
    first = list(PROMISES).index(promise)
    assert not set(raised.value.broken) & set(list(PROMISES)[:first]), "only what follows from it"


def test_what_no_type_fits_is_told() -> None:
    class Nothing(Tried):
        def coder(self, device: Device, dtype: str) -> Coder:
            raise UnsupportedDType(f"no {dtype}")

    with pytest.raises(CodecError, match="takes none of float16, bfloat16, float32, float64: no float64"):
        compcoll.check_codec(Nothing())
    with pytest.raises(compcoll.errors.InvalidArgument, match="codec=None"):
        compcoll.check_codec(None)  # type: ignore[arg-type]
