"""The lab of launch/netlab: create it, delete it, and check whether it is intact.

A lab consists of network namespaces: a switch with a bridge, and a host at each of its ports. The host's end of a link
limits the rate to the switch, the switch's end the rate to the host. A file in the runtime folder lists each namespace
with its inode as soon as it exists, so that netlab never touches a namespace that it did not create.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

DEFAULT_NAME = "netlab"
FRAME_HEADER = 14
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
FREE = 125e-6  # an idle link may pass a burst of so many seconds of its rate, but at least a frame
# Seconds by which the rate limit's timer may be late without loss of rate: usually, and with pieces of single frames.
_LATE, _LATE_FRAME = 50e-6, 25e-6
_LARGEST_PIECE, _PIECE_HEADER = 65536, 512

SWITCH = "switch"
SUBNET = "10.77.0.0/24"
NAMESPACES = Path("/run/netns")
RUN_TOKEN = "NETLAB_RUN"
NAME_TOKEN = "NETLAB_NAME"

_QUEUE = "50ms"  # length of a port's queue: long enough that several senders to one host lose nothing


class NetlabError(Exception):
    """An error that the user can correct. The message says how."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def say(message: str) -> None:
    """Print a message of netlab to stderr, apart from the output of programs."""
    print(f"netlab: {message}", file=sys.stderr, flush=True)


def parse_rate(text: str) -> int:
    """Parse bits per second such as ``1gbit`` or ``500mbit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    if found is None:
        raise NetlabError(f"--rate {text}: expected a number and bit, kbit, mbit or gbit, such as 1gbit", 2)
    bits = round(float(found[1]) * _UNITS[found[2]])
    if not 10**6 <= bits <= 10**11:
        raise NetlabError(f"--rate {text}: from 1mbit to 100gbit", 2)
    return bits


def parse_bytes(text: str) -> int:
    """Parse bytes such as ``12k`` or ``39000``."""
    found = re.fullmatch(r"(\d+)(k?)b?", text.strip().lower())
    if found is None:
        raise NetlabError(f"{text}: expected bytes, such as 12000 or 12k", 2)
    return int(found[1]) * (1024 if found[2] else 1)


def shown_rate(bits: float) -> str:
    """Format a rate with a fitting unit, as tc does."""
    for unit in ("g", "m", "k"):
        if bits >= _UNITS[unit]:
            return f"{bits / _UNITS[unit]:.4g}{unit}bit"
    return f"{bits:.0f}bit"


@dataclass(frozen=True)
class Settings:
    """The settings of a lab. The rate is in bits per second, sizes are in bytes."""

    name: str
    hosts: int
    rate: int
    mtu: int
    burst: int
    gso: int | None

    @classmethod
    def of(cls, name: str, hosts: int, rate: int, mtu: int, burst: str | None, gso: int | None) -> Settings:
        """Check the values of the command line and make settings from them."""
        valid_name(name)
        if not 2 <= hosts <= 64:
            raise NetlabError(f"--hosts {hosts}: from 2 to 64", 2)
        if not 1280 <= mtu <= 65535:
            raise NetlabError(f"--mtu {mtu}: from 1280 to 65535", 2)
        frame = mtu + FRAME_HEADER
        if gso is not None and not frame <= gso <= 65536:
            raise NetlabError(f"--gso {gso}: from a frame's {frame} to 65536", 2)
        size, largest = bucket(rate, frame)
        if burst is not None:
            size, largest = parse_bytes(burst), None
            if size < frame:
                raise NetlabError(f"--burst {burst}: give at least one frame, {frame} bytes, or a smaller --mtu", 2)
        return cls(name, hosts, rate, mtu, size, gso or largest)

    def __str__(self) -> str:
        gso = f", gso {self.gso}" if self.gso else ""
        return f"{self.hosts} hosts, {shown_rate(self.rate)} each way, mtu {self.mtu}, burst {self.burst}{gso}"


def bucket(rate: int, frame: int) -> tuple[int, int | None]:
    """Return the burst, and the largest piece (GSO) that TCP may pass to the link; None for the kernel's own limit.

    An idle link passes the burst at once, which no real wire does, so the burst is small. But it must hold a whole
    piece, plus the bytes that the rate allows while the limit's timer is late. A piece has at least two frames if
    possible: with pieces of one frame, MPI's exchanges at 4 x 1 Gb/s on two cores took 1.3 to 1.5 times as long, since
    they cost so much CPU.
    """
    frames = min(max(2, int((FREE - _LATE) * rate / 8 / frame)), _LARGEST_PIECE // frame)
    if frames <= 1:
        return round(frame + _LATE_FRAME * rate / 8), None
    piece = frames * frame
    return round(piece + _LATE * rate / 8), None if piece + frame > _LARGEST_PIECE else piece + _PIECE_HEADER


def valid_name(name: str) -> str:
    """Return the name if it is valid in names of namespaces; else raise `NetlabError`."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise NetlabError(f"--name {name}: lower-case letters, digits and dashes, at most 32, the first a letter", 2)
    return name


def runtime_folder() -> Path:
    """Return the folder of all labs, which a reboot empties: NETLAB_RUNTIME_DIR, else one in /run or /tmp."""
    chosen = os.environ.get("NETLAB_RUNTIME_DIR")
    folder = Path(chosen) if chosen else Path("/run/compcoll-netlab")
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"compcoll-netlab-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise NetlabError(f"{folder} belongs to another user: set NETLAB_RUNTIME_DIR")
    return folder


def require_tools() -> None:
    """Raise `NetlabError` if namespaces cannot be made here. The message lists what is missing."""
    if not sys.platform.startswith("linux"):
        raise NetlabError("network namespaces are Linux's; this is " + sys.platform)
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        packages = "apt install iproute2 util-linux (dnf: iproute iproute-tc util-linux)"
        raise NetlabError(f"{', '.join(missing)} not found on PATH: {packages}")
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "--ipc", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise NetlabError(
            f"this root may not make namespaces ({tried.stderr.strip()}): in a container, start it with --privileged "
            "or with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        )


def command(*words: str | int, given: str | None = None) -> str:
    """Run one of the system's tools and return what it prints."""
    done = subprocess.run([str(word) for word in words], input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetlabError(f"{' '.join(str(word) for word in words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass
class Lab:
    """A lab that is up, or the remains of one."""

    folder: Path
    settings: Settings
    _made: dict[str, int] = field(default_factory=dict)
    _ready: bool = False
    _since: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The lab's name, which its folder and namespaces are named after."""
        return self.folder.name

    @classmethod
    def at(cls, name: str) -> Lab | None:
        """Return the lab of that name, intact or not, as its file describes it; None without a file."""
        folder = runtime_folder() / valid_name(name)
        try:
            told = json.loads((folder / "lab.json").read_text())
            return cls(folder, Settings(**told["settings"]), told["made"], told["ready"], told["since"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise NetlabError(
                f"{folder / 'lab.json'} cannot be read ({error}): remove {folder}, and delete the lab's namespaces by "
                f"`ip netns delete` (possibly {', '.join(_like(name)) or 'none'})"
            ) from None

    @classmethod
    def existing(cls, name: str) -> Lab:
        """Return the lab of that name, intact or not; raise `NetlabError` if there is none."""
        lab = cls.at(name)
        if lab is None:
            raise NetlabError(f"no lab {name} is up: sudo launch/netlab up --hosts 4 --rate 1gbit")
        return lab

    @classmethod
    def opened(cls, name: str) -> Lab:
        """Return the lab of that name; raise `NetlabError` if it is not up and intact."""
        require_tools()
        lab = cls.existing(name)
        if damage := lab.damage():
            raise NetlabError(f"lab {name} is the remains of an earlier one ({damage}): launch/netlab down, then up")
        return lab

    @classmethod
    def up(cls, settings: Settings, replace: bool = False) -> Lab:
        """Create a lab. If this fails, delete what was created. With ``replace``, delete an existing lab first."""
        require_tools()
        if old := cls.at(settings.name):
            if not replace:
                damage = old.damage()
                state = f"is the remains of an earlier one ({damage})" if damage else f"is up already ({old.settings})"
                raise NetlabError(f"lab {settings.name} {state}: `netlab down` first, or --replace, or another --name")
            old.down()
        if strangers := _like(settings.name):
            raise NetlabError(
                f"namespaces that netlab did not make have this lab's names: {', '.join(strangers)}; use another "
                "--name, or `ip netns delete` them if nobody needs them"
            )
        lab = cls(runtime_folder() / settings.name, settings)
        try:
            lab._build()
        except BaseException as error:
            lab.down(quietly=True)
            if isinstance(error, NetlabError) and re.search(r"not supported|Unknown device|not found", str(error)):
                raise NetlabError(f"{error} (does this kernel have them? modprobe -a veth bridge sch_tbf)") from None
            raise
        cores = len(os.sched_getaffinity(0))
        if settings.hosts * settings.rate > 4e9 * cores:
            total = f"{settings.hosts} hosts × {shown_rate(settings.rate)}"
            say(f"{total} may be too fast for {cores} cores: run `netlab check`")
        say(f"lab {settings.name} is up: {settings}")
        return lab

    @property
    def hosts(self) -> list[str]:
        """The hosts' names, as they know each other."""
        return [f"h{i}" for i in range(self.settings.hosts)]

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self.name}-{host}"

    @staticmethod
    def address(host: str) -> str:
        """Return the address of a host or the switch."""
        number = 254 if host == SWITCH else int(host[1:]) + 1
        return f"{SUBNET.rpartition('.')[0]}.{number}"

    def damage(self) -> str | None:
        """Describe what is wrong with the lab; None if it is intact."""
        if not self._ready:
            return "it was never finished"
        for host in (*self.hosts, SWITCH):
            if _inode(self.namespace(host)) != self._made.get(self.namespace(host)):
                return f"the namespace of {host} is gone"
        dead = self.dead_links()
        return f"the link of {', '.join(dead)} is down" if dead else None

    def dead_links(self) -> list[str]:
        """Return the hosts whose namespace is gone or whose link is down."""
        ports = json.loads(command("ip", "-json", "-netns", self.namespace(SWITCH), "link"))
        carrying = {port["ifname"] for port in ports if "LOWER_UP" in port["flags"]}
        return [
            host
            for host in self.hosts
            if f"port{host[1:]}" not in carrying or _inode(self.namespace(host)) != self._made[self.namespace(host)]
        ]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the lab, so that two runs do not disturb each other."""
        with (self.folder / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise NetlabError(f"lab {self.name} is in use by process {file.read().strip()}") from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def environment(self) -> dict[str, str]:
        """Return environment variables for processes in the lab, among them the network interface to use."""
        return {
            NAME_TOKEN: self.name,
            "NETLAB_DIR": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "COMPCOLL_NETLAB": str(self.settings),
        }

    def describe(self) -> str:
        """Return the text of ``netlab status``."""
        lines = [f"{self.name}: {self.settings}"]
        if damage := self.damage():
            return f"{lines[0]}\n  not usable: {damage}; `launch/netlab down --name {self.name}` clears it away"
        lines.append(f"  up since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self._since))}")
        lines += [f"  {h}  {self.address(h)}  namespace {self.namespace(h)}" for h in (*self.hosts, SWITCH)]
        running = processes_with(NAME_TOKEN, self.name)
        lines.append(f"  {len(running)} processes run in it" if running else "  nothing runs in it")
        return "\n".join(lines)

    def down(self, quietly: bool = False) -> None:
        """End the lab's processes, and delete its namespaces and its folder."""
        ended = end_processes(NAME_TOKEN, self.name)
        for name, inode in self._made.items():
            found = _inode(name)
            if found == inode:
                for pid in command("ip", "netns", "pids", name).split():
                    say(f"process {pid}, which netlab did not start, is in {name} and keeps its links alive")
                command("ip", "netns", "delete", name)
            elif found is not None:
                say(f"namespace {name} is not the one that netlab made: left alone")
        shutil.rmtree(self.folder, ignore_errors=True)
        if not quietly:
            say(f"lab {self.name} is down" + (f"; {ended} processes were ended" if ended else ""))

    def _note(self) -> None:
        told = {"settings": asdict(self.settings), "made": self._made, "ready": self._ready, "since": self._since}
        temporary = self.folder / "lab.json.new"
        temporary.write_text(json.dumps(told, indent=1))
        temporary.replace(self.folder / "lab.json")

    def _build(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for part in ("tmp", "run"):
            (self.folder / part).mkdir(exist_ok=True)
        names = "".join(f"{self.address(host)} {host}\n" for host in (*self.hosts, SWITCH))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self._note()
        for host in (SWITCH, *self.hosts):
            command("ip", "netns", "add", self.namespace(host))
            self._made[self.namespace(host)] = _inode(self.namespace(host)) or 0
            self._note()
        mtu, switch = self.settings.mtu, self.namespace(SWITCH)
        gso = f" gso_max_size {self.settings.gso}" if self.settings.gso else ""
        ports = ["link set lo up", "link add br0 type bridge", f"link set br0 mtu {mtu} addrgenmode none up"]
        ports.append(f"addr add {self.address(SWITCH)}/24 dev br0")
        for i, host in enumerate(self.hosts):
            ports += [
                f"link add port{i} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {self.namespace(host)}",
                f"link set port{i}{gso} addrgenmode none master br0 up",
            ]
        self._batch("ip", switch, ports)
        link = ["link set lo up", f"link set eth0{gso} addrgenmode none up"]
        for host in self.hosts:
            self._batch("ip", self.namespace(host), [*link, f"addr add {self.address(host)}/24 dev eth0"])
            self._batch("tc", self.namespace(host), [self._limit("eth0")])
        self._batch("tc", switch, [self._limit(f"port{i}") for i in range(len(self.hosts))])
        self._settle_tcp()
        self._wait_for_links()
        self._ready = True
        self._note()

    def _limit(self, device: str) -> str:
        s = self.settings
        return f"qdisc add dev {device} root tbf rate {s.rate}bit burst {s.burst}b latency {_QUEUE}"

    def _batch(self, tool: str, namespace: str, lines: Sequence[str]) -> None:
        command(tool, "-n", namespace, "-batch", "-", given="\n".join(lines) + "\n")

    def _settle_tcp(self) -> None:
        """Set cubic, the usual congestion control, and no slow start after idling, when other contenders were timed."""
        windows = "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
        for host in self.hosts:
            try:  # for the route, since the machine may forbid namespaces to set their own default
                self._batch("ip", self.namespace(host), [f"route replace {SUBNET} dev eth0 congctl cubic"])
                command("ip", "netns", "exec", self.namespace(host), "sh", "-c", windows)
            except NetlabError as error:
                say(f"TCP keeps the kernel's congestion control, or its slow start after idling: {error}")
                return

    def _wait_for_links(self) -> None:
        end = time.monotonic() + 5
        while dead := self.dead_links():
            if time.monotonic() > end:
                raise NetlabError(f"the link of {', '.join(dead)} did not come up in 5 s")
            time.sleep(0.01)


def processes_with(variable: str, value: str) -> list[int]:
    """Return the pids of all processes, except this one, whose environment sets ``variable`` to ``value``."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_processes(variable: str, value: str, gently: float = 0.0) -> int:
    """Kill all processes of `processes_with`, after SIGTERM and ``gently`` seconds; return their number."""
    seen: set[int] = set()
    end = time.monotonic() + gently
    number = signal.SIGTERM if gently else signal.SIGKILL
    while members := processes_with(variable, value):
        for pid in members:
            if pid not in seen or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        seen.update(members)
        if time.monotonic() > end:
            number = signal.SIGKILL
        if time.monotonic() > end + 10:
            say(f"processes that cannot be ended: {members}")
            break
        time.sleep(0.02)
    return len(seen)


def _inode(namespace: str) -> int | None:
    try:
        return (NAMESPACES / namespace).stat().st_ino
    except OSError:
        return None


def _like(name: str) -> list[str]:
    """Return the existing namespaces whose names are those of a lab called ``name``."""
    if not NAMESPACES.is_dir():
        return []
    pattern = re.compile(re.escape(name) + rf"-(h\d+|{SWITCH})")
    return sorted(path.name for path in NAMESPACES.iterdir() if pattern.fullmatch(path.name))
