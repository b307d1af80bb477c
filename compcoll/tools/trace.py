"""``python -m compcoll trace``: merge the timelines of all ranks, and print where the time went."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .. import config
from ..errors import CompcollError
from ..simulation.plot import check
from ..stats import DECODE, ENCODE, HANDSHAKE, OPERATION, QUEUE, WAIT, WIRE

DESCRIPTION = (
    f"Merges the timelines that ranks wrote under {config.TRACE}=FOLDER into FOLDER/trace.json, for ui.perfetto.dev or "
    "chrome://tracing, and prints where the time of each kind of call went. Needs no MPI."
)
EXAMPLE = "python -m compcoll trace folder"

REST = "rest"

_COLUMNS = {
    HANDSHAKE: "handshake",
    ENCODE: "encode",
    WAIT: "wire wait",
    DECODE: "decode",
    OPERATION: "MPI/memory",
    QUEUE: "queue",
    REST: "rest",
}
"""Kinds of steps, and the headings of their columns."""

_LEGEND = """\
ms: all calls together. handshake: waiting until all ranks make the call. MPI/memory: MPI's own collectives, sums in
shared memory and copies, all uncompressed. queue: waiting for earlier requests. rest: checks, plans, calls of MPI."""
_COLOURS = {
    QUEUE: "lightgray",
    HANDSHAKE: "tab:gray",
    ENCODE: "tab:orange",
    WAIT: "tab:red",
    DECODE: "tab:green",
    OPERATION: "tab:purple",
    WIRE: "tab:blue",
}


class Step(NamedTuple):
    """A step of a call: its kind (see `compcoll.stats.Span`), and its begin and end in nanoseconds since 1970."""

    kind: str
    begun: int
    ended: int


@dataclass
class Call:
    """A collective on one rank.

    Attributes
    ----------
    rank : int
        The rank in the whole job.
    name : str
        Collective, codec, algorithm and size.
    collective : (str, int)
        Communicator and sequence number, equal on all its ranks.
    begun, ended : int
        In nanoseconds since 1970.
    steps : list of Step
        Its steps.
    """

    rank: int
    name: str
    collective: tuple[str, int]
    begun: int
    ended: int
    steps: list[Step] = field(default_factory=list)

    @property
    def handshake(self) -> Step | None:
        """The call's handshake; None if the file ends before it."""
        return next((step for step in self.steps if step.kind == HANDSHAKE), None)

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each column of the table. Messages under way are in none: they overlap other steps."""
        found = dict.fromkeys(_COLUMNS, 0.0)
        for step in self.steps:
            if step.kind in found:
                found[step.kind] += (step.ended - step.begun) / 1e9
        found[REST] = (self.ended - self.begun) / 1e9 - sum(found.values())
        return found


@dataclass
class Timeline:
    """The file of one rank.

    Attributes
    ----------
    rank : int
        The rank in the whole job.
    host : str
        Name of its host.
    events : list of dict
        The events of the file. Begin and duration of those that have them are in nanoseconds, the begin since 1970.
    """

    rank: int
    host: str
    events: list[dict[str, Any]]

    def shift(self, nanoseconds: int) -> None:
        """Add to the begin of all events."""
        for event in self.events:
            if "ts" in event:
                event["ts"] += nanoseconds

    def calls(self) -> list[Call]:
        """Return the calls. In a file, the steps of a call follow it."""
        found: list[Call] = []
        for event in self.events:
            if "ts" not in event:
                continue
            kind, begun, ended = event["cat"], event["ts"], event["ts"] + event["dur"]
            if kind == "call":
                collective = event["args"]["communicator"], event["args"]["number"]
                found.append(Call(self.rank, event["name"], collective, begun, ended))
            elif found:
                found[-1].steps.append(Step(kind, begun, ended))
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, help=f"the folder that {config.TRACE} named")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the last collective on all ranks (matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Merge the files and print the table."""
    if args.png is not None:
        check(args.png, "--png")
    timelines = read(args.folder, lambda note: print(f"note: {note}"))
    for note in align(timelines):
        print(f"note: {note}")
    calls = [call for timeline in timelines for call in timeline.calls()]
    if not calls:
        raise CompcollError(f"the files in {args.folder} hold no collective: none has ended before the program did")
    merged = args.folder / "trace.json"
    merge(timelines, merged)
    if args.png is not None:
        draw(args.png, calls)
    print("\n".join([*table(calls), "", _LEGEND, f"{merged}: open it at https://ui.perfetto.dev or chrome://tracing"]))
    print(f"\n{conclusion(calls)}")
    return 0


def read(folder: Path, note: Callable[[str], object] = print) -> list[Timeline]:
    """Read the files of all ranks. Lines that are not whole, such as the last one of a killed process, are left out.

    Parameters
    ----------
    folder : Path
        The folder of the files ``rank-N.json``.
    note : callable
        Takes a remark on what was left out.

    Raises
    ------
    CompcollError
        If there is no such file.
    """
    timelines = []
    for path in folder.glob("rank-*.json"):
        lines = path.read_text(errors="replace").splitlines()
        events = [_event(line) for line in lines if line.strip(" []")]
        if None in events[:-1]:
            note(f"{path.name}: {events[:-1].count(None)} lines are no events and were left out")
        found = [event for event in events if event is not None]
        about = next((event for event in found if event["name"] == "process_name"), None)
        if about is None:
            note(f"{path.name} was left out: it has no line that names its process")
            continue
        for event in found:
            if "ts" in event:
                event["ts"] = round(event["ts"] * 1000) + about["args"]["base_ns"]
                event["dur"] = round(event["dur"] * 1000)
        timelines.append(Timeline(about["pid"], about["args"]["host"], found))
    if not timelines:
        raise CompcollError(
            f"{folder} has no file rank-N.json of a rank: run the program with {config.TRACE}={folder} in the "
            "environment of all ranks"
        )
    return sorted(timelines, key=lambda timeline: timeline.rank)


def _event(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is not whole."""
    try:
        event = json.loads(line.strip().rstrip(",]"))
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"name", "ph", "pid", "args"} <= event.keys() else None


def align(timelines: Sequence[Timeline]) -> list[str]:
    """Shift the times of other hosts to those of the first rank's host, and return a remark for each such host.

    All ranks leave a handshake within the time of a message. So the clocks of two hosts differ by the median difference
    between the ends of handshakes.
    """
    first, notes = timelines[0], []
    known = _handshakes_end(first)
    for host in sorted({timeline.host for timeline in timelines} - {first.host}):
        there = [timeline for timeline in timelines if timeline.host == host]
        ends = [(key, end) for timeline in there for key, end in _handshakes_end(timeline).items()]
        ahead = [end - known[key] for key, end in ends if key in known]
        name = host.split()[0] if host else "a host"
        if not ahead:
            notes.append(f"the clock of {name} is not aligned: no collective has ranks there and rank {first.rank}")
            continue
        for timeline in there:
            timeline.shift(-round(median(ahead)))
        notes.append(f"the clock of {name} is {median(ahead) / 1e6:+.3f} ms from rank {first.rank}'s: aligned")
    return notes


def _handshakes_end(timeline: Timeline) -> dict[tuple[str, int], int]:
    return {call.collective: step.ended for call in timeline.calls() if (step := call.handshake) is not None}


def merge(timelines: Sequence[Timeline], path: Path) -> None:
    """Write all events into one file. Its times are in microseconds since the first event."""
    first = min(event["ts"] for timeline in timelines for event in timeline.events if "ts" in event)
    lines = []
    for timeline in timelines:
        for event in timeline.events:
            times = {"ts": (event["ts"] - first) / 1000, "dur": event["dur"] / 1000} if "ts" in event else {}
            lines.append(json.dumps({**event, **times}))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def table(calls: Sequence[Call]) -> list[str]:
    """Return the lines of a table: where the time of each rank's calls of one kind went."""
    kinds: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in calls:
        kinds[call.rank, call.name].append(call)
    width = max(len(name) for _, name in kinds)
    heads = "".join(f"{heading + ' %':>13}" for heading in _COLUMNS.values())
    lines = [f"rank  {'call':<{width}}{'calls':>7}{'ms':>11}{heads}"]
    for (rank, name), alike in sorted(kinds.items(), key=lambda item: (item[0][0], -_total(item[1]))):
        shares = "".join(f"{100 * share:>13.1f}" for share in _shares(alike).values())
        lines.append(f"{rank:<6}{name:<{width}}{len(alike):>7}{1e3 * _total(alike):>11.3f}{shares}")
    return lines


def _total(calls: Iterable[Call]) -> float:
    """Return the seconds of some calls."""
    return sum(call.ended - call.begun for call in calls) / 1e9


def _shares(calls: Sequence[Call]) -> dict[str, float]:
    """Return the share of each column in the time of some calls."""
    every, total = [call.seconds() for call in calls], _total(calls) or 1.0
    return {kind: sum(each[kind] for each in every) / total for kind in _COLUMNS}


def conclusion(calls: Sequence[Call]) -> str:
    """Return one sentence that says what takes most of the time in which calls do not wait for earlier ones."""
    shares = _shares(calls)
    running = 1 - shares.pop(QUEUE) or 1.0
    shares = {kind: share / running for kind, share in shares.items()}
    coding = shares[ENCODE] + shares[DECODE]
    largest = max({**shares, ENCODE: coding, DECODE: 0.0}.items(), key=lambda item: item[1])[0]
    if largest == HANDSHAKE:
        late, share = latest(calls)
        if late is not None and 2 * share > shares[HANDSHAKE]:
            return f"rank {late} is late: the other ranks wait {_percent(share)} of their time for it in handshakes"
        text = "ranks are late in turn: {} of the time they wait in handshakes for the last one"
        return text.format(_percent(shares[HANDSHAKE]))
    if largest == ENCODE:
        limit = "encoding" if shares[ENCODE] >= shares[DECODE] else "decoding"
        return f"{limit} is the limit: {_percent(coding)} of the time is encoding and decoding"
    return {
        WAIT: "the network is the limit: {} of the time is waiting for messages",
        OPERATION: "nothing is compressed for most of the time: {} of it is MPI's own collectives, sums in shared "
        "memory and copies",
        REST: "compcoll's own work is the limit: {} of the time is in no step, as in first calls, which make plans",
    }[largest].format(_percent(shares[largest]))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def latest(calls: Sequence[Call]) -> tuple[int | None, float]:
    """Return the rank for which others wait most in handshakes, and the share of the other ranks' time that this takes.

    The rank that begins a handshake last is the late one, and the others wait for it from their begin to its begin.
    """
    waits: dict[int, int] = defaultdict(int)
    for same in _collectives(calls):
        begins = {call.rank: step.begun for call in same if (step := call.handshake) is not None}
        if len(begins) > 1:
            last = max(begins, key=lambda rank: begins[rank])
            waits[last] += sum(begins[last] - begun for begun in begins.values())
    if not waits:
        return None, 0.0
    late = max(waits, key=lambda rank: waits[rank])
    return late, waits[late] / 1e9 / (_total(call for call in calls if call.rank != late) or 1.0)


def _collectives(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of each collective."""
    found: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.collective].append(call)
    return list(found.values())


def draw(path: Path, calls: Sequence[Call]) -> None:
    """Draw the last collective that most ranks have recorded: each rank's steps, and its messages below them.

    Parameters
    ----------
    path : Path
        The image file.
    calls : sequence of Call
        The calls of all ranks.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    last = max(_collectives(calls), key=lambda same: (len(same), max(call.ended for call in same)))
    first = min(call.begun for call in last)
    figure = Figure(figsize=(13, 1.5 + len(last)), layout="constrained")
    axes = figure.subplots()

    def bars(steps: Sequence[Step], low: float, height: float, colour: str) -> None:
        spans = [((step.begun - first) / 1e6, (step.ended - step.begun) / 1e6) for step in steps]
        axes.broken_barh(spans, (low, height), color=colour)

    for place, call in enumerate(last):
        bars([Step("call", call.begun, call.ended)], place - 0.4, 0.4, "whitesmoke")
        for kind in _COLOURS.keys() - {WIRE}:
            bars([step for step in call.steps if step.kind == kind], place - 0.4, 0.4, _COLOURS[kind])
        messages = sorted(step for step in call.steps if step.kind == WIRE)
        for number, message in enumerate(messages):
            bars([message], place + 0.05 + 0.35 * number / len(messages), 0.3 / len(messages), _COLOURS[WIRE])
    axes.set(xlabel="ms", title=last[0].name, ylim=(len(last) - 0.5, -0.5))
    axes.set_yticks(range(len(last)), [f"rank {call.rank}" for call in last])
    patches = [Patch(color=colour, label=_COLUMNS.get(kind, "messages")) for kind, colour in _COLOURS.items()]
    axes.legend(handles=patches, fontsize=8, ncols=len(patches), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(path)
