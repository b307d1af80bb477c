"""``python -m compcoll tune``: measure the constants of the cost model, and store them as a profile.

All ranks take part in every measurement at the same time, as in a collective. So ranks that share cores, memory or a
link measure the share that each of them gets.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import config
from ..algorithms import ALGORITHMS
from ..algorithms.dissemination import largest
from ..codecs import ZFP, Cast, Codec, MinMax
from ..codecs.registry import get_codec, list_codecs
from ..codecs.sparse import Sparsifier
from ..communicator import Communicator
from ..errors import CompcollError
from ..host.device import HostDevice
from ..layout import World
from ..pending import give_way
from ..plan.choose import ALLREDUCE, DISSEMINATION, NATIVE, SHARED_MEMORY
from ..plan.cost import DEFAULTS, RAW, Link, Profile, Speed, Timing, WireFormat, formula
from ..plan.profile import Stored, load, path_of, place_of, save
from ..plan.wire_formats import kind_of, wire_format
from ..transports.base import LibraryConnection, Wire

# Bytes of the timed allreduces, up to sizes that exceed all processor caches.
SIZES = tuple(1 << power for power in (8, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26))
# Times of allreduces of up to this many bytes scatter. Larger ones take longer than a scheduler's time slices.
SCATTERED = 1 << 22
# Bytes of the allreduces in a quick profile. Sizes whose times scatter are timed twice.
QUICK_SIZES = tuple(1 << power for power in (*range(12, 23, 2), *range(12, 25, 2)))
_QUICK_PART = 0.3  # of the usual time for each measurement
# A quick profile believes in a codec's gain only if the codec saves this part of the library's time on the links.
_NOTICED = 0.1
# A quick profile stores this quantile of our own allreduces' times, and 1 minus this quantile of the library's.
_DOUBTED = 0.75

_SEGMENT = 1 << 20
_SECONDS_EACH = 0.15  # for an algorithm and a size; half or a quarter of it for small sizes
_SMALL = 1 << 16
_TWICE = 1 << 20
_ROUNDS = 5  # fewest repetitions of a timed allreduce
_EXCHANGED = 8  # messages of an exchange, each half a segment long
_TINY = 32  # messages in flight at once, to measure the cost of a message
_SHORTEST = 1e-5  # seconds; shorter work is repeated in a row, with its code and memory in caches
_MOST = 200  # repetitions at most

DESCRIPTION = (
    "Measures links, codecs and allreduces among its ranks, in about half a minute, and stores a profile "
    "by which auto chooses from then on. With one rank, it measures codecs only."
)
EXAMPLE = "mpirun -n 4 python -m compcoll tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="the profile's file (default: where auto looks)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="no measurement begins after this time (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure a profile and store it."""
    from ..transports.mpi import MPITransport  # starts MPI

    transport = MPITransport(timeout=config.DEFAULT_TIMEOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an unusable profile is replaced now
        comm = Communicator(transport)
    stored = tune(comm, transport, args.seconds)
    if transport.rank == 0:
        path = args.output or path_of(stored.place)
        stored = replace(stored, profile=_merged(stored, path))
        save(stored, path)
        print("\n".join([*describe(stored), f"stored in {path}"]))
    return 0


def tune(
    comm: Communicator, transport: LibraryConnection, seconds: float | None = None, *, quick: bool = False
) -> Stored:
    """Measure links, codecs and allreduces. Collective.

    Parameters
    ----------
    comm : Communicator
        The communicator of the timed allreduces, which uses ``transport``.
    transport : LibraryConnection
        The transport between the ranks.
    seconds : float, optional
        No measurement begins after this time; default 30 s, or 3 s for a quick profile.
    quick : bool
        Whether to measure only links, the library's own allreduce and a few others, for a few sizes. Codecs and hosts
        then have the default speeds.
    """
    world = World.of(transport.nodes)
    usual = 3.0 if quick else 30.0
    watch = Stopwatch(transport, usual if seconds is None else seconds)
    device = HostDevice(config.threads(transport.cores or 1.0))
    show = _show if transport.rank == 0 and not quick and sys.stderr.isatty() else lambda text: None
    profile = replace(DEFAULTS, source="quick profile")
    if not quick:
        show("codecs")
        speeds = tuple(_speed(codec, device, watch) for codec in _codecs())
        profile = replace(DEFAULTS, speeds=speeds, per_node=world.per_node, source="measured")
    if world.size > 1:
        show("links")
        part = _QUICK_PART if quick else 1.0
        profile = with_links(profile, transport, watch, world, part)
        if quick:
            series, sizes = quick_series(comm, transport, world), QUICK_SIZES
        else:
            profile = replace(profile, message=_message(transport, device, watch, _pairs([range(world.size)])))
            series = series_of(comm, transport, world)
            sizes = (*(nbytes for nbytes in SIZES if nbytes <= _TWICE), *SIZES)
        timings = timings_of(series, profile, world, watch, sizes, part, show)
        if quick:
            timings = tuple(believed(each, timings, profile) for each in timings)
        profile = replace(profile, call=call_of(profile, timings, world), timings=timings)
    show("")
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Stored(profile, place_of(transport, device.name), made)


def _show(text: str) -> None:
    """Show the next measurement in place of the terminal's last line."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def with_links(profile: Profile, transport: LibraryConnection, watch: Stopwatch, world: World, part: float) -> Profile:
    """Measure the existing links, for ``part`` of the usual time, and return the profile with them."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(transport.nodes):
        by_node.setdefault(node, []).append(rank)
    if world.per_node > 1:
        profile = replace(profile, inside=_link(transport, watch, _pairs(by_node.values()), part))
    if world.nodes > 1:
        firsts = [ranks[0] for ranks in by_node.values()]
        profile = replace(profile, between=_link(transport, watch, _pairs([firsts]), part))
    return profile


def describe(stored: Stored) -> list[str]:
    """Return printed lines that describe a stored profile."""
    profile = stored.profile
    lines = [str(stored.place)]
    for name, link in (("inside a node", profile.inside), ("between nodes", profile.between)):
        known = "" if link not in (DEFAULTS.inside, DEFAULTS.between) else "  (not measured: default)"
        lines.append(f"{name:<16} α {link.latency * 1e6:8.2f} µs   β {1e-9 / link.per_byte:8.3f} GB/s{known}")
    lines.append(f"{'our own':<16} message {profile.message * 1e6:.1f} µs, call {profile.call * 1e6:.1f} µs")
    lines.append(f"{'GB/s of a rank':<16} {'bits':>6}{'encode':>9}{'decode':>9}{'add':>9}{'recode':>9}")
    for speed in profile.speeds:
        rates = (speed.encode, speed.decode, speed.accumulate, speed.recode)
        lines.append(f"  {speed.codec:<14} {speed.bits:6.2f}" + "".join(f"{rate / 1e9:9.2f}" for rate in rates))
    worlds = sorted({(t.world.size, t.world.per_node) for t in profile.timings})
    lines += [f"allreduces timed on {size} ranks, {per_node} on a node" for size, per_node in worlds]
    return lines


def _merged(stored: Stored, path: Path) -> Profile:
    """Add timings of other numbers of ranks, from an earlier profile for the same machines."""
    new = stored.profile
    try:
        old = load(path)
    except CompcollError:
        return new
    if old.place != stored.place:
        return new
    if not new.timings:  # one rank: codecs only
        return replace(old.profile, speeds=new.speeds, per_node=new.per_node)
    worlds = {timing.world for timing in new.timings}
    kept = tuple(timing for timing in old.profile.timings if timing.world not in worlds)
    return replace(new, timings=new.timings + kept)


def _codecs() -> list[Codec | None]:
    """Return the codecs to measure: None for no codec, all with default options, and a few with other options."""
    own: list[Codec | None] = [None, ZFP(rate=16), MinMax(4), Cast("bfloat16"), ZFP(precision=16)]
    # The cost model uses `Codec.speeds` of codecs that have no coder to measure, or encode no values alone.
    codecs = [codec for codec in map(get_codec, list_codecs()) if not (codec.additive or codec.needs_reference)]
    # One sparsifier stands for all of them.
    return own + [codec for codec in codecs if codec.name == "topk" or not isinstance(codec, Sparsifier)]


def _speed(codec: Codec | None, device: HostDevice, watch: Stopwatch) -> Speed:
    """Measure a codec's speeds on buffers larger than caches. Codecs without kernels are slow: they get a small one."""
    own = codec is None or codec.fixed_size or codec.homomorphic
    n, parts = (_SEGMENT // 4, 8) if own else (1 << 14, 1)
    values = np.random.default_rng(0).standard_normal(n * parts).astype(np.float32).reshape(parts, n)
    coder = (codec or Cast("float32")).for_largest(float(np.abs(values).max())).coder(device, "float32")
    out, target = np.empty_like(values), device.empty_bytes(coder.wire_nbytes(n))
    wires = [device.empty_bytes(coder.wire_nbytes(n)) for _ in range(parts)]
    wires = [wire[: coder.encode(n, x, (), wire)] for x, wire in zip(values, wires, strict=True)]

    def rate(verb: Callable[[Any, Any, Any], Any]) -> float:
        def pass_over() -> None:
            for x, wire, o in zip(values, wires, out, strict=True):
                verb(x, wire, o)

        return values.nbytes / watch.seconds(pass_over, 0.03)

    return Speed(
        kind_of(codec),
        wire_format(codec, device, "float32", 4).bits,
        encode=rate(lambda x, wire, o: coder.encode(n, x, (), target)),
        decode=rate(lambda x, wire, o: coder.decode(n, None, (wire,), o)),
        accumulate=rate(lambda x, wire, o: coder.decode(n, x, (wire,), o)),
        recode=rate(lambda x, wire, o: coder.encode(n, x, (wire,), target)),
    )


def _pairs(groups: Iterable[Iterable[int]]) -> dict[int, int]:
    """Pair the ranks within each group; a last odd rank has no partner."""
    found: dict[int, int] = {}
    for group in groups:
        ranks = list(group)
        for first, second in zip(ranks[::2], ranks[1::2], strict=False):
            found |= {first: second, second: first}
    return found


def _complete(pending: list[Any]) -> None:
    """Wait for messages as a collective does."""
    for message in pending:
        spins = 0
        while not message.Test():
            spins += 1
            if spins > 40:
                give_way()


def _link(transport: LibraryConnection, watch: Stopwatch, partners: dict[int, int], part: float) -> Link:
    """Measure a link: latency by half a ping-pong of 8 bytes, bandwidth by equal messages in both directions."""
    partner = partners.get(transport.rank)
    tiny = Wire(memoryview(bytearray(8))), Wire(memoryview(bytearray(8)))
    size = _SEGMENT // 2
    outgoing = [Wire(np.zeros(size, np.uint8)) for _ in range(_EXCHANGED)]
    incoming = [Wire(np.zeros(size, np.uint8)) for _ in range(_EXCHANGED)]

    def ping_pong() -> None:
        if partner is None:
            return
        for sends in (transport.rank < partner, transport.rank > partner):
            _complete([transport.isend(tiny[0], partner, 0) if sends else transport.irecv(tiny[1], partner, 0)])

    def exchange() -> None:
        if partner is not None:
            pending = [transport.irecv(wire, partner, 1) for wire in incoming]
            _complete(pending + [transport.isend(wire, partner, 1) for wire in outgoing])

    latency = watch.seconds(ping_pong, 0.1 * part) / 2
    seconds = watch.seconds(exchange, 0.3 * part)
    return Link(latency, max(seconds - latency, 1e-9) / (size * _EXCHANGED))


def _message(transport: LibraryConnection, device: HostDevice, watch: Stopwatch, partners: dict[int, int]) -> float:
    """Measure the host time of one of many messages, at both ends, with the start of kernels and with waiting."""
    partner = partners.get(transport.rank)
    coder = Cast("float32").coder(device, "float32")
    x = np.zeros(16, np.float32)

    def many() -> None:
        if partner is None:
            return
        wires = [Wire(np.empty(64, np.uint8)) for _ in range(2 * _TINY)]
        arriving = [transport.irecv(wire, partner, 2) for wire in wires[:_TINY]]
        sending = []
        for wire in wires[_TINY:]:
            coder.encode(16, x, (), wire.buffer)
            sending.append(transport.isend(wire, partner, 2))
        _complete(arriving)
        for wire in wires[:_TINY]:
            coder.decode(16, None, (wire.content,), x)
        _complete(sending)

    return watch.seconds(many, 0.1) / _TINY


class Timed(NamedTuple):
    """An allreduce to time. ``run`` takes the values and the memory of the result.

    Attributes
    ----------
    part : float
        The quantile of the repetitions that is stored; large arrays use the median.
    """

    algorithm: str
    codec: Codec | None
    run: Callable[[Any, Any], object]
    part: float = 0.5

    def part_of(self, nbytes: int) -> float:
        """Return the quantile for arrays of a size."""
        return self.part if nbytes <= SCATTERED else 0.5

    def of_visits(self, *seconds: float) -> float:
        """Return the best time of several visits, or the worst if ``part`` is above the median."""
        return max(seconds) if self.part > 0.5 else min(seconds)

    @property
    def wire(self) -> WireFormat:
        """The wire format. All timed codecs send 8 bits per value."""
        return WireFormat(kind_of(self.codec), 32.0 if self.codec is None else 8.0)

    def fits(self, nbytes: int, world: World) -> bool:
        """Return whether the algorithm accepts arrays of a size. Only small arrays fit into handshake messages."""
        return self.algorithm != DISSEMINATION or nbytes / self.wire.ratio <= largest(world.size)


def series_of(comm: Communicator, transport: LibraryConnection, world: World) -> list[Timed]:
    """Return the allreduces to time on these ranks: the library's own, and ours uncompressed and with ZFP."""
    names = [name for name in ALLREDUCE if not ALGORITHMS[name].unfit(world)]
    ways: list[tuple[str, Codec | None]] = [(NATIVE, None)]
    ways += [(name, codec) for name in names for codec in (None, ZFP(rate=8))]
    if world.nodes == 1 and transport.shared is not None:
        ways.append((SHARED_MEMORY, None))
    ways.append((DISSEMINATION, None))

    def timed(algorithm: str, codec: Codec | None) -> Timed:
        return Timed(algorithm, codec, lambda x, out: comm.allreduce(x, out=out, algorithm=algorithm, codec=codec))

    return [timed(*way) for way in ways]


def quick_series(comm: Communicator, transport: LibraryConnection, world: World) -> list[Timed]:
    """Return the allreduces of a quick profile: compressed ones, fast uncompressed ones, and the library's own.

    The library's own runs in place and without our handshake, as process groups call it for uncompressed data. It must
    win if repeated timings differ too much to decide. So ours get a high quantile and the worse of two visits, and the
    library's gets a low quantile and the better visit.
    """
    series = series_of(comm, transport, world)
    few = [each for each in series if each.codec is not None or each.algorithm in (SHARED_MEMORY, DISSEMINATION)]
    if transport.native is None:
        return few
    _, start = transport.native.reductions("allreduce", "sum")
    own = Timed(NATIVE, None, lambda x, out: start(out, out).Test(), 1 - _DOUBTED)
    return [own, *(each._replace(part=_DOUBTED) for each in few)]


def believed(timing: Timing, timings: Iterable[Timing], profile: Profile) -> Timing:
    """Raise a compressed allreduce's times to at least the library's own, for sizes where the codec can save little.

    A measured gain is only scatter there.
    """
    own = next((dict(each.points) for each in timings if each.algorithm == NATIVE), {})
    if timing.codec == RAW or not own:
        return timing
    world = timing.world
    link = profile.between if world.nodes > 1 else profile.inside
    saved = 2 * (world.size - 1) / world.size * link.per_byte * (1 - timing.bits / 32)
    points = (
        (nbytes, max(seconds, own[nbytes]) if saved * nbytes < _NOTICED * own[nbytes] else seconds)
        for nbytes, seconds in timing.points
    )
    return replace(timing, points=tuple(points))


def timings_of(
    series: Sequence[Timed],
    profile: Profile,
    world: World,
    watch: Stopwatch,
    visits: Sequence[int],
    part: float = 1.0,
    show: Callable[[str], None] = lambda text: None,
) -> tuple[Timing, ...]:
    """Time allreduces of the sizes in ``visits`` (bytes), in this order, until the stopwatch has no time left.

    Short allreduces are twice in ``visits``, since a disturbance may last longer than one visit.
    """
    points: list[dict[int, float]] = [{} for _ in series]
    # All arrays are parts of one large buffer, like gradients: huge pages show MPI at its best.
    values = np.random.default_rng(0).standard_normal(max(visits) // 4, np.float32)
    results = np.zeros_like(values)
    for index, nbytes in enumerate(visits):
        fitting = [(own, each) for own, each in zip(points, series, strict=True) if each.fits(nbytes, world)]
        expected = sum(
            formula(profile, "allreduce", each.algorithm, nbytes, world, each.wire, _SEGMENT) for _, each in fitting
        )
        budget = part * _SECONDS_EACH * (1 if nbytes > _TWICE else 0.5 if nbytes > _SMALL else 0.25) * len(fitting)
        if index and not watch.affords(max(budget, _ROUNDS * expected)):
            break
        show(f"allreduces of {nbytes} bytes, {index + 1} of {len(visits)}")
        works = [partial(each.run, values[: nbytes // 4], results[: nbytes // 4]) for _, each in fitting]
        times = watch.each(works, budget, [each.part_of(nbytes) for _, each in fitting])
        for (own, each), seconds in zip(fitting, times, strict=True):
            own[nbytes] = each.of_visits(seconds, own.get(nbytes, seconds))
    return tuple(
        Timing(each.algorithm, each.wire.codec, each.wire.bits, world, tuple(own.items()))
        for each, own in zip(series, points, strict=True)
        if own
    )


def call_of(profile: Profile, timings: tuple[Timing, ...], world: World) -> float:
    """Estimate the constant time of a call: the least by which a smallest allreduce takes longer than its formula."""
    own = [timing for timing in timings if timing.algorithm in ALLREDUCE]
    beyond = []
    for timing in [timing for timing in own if timing.codec == RAW] or own:
        (nbytes, seconds), wire = timing.points[0], WireFormat(timing.codec, timing.bits)
        said = formula(replace(profile, call=0.0), "allreduce", timing.algorithm, nbytes, world, wire, _SEGMENT)
        beyond.append(seconds - said)
    return max(min(beyond, default=0.0), 0.0)


class Stopwatch:
    """Times work that all ranks do together.

    Parameters
    ----------
    transport : LibraryConnection
        The transport between the ranks.
    seconds : float
        Time limit from now, in seconds.
    """

    def __init__(self, transport: LibraryConnection, seconds: float) -> None:
        self._transport = transport
        self._deadline = time.perf_counter() + seconds

    def affords(self, seconds: float) -> bool:
        """Return whether ``seconds`` are left. Collective."""
        return self._transport.broadcast(lambda: time.perf_counter() + seconds < self._deadline)

    def seconds(self, work: Callable[[], Any], budget: float) -> float:
        """Measure a single function, as `each` does. Collective."""
        return self.each([work], budget)[0]

    def each(
        self, works: Sequence[Callable[[], Any]], budget: float, parts: Sequence[float] | None = None
    ) -> list[float]:
        """Time functions. Return for each the median, over repetitions, of the slowest rank's time. Collective.

        The functions run alternately, in a new random order for each repetition, so that none always profits from what
        the same predecessor left in caches.

        Parameters
        ----------
        works : sequence of callable
            The functions. Each also runs once before it is timed.
        budget : float
            Seconds for all functions together. Each is repeated at least three times.
        parts : sequence of float, optional
            For each function, the quantile to return instead of the median.
        """
        for work in works:
            work()
        once = self._slowest([self._once(work, 1) for work in works])
        rows = [max(int(_SHORTEST / max(seconds, 1e-9)), 1) for seconds in once]
        turn = sum(max(seconds, _SHORTEST) for seconds in once)
        repetitions = min(max(int(budget / turn), 3), _MOST)
        draws, order = random.Random(0), list(range(len(works)))  # the same order on all ranks
        times: list[list[float]] = [[] for _ in works]
        for _ in range(repetitions):
            draws.shuffle(order)
            for index in order:
                times[index].append(self._once(works[index], rows[index]))
        return [
            float(np.quantile(self._slowest(own), part))
            for own, part in zip(times, parts or [0.5] * len(works), strict=True)
        ]

    def _once(self, work: Callable[[], Any], row: int) -> float:
        self._transport.barrier()
        started = time.perf_counter()
        for _ in range(row):
            work()
        return (time.perf_counter() - started) / row

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Return the longest time of any rank for each repetition."""
        every: list[list[float]] = self._transport.gather(lambda: seconds)
        return [max(same) for same in zip(*every, strict=True)]
