"""The page of what goes over gloo: its goals are read from the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osu_like_bench.pages import groups
from osu_like_bench.pages.records import Case, Record

CALLS = {"gloo": 100.0, "group": 105.0}
RUN = {"instruction_set": "avx2", "commit": "0123abc", "cpu": "a CPU", "cores": 2, "date": "2026-01-01", "torch": "2"}


def timed(contender: str, nbytes: int, us: float) -> dict[str, Any]:
    return {"contender": contender, "size": nbytes, "median_us": us, "ran": "native" * (contender == "group")}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "groups.json")


def case(results: list[dict[str, Any]], lab: str = "") -> Case:
    return Case("bench", lab=lab, run=RUN, results=results, others_percent=0.4)


def goals(record: Record) -> dict[str, str]:
    return {line.split(" | ")[0][2:]: line for line in groups._goals(record)}


def test_goals_are_met_or_missed_as_the_record_says(record: Record) -> None:
    steps = [{"contender": name, "median_ms": ms} for name, ms in (("gloo", 1300.0), (groups.OURS, 400.0))]
    record.cases["step"] = case(steps, "--hosts 4 --rate 1gbit")
    record.cases["node"] = case([timed(n, s, t * s) for s in (4, 1 << 20) for n, t in CALLS.items()])
    record.cases["small"] = case([timed(n, 4, t) for n, t in CALLS.items()])
    rows = goals(record)
    assert rows["step"].startswith("| step | 4 hosts, 1gbit |") and rows["step"].endswith("| 3.25 × | met |")
    assert rows["node"].endswith("1 MiB: 110100480 instead of 104857600 µs, by native | **missed** |")
    assert "4 B" not in rows["node"]  # 20 µs more, and no more
    assert rows["small"].endswith("| 4 B: +5.0 µs | met |")
    assert "| 1 MiB | 1.049e+05 | 1.101e+05 | native |" in list(groups._cases(record))


def test_bounds_and_peers() -> None:
    wires = 2 * 3 / 4 * (1 << 24) * 8 / 1e9 * 1e6 / 4
    assert groups._bound([timed("group", 1 << 24, 1.14 * wires)])[1]
    assert not groups._bound([timed("group", 1 << 24, 1.16 * wires)])[1]
    times = [timed(name, 1 << 22, ms * 1e3) for name, ms in (("group", 10.0), ("fp16", 12.0), ("fp8", 9.0))]
    assert groups._ahead(times) == ("fp16 at 4 MiB 1.20 ×, fp8 at 4 MiB 0.90 ×", False)


def test_each_size_is_that_of_the_launch_in_the_middle(record: Record) -> None:
    launches = [[100.0, 90.0, 99.0], [100.0, 120.0, 121.0], [100.0, 101.0, 125.0], [100.0, 100.0, 80.0]]
    launches.append([100.0, 102.0, 99.0])

    def merged() -> list[dict[str, Any]]:
        names = ("gloo", "group", groups.AGAIN)
        return groups.PAGES[0].merge([[timed(n, 4096, us) for n, us in zip(names, each)] for each in launches])

    record.cases["10g"] = case(merged())
    assert [each["median_us"] for each in record.cases["10g"].results] == [100.0, 102.0, 99.0]
    assert "in the worst launch 1.20 × gloo's median, at 4 KiB, by native" in goals(record)["10g"]
    assert goals(record)["10g"].endswith("| met |")  # 20 µs in one launch
    launches[1][1] = 121.0
    record.cases["10g"] = case(merged())
    control = "of all launches' 5 medians `group`'s is late in 1, gloo's own second one in 2"
    assert goals(record)["10g"].endswith(f"1.21 × gloo's median, at 4 KiB, by native; {control} | **missed** |")
    assert "5 launches" in "\n".join(groups._cases(record))
