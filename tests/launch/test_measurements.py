"""launch/measurements: what its rows make of records. These are made up, and the arithmetic is checked by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import labs
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "measurements"
MIB = 1 << 20


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("goals")


def write(folder: Path, case: str, **medians: dict[int, float]) -> None:
    results = [
        {"contender": contender, "size": size, "median_us": us, "median_low_us": 0.99 * us, "median_high_us": 1.01 * us}
        for contender, taken in medians.items()
        for size, us in taken.items()
    ]
    (folder / f"{case}.json").write_text(json.dumps({"run": {}, "results": results}))


def row(goals: ModuleType, folder: Path, begins: str) -> tuple[str, bool | None]:
    found = [each for each in goals.rows(goals.Records(folder)) if each.what.startswith(begins)]
    assert len(found) == 1, begins
    return found[0].figure, found[0].met


# 16 MiB among four hosts at 1 Gb/s: 2 · 3/4 · 16 MiB · 8 bits = 201.3 ms; a quarter of it is 50.33 ms.
@pytest.mark.parametrize(("ms", "met"), [(54.3, True), (54.5, False)])
def test_against_the_bound(goals: ModuleType, tmp_path: Path, ms: float, met: bool) -> None:
    write(tmp_path, "1g-zfp8", ring={16 * MIB: 90e3}, direct={16 * MIB: ms * 1e3})
    figure, judged = row(goals, tmp_path, "ring or direct, zfp8, 16 MiB, 4 × 1 Gb/s")
    assert judged is met
    assert figure.startswith(f"{ms / 50.3316:.3f} ")


def test_sparse_sums_against_the_bound(goals: ModuleType, tmp_path: Path) -> None:
    """64 MiB take 805.3 ms uncompressed; a sixtieth of it is 13.42 ms."""
    for ms, met in ((13.4, True), (13.5, False)):
        write(tmp_path, "1g-topk", sparse_ring={64 * MIB: 20e3}, sparse_direct={64 * MIB: ms * 1e3})
        figure, judged = row(goals, tmp_path, "top-k 0.1 %")
        assert judged is met and figure.endswith(f"(805.3 / {ms} ms)")


def test_nothing_measured_is_not_met(goals: ModuleType, tmp_path: Path) -> None:
    assert {each.met for each in goals.rows(goals.Records(tmp_path))} == {None}


def test_auto_is_late_by_more_than_a_part_and_some_microseconds(goals: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "1g-auto", native={4: 50.0, MIB: 1000.0}, ring={4: 99.0, MIB: 900.0}, auto={4: 54.9, MIB: 944.0})
    assert row(goals, tmp_path, "auto, zfp8, 4 B … 64 MiB, 4 ×") == ("4.9 % at most (1 MiB)", True)
    write(tmp_path, "1g-auto", native={4: 50.0}, ring={4: 99.0}, auto={4: 55.5})
    figure, met = row(goals, tmp_path, "auto, zfp8, 4 B … 64 MiB, 4 ×")
    assert not met
    assert "missed at 4 B" in figure


def test_naive_must_never_be_faster(goals: ModuleType, tmp_path: Path) -> None:
    for network in ("1g", "10g", "memory"):
        write(tmp_path, f"{network}-naive", ring={MIB: 60.0, 2 * MIB: 99.0}, p2p_ring={MIB: 100.0, 2 * MIB: 100.0})
    assert row(goals, tmp_path, "ring, zfp8, against naive")[1] is True
    for us, met in ((99.5, True), (101.0, False)):  # however sure the medians are
        write(tmp_path, "memory-naive", ring={MIB: us}, p2p_ring={MIB: 100.0})
        figure, judged = row(goals, tmp_path, "ring, zfp8, against naive")
        assert judged is met and figure.endswith(f" … {100 - us:.1f} ± 2.0 % (1 MiB, memory)")


def of(contender: str, size: int, us: float) -> dict[str, object]:
    """A result."""
    return {"contender": contender, "size": size, "median_us": us}


def test_auto_is_compared_with_contenders_of_its_own_launch() -> None:
    launches = [
        {"results": [of(*result) for result in zip(("native", "ring", "auto"), (4, 4, 4), us, strict=True)]}
        for us in ((90.0, 200.0, 91.0), (70.0, 150.0, 73.0), (80.0, 60.0, 61.8))
    ]
    assert labs.middle(launches, "auto")["results"] == launches[2]["results"]


def test_of_several_launches_each_result_is_the_middle_one() -> None:
    taken = ((1108.0, 41.0), (1380.0, 40.0), (1245.0, 43.0))
    results = ([of("native", 64, large), of("native", 2, small)] for large, small in taken)
    record = labs.middle([{"run": {"launch": number}, "results": each} for number, each in enumerate(results)], "auto")
    assert record["results"] == [of("native", 64, 1245.0), of("native", 2, 41.0)]
    assert record["median_us_of_launches"] == [[1108.0, 41.0], [1380.0, 40.0], [1245.0, 43.0]]
    assert record["run"] == {"launch": 0}
