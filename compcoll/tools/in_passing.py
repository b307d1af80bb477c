"""A profile in two or three seconds, for ranks that nobody has tuned: by it ``auto`` decides over a process group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..collectives.choose import DISSEMINATION, NATIVE, SHARED_MEMORY
from ..communicator import Communicator
from ..layout import World
from ..model.predict import DEFAULTS, RAW, Profile, Timing
from ..transports.base import Tunable
from .timing import Bar, Stopwatch
from .tune import Timed, call_of, series_of, timings_of, with_links

_FEW_SIZES, _PART = tuple(1 << power for power in (*range(12, 23, 2), *range(12, 25, 2))), 0.3
"""What is measured in passing: bytes, up to where only these count, and the part of the usual time for each."""

_NOTICED = 0.1
"""The part of the library's own time that a codec must save on the wire for what it is measured to gain to count."""

_DOUBTED = 0.75
"""The part of what is measured in passing that took at most the time that counts, of what shall replace the usual."""


def estimate(comm: Communicator, transport: Tunable, seconds: float = 3.0) -> Profile:
    """Measure links, and allreduces of a few sizes, by the library's own and compressed ones; codecs are taken to be as
    fast as by default. Collective.

    Parameters
    ----------
    comm, transport
        As of `tune`.
    seconds : float
        No measurement begins after so long.
    """
    world, watch = World.of(transport.nodes), Stopwatch(transport, seconds)
    profile = replace(with_links(DEFAULTS, transport, watch, world, _PART), source="measured in passing")
    with Bar(enabled=False) as bar:
        timings = timings_of(few_series(comm, transport, world), profile, world, watch, bar, _FEW_SIZES, _PART)
    timings = tuple(believed(each, timings, profile) for each in timings)
    return replace(profile, call=call_of(profile, timings, world), timings=timings)


def believed(timing: Timing, timings: Iterable[Timing], profile: Profile) -> Timing:
    """What is compressed takes no less than the library's own where there is little to save: what was seen then is how
    times scatter, and not the codec.
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


def few_series(comm: Communicator, transport: Tunable, world: World) -> list[Timed]:
    """List what is measured in passing: what compresses, what is about as fast without, and the library's own, in place
    and without our opening, as a group's own is called where nothing is compressed.

    A few repetitions tell little where times scatter, as on links that are faster than the cores beside them. Ours then
    count as slow as they were now and then, the library's own as fast, and of two visits ours as slow as in the worse
    one: what cannot be told apart is left to the library.
    """
    series = series_of(comm, transport, world)
    few = [each for each in series if each.codec is not None or each.algorithm in (SHARED_MEMORY, DISSEMINATION)]
    if transport.native is None:
        return few
    _, start = transport.native.reductions("allreduce", "sum")
    own = Timed(NATIVE, None, lambda x, out: start(out, out).Test(), 1 - _DOUBTED)
    return [own, *(each._replace(part=_DOUBTED) for each in few)]
