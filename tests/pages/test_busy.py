"""The page of busy cores, from figures that are made up; and the control group with the time of one core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from osu_like_bench.pages import busy
from osu_like_bench.pages.records import Case, Record

MIB = 1 << 20
RUN = {"cpu": "some", "cores": 2, "date": "2026-01-01", "commit": "abc", "instruction_set": "avx2", "mpi": "MPI 1"}


def case(remark: str, **times: dict[int, float]) -> Case:
    results = [
        {"contender": name, "size": size, "mean_us": us, "median_us": us / 2, "p99_us": 3 * us, "algorithm": "ring"}
        for name, taken in times.items()
        for size, us in taken.items()
    ]
    return Case("bench", remark=remark, run=RUN, results=results, others_percent=2.0)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "busy.json")


def goals(record: Record) -> dict[tuple[str, str], tuple[str, str]]:
    rows = [line.strip("| ").split(" | ") for line in list(busy._goals(record))[2:]]
    return {(what, goal): (figure, met) for what, goal, figure, met in rows}


def test_rows_go_by_means_from_their_size_on(record: Record) -> None:
    native = {4: 10.0, MIB: 1000.0, 16 * MIB: 9000.0}
    auto = {4: 14.0, MIB: 490.0, 16 * MIB: 4700.0}  # 4 bytes: 1.4 times as long, but only 4 us more
    record.cases["burners-2"] = case("two", native=native, auto=auto, auto_uncompressed=auto)
    found = goals(record)
    assert found["two: auto", "≤ 1.05 × native"] == ("4 B: 1.40, 1 MiB: 0.49, 16 MiB: 0.52", "met")
    figure = "1 MiB: 0.49, **16 MiB: 0.52**"
    assert found["two: auto", "≤ 0.5 × native from 1 MiB on"] == (figure, "**missed**")


def test_a_case_against_another(record: Record) -> None:
    record.cases["one-core"] = case("bound", auto={MIB: 1100.0})
    record.cases["quota"] = case("limited", auto={MIB: 1250.0})
    assert goals(record)["limited: auto", "≤ 1.1 × auto (one-core)"] == ("**1 MiB: 1.14**", "**missed**")
    assert goals(record)["limited: auto_uncompressed", "≤ 1.1 × auto_uncompressed (one-core)"][1] == "not measured"


def test_page(record: Record, tmp_path: Path) -> None:
    record.cases["quiet"] = Case("bench", remark="nothing else")
    assert {met for _, met in goals(record).values()} == {"not measured"}
    taken = {"native": {MIB: 300.0}, "auto": {MIB: 100.0}, "auto_uncompressed": {MIB: 400.0}}
    record.cases["quiet"] = case("nothing else", **taken)
    record.cases[busy.WAITING] = Case("waiting", run=RUN, results=[{"size": 4, "cpu_ms": 21.0}])
    assert [met for _, met in goals(record).values()] == ["met", "**missed**", "**missed**"]
    text = "\n".join(busy._cases(record))
    assert "| 1 MiB | 300 | 150 | 900 | 100 | 50 | 300 | 400 | 200 | 1200 | ring |" in text
    about = "some, 2 cores, avx2, MPI 1, 2026-01-01, commit `abc`; others used 2 % of the machine."
    assert f"## Nothing else\n\n`bench`; {about}\n\n" in text
    assert [busy._shown(size) for size in (4, 64 << 10, MIB, 4002220)] == ["4 B", "64 KiB", "1 MiB", "4,002,220"]
    pytest.importorskip("matplotlib")
    busy._plot(record, tmp_path)
    assert (tmp_path / "busy.png").exists()


def test_means_have_one_name() -> None:
    rows = busy._rows({"results": [{"contender": "a", "avg_us": 2.0}, {"contender": "a", "avg_ms": 1.0}]})
    assert rows == [{"contender": "a", "mean_us": 2.0}, {"contender": "a", "mean_ms": 1.0}]


def test_a_group_with_the_time_of_one_core() -> None:
    """Where none may be made, it says so."""
    show = "from compcoll.host.cores import quotas; print(min(quota.cores for quota in quotas()))"
    program = Path(busy.__file__).with_name("one-core")
    done = subprocess.run([program, sys.executable, "-c", show], capture_output=True, text=True, timeout=60)
    if "no control group can be limited here" in done.stderr:
        assert done.returncode == 1
        pytest.skip(done.stderr)
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr
    assert subprocess.run([program, "sh", "-c", "exit 3"], timeout=60).returncode == 3
    assert not [*Path("/sys/fs/cgroup").glob("**/compcoll-one-core-*")]
