"""Ports for the ranks of a test."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_ports(number: int) -> list[int]:
    """Return free ports that the system does not assign by itself: gloo's many sockets would take those."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(lowest - 8192, lowest), 8192):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError("no port is free")
