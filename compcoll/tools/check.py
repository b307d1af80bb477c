"""`check_codec`: test everything about a codec that collectives rely on, with ranks in this process and without MPI."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..algorithms import ALGORITHMS
from ..algorithms.record import REDUCTIONS
from ..codecs.base import UPDATING, Codec
from ..codecs.registry import needed_codec
from ..codecs.sparse import Sparsifier, VarianceFeedback
from ..communicator import Communicator
from ..dtypes import DTYPES, computed_on
from ..errors import CodecError, InvalidArgument, UnsupportedDType
from ..feedback import ErrorFeedback
from ..host.device import HostDevice
from ..host.encode_options import EncodeOptions
from ..plan import choose
from ..transports.loopback import Loopback

Array = npt.NDArray[Any]
Found = Iterator[str]  # descriptions of errors; none if all is right

_host = lru_cache(maxsize=1)(HostDevice)
_GUARD = np.full(64, 0xA5, np.uint8)
_WORLDS = ((2, 2), (3, 3), (4, 2))  # (ranks, ranks per node)
_LONG = 600_000  # values: more than one segment on each of two ranks


def check_codec(codec: str | Codec, **codec_options: Any) -> None:
    """Check that a codec keeps its promises to collectives, in every algorithm, on a few ranks in this process.

    The promises are the keys of ``compcoll.tools.check.PROMISES``. To check a codec with C++ kernels takes a second.

    Parameters
    ----------
    codec : str or Codec
        A codec, or its name, with or without options: ``"minmax:bits=4"``.
    **codec_options
        Options of a codec given by name.

    Raises
    ------
    CodecError
        If the codec breaks promises. The message lists them, with what was found and what is right.

    Examples
    --------
    >>> compcoll.check_codec("zfp", rate=8)
    """
    chosen = needed_codec(codec, codec_options)
    trials, refused = [], "none"
    for dtype in sorted(DTYPES, key=lambda name: name != "float32"):
        try:
            trials.append(Trial(chosen, dtype))
        except (UnsupportedDType, InvalidArgument) as error:
            refused = str(error)
    if not trials:
        raise CodecError(f"{chosen!r} takes none of {', '.join(DTYPES)}: {refused}")
    broken: dict[str, str] = {}
    with np.errstate(all="ignore"):
        for name, promise in PROMISES.items():
            for trial in trials if _applies(name, chosen) else ():
                try:
                    found = next(promise(trial), None)
                except Exception as error:  # a codec may raise any exception
                    found = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if found is not None:
                    broken[name] = f"{trial.dtype}: {found}"
                    break
    if broken:
        lines = "".join(f"\n  {name}: {text}" for name, text in broken.items())
        raise CodecError(f"{chosen!r} breaks {len(broken)} of {len(PROMISES)} promises:{lines}", broken)


def _applies(name: str, codec: Codec) -> bool:
    """Return whether a codec gives a promise."""
    return name not in (_OF_CODERS if codec.additive else _OF_VALUES if codec.needs_reference else ())


class Trial:
    """Encodes and decodes whole arrays by a codec bound to an element type. If it needs a reference, that is zeros.

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
        self.coder: Any = None if codec.additive else codec.coder(_host(), dtype)
        self.n = min(max(2 * codec.block, 256), 4096) + 3

    def normals(self, n: int, seed: int = 0) -> Array:
        return np.random.default_rng(seed).standard_normal(n).astype(self.numpy)

    def samples(self) -> dict[str, Array]:
        """Return arrays that a codec must accept, by name."""
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
        """Return the wire of an array plus decoded wires, written to memory filled with ``fill``."""
        most = self.coder.wire_nbytes(x.size)
        memory = np.concatenate([np.full(most, fill, np.uint8), _GUARD])
        if self.codec.needs_reference:
            how.setdefault("decoded", np.zeros(x.size, self.numpy))
        if "decoded" in how:
            how["decoded"] = _host().flat(how["decoded"], self.dtype)
        length = self.coder.encode(x.size, _host().flat(x, self.dtype), wires, memory[:most], EncodeOptions(**how))
        if not 0 <= length <= most or (memory[most:] != _GUARD).any():
            raise CodecError(f"encode wrote {length} bytes for {x.size} values, but wire_nbytes allows {most}")
        return memory[:length]

    def decode(
        self, n: int, *wires: Array, add: Array | None = None, out: Array | None = None, scale: float = 1.0
    ) -> Array:
        """Return the sum of an array and decoded wires."""
        out = np.full(n, 0 if self.codec.needs_reference else 7, self.numpy) if out is None else out
        flat = None if add is None else _host().flat(add, self.dtype)
        self.coder.decode(n, flat, wires, _host().flat(out, self.dtype), scale=scale)
        return out

    def once(self, x: Array) -> float:
        """Return the relative error of encoding an array once."""
        return relative(self.decode(x.size, self.encode(x)), x.astype(np.float64))

    def feedback(self, n: int) -> ErrorFeedback:
        """Return the state that a sparsifier needs for a buffer."""
        assert isinstance(self.codec, Sparsifier)
        feedback = self.codec.state()
        if isinstance(feedback, VarianceFeedback):
            feedback.observe(np.full(n, 1e-3))
        return feedback


def same(x: Array, y: Array) -> bool:
    return x.tobytes() == y.tobytes()


def relative(got: Array, exact: Array) -> float:
    """Return the root mean square of the error, relative to that of the exact values."""
    return float(np.sqrt(np.square(got.astype(np.float64).ravel() - exact).sum() / np.square(exact).sum()))


class Ranks:
    """Ranks in this process, whose collectives run with one codec.

    Parameters
    ----------
    trial : Trial
        The codec and the element type.
    size, per_node : int
        Ranks, and ranks on a node.
    """

    def __init__(self, trial: Trial, size: int, per_node: int) -> None:
        self.trial, self.size, self.nodes = trial, size, -(-size // per_node)
        self.world = Loopback(size, per_node, seed=0)
        self.comms = [Communicator(transport, codec=trial.codec) for transport in self.world.transports]

    def run(self, collective: str, algorithm: str, inputs: Sequence[Array], feedback: Sequence[Any] = ()) -> list[Any]:
        """Run a collective on all ranks, and return their results."""
        more: list[dict[str, Any]] = [{"feedback": each} for each in feedback] or [{} for _ in inputs]
        if collective == "alltoallv":
            more = [{"counts": np.diff(_uneven(x, self.size), prepend=0, append=x.size)} for x in inputs]
        if self.trial.codec.needs_reference:
            previous = np.array(inputs if collective == "allgather" else inputs[0])
            previous[..., ::50] = 0
            more = [{"out": previous.copy()} for _ in inputs]
        return self.world.run(
            getattr(comm, f"i{collective}")(x, algorithm=algorithm, **how)
            for comm, x, how in zip(self.comms, inputs, more, strict=True)
        )

    def algorithms(self, collective: str) -> list[str]:
        """Return the algorithms that accept the codec and need no MPI."""
        names = [name for name in choose.NAMES[collective] if name not in choose.BY_MPI]
        if collective == "allreduce":
            names = [name for name in names if (name in choose.SPARSE) == self.trial.sparse]
        return names

    def allowed(self, collective: str, algorithm: str, x: Array) -> float:
        """Return the allowed relative error of a result: twice the most that errors of encoding ``x`` can add up to."""
        trial, rounding = self.trial, (self.size + 2) * self.trial.rounding
        if trial.codec.additive:
            error = trial.codec.sum_error(self.size)
            return np.inf if error is None else 2 * error + rounding
        once = max(trial.once(x), trial.once(x[: x.size // self.size]))  # of a buffer, and of a chunk
        record = ALGORITHMS[algorithm]
        growth = record.growth(collective, self.size, self.nodes, once**2)
        levels = record.encodings(collective, self.size, self.nodes).levels
        return 2 * once * max(growth.independent, growth.alike) * (1 + once) ** levels + rounding


def _uneven(x: Array, ranks: int) -> Array:
    """Return where the parts of an array for all ranks but the first begin in an alltoallv: they differ in length."""
    return np.arange(1, ranks) * (x.size // ranks) - 3


def _configuration(trial: Trial) -> Found:
    codec = trial.codec
    name, text = getattr(codec, "name", None), repr(codec)
    if not isinstance(name, str) or not name:
        yield f"its name is {name!r}: give the class a name, a string"
    hash(codec)  # plans are cached by codec
    twin = dataclasses.replace(codec) if dataclasses.is_dataclass(codec) else copy.copy(codec)
    if twin != codec or hash(twin) != hash(codec) or repr(twin) != text or " at 0x" in text:
        yield f"a codec with the same options is not equal, or has the repr {twin!r}: ranks compare codecs by repr"
    if not dataclasses.is_dataclass(codec) or not type(codec).__dataclass_params__.frozen:
        yield "its options can be changed: make the class a frozen dataclass"


def _wire_size(trial: Trial) -> Found:
    coder, fixed = trial.coder, trial.codec.fixed_size
    if coder.fixed_size != fixed:
        yield f"fixed_size is {fixed} in the codec, but {coder.fixed_size} in its coder: let both be equal"
    for what, x in trial.samples().items():
        length, most = trial.encode(x).size, coder.wire_nbytes(x.size)
        if fixed and length != most:
            yield f"{what}: {length} bytes, but fixed_size is True: write all {most}, or set fixed_size to False"


def _inputs(trial: Trial) -> Found:
    x, add = trial.normals(trial.n), trial.normals(trial.n, seed=1)
    wire = trial.encode(add)
    given = [x, add, wire]
    before = [each.tobytes() for each in given]
    trial.encode(x, [wire], residual=np.zeros(x.size, trial.computed), decoded=np.empty_like(x))
    trial.decode(x.size, wire, add=add)
    for what, each, content in zip(("the values", "the values added to", "a wire"), given, before, strict=True):
        if each.tobytes() != content:
            yield f"{what} changed: write only to the wire and to out"


def _same_bytes(trial: Trial) -> Found:
    x, other = trial.normals(trial.n), trial.normals(trial.n, seed=1)
    first = trial.encode(x, rng_counter=1)
    trial.encode(other, rng_counter=2)
    if not same(first, trial.encode(x, rng_counter=1, fill=0xFF)):
        yield "the same values gave other bytes: keep no state, write all bytes, draw random numbers only from rng"
    if trial.codec.stochastic and all(
        same(first, trial.encode(x, rng_counter=rng_counter)) for rng_counter in range(2, 10)
    ):
        yield "stochastic is True, but all draws gave the same bytes: draw random numbers from rng"


def _special_values(trial: Trial) -> Found:
    for what, x in trial.samples().items():
        got, known = trial.decode(x.size, trial.encode(x)).astype(np.float64), np.isfinite(x.astype(np.float64))
        if np.isfinite(got[~known]).any():
            yield f"{what}: NaN or Inf became finite: keep it NaN or Inf"
        if "large" not in what and known.all() and not np.isfinite(got).all():
            yield f"{what}: finite values became NaN or Inf"


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
            yield f"{what}: encode must store in how.decoded the values that other ranks decode from the wire"
        if not same(wire, trial.encode(x)):
            yield f"{what}: the wire is different if how.decoded is None: write the same wire"


def _residual(trial: Trial) -> Found:
    if trial.dtype != trial.computed.name:  # 16-bit floats are rounded once more
        return
    x, kept = trial.normals(trial.n), trial.normals(trial.n, seed=1) / 8
    for feed, share in [(True, 1.0)] if trial.sparse else [(True, 1.0), (True, 0.5), (False, 0.5)]:
        residual, scale = kept.copy(), 0.5
        wire = trial.encode(x, residual=residual, feed=feed, residual_scale=share, scale=scale, rng_counter=1)
        given = x.astype(np.float64) * scale + (kept if feed else 0.0)
        right = (given - trial.decode(x.size, wire)) * share + (0.0 if feed else kept)
        if not np.allclose(residual, right, rtol=0, atol=4 * trial.rounding * float(np.abs(given).max())):
            how = f"feed={feed}, residual_scale={share}"
            yield f"{how}: how.residual must hold the encoded values minus the decoded ones, times residual_scale"
    x[trial.n // 2], residual = np.nan, kept.copy()
    trial.encode(x, residual=residual)
    if not np.isfinite(residual).all():
        yield "store 0 in how.residual if an error is NaN or Inf: it would stay there for ever"


def _sums(trial: Trial) -> Found:
    x, y, z = (trial.normals(trial.n, seed) for seed in range(3))
    if trial.codec.needs_largest:
        trial = Trial(trial.codec.for_largest(float(max(np.abs(each).max() for each in (x, y, z)))), trial.dtype)
    wires = [trial.encode(y), trial.encode(z)]
    terms = [x.astype(np.float64) * 0.5, *(trial.decode(x.size, wire).astype(np.float64) for wire in wires)]
    if trial.codec.homomorphic:  # the array is encoded, too
        terms[0] = trial.decode(x.size, trial.encode(x, scale=0.5)).astype(np.float64)
    near = 4 * trial.rounding * float(sum(np.abs(term).max() for term in terms))
    for count in (1, 2):
        right = sum(terms[: 1 + count])
        got = trial.decode(x.size, *wires[:count], add=x, scale=0.5)
        if not np.allclose(got.astype(np.float64), right, rtol=0, atol=near):
            yield f"decode must store add · scale plus {count} decoded wires"
        if not same(got, trial.decode(x.size, *wires[:count], add=(out := x.copy()), out=out, scale=0.5)):
            yield "decode gives other values if out is add: read each value before you overwrite it"
    if trial.dtype == trial.computed.name and not same(
        trial.encode(x, wires), trial.encode(trial.decode(x.size, *wires, add=x))
    ):
        yield "encode of an array and wires must write the same bytes as encode of their sum"


def _failed_decoding(trial: Trial) -> Found:
    if trial.codec.fixed_size:  # wires of another length cannot arrive
        return
    x, out = trial.normals(trial.n), np.full(trial.n, 7, trial.numpy)
    wire = trial.encode(x)
    try:
        trial.decode(x.size, wire[: wire.size // 2].copy(), out=out)
    except Exception:
        if (out != 7).any():
            yield "decode of half a wire wrote to out, then raised an error: check the wire first"


def _worlds(trial: Trial) -> list[Ranks]:
    """Return worlds of two, three, and four ranks (on two nodes); for types other than float32 only three ranks."""
    return [Ranks(trial, *world) for world in (_WORLDS if trial.dtype == "float32" else _WORLDS[1:2])]


def _allreduce(trial: Trial) -> Found:
    for ranks in _worlds(trial):
        inputs = [trial.normals(trial.n, seed) for seed in range(ranks.size)]
        for algorithm in ranks.algorithms("allreduce"):
            feedback = [trial.feedback(trial.n) for _ in inputs] if trial.sparse else []
            yield from _compared(ranks, "allreduce", algorithm, inputs, feedback)


def _long_buffers(trial: Trial) -> Found:
    if trial.dtype == "float32" and not trial.sparse:
        ranks = Ranks(trial, 2, 2)
        inputs = [trial.normals(_LONG, seed) for seed in range(ranks.size)]
        for algorithm in ranks.algorithms("allreduce")[:1]:
            yield from _compared(ranks, "allreduce", algorithm, inputs)


def _other_collectives(trial: Trial) -> Found:
    for ranks in [] if trial.codec.additive else _worlds(trial)[-1:]:
        for collective in UPDATING if trial.codec.needs_reference else choose.NAMES:
            n = [ranks.size * trial.n] * ranks.size
            if collective == "allgatherv":
                n = [trial.n + 5 * rank for rank in range(ranks.size)]
            inputs = [trial.normals(length, seed) for seed, length in enumerate(n)]
            for algorithm in ranks.algorithms(collective) if collective != "allreduce" else ():
                yield from _compared(ranks, collective, algorithm, inputs)


def _compared(
    ranks: Ranks, collective: str, algorithm: str, inputs: Sequence[Array], feedback: Sequence[Any] = ()
) -> Found:
    """Compare a collective's results with the exact ones, and with each other if all ranks must get the same result."""
    before = [x.tobytes() for x in inputs]
    results = ranks.run(collective, algorithm, inputs, feedback)
    case = f"{collective} of {inputs[0].size} values by {algorithm} on {ranks.size} ranks"
    got = [result for result in results if result is not None]
    alike = collective not in ("reduce_scatter", "scatter", "alltoall", "alltoallv")
    if alike and any(not same(result, got[0]) for result in got):
        yield f"{case}: ranks have different bits: how.decoded must hold what other ranks decode"
    if any(x.tobytes() != content for x, content in zip(inputs, before, strict=True)):
        yield f"{case}: the input changed"
    if ranks.trial.sparse and collective == "allreduce":  # values not sent stay in ``feedback``
        return
    allowed = ranks.allowed(collective, algorithm, inputs[0])
    exact = _exact(collective, [x.astype(np.float64) for x in inputs])
    error = max(relative(result, right) for result, right in zip(results, exact, strict=True) if result is not None)
    if not error <= allowed:
        yield f"{case}: the relative error is {error:.2g}, but the error of one encoding allows only {allowed:.2g}"


def _exact(collective: str, inputs: Sequence[Array]) -> Sequence[Array]:
    """Return all ranks' exact results of a collective, whose root is rank 0."""
    ranks = len(inputs)
    if collective == "alltoallv":
        parts = zip(*(np.split(x, _uneven(x, ranks)) for x in inputs), strict=True)
        return [np.concatenate(part) for part in parts]
    if collective == "scatter":
        return np.split(inputs[0], ranks)
    if collective == "alltoall":
        return [np.concatenate(parts) for parts in zip(*(np.split(x, ranks) for x in inputs), strict=True)]
    if collective == "reduce_scatter":
        return np.split(np.sum(inputs, axis=0), ranks)
    if collective in REDUCTIONS:
        return [np.sum(inputs, axis=0)] * ranks
    return [inputs[0] if collective == "bcast" else np.concatenate(inputs)] * ranks


def _error_feedback(trial: Trial) -> Found:
    codec = trial.codec
    if trial.dtype != "float32" or not codec.feedback_converges(trial.dtype):
        return
    if isinstance(codec, Sparsifier) and codec.state is not ErrorFeedback:  # its state holds more than residuals
        return
    for ranks in _worlds(trial):
        quantizer = codec.quantizer(_host(), trial.dtype, ranks.size)
        if quantizer is not None and not quantizer.feedback:
            return
        inputs = [trial.normals(trial.n, seed) for seed in range(ranks.size)]
        exact, largest = np.sum(inputs, axis=0, dtype=np.float64), float(np.sum(np.abs(inputs), axis=0).max())
        for algorithm in ranks.algorithms("allreduce"):
            kept = [ErrorFeedback() for _ in inputs]
            total = sum(ranks.run("allreduce", algorithm, inputs, kept)[0].astype(np.float64) for _ in range(2))
            off = total + sum(each.residual for each in kept if each.residual is not None) - 2 * exact
            if not float(np.abs(off).max()) <= 64 * trial.rounding * largest:
                case = f"two allreduces by {algorithm} on {ranks.size} ranks"
                yield f"{case}: the sum of results and residuals is {np.abs(off).max():.2g} off the exact sum"


def _by_name(*promises: Callable[[Trial], Found]) -> dict[str, Callable[[Trial], Found]]:
    return {promise.__name__.strip("_").replace("_", " "): promise for promise in promises}


_OF_CODERS = _by_name(
    _wire_size,
    _inputs,
    _same_bytes,
    _decoding,
    _special_values,
    _decoded_copy,
    _residual,
    _sums,
    _failed_decoding,
)
# Those of codecs that encode values alone, and add.
_OF_VALUES = _by_name(_inputs, _decoding, _decoded_copy, _residual, _sums, _allreduce, _long_buffers, _error_feedback)
# The tests of a codec's promises, by name. Those of coders do not apply to additive codecs, which have no coder.
PROMISES: Mapping[str, Callable[[Trial], Found]] = {
    **_by_name(_configuration),
    **_OF_CODERS,
    **_by_name(_allreduce, _long_buffers, _error_feedback, _other_collectives),
}
