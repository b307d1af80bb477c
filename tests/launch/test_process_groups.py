"""The page of what goes over gloo: its goals are read from the records."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import process_groups
import pytest

CALLS = {"gloo": 100.0, "group": 105.0}


def timed(contender: str, nbytes: int, us: float) -> dict[str, object]:
    ran = "native" if contender == "group" else ""
    return {"contender": contender, "size": nbytes, "ran": ran, "median_us": us}


RUN = {"instruction_set": "avx2", "commit": "0123abc"}


def record(folder: Path, case: str, results: list[dict[str, object]]) -> None:
    about = {"command": f"python -m {case}", "cpu": "a CPU", "cores": 2, "date": "2026-01-01", "others_percent": 0.4}
    folder.mkdir(exist_ok=True)
    (folder / f"{case}.json").write_text(json.dumps({"results": results, "about": about, "run": RUN}))


def test_goals_are_met_or_missed_as_the_records_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "RECORDS", tmp_path / "groups")
    monkeypatch.setattr(process_groups, "PAGE", tmp_path / "groups.md")
    folder = tmp_path / "groups"
    record(
        folder, "step", [{"contender": n, "median_ms": t} for n, t in (("gloo", 1300.0), (process_groups.OURS, 400.0))]
    )
    record(
        folder,
        "node",
        [timed(n, s, t * s) for s in (4, 1 << 20) for n, t in CALLS.items()],
    )
    record(folder, "small", [timed(n, 4, t) for n, t in CALLS.items()])
    assert process_groups.write() == 1
    rows: dict[str, str] = {}
    for line in (tmp_path / "groups.md").read_text().splitlines():
        rows.setdefault(line.split(" | ")[0][2:], line)
    assert rows["step"].endswith("| 3.25 × | met |")
    assert rows["node"].endswith("1 MiB: 110100480 instead of 104857600 µs, by native | **missed** |")
    assert "4 B" not in rows["node"]  # 20 µs more, and no more
    assert rows["small"].endswith("| 4 B: +5.0 µs | met |")
    assert rows["1 MiB"] == "| 1 MiB | 1.049e+05 | 1.101e+05 | native |"


def taken(ms: float) -> process_groups.Taken:
    return process_groups.Taken(ms, "")


def test_bounds_and_peers() -> None:
    wires = 2 * 3 / 4 * (1 << 24) * 8 / 1e9 * 1e3 / 4
    assert process_groups._bound({("group", 1 << 24): taken(1.14 * wires)})[1]
    assert not process_groups._bound({("group", 1 << 24): taken(1.16 * wires)})[1]
    times = {("group", 1 << 22): taken(10.0), ("fp16", 1 << 22): taken(12.0), ("fp8", 1 << 22): taken(9.0)}
    assert process_groups._ahead(times) == ("fp16 at 4 MiB 1.20 ×, fp8 at 4 MiB 0.90 ×", False)


def test_each_size_is_that_of_the_launch_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "REPOSITORY", tmp_path)
    monkeypatch.setattr(process_groups, "RECORDS", tmp_path)
    monkeypatch.setattr(process_groups, "lab", lambda *_: nullcontext())
    launches = iter(
        ((100.0, 90.0, 99.0), (100.0, 120.0, 121.0), (100.0, 101.0, 125.0), (100.0, 100.0, 80.0), (100.0, 102.0, 99.0))
    )

    def measured(words: list[str], path: Path, seconds: float, environ: object) -> int:
        assert str(path.relative_to(tmp_path)) in words
        results = [
            timed(name, 4096, us)
            for name, us in zip(process_groups.CONTENDERS["10g"].split(","), next(launches), strict=True)
        ]
        path.write_text(json.dumps({"results": results, "run": RUN, "others_percent": 2.0}))
        return 0

    monkeypatch.setattr(process_groups, "measure", measured)
    assert process_groups._measured("10g", quick=False)
    record = json.loads((tmp_path / "10g.json").read_text())
    assert [each["median_us"] for each in record["results"]] == [100.0, 102.0, 99.0]
    assert record["about"]["launches"] == 5 and record["about"]["others_percent"] == 2.0
    assert next(launches, None) is None and [path.name for path in tmp_path.iterdir()] == ["10g.json"]
    assert process_groups._worst(record) == "; in the worst launch 1.20 × gloo's median, at 4 KiB, by native"
    assert process_groups._worst({"results": record["results"]}) == ""
    monkeypatch.setattr(process_groups, "PAGE", tmp_path / "groups.md")
    assert process_groups.write() == 0  # 20 µs in one launch
    record["results_of_launches"][1][1] = timed("group", 4096, 121.0)
    (tmp_path / "10g.json").write_text(json.dumps(record))
    assert process_groups.write() == 1
    text = process_groups.PAGE.read_text()
    seen = "1.21 × gloo's median, at 4 KiB, by native"
    control = "of all launches' 5 medians `group`'s is late in 1, gloo's own second one in 2"
    assert f"{seen}; {control} | **missed** |" in text
