"""What collectives rely on in a coder, and so in a codec: one promise after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codecs.base import Codec
from ..codecs.sparse import Sparsifier, VarianceFeedback
from ..devices.encode_options import EncodeOptions
from ..devices.host import HostDevice
from ..dtypes import DTYPES, computed_on
from ..errors import CodecError
from ..feedback import ErrorFeedback

Array = npt.NDArray[Any]
Found = Iterator[str]
"""What is wrong, in words; nothing if all is right."""

HOST = HostDevice()
_GUARD = np.full(64, 0xA5, np.uint8)


class Trial:
    """A codec bound to an element type, for whole arrays.

    Parameters
    ----------
    codec : Codec
        The codec.
    dtype : str
        The element type.
    """

    def __init__(self, codec: Codec, dtype: str) -> None:
        self.codec, self.dtype = codec, dtype
        self.numpy, self.computed = DTYPES[dtype].numpy, computed_on(dtype).numpy
        self.rounding = 2 * DTYPES[dtype].rounding
        self.sparse = isinstance(codec, Sparsifier)
        self.coder: Any = None if codec.additive else codec.coder(HOST, dtype)
        self.n = min(max(2 * codec.block, 256), 4096) + 3

    def normals(self, n: int, seed: int = 0) -> Array:
        return np.random.default_rng(seed).standard_normal(n).astype(self.numpy)

    def samples(self) -> dict[str, Array]:
        """Arrays that a codec must take, by what they are."""
        n, numpy = self.n, self.numpy
        largest = 6e4 if self.dtype == "float16" else float(np.finfo(np.float32).max)
        found = {f"{length} values": self.normals(length) for length in (0, 1, 7, n)}
        found["zeros"] = np.zeros(n, numpy)
        found["subnormal values"] = (8 * DTYPES[self.dtype].smallest * self.normals(n).astype(float)).astype(numpy)
        found["large values"] = (largest / 8 * np.sign(self.normals(n).astype(float))).astype(numpy)
        for what, value in (("NaN", np.nan), ("Inf", np.inf)):
            found[f"values with {what}"] = self.normals(n)
            found[f"values with {what}"][n // 2] = value
        return found

    def encode(self, x: Array, wires: Sequence[Array] = (), *, fill: int = 0, **how: Any) -> Array:
        """The wire of an array plus the decoded wires, in memory that held ``fill`` before."""
        most = self.coder.wire_nbytes(x.size)
        memory = np.concatenate([np.full(most, fill, np.uint8), _GUARD])
        if "decoded" in how:
            how["decoded"] = HOST.flat(how["decoded"], self.dtype)
        length = self.coder.encode(x.size, HOST.flat(x, self.dtype), wires, memory[:most], EncodeOptions(**how))
        if not 0 <= length <= most or (memory[most:] != _GUARD).any():
            raise CodecError(f"encode wrote {length} bytes for {x.size} values, but wire_nbytes allows {most}")
        return memory[:length]

    def decode(
        self, n: int, *wires: Array, add: Array | None = None, out: Array | None = None, scale: float = 1.0
    ) -> Array:
        """The sum of an array and decoded wires."""
        out = np.full(n, 7, self.numpy) if out is None else out
        flat = None if add is None else HOST.flat(add, self.dtype)
        self.coder.decode(n, flat, wires, HOST.flat(out, self.dtype), scale=scale)
        return out

    def once(self, x: Array) -> float:
        """The relative error of encoding an array once."""
        return relative(self.decode(x.size, self.encode(x)), x.astype(np.float64))

    def feedback(self, n: int) -> ErrorFeedback:
        """What a sparsifier keeps of a buffer."""
        assert isinstance(self.codec, Sparsifier)
        feedback = self.codec.state()
        if isinstance(feedback, VarianceFeedback):
            feedback.observe(np.full(n, 1e-3))
        return feedback


def same(x: Array, y: Array) -> bool:
    return x.tobytes() == y.tobytes()


def relative(got: Array, exact: Array) -> float:
    """Root mean square of an error, relative to that of the exact values."""
    return float(np.sqrt(np.square(got.astype(np.float64).ravel() - exact).sum() / np.square(exact).sum()))


def _wire_size(trial: Trial) -> Found:
    coder, fixed = trial.coder, trial.codec.fixed_size
    if coder.fixed_size != fixed:
        yield f"fixed_size is {fixed} of the codec and {coder.fixed_size} of its coder"
    for what, x in trial.samples().items():
        length, most = trial.encode(x).size, coder.wire_nbytes(x.size)
        if fixed and length != most:
            yield f"{what}: {length} bytes, but fixed_size is True: write all {most}, or let it be False"


def _inputs(trial: Trial) -> Found:
    x, add = trial.normals(trial.n), trial.normals(trial.n, seed=1)
    wire = trial.encode(add)
    given = [x, add, wire]
    before = [each.tobytes() for each in given]
    trial.encode(x, [wire], residual=np.zeros(x.size, trial.computed), decoded=np.empty_like(x))
    trial.decode(x.size, wire, add=add)
    for what, each, content in zip(("the values", "the values added to", "a wire"), given, before, strict=True):
        if each.tobytes() != content:
            yield f"{what} changed: write to the wire and to out alone"


def _same_bytes(trial: Trial) -> Found:
    x, other = trial.normals(trial.n), trial.normals(trial.n, seed=1)
    first = trial.encode(x, draw=1)
    trial.encode(other, draw=2)
    if not same(first, trial.encode(x, draw=1, fill=0xFF)):
        yield "the same values gave other bytes: keep no state, write all bytes, draw random numbers from rng alone"
    if trial.codec.stochastic and all(same(first, trial.encode(x, draw=draw)) for draw in range(2, 10)):
        yield "stochastic is True, but all draws gave the same bytes: draw random numbers from rng"


def _special_values(trial: Trial) -> Found:
    for what, x in trial.samples().items():
        got, known = trial.decode(x.size, trial.encode(x)).astype(np.float64), np.isfinite(x.astype(np.float64))
        if np.isfinite(got[~known]).any():
            yield f"{what}: decoded to a finite value"
        if "large" not in what and known.all() and not np.isfinite(got).all():
            yield f"{what}: decoded to NaN or Inf"


def _decoding(trial: Trial) -> Found:
    for what, x in trial.samples().items():
        wire = trial.encode(x)
        got, again = trial.decode(x.size, wire), trial.decode(x.size, wire.copy(), out=np.full(x.size, -1, trial.numpy))
        if not same(got, again):
            yield f"{what}: decoding twice gave different values: store all values, keep no state"


def _decoded_copy(trial: Trial) -> Found:
    for what, x in trial.samples().items():
        decoded = np.full_like(x, 7)
        wire = trial.encode(x, decoded=decoded)
        if not same(decoded, trial.decode(x.size, wire)):
            yield f"{what}: encode must store in how.decoded what decode makes of the wire, on which other ranks go on"
        if not same(wire, trial.encode(x)):
            yield f"{what}: the wire depends on whether decoded values are asked for"


def _residual(trial: Trial) -> Found:
    if trial.dtype != trial.computed.name:  # halves are rounded once more
        return
    x, kept = trial.normals(trial.n), trial.normals(trial.n, seed=1) / 8
    for feed, share in [(True, 1.0)] if trial.sparse else [(True, 1.0), (True, 0.5), (False, 0.5)]:
        residual, scale = kept.copy(), 0.5
        wire = trial.encode(x, residual=residual, feed=feed, residual_scale=share, scale=scale, draw=1)
        given = x.astype(np.float64) * scale + (kept if feed else 0.0)
        right = (given - trial.decode(x.size, wire)) * share + (0.0 if feed else kept)
        if not np.allclose(residual, right, rtol=0, atol=4 * trial.rounding * float(np.abs(given).max())):
            how = f"feed={feed}, residual_scale={share}"
            yield f"{how}: how.residual must hold the encoded values less the decoded, times residual_scale"
    x[trial.n // 2], residual = np.nan, kept.copy()
    trial.encode(x, residual=residual)
    if not np.isfinite(residual).all():
        yield "a loss that is NaN or Inf must be 0 in how.residual: it would stay for ever"


def _sums(trial: Trial) -> Found:
    x, y, z = (trial.normals(trial.n, seed) for seed in range(3))
    wires = [trial.encode(y), trial.encode(z)]
    terms = [x.astype(np.float64) * 0.5, *(trial.decode(x.size, wire).astype(np.float64) for wire in wires)]
    near = 4 * trial.rounding * float(sum(np.abs(term).max() for term in terms))
    for count in (1, 2):
        right = sum(terms[: 1 + count])
        got = trial.decode(x.size, *wires[:count], add=x, scale=0.5)
        if not np.allclose(got.astype(np.float64), right, rtol=0, atol=near):
            yield f"decode must store add · scale plus {count} decoded wires"
        if not same(got, trial.decode(x.size, *wires[:count], add=(out := x.copy()), out=out, scale=0.5)):
            yield "decode gives other values where out is add"
    if trial.dtype == trial.computed.name and not same(
        trial.encode(x, wires), trial.encode(trial.decode(x.size, *wires, add=x))
    ):
        yield "encode of an array and wires must write the bytes of their sum"


def _failed_decoding(trial: Trial) -> Found:
    if trial.codec.fixed_size:  # of another length none arrives
        return
    x, out = trial.normals(trial.n), np.full(trial.n, 7, trial.numpy)
    wire = trial.encode(x)
    try:
        trial.decode(x.size, wire[: wire.size // 2].copy(), out=out)
    except Exception:
        if (out != 7).any():
            yield "decode of half a wire wrote to out, then raised an error: check the wire before"


Promises = Mapping[str, Callable[[Trial], Found]]

PROMISES: Promises = {
    "wire size": _wire_size,
    "inputs": _inputs,
    "same bytes": _same_bytes,
    "decoding": _decoding,
    "special values": _special_values,
    "decoded copy": _decoded_copy,
    "residual": _residual,
    "sums": _sums,
    "failed decoding": _failed_decoding,
}
"""What a coder promises, by name."""
