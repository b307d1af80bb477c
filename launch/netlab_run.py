"""`netlab run`: run a program on the hosts, watch it and the machine's other load, and end all its processes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from launcher import launcher
from netlab_lab import RUN_TOKEN, SUBNET, SWITCH, Lab, NetlabError, end_processes, processes_with, say

AGENT = Path(__file__).resolve().with_name("netlab-ssh")
TIMED_OUT = 124
_EAGER = str((1 << 18) + 4096)  # bytes, including MPI's headers
_GRACE = 5.0  # seconds in which a job may end by itself after a rank or daemon has failed
_DISTURBED = 5.0  # if other processes use more per cent of the machine than this, measurements are not trusted
_SAMPLE = 0.5  # seconds between two checks of the links and of other processes
_PF_KTHREAD = 0x00200000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# The shell command of a rank notes its exit status: Hydra may wait for ever for a rank that left without MPI_Finalize.
_ONE_RANK = '"$@"; S=$?; echo $S >"$NETLAB_DIR/run/${OMPI_COMM_WORLD_RANK-${PMI_RANK-$RANK}}.rank"; exit $S'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `netlab run`."""
    add = parser.add_argument
    add("-n", dest="ranks", type=int, help="ranks (default: one for each host)")
    add("--per-host", type=int, help="ranks on each host (default: spread over all, evenly)")
    mpi = (
        "the MPI, from the environment that `make` built for it (default: as launch/mpirun chooses); none: set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
    )
    add("--mpi", choices=(*launcher.ENVIRONMENTS, "none"), help=mpi)
    add("--prefix", type=Path, help="a virtual environment to use instead")
    settings = parser.add_mutually_exclusive_group()
    settings.add_argument("--tuned", action="store_true", default=True, help="make MPI's TCP full-duplex (default)")
    settings.add_argument("--default", dest="tuned", action="store_false", help="keep MPI's default TCP settings")
    own = (
        "let ranks assume that their host has all cores to itself: do not limit threads, and let each host report that "
        "it is a separate machine"
    )
    add("--own-cores", action="store_true", help=own)
    add("--mpirun-args", default="", metavar="ARGS", help='more arguments of mpirun: "--mca coll_… …"')
    add("--timeout", type=float, default=600.0, metavar="S", help="end the run after S seconds (default: %(default)g)")
    add_quiet_arguments(parser)
    add("--record", type=Path, metavar="FILE", help="write settings, load and outcome to a JSON file")
    add("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGS", help="the program to run")


def main(lab: Lab, options: argparse.Namespace) -> int:
    """Run the program of the command line; return its exit status."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise NetlabError("nothing to run: launch/netlab run [options] -- PROGRAM ARGS", 2)
    placement = _placement(lab, options.ranks, options.per_host)
    if options.timeout <= 0:
        raise NetlabError(f"--timeout {options.timeout:g}: must be above 0", 2)
    if options.record is not None and not options.record.resolve().parent.is_dir():
        raise NetlabError(f"--record {options.record}: no such folder", 2)
    with lab.lock():
        if ended := end_processes("NETLAB_NAME", lab.name):
            say(f"ended {ended} processes of an earlier run")
        load = wait_for_quiet(options.quiet_cpu, options.quiet_wait)
        environ = {**os.environ, **lab.environment(), RUN_TOKEN: uuid.uuid4().hex}
        threads = str(max((os.cpu_count() or 1) // sum(placement.values()), 1))
        if options.own_cores:
            environ["NETLAB_OWN_CORES"] = "1"
        else:  # all hosts share the cores
            environ = {"COMPCOLL_THREADS": threads, "OMP_NUM_THREADS": threads, **environ}
        environ["COMPCOLL_NETLAB_SETTINGS"] = "tuned" if options.tuned else "default"
        if options.mpi == "none":
            commands, environ = _plain_commands(lab, placement, program, options.prefix, environ)
        else:
            commands, environ = _mpi_command(lab, placement, program, options, environ)
        meter = LoadMeter()
        started = time.time()
        status, why = Run(lab, environ, placement, options.timeout, meter).run(commands)
        during = meter.others()
    if why is not None:
        say(why)
    if load is not None or during > _DISTURBED:
        before = "" if load is None else f"{load:.0f} % before, "
        disturbed = ": DISTURBED, do not trust the times" if during > _DISTURBED else ""
        say(f"the machine's other load: {before}{during:.0f} % meanwhile{disturbed}")
    if options.record is not None:
        told = {
            "lab": str(lab.settings),
            "mpi": options.mpi or os.environ.get("MPI", "openmpi"),
            "settings": environ["COMPCOLL_NETLAB_SETTINGS"],
            "program": shlex.join(program),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 3),
            "other_load_before_percent": None if load is None else round(load, 1),
            "other_load_meanwhile_percent": round(during, 1),
            "disturbed": during > _DISTURBED,
            "exit_status": status,
            "ended_because": why,
        }
        options.record.write_text(json.dumps(told, indent=1) + "\n")
    return status


def _placement(lab: Lab, ranks: int | None, per_host: int | None) -> dict[str, int]:
    """Return the number of ranks of each host, in the order of ranks."""
    hosts = lab.hosts
    if ranks is None:
        ranks = (per_host or 1) * len(hosts)
    if ranks < 1 or (per_host is not None and per_host < 1):
        raise NetlabError("-n and --per-host must be at least 1", 2)
    if per_host is None:
        per_host = math.ceil(ranks / len(hosts))
    if ranks > per_host * len(hosts):
        raise NetlabError(f"-n {ranks}: {len(hosts)} hosts with {per_host} each are {per_host * len(hosts)}", 2)
    return {h: min(per_host, ranks - i * per_host) for i, h in enumerate(hosts) if ranks > i * per_host}


def _mpi_command(
    lab: Lab, placement: dict[str, int], program: Sequence[str], options: argparse.Namespace, environ: dict[str, str]
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the command that starts mpirun on the switch, and its environment."""
    try:
        prefix = options.prefix
        if prefix is None and options.mpi is not None:
            folder = launcher.REPOSITORY / launcher.ENVIRONMENTS[options.mpi]
            prefix = folder if (folder / "bin" / "python").exists() else None
            if prefix is None and options.mpi != "system":
                raise NetlabError(f"--mpi {options.mpi}: no {folder.name} here: make MPI={options.mpi} install")
        elif prefix is None:
            prefix = launcher.environment_prefix()
        elif not (prefix / "bin" / "python").exists():
            raise NetlabError(f"--prefix {prefix}: there is no bin/python in it", 2)
        prefix = prefix.absolute() if prefix is not None else None
        kind = launcher.flavour(launcher.find_mpirun(prefix))
        if kind not in ("openmpi", "mpich"):
            raise NetlabError(f"{launcher.find_mpirun(prefix)} is neither Open MPI's nor MPICH's")
        arguments, added = (_open_mpi if kind == "openmpi" else _mpich)(placement, options.tuned)
        arguments += [*shlex.split(options.mpirun_args), "/bin/sh", "-c", _ONE_RANK, "rank", *program]
        command, environ = launcher.prepare(arguments, prefix, {**environ, **added})
    except launcher.LaunchError as error:
        raise NetlabError(str(error)) from None
    return [on_host(SWITCH, command)], environ


def _open_mpi(placement: Mapping[str, int], tuned: bool) -> tuple[list[str], dict[str, str]]:
    prte = {
        "plm": "ssh",
        "plm_ssh_agent": str(AGENT),
        "plm_ssh_no_tree_spawn": "1",
        "prte_if_include": SUBNET,
        "prte_leave_session_attached": "1",
    }
    mca = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": SUBNET, "mpi_yield_when_idle": "1"}
    if max(placement.values()) > 1:
        mca["btl"] = "tcp,self,sm"
    if tuned:
        mca["btl_tcp_flags"] = "0x1"  # only sends: with puts, the default, pairwise exchanges are half-duplex
        # No rendezvous up to 256 KiB, since a rank that shares its core answers late.
        mca |= dict.fromkeys(("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size"), _EAGER)
    hosts = ",".join(f"{host}:{count}" for host, count in placement.items())
    arguments = ["--host", hosts, "-n", str(sum(placement.values())), "--bind-to", "none"]
    arguments += ["--map-by", f"ppr:{max(placement.values())}:node"]
    arguments += [word for name, value in prte.items() for word in ("--prtemca", name, value)]
    arguments += [word for name, value in mca.items() for word in ("--mca", name, value)]
    return arguments, {}


def _mpich(placement: Mapping[str, int], tuned: bool) -> tuple[list[str], dict[str, str]]:
    arguments = ["-launcher", "ssh", "-launcher-exec", str(AGENT), "-localhost", SWITCH, "-iface", "br0"]
    arguments += ["-hosts", ",".join(f"{host}:{count}" for host, count in placement.items())]
    arguments += ["-n", str(sum(placement.values())), "-bind-to", "none"]
    added = {"UCX_NET_DEVICES": "eth0", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    added["UCX_TLS"] = "tcp,self"
    if max(placement.values()) > 1:
        added["UCX_TLS"] += ",sysv,posix"
    if tuned:
        added["UCX_RNDV_THRESH"] = "inf"  # with rendezvous, the default, pairwise exchanges are half-duplex
    return arguments, added


def _plain_commands(
    lab: Lab, placement: dict[str, int], program: Sequence[str], prefix: Path | None, environ: dict[str, str]
) -> tuple[list[list[str]], dict[str, str]]:
    """Return a command for each rank, which starts it on its host without MPI, and the environment."""
    prefix = (prefix or launcher.environment_prefix() or Path(sys.prefix)).absolute()
    environ = {**environ, "PATH": f"{prefix / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"}
    world = {"WORLD_SIZE": sum(placement.values()), "MASTER_ADDR": lab.address("h0"), "MASTER_PORT": 29500}
    commands: list[list[str]] = []
    for host, count in placement.items():
        for local in range(count):
            own = {**world, "RANK": len(commands), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
            settings = [f"{name}={value}" for name, value in own.items()]
            commands.append(on_host(host, ["env", *settings, "/bin/sh", "-c", _ONE_RANK, "rank", *program]))
    return commands, environ


def on_host(host: str, command: Sequence[str]) -> list[str]:
    """Wrap a command so that it runs on a host of the lab. Its environment must contain `Lab.environment`."""
    return [str(AGENT), host, shlex.join(command)]


@dataclass
class Run:
    """The processes of one run."""

    lab: Lab
    environ: dict[str, str]
    placement: dict[str, int]
    timeout: float
    meter: LoadMeter
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _interrupted: int | None = None

    def run(self, commands: Sequence[Sequence[str]]) -> tuple[int, str | None]:
        """Start the commands and wait; return the exit status, and the reason of a failure or None."""
        for name in ("run", "tmp"):
            shutil.rmtree(self.lab.folder / name, ignore_errors=True)
            (self.lab.folder / name).mkdir()
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        # mpirun may exit before the hosts' daemons do: let them become children of this process, so that their CPU time
        # does not count as other load.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": _end_with_parent}
        try:
            for command in commands:
                self._processes.append(subprocess.Popen(command, env=self.environ, **how))
            return self._watch()
        finally:
            if self._all_ended():
                self._let_leave(2.0)
            end_processes(RUN_TOKEN, self.environ[RUN_TOKEN], gently=2.0)
            for process in self._processes:
                process.wait()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            shutil.rmtree(self.lab.folder / "tmp", ignore_errors=True)
            (self.lab.folder / "tmp").mkdir(exist_ok=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> tuple[int, str | None]:
        sampled = time.monotonic()
        dead: list[str] = []
        deadline, failing_since = sampled + self.timeout, math.inf
        while True:
            now = time.monotonic()
            if now - sampled > _SAMPLE:
                self.meter.sample()
                sampled, dead = now, self.lab.dead_links()
            if self._all_ended():
                status = next((code for process in self._processes if (code := process.returncode)), 0)
                return self._judged(128 - status if status < 0 else status)
            if self._interrupted is not None:
                return 128 + self._interrupted, f"ended by {signal.Signals(self._interrupted).name}"
            if now > deadline:
                return TIMED_OUT, f"the run took longer than {self.timeout:g} s and was ended (--timeout)"
            if dead:
                return 1, f"host {', '.join(dead)} died: its link is down or its namespace has gone; the run was ended"
            failure = self._failure()
            failing_since = math.inf if failure is None else min(failing_since, now)
            if now - failing_since > _GRACE:
                return 1, f"{failure}, and other processes did not end: the run was ended"
            time.sleep(0.05)

    def _all_ended(self) -> bool:
        return None not in [process.poll() for process in self._processes]

    def _let_leave(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while processes_with(RUN_TOKEN, self.environ[RUN_TOKEN]) and time.monotonic() < end:
            time.sleep(0.01)

    def _judged(self, status: int) -> tuple[int, str | None]:
        """Return the run's status and reason. Open MPI's mpirun may return 0 even if a host has died."""
        self._let_leave(1.0)
        notes = {path.name for path in (self.lab.folder / "run").iterdir()}
        if all(f"{rank}.rank" in notes for rank in range(sum(self.placement.values()))) and status == 0:
            return 0, None
        if silent := [host for host in self.placement if f"{host}.ended" not in notes]:
            which = "a host" if len(silent) == len(self.placement) else f"host {', '.join(silent)}"
            return status or 1, f"{which} died: its processes vanished (mpirun may have said why, above)"
        return status or 1, self._failure() or "not every rank ended by itself"

    def _failure(self) -> str | None:
        """Describe the first failure: of a rank, else of MPI's daemon on a host; None if there is none."""
        for pattern, part in (("*.rank", "rank {}"), ("*.ended", "MPI's daemon on host {}")):
            bad = []
            for note in (self.lab.folder / "run").glob(pattern):
                if (status := note.read_text().strip()) not in ("", "0"):
                    bad.append((note.stat().st_mtime_ns, f"{part.format(note.stem)} {how(int(status))}"))
            if bad:
                return min(bad)[1] + (f" ({len(bad) - 1} others after it)" if len(bad) > 1 else "")
        return None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = number


def how(status: int) -> str:
    """Describe a shell's exit status."""
    if status > 128:
        try:
            return f"died of {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"ended with status {status}"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def add_quiet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on the machine's other load."""
    quiet = "start only after others have used less of all cores for 2 s (PERCENT: %(const)g by default)"
    parser.add_argument("--quiet-cpu", nargs="?", type=float, const=5.0, metavar="PERCENT", help=quiet)
    wait = "give up after waiting S seconds (default: %(default)g)"
    parser.add_argument("--quiet-wait", type=float, default=300.0, metavar="S", help=wait)


class LoadMeter:
    """Measures stolen time, and CPU use of processes that do not descend from this one, in per cent of all cores.

    The other processes are counted one by one. To subtract this process's children from the total would be wrong, since
    the system charges interrupts of the lab's traffic sometimes to a process and sometimes to none. Call `sample` about
    every second.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._ticks, self._last = 0, _ticks_of_others()
        self._busy, self._stolen = _busy_and_stolen_ticks()

    def sample(self) -> None:
        """Count CPU use since the last sample."""
        now = _ticks_of_others()
        self._ticks += max(now - self._last, 0)  # negative if a process has ended whose parent does not wait for it
        self._last = now

    def others(self) -> float:
        """Return the load since the meter was made. It is at most the load of the whole machine."""
        self.sample()
        busy, stolen = _busy_and_stolen_ticks()
        whole = (time.monotonic() - self._began) * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK")
        return 100 * (min(self._ticks, busy - self._busy) + stolen - self._stolen) / max(whole, 1e-9)


def wait_for_quiet(percent: float | None, at_most: float) -> float | None:
    """Wait until other processes use less than ``percent`` of the machine for 2 s; return their load.

    Return None at once if ``percent`` is None.
    """
    if percent is None:
        return None
    end, quiet, said, load = time.monotonic() + at_most, 0, False, 100.0
    while quiet < 4:
        meter = LoadMeter()
        time.sleep(0.5)
        load = meter.others()
        quiet = quiet + 1 if load < percent else 0
        if time.monotonic() > end and not quiet:
            raise NetlabError(f"not quiet within {at_most:g} s: others use {load:.0f} % of the machine (--quiet-wait)")
        if not quiet and not said:
            say(f"others use {load:.0f} % of the machine: waiting for less than {percent:g} %")
            said = True
    return load


def _ticks_of_others() -> int:
    """Return the CPU ticks of all processes that do not descend from this one, including their ended children."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                if not int(fields[6]) & _PF_KTHREAD:
                    used[int(entry.name)] = sum(map(int, fields[11:15]))

    def is_own(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(ticks for pid, ticks in used.items() if not is_own(pid))


def _busy_and_stolen_ticks() -> tuple[int, int]:
    """Return the ticks of all cores in processes and interrupts, and those taken by the hypervisor."""
    user, nice, system, _, _, irq, softirq, stolen = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq, stolen
