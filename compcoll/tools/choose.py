"""``python -m compcoll choose``: choose codec and algorithm for a buffer, a network and an allowed error."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..host.device import HostDevice
from ..layout import World
from ..plan import choose
from ..plan.call import Call
from ..plan.cost import Profile
from ..plan.plan import Plan
from .arguments import link, parse_bytes
from .explain import add_place, plan_in, profile_named, world_of

DESCRIPTION = (
    "Prints which codec and algorithm the cost model predicts to be fastest for an allreduce with an "
    "allowed error of the result, and the gain over MPI's own allreduce. Needs no MPI."
)
EXAMPLE = "python -m compcoll choose --bytes 100M --link 10gbit --ranks 16 --error 1e-2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_place(parser)
    add = parser.add_argument
    add("--link", metavar="SPEED", help="a node's speed in each direction: 10gbit, 1.25GB/s (default: the profile's)")
    add("--latency", metavar="TIME", help="latency between nodes, such as 20us (default: the profile's)")
    add(
        "--error",
        type=float,
        default=1e-2,
        metavar="X",
        help="allowed relative error of the result, ‖result - exact‖ / ‖exact‖, such as 1e-3 (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan as `Communicator.explain` does, and the call for a program."""
    profile = profile_named(args.profile, HostDevice())
    world = world_of(args, profile)
    if args.link is not None or args.latency is not None:
        # The profile's timings were measured on other links, so they do not apply.
        between = link(args.link, args.latency, profile.between)
        profile = replace(profile, between=between, timings=(), source=f"{profile.source}, but for the link")
    plan = chosen(profile, world, parse_bytes(args.bytes), args.error, args.dtype)
    codec = "" if plan.codec is None else f', codec="auto", tolerance={args.error:g}'
    print(f"{plan}\nin a program: compcoll.allreduce(x{codec})")
    return 0


def chosen(profile: Profile, world: World, nbytes: int, error: float, dtype: str = "float32") -> Plan:
    """Return the plan of an allreduce with ``codec="auto", tolerance=error``.

    Parameters
    ----------
    profile : Profile
        The machines' speeds.
    world : World
        The ranks.
    nbytes : int
        Bytes of a rank's buffer.
    error : float
        The allowed relative error of the result.
    dtype : str
        Element type.

    Raises
    ------
    InvalidArgument
        If there is only one rank, the error is not in [0, 1), or the buffer holds no value.
    """
    itemsize = DTYPES[dtype].itemsize
    if world.size < 2:
        raise InvalidArgument(f"--ranks {world.size}: at least 2 are needed, one rank has nothing to send")
    if not 0 <= error < 1:
        raise InvalidArgument(f"--error {error:g}: a relative error of 0 to below 1 is needed, such as 1e-2")
    if nbytes < itemsize:
        raise InvalidArgument(f"--bytes {nbytes}: at least the {itemsize} bytes of one {dtype} are needed")
    call = Call("allreduce", nbytes // itemsize, dtype, itemsize, "sum", None, choose.AUTO, tolerance=error)
    return plan_in(call, world, profile)


def gain(plan: Plan) -> float:
    """Return the predicted speedup of a plan over MPI's own uncompressed allreduce."""
    native, *others = choose.options(plan.call, plan.setting)
    best = next(o for o in (native, *others) if (o.algorithm, o.codec) == (plan.algorithm, plan.codec))
    return native.seconds / best.seconds
