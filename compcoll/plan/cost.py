"""The cost model: predict how long a collective takes, from a few measured constants.

All functions are pure functions of a `Profile`. A message of n bytes takes Hockney's ``α + n β`` (R. W. Hockney, "The
communication challenge for MPP", Parallel Computing 20, 1994); each algorithm adds up its messages. n: bytes of a
rank's buffer; W: bytes of its wire; p: ranks; k: ranks per node; m: segments of a chunk; h and w: seconds that the
host and the wire take for a segment.

Inside a node the host copies the messages, so the time of the copies adds to that of encoding. Between nodes messages
move while values are encoded and decoded: m segments take ``m max(h, w) + min(h, w)``, where the last term fills the
pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..algorithms import ALGORITHMS
from ..algorithms.costs import Costs
from ..algorithms.record import REDUCTIONS
from ..codecs import ALL
from ..codecs.base import Speed as Speed
from ..errors import InvalidArgument
from ..layout import World

# The codec kind of uncompressed values.
RAW = "none"

# The codec kind of sparsifiers.
SPARSE = "sparse"


@dataclass(frozen=True)
class Link:
    """Latency and inverse bandwidth of a class of links.

    Parameters
    ----------
    latency : float
        Seconds of an empty message (α).
    per_byte : float
        Seconds per byte (β) in each direction, while the opposite direction is equally busy.
    """

    latency: float
    per_byte: float

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if not 0 <= number < math.inf:
                raise InvalidArgument(f"link: {name}={number!r} s must be finite and not negative")


@dataclass(frozen=True)
class Timing:
    """The measured time of an allreduce.

    Parameters
    ----------
    algorithm : str
        ``"native"`` or one of our own.
    codec : str
        Kind of codec.
    bits : float
        Bits of a float32 value on the wire.
    world : World
        The ranks that took part.
    points : tuple of (int, float)
        Buffer sizes in bytes, with the measured seconds.
    """

    algorithm: str
    codec: str
    bits: float
    world: World
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Profile:
    """The constants of the cost model: speeds of machines, network and MPI.

    Parameters
    ----------
    inside, between : Link
        Links inside a node and between nodes. The ranks of a node share ``between``.
    speeds : tuple of Speed
        Speeds of codecs and of `RAW`.
    message : float
        Host seconds for a message of our own algorithms: to send and receive it, get memory, and start a kernel.
    call : float
        Host seconds that a call takes longer with our own algorithms than with MPI's own.
    per_node : int
        Ranks that shared a node when speeds were measured; 0 if speeds do not depend on it.
    timings : tuple of Timing
        Measured times that correct the formulas.
    source : str
        Origin of the profile, for messages.
    """

    inside: Link
    between: Link
    speeds: tuple[Speed, ...]
    message: float
    call: float
    per_node: int = 0
    timings: tuple[Timing, ...] = ()
    source: str = "defaults"

    def __post_init__(self) -> None:
        for name, number in (("message", self.message), ("call", self.call)):
            if not 0 <= number < math.inf:
                raise InvalidArgument(f"profile: {name}={number!r} s must be finite and not negative")
        for speed in self.speeds:
            rates = (speed.bits, speed.encode, speed.decode, speed.accumulate, speed.recode)
            if not all(0 < rate < math.inf for rate in rates):
                raise InvalidArgument(f"profile: {speed!r}: bits and bytes per second must be positive and finite")
        if RAW not in {speed.codec for speed in self.speeds}:
            raise InvalidArgument(f"profile: no speed of {RAW!r}, which stands for uncompressed values")
        for timing in self.timings:
            if not timing.points or not all(n >= 0 and 0 < seconds < math.inf for n, seconds in timing.points):
                raise InvalidArgument(f"profile: {timing.algorithm}: points={timing.points!r} need positive seconds")
        if self.per_node < 0:
            raise InvalidArgument(f"profile: per_node={self.per_node!r} must not be negative")

    def speed(self, codec: str, bits: float) -> Speed:
        """Return the most similar known speed: that of the same codec kind with the nearest bits.

        If the kind was not measured, the codec's default is returned, or else the slowest speed.
        """
        for speeds in (self.speeds, _USUAL):
            if alike := [speed for speed in speeds if speed.codec == codec]:
                return min(alike, key=lambda speed: abs(speed.bits - bits))
        return min(self.speeds, key=lambda speed: speed.recode)

    def measured(self, world: World, algorithm: str | None = None) -> bool:
        """Return whether an uncompressed algorithm was timed on ranks placed like these.

        By default, any algorithm will do, compressed or not, but for MPI's own.
        """
        of_world = [timing for timing in self.timings if timing.world == world]
        if algorithm is None:
            return any(timing.algorithm != "native" for timing in of_world)
        return any(timing.algorithm == algorithm and timing.codec == RAW for timing in of_world)


# Default speeds of codecs.
_USUAL = tuple(speed for codec in ALL for speed in codec.speeds)


class WireFormat(NamedTuple):
    """The format of values on the wire.

    Attributes
    ----------
    codec : str
        Kind of codec.
    bits : float
        Bits of a value on the wire.
    itemsize : int
        Bytes of a value.
    """

    codec: str = RAW
    bits: float = 32.0
    itemsize: int = 4

    @property
    def ratio(self) -> float:
        """The compression ratio: bytes of a value over those of its wire."""
        return 8 * self.itemsize / self.bits


def raw(itemsize: int = 4) -> WireFormat:
    """Return the wire format of uncompressed values."""
    return WireFormat(RAW, 8.0 * itemsize, itemsize)


def predict(
    profile: Profile,
    collective: str,
    algorithm: str,
    nbytes: int,
    world: World,
    wire: WireFormat,
    segment: int = 1 << 20,
) -> float:
    """Predict the seconds that a collective takes.

    If the algorithm was measured, the formula's time is multiplied by the ratio of measured to computed time. The
    measurement must be from an equal `World`; for MPI's own, it is the one from the most similar world.

    Parameters
    ----------
    profile : Profile
        The model's constants.
    collective, algorithm : str
        Such as ``"allreduce"`` and ``"ring"``.
    nbytes : int
        Bytes of a rank's buffer, uncompressed.
    world : World
        The ranks.
    wire : WireFormat
        Format of the values on the wire; ``"native"`` sends them uncompressed.
    segment : int
        Uncompressed bytes of a segment.
    """
    if nbytes < 0 or segment < 1:
        raise InvalidArgument(f"{nbytes} bytes in segments of {segment}: bytes must be 0 or more, segments 1 or more")
    if algorithm == "native":
        if wire.itemsize < 4 and collective in REDUCTIONS:
            # MPI cannot reduce halves: input and output are copied to float32, and the result back.
            copies = 3 * 4 / wire.itemsize * nbytes / profile.speed(RAW, 32.0).decode
            return copies + predict(profile, collective, algorithm, nbytes * 4 // wire.itemsize, world, raw(), segment)
        wire = raw(wire.itemsize)
    seconds = formula(profile, collective, algorithm, nbytes, world, wire, segment)
    timing = _best_timing(profile.timings, collective, algorithm, world, wire)
    if timing is None and (other := ALGORITHMS[algorithm].cost_proxy):
        timing = _best_timing(profile.timings, collective, other, world, wire)
    if timing is None or world.size == 1:
        return seconds
    known = WireFormat(timing.codec, timing.bits)
    return seconds * _interpolate(
        nbytes,
        [
            (n, measured / formula(profile, "allreduce", timing.algorithm, n, timing.world, known, segment))
            for n, measured in timing.points
        ],
    )


def formula(
    profile: Profile, collective: str, algorithm: str, nbytes: int, world: World, wire: WireFormat, segment: int
) -> float:
    """Return the seconds by the algorithm's formula, handshake included."""
    if world.size == 1:
        return nbytes / profile.speed(RAW, 32.0).decode
    record, costs = ALGORITHMS[algorithm], _costs(profile, nbytes, world, wire, segment, world.per_node)
    handshake = (world.size - 1).bit_length() * (costs.latency + 0.5 * profile.message)
    return handshake + (profile.call if record.steps else 0.0) + record.cost(costs, collective)


def _costs(profile: Profile, nbytes: int, world: World, wire: WireFormat, segment: int, share: int) -> Costs:
    """Return a call's constants, in seconds per byte of the caller's values, if ``share`` ranks share a node."""

    def among(others: World, coded: bool) -> Costs:
        return _costs(profile, nbytes, others, wire if coded else raw(wire.itemsize), segment, share)

    speed = profile.speed(wire.codec, wire.bits)
    plain = profile.speed(RAW, 8.0 * wire.itemsize)
    # The ranks of a node share its cores and memory. Kernels compute on halves as float32.
    crowd = share / profile.per_node if profile.per_node else 1.0
    work = crowd * (4 / wire.itemsize if wire.itemsize < 4 else 1.0)
    alone = world.nodes == 1
    return Costs(
        n=float(nbytes),
        world=world,
        segment=segment,
        shrink=1 / wire.ratio,
        encode=work / speed.encode,
        decode=work / speed.decode,
        accumulate=work / speed.accumulate,
        recode=work / speed.recode,
        add=crowd / plain.accumulate,
        message=profile.message,
        latency=profile.inside.latency if alone else profile.between.latency,
        inside_latency=profile.inside.latency,
        inside=profile.inside.per_byte,
        between=0.0 if alone else profile.between.per_byte,
        among=among,
    )


def _best_timing(
    timings: Iterable[Timing], collective: str, algorithm: str, world: World, wire: WireFormat
) -> Timing | None:
    if collective != "allreduce":
        return None
    fitting = [t for t in timings if t.algorithm == algorithm and (t.codec == RAW) == (wire.codec == RAW)]
    if algorithm != "native":
        fitting = [timing for timing in fitting if timing.world == world]
    fitting = [timing for timing in fitting if (timing.world.nodes == 1) == (world.nodes == 1)]
    return min(fitting, key=lambda t: (t.world != world, abs(t.world.size - world.size)), default=None)


def _interpolate(nbytes: int, factors: list[tuple[int, float]]) -> float:
    """Interpolate factors linearly in logarithms; outside the measured sizes, the nearest factor holds."""
    sizes, values = np.log(np.maximum(np.array(sorted(factors), float).T, [[1], [0]]))
    return float(np.exp(np.interp(math.log(max(nbytes, 1)), sizes, values)))


# The profile if nothing was measured: shared memory inside a node, TCP at 10 Gb/s between nodes.
DEFAULTS = Profile(
    # Codec speeds are of a core with AVX2.
    inside=Link(latency=1e-6, per_byte=1 / 5e9),
    between=Link(latency=20e-6, per_byte=8 / 10e9),
    speeds=(
        Speed(RAW, 32, 10e9, 10e9, 8e9, 6e9),
        *_USUAL,
        Speed(SPARSE, 0.64, 4e9, 4e9, 3e9, 2e9),
    ),
    message=4e-6,
    call=10e-6,
)

# Allreduce times with Intel MPI 2021.18 by bytes, divided by those of `shared_memory`: two ranks, one AMD EPYC node.
_INTEL = {
    "native": (
        *((1 << 12, 1.05), (1 << 13, 0.95), (1 << 14, 0.85), (1 << 15, 0.7), (1 << 16, 0.6)),
        *((1 << 19, 0.7), (1 << 20, 1.1)),
    ),
    "dissemination": ((1 << 10, 0.8), (1 << 12, 0.95), (1 << 13, 1.05), (1 << 14, 1.2), (1 << 15, 1.4)),
}


@lru_cache(maxsize=8)
def defaults_of(mpi: str) -> Profile:
    """Return the default profile for an MPI library.

    It has timings if the library is known to be faster inside a node than the cost model's formula.
    """
    if not mpi.startswith("Intel"):
        return DEFAULTS
    pair = World(2, 2)

    def seconds(nbytes: int) -> float:
        return predict(DEFAULTS, "allreduce", "shared_memory", nbytes, pair, raw())

    return replace(
        DEFAULTS,
        timings=tuple(
            Timing(algorithm, RAW, 32.0, pair, tuple((n, times * seconds(n)) for n, times in points))
            for algorithm, points in _INTEL.items()
        ),
    )
