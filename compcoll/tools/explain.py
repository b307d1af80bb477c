"""``python -m compcoll explain``: print the cost model's prediction for a collective, and the choice of ``auto``."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from ..algorithms.record import REDUCTIONS, ROOTED, UNEVEN
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..execute.compiled_plan import named_codec
from ..host.device import HostDevice
from ..layout import World
from ..plan import choose
from ..plan.call import NO_REDUCTION, Call, Setting
from ..plan.cost import DEFAULTS, Profile
from ..plan.plan import Plan, make_plan
from ..plan.profile import latest, load
from .arguments import add_codec_options, codec_text, parse_bytes

DESCRIPTION = (
    "Prints what the cost model predicts for every algorithm, with and without the codec, and what "
    "auto chooses and why. Needs no MPI."
)

EXAMPLE = "python -m compcoll explain --bytes 16M --codec zfp:rate=8 -p 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_place(parser)
    add_codec_options(
        parser, "zfp, minmax, cast …; or auto, with --tolerance as the allowed relative error of the result"
    )
    parser.add_argument("--collective", choices=sorted(choose.NAMES), default="allreduce", help="default: %(default)s")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a buffer, ranks and a profile."""
    add = parser.add_argument
    add("--bytes", required=True, metavar="SIZE", help="bytes of a rank's buffer, such as 64K, 16M or 1G")
    add("-p", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("--ranks-per-node", type=int, metavar="N", help="default: as in the profile, else 1")
    add("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    add("--profile", metavar="FILE", help='a stored profile, or "defaults" (default: the last one made on this host)')


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    print(plan(args))
    return 0


def plan(args: argparse.Namespace) -> Plan:
    """Make the plan of the call that the arguments describe."""
    profile = profile_named(args.profile, HostDevice())
    codec, tolerance = named_codec(codec_text(args), {})
    itemsize = DTYPES[args.dtype].itemsize
    call = Call(
        args.collective,
        parse_bytes(args.bytes) // itemsize,
        args.dtype,
        itemsize,
        "sum" if args.collective in REDUCTIONS else NO_REDUCTION,
        codec,
        choose.AUTO,
        0 if args.collective in ROOTED else None,
        () if args.collective in UNEVEN else None,
        tolerance,
    )
    return plan_in(call, world_of(args, profile), profile)


def plan_in(call: Call, world: World, profile: Profile) -> Plan:
    """Make the plan of a call under MPI with arrays in host memory."""
    shared = world.nodes == 1 and world.size > 1
    return make_plan(call, Setting(world, HostDevice(), profile, library="MPI", shared=shared))


def profile_named(named: str | None, device: HostDevice) -> Profile:
    """Return the named profile: ``"defaults"``, a file, or by default the newest profile made on this host."""
    if named == "defaults":
        return DEFAULTS
    if named is not None:
        return load(Path(named)).profile
    stored = latest(platform.node(), device.name)
    return DEFAULTS if stored is None else stored.profile


def world_of(args: argparse.Namespace, profile: Profile) -> World:
    """Return the ranks that the arguments describe."""
    if args.ranks < 1:
        raise InvalidArgument(f"-p {args.ranks}: at least 1 rank is needed")
    if args.ranks_per_node is not None:
        return World(args.ranks, args.ranks_per_node)
    timed = [timing.world for timing in profile.timings if timing.world.size == args.ranks]
    return timed[0] if timed else World(args.ranks, min(args.ranks, max(profile.per_node, 1)))
