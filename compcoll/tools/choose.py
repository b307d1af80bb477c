"""``python -m compcoll choose``: the codec and the algorithm for a buffer, a network and an error that is allowed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..collectives import choose
from ..collectives.call import Call, Setting
from ..collectives.choose import Option
from ..collectives.explanation import duration
from ..collectives.plan import make_plan
from ..devices.host import HostDevice
from ..dtypes import DTYPES
from ..errors import CompcollError, InvalidArgument
from ..layout import World
from ..model.kinds import short
from ..model.predict import DEFAULTS, Profile
from .arguments import link, parse_bytes
from .explain import profile_named, world_of

EXAMPLE = "python -m compcoll choose --bytes 100M --link 10gbit --ranks 16 --error 1e-2"


class Choice(NamedTuple):
    """The allreduce to make, and what there is beside it.

    Attributes
    ----------
    best : Option
        What ``algorithm="auto", codec="auto"`` takes.
    native : Option
        MPI's own allreduce, uncompressed.
    ways : tuple of Option
        The fastest that may be chosen of each codec, and of values as they are; the fastest first.
    """

    best: Option
    native: Option
    ways: tuple[Option, ...]

    def gain(self, option: Option) -> float:
        """Tell how many times as fast as MPI's own that is."""
        return self.native.seconds / option.seconds


DESCRIPTION = (
    "Prints, by the cost model, which codec and algorithm make an allreduce fastest while the error of "
    "its result stays inside what is allowed, and what that gains over MPI's own. Needs no MPI."
)
"""What the command does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--bytes", required=True, metavar="SIZE", help="bytes of a rank's buffer, such as 64K, 16M or 1G")
    add("-p", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("--ranks-per-node", type=int, metavar="N", help="default: as in the profile, else 1")
    add("--link", metavar="SPEED", help="a node's network, each way: 10gbit, 1.25GB/s (default: the profile's)")
    add("--latency", metavar="TIME", help="of a message between nodes, such as 20us (default: the profile's)")
    add(
        "--error",
        type=float,
        default=1e-2,
        metavar="X",
        help="relative error of the result that is allowed, ‖result - exact‖ / ‖exact‖ (default: %(default)g)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    add("--profile", metavar="FILE", help='a stored profile, or "defaults" (default: the last one made on this host)')


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    try:
        profile = profile_named(args.profile, HostDevice())
        if args.link is not None or args.latency is not None:
            # What was timed on other links says nothing of these.
            between = link(args.link, args.latency, profile.between)
            profile = replace(profile, between=between, timings=())
        world, nbytes = world_of(args, profile), parse_bytes(args.bytes)
        choice = chosen(profile, world, nbytes, args.error, args.dtype)
    except CompcollError as error:
        print(f"compcoll choose: {error}", file=sys.stderr)
        return 1
    print("\n".join([*_head(args, profile, world, nbytes), "", *_table(choice), "", *_tail(args, profile, choice)]))
    return 0


def chosen(profile: Profile, world: World, nbytes: int, error: float, dtype: str = "float32") -> Choice:
    """Choose as a call with ``codec="auto", tolerance=error`` does.

    Parameters
    ----------
    profile : Profile
        What is known of the machines.
    world : World
        The ranks.
    nbytes : int
        Bytes of a rank's buffer.
    error : float
        The result's relative error that is allowed.
    dtype : str
        Element type.

    Raises
    ------
    InvalidArgument
        If there is one rank only, the error is negative or not finite, or the buffer holds no value.
    """
    itemsize = DTYPES[dtype].itemsize
    if world.size < 2:
        raise InvalidArgument(f"--ranks {world.size}: at least 2 are needed, one rank has nothing to send")
    if not 0 <= error < 1:
        raise InvalidArgument(f"--error {error:g}: a relative error of 0 to below 1 is needed, such as 1e-2")
    if nbytes < itemsize:
        raise InvalidArgument(f"--bytes {nbytes}: at least the {itemsize} bytes of one {dtype} are needed")
    call = Call("allreduce", nbytes // itemsize, dtype, itemsize, "sum", None, choose.AUTO, tolerance=error)
    setting = Setting(world, HostDevice(), profile, library="MPI", shared=world.nodes == 1)
    found = choose.options(call, setting)
    plan = make_plan(call, setting)
    best = next(option for option in found if (option.algorithm, option.codec) == (plan.algorithm, plan.codec))
    ways: dict[str, Option] = {}
    for option in sorted((option for option in found if not option.refused), key=lambda option: option.seconds):
        ways.setdefault("" if option.codec is None else option.codec.name, option)
    if best not in ways.values():
        ways["chosen"] = best
    return Choice(best, found[0], tuple(sorted(ways.values(), key=lambda option: option.seconds)))


def call_of(best: Option, error: float) -> str:
    """The call that makes it, in a program.

    Parameters
    ----------
    best : Option
        What was chosen.
    error : float
        The error that is allowed.
    """
    if best.codec is None:
        return "compcoll.allreduce(x)"
    return f'compcoll.allreduce(x, codec="auto", tolerance={error:g})'


def _head(args: argparse.Namespace, profile: Profile, world: World, nbytes: int) -> list[str]:
    nodes = f"{world.nodes} nodes of {world.per_node}" if world.nodes > 1 else "one node"
    lines = [f"allreduce of {nbytes} bytes of {args.dtype} on {world.size} ranks, {nodes}; error up to {args.error:g}"]
    if world.nodes > 1:
        speed, latency = 8e-9 / profile.between.per_byte, duration(profile.between.latency)
        said = "as given" if args.link or args.latency else f"profile: {profile.source}"
        lines.append(f"between nodes {speed:.4g} Gb/s, {latency} a message ({said})")
    elif args.link or args.latency:
        lines.append("one node: its ranks do not use the link; --ranks-per-node 1 puts each on a node of its own")
    return lines


def _table(choice: Choice) -> list[str]:
    shown: Sequence[Option] = choice.ways
    if choice.native not in shown:
        shown = [*shown, choice.native]
    lines = [f"{'codec':<26}{'algorithm':<20}{'time':>12}{'gain':>8}{'error':>10}"]
    for option in shown:
        error = f"{option.error:.1e}" if option.error else "0"
        mark = "  <- auto" if option == choice.best else f"  ({option.refused})" if option.refused else ""
        lines.append(
            f"{short(option.codec):<26}{option.algorithm:<20}{duration(option.seconds):>12}"
            f"{choice.gain(option):>7.2f}×{error:>10}{mark}"
        )
    return lines


def _tail(args: argparse.Namespace, profile: Profile, choice: Choice) -> list[str]:
    if profile.source == DEFAULTS.source:
        rests = "modelled, with the default speeds of codecs and hosts: nothing was measured here; `tune` does"
    else:
        rests = f"modelled, with speeds of codecs and hosts from the profile {profile.source}"
    return [
        f"in a program: {call_of(choice.best, args.error)}",
        f"times: {rests}",
        "gain: over MPI's own allreduce, uncompressed; error: estimate for Gaussian values",
    ]
