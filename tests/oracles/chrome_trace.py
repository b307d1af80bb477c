"""Reads Chrome traces strictly: "Trace Event Format", Google, 2016, metadata and complete events of an array."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = {"call", "queue", "handshake", "encode", "decode", "wait", "wire", "operation"}


@dataclass
class Span:
    """A complete event; times in nanoseconds."""

    name: str
    kind: str
    begun: int
    ended: int
    place: tuple[int, int]
    args: dict[str, Any]
    steps: list[Span] = field(default_factory=list)

    def of(self, kind: str) -> list[Span]:
        return [step for step in self.steps if step.kind == kind]


def events(path: Path) -> list[dict[str, Any]]:
    """One event a line. The bracket at the end may be missing, but nothing else."""
    text = path.read_text()
    read: list[dict[str, Any]] = json.loads(text if text.rstrip().endswith("]") else text + "\n]")
    assert len([line for line in text.splitlines() if line.strip("[]")]) == len(read)
    return read


def calls(path: Path, rank: int | None = None) -> list[Span]:
    """The calls in a file with their steps, after all that must hold of it was checked; of ``rank`` only, if given."""
    found: list[Span] = []
    threads: dict[tuple[int, int], list[Span]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in events(path):
        if rank is not None:
            assert event["pid"] == rank
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        if event["ph"] == "M":
            assert event.keys() == {"name", "ph", "pid", "tid", "args"}
            assert event["name"] in ("process_name", "thread_name") and type(event["args"]["name"]) is str
            assert event["name"] == "process_name" or (event["pid"], event["tid"]) not in named
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X" and event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["cat"] in KINDS and event["ts"] >= 0 and event["dur"] >= 0
        place = event["pid"], event["tid"]
        assert place in named, "a thread without a name"
        begun = round(event["ts"] * 1000)
        ended = begun + round(event["dur"] * 1000)
        span = Span(event["name"], event["cat"], begun, ended, place, event["args"])
        threads[place].append(span)
        if span.kind == "call":
            found.append(span)
            continue
        found[-1].steps.append(span)
        assert found[-1].begun <= span.begun and span.ended <= found[-1].ended, "a step outside its call"
        assert (span.kind == "wire") == (span.place != found[-1].place), "only messages have threads of their own"
        if span.kind not in ("handshake", "queue"):
            assert type(span.args["bytes"]) is int
    for spans in threads.values():
        check_nested(spans)
    for call in found:
        assert sum(s.ended - s.begun for s in call.steps if s.kind != "wire") <= call.ended - call.begun
        assert len(call.of("handshake")) == 1
    return found


def check_nested(spans: list[Span]) -> None:
    """Of two events of a thread, one is inside the other, or they have no time in common."""
    open_ones: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begun, -span.ended)):
        while open_ones and open_ones[-1].ended <= span.begun:
            open_ones.pop()
        assert not open_ones or span.ended <= open_ones[-1].ended, f"{span} overlaps {open_ones[-1]}"
        open_ones.append(span)
