"""``python -m compcoll simulate``: predict the time of allreduces on a simulated network."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..codecs import Codec
from ..codecs.sparse import Sparsifier
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..host.device import HostDevice
from ..plan.cost import Profile
from ..plan.explanation import duration, link_text
from ..plan.wire_formats import kind_of, short, wire_format
from ..simulation import run as simulation
from ..simulation.network import Network
from ..simulation.run import ALGORITHMS, Outcome, Scenario, resized, step_seconds
from .arguments import (
    add_codec_options,
    amount,
    chosen_codec,
    doubling,
    given,
    link,
    parse_bytes,
    parse_seconds,
    parse_speed,
)
from .explain import profile_named

_VERBS = ("encode", "decode", "accumulate", "recode")


DESCRIPTION = (
    "Runs compcoll's own allreduce algorithms on a virtual clock: messages and kernels take time, but "
    "nothing is sent or computed. Needs no MPI. docs/simulation.md describes the model."
)
EXAMPLE = "python -m compcoll simulate --ranks 256 --link 100gbit --latency 2us --codec zfp:rate=8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="number of ranks, such as 4096")
    add("-m", "--bytes", default="16M", metavar="SIZE", help="bytes of a rank's buffer; MIN:MAX doubles them (16M)")
    add("--algorithm", default=",".join(ALGORITHMS), metavar="NAMES", help="default: %(default)s")
    add("--computing", metavar="TIME", help="time of a step on one GPU: also predict training by LDTE-BS's model")
    add("--patient", action="store_true", help="simulate even millions of messages one by one, which takes minutes")
    add("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    codec = parser.add_argument_group("codec")
    add_codec_options(
        codec,
        "zfp, minmax, cast …; uncompressed allreduces are always simulated, too; wires of varying size are assumed to "
        "be half as long as the values",
    )
    for verb in _VERBS:
        codec.add_argument(f"--{verb}", metavar="SPEED", help=f"speed of its {verb} kernel, such as 6GB/s of values")
    network = parser.add_argument_group("network", "links and host times are by default the profile's")
    add = network.add_argument
    add("--link", metavar="SPEED", help="speed of a NIC in each direction: 100gbit, 12.5GB/s")
    add("--latency", metavar="TIME", help="latency between nodes: 2us")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="consecutive ranks share a node (default: 1)")
    add("--inside", metavar="SPEED", help="speed of a rank's port inside its node in each direction")
    add("--inside-latency", metavar="TIME", help="latency inside a node")
    add("--copied", action="store_true", help="inside a node the receiving host copies, as in shared memory")
    add("--nics", type=int, default=1, metavar="N", help="NICs of a node, shared by its ranks (default: 1)")
    add("--oversubscription", type=float, default=1.0, metavar="X", help="all NICs' speed over the node's uplink's (1)")
    add("--message", metavar="TIME", help="host time of a message, half at either end")
    add("--call", metavar="TIME", help="host time before a collective begins")
    add("--profile", default="defaults", metavar="FILE", help='a profile stored by `tune`, or "defaults" (the default)')
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw time against ranks and size (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Simulate the allreduces, and print their times."""
    scenario, codec = _scenario(args)
    names = _algorithms(args.algorithm)
    sizes = _sizes(args.bytes, DTYPES[args.dtype].itemsize)
    if args.plot is not None:
        from ..simulation import plot as simulation_plot

        simulation_plot.check(args.plot)
    training = _training(args, scenario, codec, sizes)
    sparse = isinstance(codec, Sparsifier)
    codecs = [None] if codec is None or (sparse and training) else [None, codec]
    with _progress() as bar:
        progress = None if bar is None else bar.update
        outcomes = [
            [
                simulation.allreduce(resized(scenario, nbytes=size), name, way, patient=args.patient, progress=progress)
                for name in names
                for way in codecs
            ]
            for size in sizes
        ]
        if args.plot is not None:
            simulation_plot.plot(args.plot, scenario, names, codecs, sizes, progress)
    if args.json:
        record = _record(scenario, [outcome for row in outcomes for outcome in row])
        print(json.dumps({**record, "training": training}, indent=1))
        return 0
    tables = [_table(resized(scenario, nbytes=size), row) for size, row in zip(sizes, outcomes, strict=True)]
    parts = [_head(scenario), *tables, _crossovers(sizes, outcomes), _throughputs(training)]
    print("\n\n".join("\n".join(lines) for lines in parts if lines))
    return 0


def _scenario(args: argparse.Namespace) -> tuple[Scenario, Codec | None]:
    profile, codec = profile_named(args.profile, HostDevice()), chosen_codec(args)
    network = Network(
        inside=link(args.inside, args.inside_latency, profile.inside),
        between=link(args.link, args.latency, profile.between),
        ranks_per_node=args.ranks_per_node,
        nics=args.nics,
        oversubscription=args.oversubscription,
        copied=args.copied,
        message=given(args.message, parse_seconds, profile.message),
    )
    scenario = Scenario(
        args.ranks,
        network,
        DTYPES[args.dtype].itemsize,
        args.dtype,
        _speeds(args, profile, codec),
        call=given(args.call, parse_seconds, profile.call),
    )
    return scenario, codec


def _training(
    args: argparse.Namespace, scenario: Scenario, codec: Codec | None, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the predicted training steps for all sizes, if ``--computing`` is given."""
    if args.computing is None:
        return []
    computing, network = parse_seconds(args.computing), scenario.network
    ratio = wire_format(codec, HostDevice(), args.dtype, DTYPES[args.dtype].itemsize).ratio
    return [
        {
            "nbytes": nbytes,
            "uncompressed": step_seconds(nbytes, computing, network, args.ranks),
            "compressed": step_seconds(nbytes / ratio, computing, network, args.ranks),
            "codec": short(codec),
        }
        for nbytes in sizes
    ]


def _speeds(args: argparse.Namespace, profile: Profile, codec: Codec | None) -> Profile:
    """Return the profile with the given speeds of the codec."""
    given = {verb: parse_speed(getattr(args, verb)) for verb in _VERBS if getattr(args, verb) is not None}
    if not given:
        return profile
    if codec is None:
        raise InvalidArgument(f"--{next(iter(given))} is the speed of a codec: give --codec")
    if isinstance(codec, Sparsifier):
        raise InvalidArgument(f"{codec.name}: sparse allreduces are not simulated; `explain` predicts them")
    bits = wire_format(codec, HostDevice(), args.dtype, DTYPES[args.dtype].itemsize).bits
    speed = replace(profile.speed(kind_of(codec), bits), codec=kind_of(codec), bits=bits, **given)
    return replace(profile, speeds=(speed, *profile.speeds))


def _algorithms(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ALGORITHMS:
            raise InvalidArgument(f"algorithm {name!r} cannot be simulated: {', '.join(ALGORITHMS)} can")
    return names


def _sizes(text: str, itemsize: int) -> list[int]:
    first, colon, last = text.partition(":")
    low = parse_bytes(first)
    high = parse_bytes(last) if colon else low
    if low > high:
        raise InvalidArgument(f"{text!r}: the smallest size is larger than the largest")
    return doubling(low, high)


def _progress() -> contextlib.AbstractContextManager[Any]:
    """Return a progress bar for terminals; a context of None if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return contextlib.nullcontext()
    return tqdm(unit=" events", unit_scale=True, leave=False, file=sys.stderr, delay=0.5, disable=None)  # type: ignore[no-any-return]


def _head(scenario: Scenario) -> list[str]:
    network, nodes = scenario.network, scenario.world.nodes
    uplinks = f", uplinks {network.oversubscription:g}:1" if network.oversubscription > 1 else ""
    nics = f"{network.nics} NICs" if network.nics > 1 else "a NIC"
    lines = [f"allreduce of {scenario.dtype} on {scenario.ranks} ranks, {nodes} nodes of {network.ranks_per_node}"]
    if nodes > 1:
        lines.append(f"between nodes: {link_text(network.between)}, {nics} a node{uplinks}")
    if network.ranks_per_node > 1:
        lines.append(
            f"inside a node: {link_text(network.inside)}" + (", copied by the receiver" if network.copied else "")
        )
    host = f"host: {duration(network.message)} a message, {duration(scenario.call)} a call"
    return [*lines, f"{host}; codecs as in profile: {scenario.profile.source}"]


def _table(scenario: Scenario, outcomes: Sequence[Outcome]) -> list[str]:
    plain = {outcome.algorithm: outcome.seconds for outcome in outcomes if outcome.codec is None}
    fastest = min(outcomes, key=lambda outcome: outcome.seconds)
    lines = [
        f"{amount(scenario.nbytes)}; bound 2(p-1)/p·n·β = {duration(scenario.bound)}",
        f"{'algorithm':<20}{'codec':<20}{'time':>12}{'× bound':>9}{'gain':>8}"
        f"{'wire a rank':>13}{'messages':>10}{'encode':>12}{'decode':>12}",
    ]
    for o in outcomes:
        gain = plain[o.algorithm] / o.seconds
        lines.append(
            f"{o.algorithm:<20}{short(o.codec):<20}{duration(o.seconds):>12}{o.seconds / scenario.bound:>9.2f}"
            f"{gain:>7.2f}×{amount(o.wire_nbytes):>13}{o.messages:>10.0f}"
            f"{duration(o.encode_seconds):>12}{duration(o.decode_seconds):>12}{'  <- fastest' if o is fastest else ''}"
        )
    rounded = {o.nbytes for o in outcomes if o.nbytes != scenario.nbytes}
    lines += [f"(rounded up to {nbytes} bytes, so that all ranks' chunks have equal size)" for nbytes in rounded]
    return lines


def _crossovers(sizes: Sequence[int], outcomes: Sequence[Sequence[Outcome]]) -> list[str]:
    """Return lines with the sizes from which each option is fastest."""
    if len(sizes) < 2:
        return []
    lines, last = ["fastest from size on"], ""
    for size, row in zip(sizes, outcomes, strict=True):
        best = min(row, key=lambda outcome: outcome.seconds)
        name = f"{best.algorithm} {short(best.codec)}"
        if name != last:
            lines.append(f"{amount(size):>12}  {name}")
        last = name
    return lines


def _throughputs(training: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["training steps by the throughput model of LDTE-BS, without overlap"] if training else []
    for step in training:
        plain, compressed = step["uncompressed"], step["compressed"]
        line = f"{amount(step['nbytes']):>12}  uncompressed {duration(plain)}"
        if step["codec"] != short(None):
            line += f"; {step['codec']} {duration(compressed)}, {plain / compressed:.2f} × as fast"
        lines.append(line)
    return lines


def _record(scenario: Scenario, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    results = [
        {**outcome._asdict(), "codec": None if outcome.codec is None else repr(outcome.codec)} for outcome in outcomes
    ]
    return {
        "ranks": scenario.ranks,
        **asdict(scenario.network),
        "call": scenario.call,
        "dtype": scenario.dtype,
        "profile": scenario.profile.source,
        "results": results,
    }
