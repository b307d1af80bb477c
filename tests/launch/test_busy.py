"""launch/busy: what its rows make of records, which are made up; and the control group with the time of one core."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "busy"
MIB = 1 << 20


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("busy_page")


@pytest.fixture
def cpu_quota(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cpu_quota")


def write(folder: Path, name: str, **means: dict[int, float]) -> None:
    results = [
        {"contender": contender, "size": size, "avg_us": us, "median_us": us / 2, "p99_us": 3 * us, "algorithm": "ring"}
        for contender, taken in means.items()
        for size, us in taken.items()
    ]
    run = {"cpu": "some", "date": "2026-01-01", "commit": "abc", "instruction_set": "avx2"}
    content = {"run": run, "results": results, "others_percent": 2.0}
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_rows_go_by_means_from_their_size_on(page: ModuleType, tmp_path: Path) -> None:
    native = {4: 10.0, MIB: 1000.0, 16 * MIB: 9000.0}
    auto = {4: 14.0, MIB: 490.0, 16 * MIB: 4700.0}  # 4 bytes: 1.4 times as long, but only 4 us more
    write(tmp_path, "burners-2-nice-0.1", native=native, auto=auto, auto_uncompressed=auto)
    found = {
        (row.goal, row.figure): row.met
        for row in page.rows(page.Records(tmp_path))
        if row.what == "2 busy processes, nice 0: auto"
    }
    assert found == {
        ("≤ 1.05 × native", "4 B: 1.40, 1 MiB: 0.49, 16 MiB: 0.52"): True,
        ("≤ 0.5 × native from 1 MiB on", "1 MiB: 0.49, **16 MiB: 0.52**"): False,
    }


def test_launches_in_turns_are_one_mean(page: ModuleType, tmp_path: Path) -> None:
    for turn, (bound, limited) in enumerate(((1000.0, 1000.0), (1200.0, 1500.0)), 1):
        write(tmp_path, f"one-core.{turn}", auto={MIB: bound})
        write(tmp_path, f"quota.{turn}", auto={MIB: limited})
    row = next(row for row in page.rows(page.Records(tmp_path)) if row.goal.startswith("≤ 1.1 × auto (one-core)"))
    assert (row.figure, row.met) == ("**1 MiB: 1.14**", False)


def test_page(page: ModuleType, tmp_path: Path) -> None:
    assert {row.met for row in page.rows(page.Records(tmp_path))} == {None}
    write(tmp_path, "quiet", native={MIB: 300.0}, auto={MIB: 100.0}, auto_uncompressed={MIB: 400.0})
    (tmp_path / "records").mkdir()
    for path in tmp_path.glob("*.json"):
        path.rename(tmp_path / "records" / path.name)
    (tmp_path / "records" / "waiting.json").write_text(json.dumps({"results": [{"size": 4, "cpu_ms": 21.0}]}))
    pytest.importorskip("matplotlib")
    assert page.write(tmp_path / "records") == 2  # goals that were missed
    text = (tmp_path / "busy.md").read_text()
    assert "| 1 MiB | 300 | 150 | 900 | 100 | 50 | 300 | 400 | 200 | 1200 | ring |" in text
    assert "Commit abc, 2026-01-01, avx2. Others used 2 %" in text
    assert "4 B: 21.0 ms | **missed**" in text and (tmp_path / "busy.png").exists()


def test_a_group_with_the_time_of_one_core(cpu_quota: ModuleType) -> None:
    """Where none may be made, it says so."""
    show = "from compcoll.devices.cores import quotas; print(min(quota.cores for quota in quotas()))"
    try:
        with cpu_quota.one_core() as prefix:
            done = subprocess.run([*prefix, sys.executable, "-c", show], capture_output=True, text=True, timeout=60)
            group = Path(prefix[-1])
            assert group.exists()
    except cpu_quota.NoQuota as error:
        pytest.skip(str(error))
    assert done.stdout == "1.0\n", done.stderr
    assert not group.exists()
