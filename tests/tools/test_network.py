"""Where gloo listens: what `doctor --network` says, against the sockets of PyTorch's gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from ipaddress import IPv4Address

import pytest

from compcoll.tools import network
from compcoll.tools.network import Interface, gloo_listens, interfaces

IPV4 = [each.name for each in interfaces() if "." in each.addresses[0]]
SOCKETS = """
import datetime, os, torch.distributed as d
group = d.ProcessGroupGloo(d.HashStore(), 0, 1, datetime.timedelta(seconds=5))
links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
rows = [line.split() for line in open("/proc/net/tcp")][1:]
print(*{row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links})
"""
"""Makes a gloo group of PyTorch, and prints at which addresses this process listens, as Linux writes them."""

LO = Interface("lo", ("127.0.0.1",), loopback=True)
ETH0, IB0 = Interface("eth0", ("10.0.0.5",)), Interface("ib0", ("10.1.0.5",))
OLD = Interface("eth1", ("10.2.0.5",), up=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *IPV4])
def test_pytorch_listens_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    done = subprocess.run([sys.executable, "-c", SOCKETS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (seen,) = done.stdout.split() or [""]
    found = re.match(r"(\S+) \(([\d.]+)", gloo_listens().text)
    assert found and found[2] == str(IPv4Address(int(seen, 16).to_bytes(4, sys.byteorder)))
    assert found[1] == name or not name


@pytest.mark.parametrize(
    ("every", "variable", "address", "text", "problem", "remedy"),
    [
        ([LO, ETH0], "", "10.0.0.5", "eth0 (10.0.0.5), since the host name * resolves to 10.0.0.5", None, "*"),
        ([LO, ETH0], "", "10.0.0.6", "an interface (10.0.0.6), since *", None, "*"),
        ([LO, ETH0, OLD], "eth0", "127.0.1.1", "eth0 (10.0.0.5), since GLOO_SOCKET_IFNAME=eth0", None, "*"),
        (
            [LO, ETH0, OLD],
            *("", "127.0.1.1", "lo (127.0.1.1, loopback), since the host name * resolves to 127.0.1.1"),
            *("other nodes cannot reach lo*", "export GLOO_SOCKET_IFNAME=eth0"),
        ),
        (
            [LO, ETH0, IB0],
            *("", None, "lo (127.0.0.1, loopback), since the host name * resolves to no address of this machine"),
            *("other nodes cannot reach lo*", "set *: eth0 (10.0.0.5) or ib0 (10.1.0.5)"),
        ),
        ([LO, OLD], "eth1", None, "eth1 (10.2.0.5, down), *", "eth1 is down*", "connect this machine to a network"),
        ([LO, ETH0], "eth0,en1", None, "eth0 (10.0.0.5), en1, *", "there is no interface en1 with an address", "*"),
    ],
)
def test_what_to_set(
    every: list[Interface],
    variable: str,
    address: str | None,
    text: str,
    problem: str | None,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    monkeypatch.setattr(network, "interfaces", lambda: every)
    monkeypatch.setattr(network, "_address_of", lambda host: address)
    for seen, pattern in zip(gloo_listens(), (text, problem, remedy), strict=True):
        assert seen is pattern or re.fullmatch(re.escape(str(pattern)).replace(r"\*", ".*"), str(seen)), seen


def doctor(*arguments: str, interface: str) -> subprocess.CompletedProcess[str]:
    """The command, with a value of GLOO_SOCKET_IFNAME."""
    words = [sys.executable, "-m", "compcoll", "doctor", "--network", *arguments]
    environ = os.environ | {"GLOO_SOCKET_IFNAME": interface}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ)


def test_doctor_finds_the_loopback_interface() -> None:
    done = doctor(interface="lo")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gloo         takes lo (127.0.0.1, loopback), since GLOO_SOCKET_IFNAME=lo\n" in done.stdout
    assert "  wrong  other nodes cannot reach lo, which is the loopback interface\n" in done.stdout


def test_json() -> None:
    name = next((each.name for each in interfaces() if each.up and not each.loopback), None)
    if name is None:
        pytest.skip("no network here")
    report = json.loads(doctor("--json", interface=name).stdout)
    assert report["ok"] and not report["findings"] and report["gloo"].startswith(name)
    assert [each["name"] for each in report["interfaces"]] == [each.name for each in interfaces()]
