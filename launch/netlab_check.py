"""`netlab check`: measure the links with plain sockets, and compare them with the lab's settings.

As a program, this file is one host's part: `netlab_check.py serve` answers other hosts; `netlab_check.py stream ADDRESS
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
_PAUSE = 0.002  # seconds between two messages, in which the rate limit's token bucket fills again
_PATIENCE = 60.0
_TO_START = 0.5  # seconds until a measurement, so that all hosts can start it at the same time
_TCP_HEADERS = 52  # IP's, TCP's and its time stamps


# --- a host's part -----------------------------------------------------------------------------------------------


def _receive(connection: socket.socket, into: bytearray | memoryview) -> None:
    if connection.recv_into(into, len(into), socket.MSG_WAITALL) < len(into):
        raise EOFError


def _serve_one(connection: socket.socket) -> None:
    """Serve one connection: time a stream and reply its rate, or answer each message with one byte."""
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
        # Skip the start, when TCP opens its window and the token bucket is full.
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
    """Send a stream from ``start`` on (monotonic clock); return the bits per second that arrive."""
    time.sleep(max(start - time.monotonic(), 0.0))
    with _connect(address, "stream", seconds / 4) as connection:
        end, piece = time.perf_counter() + seconds, bytes(_PIECE)
        while time.perf_counter() < end:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return float(connection.makefile().read())


def _message(address: str, size: int, count: int) -> float:
    """Return the lower quartile of seconds from a message on an idle link to its answer of one byte."""
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
    """Answer other hosts until this process is killed."""
    listener = socket.create_server(("", PORT), backlog=64)
    print("ready", flush=True)
    while True:
        threading.Thread(target=_serve_one, args=(listener.accept()[0],), daemon=True).start()


# --- the user's part ---------------------------------------------------------------------------------------------


class Hosts:
    """Starts and ends the processes that measure on the hosts."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._environ = {**os.environ, **lab.environment(), RUN_TOKEN: uuid.uuid4().hex}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hosts]:
        """Run a server on each host inside this context."""
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
        """Return the number that a host's measurement prints."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if said := process.communicate(timeout=_PATIENCE)[0]:
                return float(said)
        raise NetlabError(f"host {host} died while it measured")

    def streams(self, pairs: Sequence[tuple[str, str]], seconds: float) -> list[float]:
        """Return the bits per second from the first to the second host of each pair, all at the same time."""
        start = time.monotonic() + _TO_START
        processes = [self._start(a, "stream", self._lab.address(b), seconds, start) for a, b in pairs]
        return [self._result(host, process) for (host, _), process in zip(pairs, processes, strict=True)]

    def message(self, pair: tuple[str, str], size: int, count: int = 60) -> float:
        """Return the seconds that a message takes to the second host, and its answer of one byte back."""
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
    """Add the options of `netlab check`."""
    add = parser.add_argument
    add("--tolerance", type=float, default=5.0, metavar="PERCENT", help="of rates (default: %(default)g)")
    add("--latency", type=float, default=100.0, metavar="US", help="limit for one way (default: %(default)g µs)")
    add("--free", metavar="BYTES", help="limit of an idle link's burst (default: 2.5 frames, or 125 µs of the rate)")
    add("--seconds", type=float, default=0.4, help="each stream's length (default: %(default)g)")
    add("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    add_quiet_arguments(parser)


def main(lab: Lab, options: argparse.Namespace) -> int:
    """Measure the links and print a table; return 0 if all links are as the settings ask, else 1."""
    if not 0 < options.tolerance < 100 or options.seconds <= 0:
        raise NetlabError("--tolerance must be between 0 and 100, and --seconds above 0", 2)
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
        say(f"{len(bad)} of {len(rows)} measurements are off: is this machine busy, or too slow for these settings?")
    return 1 if bad else 0


def _rows(lab: Lab, hosts: Hosts, tolerance: float, latency: float, free: float, seconds: float) -> Iterator[Row]:
    names, rate = lab.hosts, lab.settings.rate
    net = rate * (lab.settings.mtu - _TCP_HEADERS) / (lab.settings.mtu + FRAME_HEADER)  # without headers

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
    """Run one host's part of a measurement."""
    if kind == "serve":
        _serve()
    elif kind == "stream":
        print(_stream(given[0], float(given[1]), float(given[2])))
    else:
        print(_message(given[0], int(given[1]), int(given[2])))


if __name__ == "__main__":
    _part(*sys.argv[1:])
