"""The self-test: codecs and collectives must give the same results here as on other machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..codecs import ALL, ZFP, Codec
from ..codecs.sparse import TopK
from ..dtypes import DTYPES
from ..errors import CompcollError
from ..host.device import HostDevice
from ..layout import World
from ..plan import choose
from ..plan.accuracy import relative_error
from .check import Trial

if TYPE_CHECKING:
    from ..communicator import Communicator

_EXAMPLES = [(cls(**example.options), example) for cls in ALL for example in cls.examples]

# Examples whose wires are the same on every machine.
CODECS: Mapping[str, Codec] = {codec.label: codec for codec, example in _EXAMPLES if example.digests}

# Codecs that call zfpy. Different versions of zfpy may write different wires for the same values.
BY_ZFPY: Mapping[str, Codec] = {codec.label: codec for codec, _ in _EXAMPLES if codec.kind == "zfpy"}

# The digest of a wire, its decoded values and the wire of a sum, for each of `CODECS` and each element type.
DIGESTS: dict[str, str] = {
    f"{codec.label}, {dtype}": digest
    for codec, example in _EXAMPLES
    for dtype, digest in zip(DTYPES, example.digests.split(), strict=False)
}

_N = 10_007


def values(dtype: str) -> npt.NDArray[Any]:
    """Return numbers of many magnitudes and both signs. Integer arithmetic makes them the same on all machines."""
    state = np.arange(1, _N + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(32)
    mantissa = (state >> np.uint64(40)).astype(np.int64) - (1 << 23)
    exponent = (state & np.uint64(7)).astype(np.int64) - 26
    made = np.ldexp(mantissa.astype(np.float64), exponent)
    made[1000:1400] = 0.0
    return made.astype(DTYPES[dtype].numpy)


def digests(device: HostDevice, codecs: Mapping[str, Codec] = CODECS) -> Iterator[tuple[str, str]]:
    """Yield the name and digest of each codec's results for `values`, and for their sum with a wire."""
    for dtype in DTYPES:
        x = device.flat(values(dtype), dtype)
        for name, codec in codecs.items():
            coder = codec.coder(device, dtype)
            wire, second = (np.empty(coder.wire_nbytes(_N), np.uint8) for _ in range(2))
            decoded = np.empty_like(x)
            wire = wire[: coder.encode(_N, x, (), wire)]
            coder.decode(_N, None, (wire,), decoded)
            second = second[: coder.encode(_N, x, (wire,), second)]
            digest = blake2b(digest_size=8)
            for part in (wire, decoded, second):
                digest.update(part.tobytes())
            yield f"{name}, {dtype}", digest.hexdigest()


def check_codecs() -> list[str]:
    """Return descriptions of the errors of codecs on this machine; none if all is right."""
    wrong = []
    for instruction_set in HostDevice.instruction_sets():
        for name, digest in digests(HostDevice(1, instruction_set)):
            if DIGESTS.get(name) != digest:
                wrong.append(f"{name} on {instruction_set}: digest {digest}, expected {DIGESTS.get(name)}")
    for name, codec in {**CODECS, **BY_ZFPY}.items():
        wrong += _check_values(name, codec)
    return wrong


def check_gpu() -> str:
    """Encode on the first GPU, and compare the wire with the host's. Return the error, or an empty string."""
    x, codec = values("float32"), ZFP(rate=8)
    host = codec.coder(HostDevice(1), "float32")
    expected = np.empty(host.wire_nbytes(_N), np.uint8)
    host.encode(_N, x, (), expected)
    try:
        from ..gpu.device import CudaDevice

        device = CudaDevice(0)
        runtime, coder = device.runtime, codec.coder(device, "float32")
        there, wire = runtime.device_bytes(x.nbytes).view(np.float32), runtime.device_bytes(expected.nbytes)
        device.from_host(x, there, runtime.launching)
        coder.encode(_N, there, (), wire)
        got = device.to_host(wire, runtime.launching)
    except Exception as error:  # CuPy's, the compiler's or the driver's: the GPU cannot be used
        return f"a kernel does not run: {type(error).__name__}: {error}"
    differ = int(np.count_nonzero(got != expected))
    return f"{differ} of {got.size} bytes of a wire differ from the host's" if differ else ""


def _check_values(name: str, codec: Codec) -> list[str]:
    """Check that decoded values are close to the encoded ones, and that NaN does not become finite."""
    trial, x = Trial(codec, "float32"), values("float32")
    error = trial.once(x)
    # Generous limits: no codec comes near them.
    lossless, small = codec.encoding_error("float32") == 0, codec.feedback_converges("float32")
    allowed = 0.0 if lossless else 0.9 if small else 4.0
    wrong = [] if error <= allowed else [f"{name}: relative error {error:.2g}, expected at most {allowed:g}"]
    x[77] = np.nan
    got = trial.decode(_N, trial.encode(x))[77]
    return wrong + [f"{name}: NaN became {got}"] * bool(np.isfinite(got))


def check_allreduce(comm: Communicator, world: World) -> list[str]:
    """Return descriptions of the errors of sums over all ranks. Collective."""
    wrong = []
    rng = np.random.default_rng(12345)
    inputs = [rng.standard_normal(50_000).astype(np.float32) for _ in range(min(comm.size, 64))]
    own = inputs[comm.rank % len(inputs)]
    counts = np.bincount(np.arange(comm.size) % len(inputs), minlength=len(inputs))
    exact = sum(count * x.astype(np.float64) for count, x in zip(counts, inputs, strict=True))
    codec = ZFP(rate=16)
    for algorithm in choose.NAMES["allreduce"]:
        # A sparsifier that sends all values is lossless.
        ways: tuple[Codec | None, ...] = (TopK(1.0),) if algorithm in choose.SPARSE else (None, codec)
        for way in ways if algorithm != choose.NATIVE else (None,):
            name = f"allreduce by {algorithm}" + ("" if way is None else f" with {way!r}")
            try:
                got = comm.allreduce(own, algorithm=algorithm, codec=way)
                digest = np.frombuffer(blake2b(got.tobytes(), digest_size=8).digest(), np.uint8).astype(np.int64)
                same = comm.allreduce(digest, op="max") == comm.allreduce(digest, op="min")
            except CompcollError as error:
                wrong.append(f"{name}: {error}")
                return wrong
            error_now = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
            expected = relative_error(way, "float32", "allreduce", algorithm, world) or 0.0
            if not error_now <= 4 * expected + 1e-5:
                wrong.append(f"{name}: relative error {error_now:.2g}, expected about {expected:.2g}")
            if not np.all(same):
                wrong.append(f"{name}: ranks got different results")
    return wrong
