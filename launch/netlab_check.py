"""`netlab check`: measure the links with plain sockets, and compare with what was asked for.

Run as a program, it is one host's part: `netlab_check.py serve` answers the others, `netlab_check.py stream ADDRESS
SECONDS START` and `netlab_check.py message ADDRESS SIZE COUNT` measure and print a number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from netlab_lab import FRAME_HEADER, FREE, RUN_TOKEN, Lab, NetlabError, end_processes, parse_bytes, say, shown_rate
from netlab_run import add_quiet_arguments, on_host, wait_for_quiet

PORT = 7000
_PIECE = 1 << 18
_HEADER = 24
_PAUSE = 0.002  # seconds between two messages, in which a bucket fills again
_PATIENCE = 60.0
_TO_START = 0.5  # seconds that hosts get to start their parts of a measurement together
_TCP_HEADERS = 52  # IP's, TCP's and its time stamps


# --- a host's part -----------------------------------------------------------------------------------------------


def _receive(connection: socket.socket, into: bytearray | memoryview) -> None:
    if connection.recv_into(into, len(into), socket.MSG_WAITALL) < len(into):
        raise EOFError


def _serve_one(connection: socket.socket) -> None:
    """A stream to swallow and time, or messages to answer with one byte each."""
    with connection, contextlib.suppress(OSError, EOFError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        header = bytearray(_HEADER)
        _receive(connection, header)
        kind, size = header.decode().split()
        buffer = memoryview(bytearray(_PIECE if kind == "stream" else int(size)))
        if kind == "message":
            while True:
                _receive(connection, buffer)
                connection.sendall(b".")
        # The start, when TCP opens its window and the bucket is full, does not count.
        start_at, total, first, last = time.perf_counter() + float(size), 0, 0.0, 0.0
        while got := connection.recv_into(buffer):
            last = time.perf_counter()
            if last >= start_at:
                first, total = (last, 0) if first == 0.0 else (first, total + got)
        connection.sendall(json.dumps(8 * total / (last - first) if last > first else 0.0).encode())


def _connect(address: str, kind: str, size: float | int) -> socket.socket:
    connection = socket.create_connection((address, PORT), timeout=_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"{kind} {size}".ljust(_HEADER).encode())
    return connection


def _stream(address: str, seconds: float, start: float) -> float:
    """Bits per second that arrive of a stream that begins at a time of the monotonic clock."""
    time.sleep(max(start - time.monotonic(), 0.0))
    with _connect(address, "stream", seconds / 4) as connection:
        end, piece = time.perf_counter() + seconds, bytes(_PIECE)
        while time.perf_counter() < end:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return float(connection.makefile().read())


def _message(address: str, size: int, count: int) -> float:
    """Seconds from sending a message on an idle link to its answer of one byte: the lower quartile."""
    with _connect(address, "message", size) as connection:
        data, times = bytes(size), []
        for _ in range(count + 8):
            time.sleep(_PAUSE)
            began = time.perf_counter()
            connection.sendall(data)
            connection.recv(1)
            times.append(time.perf_counter() - began)
        return statistics.quantiles(times[8:], n=4)[0]


def _serve() -> None:
    """Answer the other hosts until this process is ended."""
    listener = socket.create_server(("", PORT), backlog=64)
    print("ready", flush=True)
    while True:
        threading.Thread(target=_serve_one, args=(listener.accept()[0],), daemon=True).start()


# --- the part that asks ------------------------------------------------------------------------------------------


class Hosts:
    """The hosts' parts, as processes on them."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._environ = {**os.environ, **lab.environment(), RUN_TOKEN: uuid.uuid4().hex}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hosts]:
        """Let every host answer the others meanwhile."""
        servers = [self._start(host, "serve") for host in self._lab.hosts]
        try:
            for host, server in zip(self._lab.hosts, servers, strict=True):
                assert server.stdout is not None
                if server.stdout.readline() != "ready\n":
                    raise NetlabError(f"host {host} does not answer")
            yield self
        finally:
            end_processes(RUN_TOKEN, self._environ[RUN_TOKEN])
            for server in servers:
                server.communicate()

    def _start(self, host: str, *words: object) -> subprocess.Popen[str]:
        program = on_host(host, [sys.executable, str(Path(__file__).resolve()), *map(str, words)])
        return subprocess.Popen(program, env=self._environ, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def _result(self, host: str, process: subprocess.Popen[str]) -> float:
        """The number that a host's measurement prints."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if said := process.communicate(timeout=_PATIENCE)[0]:
                return float(said)
        raise NetlabError(f"host {host} died while it measured")

    def streams(self, pairs: Sequence[tuple[str, str]], seconds: float) -> list[float]:
        """Bits per second of each pair, all at once."""
        start = time.monotonic() + _TO_START
        processes = [self._start(a, "stream", self._lab.address(b), seconds, start) for a, b in pairs]
        return [self._result(host, process) for (host, _), process in zip(pairs, processes, strict=True)]

    def message(self, pair: tuple[str, str], size: int, count: int = 60) -> float:
        """The seconds that a message takes there and, of one byte, back."""
        host, other = pair
        return self._result(host, self._start(host, "message", self._lab.address(other), size, count))


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    asked: str
    good: bool
    value: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `netlab check`."""
    add = parser.add_argument
    add("--tolerance", type=float, default=5.0, metavar="PERCENT", help="of the rate (default: %(default)g)")
    add("--latency", type=float, default=100.0, metavar="US", help="most for one way (default: %(default)g µs)")
    add("--free", metavar="BYTES", help="most to pass an idle link free (default: 2.5 frames, or 125 µs' worth)")
    add("--seconds", type=float, default=0.4, help="each stream's length (default: %(default)g)")
    add("--json", type=Path, metavar="FILE", help="write the measurements there, too")
    add_quiet_arguments(parser)


def main(lab: Lab, options: argparse.Namespace) -> int:
    """Measure, print, and judge: 0 if everything is as asked for."""
    if not 0 < options.tolerance < 100 or options.seconds <= 0:
        raise NetlabError("--tolerance is between 0 and 100, --seconds above 0", 2)
    by_default = max(2.5 * lab.settings.mtu, FREE * lab.settings.rate / 8)
    free = float(parse_bytes(options.free)) if options.free else by_default
    with lab.lock():
        load = wait_for_quiet(options.quiet_cpu, options.quiet_wait)
        print(f"lab {lab.name}: {lab.settings}")
        rows = []
        with Hosts(lab).serving() as hosts:
            for row in _rows(lab, hosts, options.tolerance, options.latency, free, options.seconds):
                print(f"  {row.what:<46} {row.measured:>12}   {row.asked:<24} {'ok' if row.good else 'NOT AS ASKED'}")
                rows.append(row)
    if options.json is not None:
        told = {"lab": str(lab.settings), "other_load_percent": load, "rows": [vars(row) for row in rows]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    bad = [row for row in rows if not row.good]
    if bad:
        say(f"{len(bad)} of {len(rows)} are not as asked for: another load on this machine, or more than it carries?")
    return 1 if bad else 0


def _rows(lab: Lab, hosts: Hosts, tolerance: float, latency: float, free: float, seconds: float) -> Iterator[Row]:
    names, rate = lab.hosts, lab.settings.rate
    net = rate * (lab.settings.mtu - _TCP_HEADERS) / (lab.settings.mtu + FRAME_HEADER)  # what is left for payload

    def judged(what: str, bits: float, of: float) -> Row:
        asked = f"{shown_rate(of)} ± {tolerance:g} %"
        return Row(what, shown_rate(bits), asked, abs(bits / of - 1) <= tolerance / 100, bits)

    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    for pair in ring:
        yield judged(f"stream {pair[0]} → {pair[1]}", hosts.streams([pair], seconds)[0], net)
    there, back = hosts.streams([(names[0], names[1]), (names[1], names[0])], seconds)
    yield judged(f"both ways at once, {names[0]} → {names[1]}", there, net)
    yield judged(f"                   {names[1]} → {names[0]}", back, net)
    if len(names) > 2:
        every = hosts.streams(ring, seconds)
        yield judged("all hosts at once, each to the next: slowest", min(every), net)
        yield judged("                                     fastest", max(every), net)
        senders = [(name, names[0]) for name in names[1:]]
        yield judged(f"all to {names[0]} at once: sum", sum(hosts.streams(senders, seconds)), net)

    pair = (names[0], names[-1])
    base = hosts.message(pair, 1, 200)
    one_way, what = base / 2 * 1e6, f"ping-pong {pair[0]} ↔ {pair[1]}, 1 B: one way"
    yield Row(what, f"{one_way:.1f} µs", f"≤ {latency:g} µs", one_way <= latency, one_way)
    for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18):
        took = hosts.message(pair, size) - base
        passed = size - took * rate / 8
        what = f"{size >> 10:4d} KiB on an idle link: {took * 1e6:7.1f} µs, bytes free"
        yield Row(what, f"{passed:.0f} B", f"≤ {free:.0f} B", passed <= free, passed)


def _part(kind: str, *given: str) -> None:
    """Do a host's part, as the command line says."""
    if kind == "serve":
        _serve()
    elif kind == "stream":
        print(_stream(given[0], float(given[1]), float(given[2])))
    else:
        print(_message(given[0], int(given[1]), int(given[2])))


if __name__ == "__main__":
    _part(*sys.argv[1:])
