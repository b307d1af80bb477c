"""``python -m compcoll doctor``: report the environment, test compcoll in it, and print what to change."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import config
from ..communicator import Communicator
from ..errors import CompcollError, MPIMissing
from ..gpu.discovery import gpus
from ..host.cores import affinity, usable_cores
from ..host.device import HostDevice
from ..layout import World
from ..plan.choose import NAMES
from ..plan.cost import DEFAULTS
from ..plan.explanation import link_text
from ..plan.profile import find, load, path_of, place_of
from . import selftest
from .machine import Launcher, binding, cpu, launcher, loaded_networks, settings, versions
from .network import gloo_listens, interfaces
from .tune import Stopwatch, with_links

if TYPE_CHECKING:
    from ..transports.mpi import MPITransport

T = TypeVar("T")

WRONG, SLOW, NOTE = "wrong", "slow", "note"

_NEEDED = ("numpy", "ml_dtypes", "zfpy")
_SECONDS = 1.0  # to measure messages
_TIMEOUT = 60.0


class Finding(NamedTuple):
    """A problem or a remark.

    Attributes
    ----------
    level : {"wrong", "slow", "note"}
        ``"wrong"`` if results are wrong or missing, ``"slow"`` if something costs speed, else ``"note"``.
    text, remedy : str
        The description, and what the user can do.
    """

    level: str
    text: str
    remedy: str


@dataclass
class Report:
    """Facts and findings of one rank or all ranks.

    Attributes
    ----------
    facts : dict
        Facts for the JSON output.
    lines : list of (str, str)
        Headings and texts for the printed output.
    findings : list of Finding
        Problems and remarks.
    verdict : str
        The last line of the printed output if nothing is wrong.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    verdict: str = "compcoll works here"

    @property
    def healthy(self) -> bool:
        return all(finding.level != WRONG for finding in self.findings)

    def add(self, heading: str, text: str, **facts: Any) -> None:
        """Add a line of the printed output, with its facts for JSON."""
        self.lines.append((heading, text))
        self.facts |= facts

    def find(self, level: str, text: str, remedy: str) -> None:
        """Add a finding, unless it is there already."""
        finding = Finding(level, text, remedy)
        if finding not in self.findings:
            self.findings.append(finding)

    def attempt(self, work: Callable[[], T], remedy: str) -> T | None:
        """Return a function's result; if it raises `CompcollError`, add a finding and return None."""
        try:
            return work()
        except CompcollError as error:
            self.find(WRONG, str(error), remedy)
            return None


DESCRIPTION = (
    "Examines the machine, MPI and the launcher, tests codecs and collectives, and prints what to "
    "change. Start it alone, or under mpirun with the ranks and nodes that you will use. The exit status is 1 if "
    "something is wrong."
)
EXAMPLE = "mpirun -n 4 python -m compcoll doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    network = "examine only this node's network interfaces: where PyTorch's gloo listens, and what to set"
    parser.add_argument("--network", action="store_true", help=network)


def run(args: argparse.Namespace) -> int:
    """Examine all ranks, and print the report on one."""
    report, started_by = Report(), launcher()
    if args.network:
        _network(report)
    else:
        _packages(report)
        _environment(report)
        _cpu(report)
    if args.network or examine_ranks(report, started_by):
        print(to_json(report) if args.json else "\n".join(to_text(report)), flush=True)
    return 0 if report.healthy else 1


def _network(report: Report) -> None:
    """Report this node's network interfaces, and the one where gloo listens."""
    report.verdict = "other nodes can connect to gloo here, unless a firewall is in the way"
    every, gloo = interfaces(), gloo_listens()
    report.add("interfaces", ", ".join(map(str, every)) or "none", interfaces=[each._asdict() for each in every])
    report.add("gloo", f"takes {gloo.text}", gloo=gloo.text)
    if gloo.problem:
        report.find(WRONG, gloo.problem, f"{gloo.remedy}, before the ranks start on this node")


def _packages(report: Report) -> None:
    system, python = f"{platform.system()} {platform.machine()}", platform.python_version()
    found = versions()
    version = found.pop("compcoll")
    about = f"{version} on Python {python}, {system}"
    report.add("compcoll", about, compcoll=version, python=python, system=system)
    installed = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = ", ".join(name for name, number in found.items() if not number)
    report.add("packages", installed + (f"; not installed: {missing}" if missing else ""), packages=found)
    for name in _NEEDED:
        if not found[name]:
            report.find(WRONG, f"{name} is not installed", f"pip install {name}")


def _environment(report: Report) -> None:
    ours, unknown, mpis = settings()
    every = {**ours, **mpis}
    text = ", ".join(f"{name}={value}" for name, value in every.items())
    report.add("environment", text or "no settings of compcoll's or MPI's", environment=every)
    for name in unknown:
        text = f"{name} is in the environment, but compcoll has no such setting"
        report.find(NOTE, text, "check the spelling")
    for read in (config.timeout, lambda: config.threads(1), config.segment_nbytes):
        report.attempt(read, "correct it, or unset it")


def _cpu(report: Report) -> None:
    name, features = cpu()
    report.add("CPU", f"{name}: {', '.join(features) or 'no feature that matters'}", cpu=name, cpu_features=features)
    sets = HostDevice.instruction_sets()
    used = report.attempt(lambda: config.instruction_set(sets), "choose one that this CPU can run, or unset it")
    report.add("kernels", f"{used or 'none'} of {', '.join(sets)}", instruction_set=used, instruction_sets=sets)
    if used is not None and used != sets[-1]:
        remedy = f"unset {config.INSTRUCTION_SET}, unless you compare instruction sets"
        report.find(SLOW, f"kernels use {used}, but this CPU can run {sets[-1]}", remedy)
    if sets == ["portable"] and platform.machine() == "x86_64":
        report.find(SLOW, "this CPU has no AVX2, so the portable kernels are used", "a newer CPU encodes faster")


def examine_ranks(report: Report, started_by: Launcher) -> bool:
    """Examine all ranks together; return whether this rank prints. Collective under MPI."""
    try:
        from ..transports.mpi import MPITransport
    except MPIMissing as error:
        text, _, remedy = str(error).rpartition(": ")
        report.add("MPI", f"none: {text}", mpi=None)
        unneeded = not report.facts["packages"]["mpi4py"] and started_by.name == "none"
        report.find(NOTE if unneeded else WRONG, text, remedy)
        _codecs(report)
        _gpu(report)
        return started_by.rank == 0
    transport = MPITransport(timeout=config.DEFAULT_TIMEOUT)
    try:
        _library(report, transport, started_by)
        _placement(report, transport)
        _codecs(report)
        _messages(report, transport)
        _gpu(report)
        _sums(report, transport)
        _profile(report, transport)
        _collect(report, transport)
    except CompcollError as error:
        report.find(WRONG, f"{type(error).__name__}: {error}", "the error is in the test after the last line above")
    alone = transport.size == 1 and started_by.ranks > 1
    return started_by.rank == 0 if alone else transport.rank == 0


def _library(report: Report, transport: MPITransport, started_by: Launcher) -> None:
    from ..transports.library import library  # loads MPI

    known = library()
    name = " ".join(known.version.split(",")[0].splitlines()[0].replace("Version:", "").split())
    standard = ".".join(map(str, known.standard))
    found = re.search(r"Device:\s*(\S+)", known.version)
    device = found[1] if found else None
    text = f"{name}{f' ({device})' if device else ''}, MPI {standard}, threads: {known.thread_level}"
    facts = {"mpi": name, "mpi_standard": standard, "thread_level": known.thread_level}
    report.add("MPI", text, **facts, mpi_memory_kinds=known.memory_kinds, mpi_device=device)
    text = started_by.name + (f", {started_by.ranks} ranks" if started_by.ranks > 1 else "")
    report.add("launcher", text, launcher=started_by._asdict())
    if started_by.ranks != transport.size and started_by.name != "none":
        report.find(
            WRONG,
            f"{started_by.name} started {started_by.ranks} ranks, but MPI sees {transport.size}: this launcher belongs "
            f"to another MPI than the library that mpi4py loaded ({name})",
            "use the mpirun of that library (launch/mpirun finds it), or point MPI4PY_LIBMPI at the other library",
        )
    if known.thread_level != "MULTIPLE":
        text = f'MPI was started with thread level {known.thread_level}: progress="thread" cannot be used'
        report.find(NOTE, text, 'set mpi4py.rc.thread_level = "multiple" before MPI starts; MPI must support it')


def _placement(report: Report, transport: MPITransport) -> None:
    own = affinity()
    every = transport.gather(lambda: own)
    hosts = transport.gather(platform.node)
    present = transport.gather(lambda: os.cpu_count() or len(own))
    texts = []
    for node in range(max(transport.nodes) + 1):
        ranks = [rank for rank, on in enumerate(transport.nodes) if on == node]
        host, cores = hosts[ranks[0]], {core for rank in ranks for core in every[rank]}
        bound = binding([every[rank] for rank in ranks], present[ranks[0]])
        texts.append(f"{len(ranks)} on {host} ({len(every[ranks[0]])} cores a rank, {bound})")
        if len(ranks) > len(cores):
            remedy = "start fewer ranks there, or let the launcher bind them to more cores"
            report.find(SLOW, f"{len(ranks)} ranks share {len(cores)} cores on {host}", remedy)
    text = f"{transport.size} on {_counted(len(texts), 'node')}: {'; '.join(texts[:4])}{' …' * (len(texts) > 4)}"
    report.add("ranks", text, ranks=transport.size, nodes=list(transport.nodes), hosts=hosts, cores=every)
    threads = report.attempt(lambda: config.threads(transport.cores), f"correct {config.THREADS}, or unset it")
    report.add("threads", f"{threads} for each kernel", threads=threads)
    if threads is not None and threads > (usable := usable_cores()):
        text = f"{threads} threads for each kernel on {_counted(usable, 'core')}"
        report.find(SLOW, text, f"unset {config.THREADS}, or set it to at most {usable}")


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def _codecs(report: Report) -> None:
    wrong = report.attempt(selftest.check_codecs, "see the other lines of this report")
    for text in wrong or ():
        report.find(WRONG, f"codec {text}", "build compcoll again; if the error stays, report it with this output")
    count = f"{len(selftest.CODECS)} of our own on {len(HostDevice.instruction_sets())} instruction sets"
    verdict = "correct" if wrong == [] else f"{len(wrong or [0])} tests failed"
    report.add("codecs", f"{count}, {len(selftest.BY_ZFPY)} by zfpy: {verdict}", codecs_wrong=wrong)


def _messages(report: Report, transport: MPITransport) -> None:
    """Report latency and bandwidth of messages, measured by all pairs of ranks at once."""
    world = World.of(transport.nodes)
    networks = loaded_networks()
    report.facts["loaded_networks"] = networks
    if world.size == 1:
        report.add("messages", "none: one rank only; start this under mpirun to test more")
        return
    measured = with_links(DEFAULTS, transport, Stopwatch(transport, _SECONDS), world, 0.1)
    among = f" (loaded: {', '.join(networks)})" if networks else ""
    for there, where, link, guess in (
        (world.per_node > 1, "inside a node", measured.inside, "probably shared memory"),
        (world.nodes > 1, "between nodes", measured.between, f"TCP or a transport that MPI prefers{among}"),
    ):
        if there:
            text = f"{where}: {link_text(link)}; {guess} (MPI does not report it)"
            facts = {"latency": link.latency, "bytes_per_second": 1 / link.per_byte}
            report.add("messages", text, **{where.replace(" ", "_"): facts})


def _gpu(report: Report) -> None:
    """Report the GPUs, and how MPI takes their memory to other ranks."""
    names, why = gpus()
    wrong = selftest.check_gpu() if names else ""
    if wrong:
        remedy = "pip install 'cupy-cuda13x[ctk]' (cuda12x for CUDA 12) installs the compiler that CuPy needs"
        report.find(WRONG, f"GPU: {wrong}", remedy)
    text = ", ".join(names) if names else f"none ({why})"
    facts: dict[str, Any] = {"gpus": names, "gpu_wrong": wrong}
    if report.facts["mpi"] is None:
        report.add("GPU", text, **facts)
        return
    from ..transports.library import gpu_awareness  # loads MPI

    known = report.attempt(gpu_awareness, f"correct {config.GPU_AWARE}, or unset it")
    if known is None:
        return
    way = "takes their memory" if known.aware else "does not take their memory: wires go through pinned host memory"
    facts |= {"gpu_aware": known.aware, "gpu_aware_by": known.how}
    report.add("GPU", f"{text}; MPI {way} ({known.how})", **facts)


def _sums(report: Report, transport: MPITransport) -> None:
    comm = Communicator(transport.comm, timeout=_TIMEOUT)
    wrong = selftest.check_allreduce(comm, World.of(transport.nodes))
    remedy = "run it again with fewer ranks or another MPI; if the error stays, report it with this output"
    for text in wrong:
        report.find(WRONG, text, remedy)
    verdict = "correct" if not wrong else f"{len(wrong)} tests failed"
    report.add("sums", f"allreduce by {', '.join(NAMES['allreduce'])}: {verdict}", sums_wrong=wrong)
    if not wrong:
        comm.free()


def _profile(report: Report, transport: MPITransport) -> None:
    """Report the profile that ``auto`` uses on these machines."""
    place = place_of(transport, HostDevice().name)
    if transport.rank != 0:
        return
    named = config.profile()
    if named == config.NO_PROFILE:
        report.add("profile", f"defaults, as {config.PROFILE} says", profile=None)
        return
    stored = report.attempt(lambda: load(Path(named)) if named else find(place), "measure it again, or delete it")
    if stored is not None:
        source = named or str(path_of(stored.place))
        report.add("profile", f"{source}, made {stored.made}", profile=source)
        return
    report.add("profile", "none for these machines and this MPI: auto uses default speeds", profile=None)
    if transport.size > 1:
        remedy = "mpirun … python -m compcoll tune"
        report.find(NOTE, 'no speeds were measured here: algorithm="auto" guesses', remedy)


def _collect(report: Report, transport: MPITransport) -> None:
    """Collect the findings of all ranks on every rank."""
    every = transport.gather(lambda: [list(finding) for finding in report.findings])
    for rank, findings in enumerate(every):
        for level, text, remedy in findings:
            alike = [level, text, remedy] in every[0]
            report.find(level, text if alike else f"rank {rank}: {text}", remedy)


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    findings = [finding._asdict() for finding in report.findings]
    return json.dumps({"ok": report.healthy, **report.facts, "findings": findings}, indent=1)


def to_text(report: Report) -> Sequence[str]:
    """Return the lines of the printed report."""
    lines = [f"{heading:<13}{text}" for heading, text in report.lines]
    if report.findings:
        lines += ["", "what to change"]
        order = (WRONG, SLOW, NOTE)
        for level, text, remedy in sorted(report.findings, key=lambda finding: order.index(finding.level)):
            lines += [f"  {level:<6} {text}", f"         → {remedy}"]
    return [*lines, "", report.verdict if report.healthy else "something is wrong: see above"]
