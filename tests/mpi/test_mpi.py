"""The checks in tests/mpi/check_*.py, on every rank count and MPI: one job for each, one result for each check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mpi.checks import THE_END, CheckJob
from mpi.environments import MPI, Completed, selected_ranks
from mpi.run import HERE, expand

pytestmark = pytest.mark.every_mpi

ALONE = "check_collectives.check_ranks_part"  # looks where the system puts two ranks
CHECKS = [check for check in expand([], HERE) if check != ALONE]
# `make test` runs these on 2 ranks of the first MPI; all others on 3 of it, and on 2 of the other MPIs.
LONG_ONES = {
    "check_collectives.check_allreduce",
    "check_collectives.check_freed_with_their_owner",
    "check_collectives.check_large_messages",
    "check_errors.check_time_outs_cost_nothing_between_nodes",
    "check_explain.check_what_is_explained_runs",
    "check_recordings.check_files_of_a_repeated_call",
    "check_recordings.check_same_bits_as_the_algorithm",
}
# And these not at all: only `make test-all` does.
LONGEST = {"check_recordings.check_calls_that_do_not_belong_together", "check_tuning.check_tune"}
OTHERS = (2, 5)  # ranks on which other MPIs than the first have all checks: a power of two or not, more than cores
FEWER = (1, 2, 3)  # ranks of the long ones; the others have every algorithm on 4, 5 and 8 ranks


def marks(check: str, ranks: int) -> list[pytest.MarkDecorator]:
    """Where `make test` has it, too; and on which MPI it is."""
    where = [] if ranks in OTHERS else [pytest.mark.first_mpi]
    if check == THE_END and ranks == 2:
        return where
    if check in LONGEST:
        return [*where, pytest.mark.slow]
    if ranks == (2 if check in LONG_ONES else 3):
        return [*where, pytest.mark.quick_on("first")]
    if check not in LONG_ONES and ranks == 2:
        return [*where, pytest.mark.quick_on("others")]
    return [*where, pytest.mark.slow]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        counts = selected_ranks(metafunc.config)
        cases = [
            (count, check)
            for count in counts
            for check in [*CHECKS, THE_END]
            if count in FEWER or counts == [count] or check not in LONG_ONES | LONGEST
        ]
        params = [pytest.param(*case, id=f"n{case[0]}-{case[1]}", marks=marks(case[1], case[0])) for case in cases]
        metafunc.parametrize(("ranks", "check"), params)


@pytest.fixture(scope="session")
def job_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., CheckJob]]:
    """The job that runs all selected checks of one rank count on one MPI; the one before it is ended."""
    current: dict[tuple[MPI, int], CheckJob] = {}

    def get(mpi: MPI, ranks: int) -> CheckJob:
        if (mpi, ranks) not in current:
            for job in current.values():
                job.close()
            current.clear()
            items = [item for item in request.session.items if getattr(item, "function", None) is test_check]
            chosen = [item.callspec.params for item in items]
            names = [p["check"] for p in chosen if (p["mpi"], p["ranks"]) == (mpi, ranks)]
            folder = tmp_path_factory.mktemp(f"{mpi.name}-n{ranks}-")
            current[mpi, ranks] = CheckJob(ranks, [name for name in names if name != THE_END], folder, mpi.prefix)
        return current[mpi, ranks]

    yield get
    for job in current.values():
        job.close()


def test_check(mpi: MPI, ranks: int, check: str, job_of: Callable[..., CheckJob]) -> None:
    job_of(mpi, ranks).report(check)


@pytest.mark.slow
@pytest.mark.alone
def test_ranks_part(mpirun: Callable[..., Completed]) -> None:
    mpirun(2, HERE / "run.py", ALONE)
