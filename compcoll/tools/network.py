"""The network interfaces of this machine, and the one where PyTorch's gloo listens."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import closing, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

INTERFACE_NAME = "GLOO_SOCKET_IFNAME"
COMMAND = "python -m compcoll doctor --network"

_ADDRESS, _FLAGS = 0x8915, 0x8913  # SIOCGIFADDR and SIOCGIFFLAGS of Linux's <linux/sockios.h>
_LOOPBACK, _READY = 0x8, 0x41  # of <net/if.h>; ready is up and running
_GLOBAL = "00"  # scope of an IPv6 address that other machines may reach


class Interface(NamedTuple):
    """A network interface.

    Attributes
    ----------
    name : str
        Its name, such as ``"eth0"``.
    addresses : tuple of str
        Its first IPv4 address, and its global IPv6 addresses.
    loopback, up : bool
        Whether it reaches this machine only, and whether it is up and has a carrier.
    """

    name: str
    addresses: tuple[str, ...]
    loopback: bool = False
    up: bool = True

    def __str__(self) -> str:
        about = [*self.addresses, *["loopback"] * self.loopback, *["down"] * (not self.up)]
        return f"{self.name} ({', '.join(about)})" if about else self.name

    @property
    def problem(self) -> str | None:
        """Why ranks of other nodes cannot connect here; None if nothing is wrong."""
        if not self.addresses:
            return f"there is no interface {self.name} with an address"
        if self.loopback:
            return f"other nodes cannot reach {self.name}, which is the loopback interface"
        return None if self.up else f"{self.name} is down or has no carrier"


class Listening(NamedTuple):
    """Where gloo listens for other ranks.

    Attributes
    ----------
    text : str
        Interface and address, and why gloo takes them.
    problem : str or None
        Why ranks of other nodes cannot connect; None if nothing is wrong.
    remedy : str
        What to set.
    """

    text: str
    problem: str | None
    remedy: str

    def __str__(self) -> str:
        advice = f"; {self.problem}: {self.remedy}" if self.problem else ""
        return f"gloo on {socket.gethostname()} takes {self.text}{advice} (see `{COMMAND}` on each node)"


def interfaces() -> list[Interface]:
    """Return the interfaces that have an address."""
    found = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            addresses = _global_ipv6(name)
            with suppress(OSError):  # it has no IPv4 address
                addresses.insert(0, socket.inet_ntoa(fcntl.ioctl(asked, _ADDRESS, request)[20:24]))
            with suppress(OSError):  # it has just been removed
                (flags,) = struct.unpack_from("H", fcntl.ioctl(asked, _FLAGS, request), 16)
                if addresses:
                    found.append(Interface(name, tuple(addresses), bool(flags & _LOOPBACK), flags & _READY == _READY))
    return found


def _global_ipv6(name: str) -> list[str]:
    with suppress(OSError):  # there is no IPv6
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [str(IPv6Address(int(row[0], 16))) for row in rows if row[5] == name and row[3] == _GLOBAL]
    return []


def gloo_listens() -> Listening:
    """Return where PyTorch's gloo listens, without starting it.

    It takes the interfaces that GLOO_SOCKET_IFNAME names; else the first address of the host name at which it can
    listen; else 127.0.0.1.
    """
    every = interfaces()
    if given := os.environ.get(INTERFACE_NAME):
        why = f"{INTERFACE_NAME}={given}"
        known = {each.name: each for each in every}
        taken = [known.get(name, Interface(name, ())) for name in given.split(",")]
    else:
        host = socket.gethostname()
        address = _address_of(host)
        why = f"the host name {host} resolves to {address or 'no address of this machine'}"
        address = address or "127.0.0.1"
        loopback = ip_address(address).is_loopback
        owners = [each for each in every if address in each.addresses or (loopback and each.loopback)]
        owner = owners[0] if owners else Interface("an interface", ())  # this is not the interface's first address
        taken = [owner._replace(addresses=(address,))]
    usable = [each for each in every if each.up and not each.loopback]
    remedy = f"export {INTERFACE_NAME}={usable[0].name}" if usable else "connect this machine to a network"
    if len(usable) > 1:
        names = " or ".join(map(str, usable))
        remedy = f"set {INTERFACE_NAME} to the interface of the network between the nodes: {names}"
    problem = next((each.problem for each in taken if each.problem), None)
    return Listening(f"{', '.join(map(str, taken))}, since {why}", problem, remedy)


def _address_of(host: str) -> str | None:
    """Return the first address of a host name at which this machine can listen."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), closing(socket.socket(family, kind, protocol)) as tried:
                tried.bind(address)
                return str(address[0])
    return None
