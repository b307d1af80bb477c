"""launch/one_machine.py: its pages, from records that are made up, and commands that osu_like_bench takes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.records import RUN

from osu_like_bench.parser import build_parser


@pytest.fixture
def one_machine() -> ModuleType:
    return importlib.import_module("one_machine")


def record(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"run": RUN | {"command": "python -m osu_like_bench …"}, "results": results, "others_percent": 3.4}


def choices(largest: int, *, slow: str = "") -> list[dict[str, Any]]:
    """Times in microseconds that grow with the size; one selector may be too slow."""
    of_a_mib = {"copy": 30, "read": 10, "ldte": 20, "hierarchical": 30, "exact": 25, "trimmed": 50, "bisection": 40}
    of_a_mib |= {"strom": 12, "randomk": 60, "argpartition": 500, "topk": 2000}
    if slow:
        of_a_mib[slow] *= 100
    return [
        {"method": method, "size": 1 << power, "median_us": us * 2.0 ** (power - 20), "wrong": 0}
        for power in range(16, largest + 1)
        for method, us in of_a_mib.items()
    ]


def test_commands_are_understood(one_machine: ModuleType) -> None:
    for _, words in one_machine.CASES.values():
        build_parser().parse_args(words.split())


def test_page_of_one_machine(one_machine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_machine, "PAGES", tmp_path)
    kernels = [
        {"codec": codec, "operation": operation, "implementation": name, "throughput": speed, "versus": versus}
        for codec in one_machine.KERNELS
        for operation in ("encode", "decode", "accumulate")
        for name, speed, versus in (("avx2", 12.0, {"memcpy": 0.8, "zfpy": 40.0, "numpy": 7.0}), ("numpy", 1.0, {}))
    ]
    sums = {
        case: [
            {"contender": name, "size": 1 << power, "median_us": float(1 << power), "algorithm": "ring"}
            for power in range(2, 28)
            for name in names
        ]
        for case, names in (("4-ranks", one_machine.FOUR_RANKS), ("2-ranks", one_machine.TWO_RANKS))
    }
    folder = tmp_path / "one-machine"
    folder.mkdir()
    (folder / "codecs.json").write_text(json.dumps(record(kernels)))
    one_machine._write("one-machine", one_machine._one_machine)
    assert not (tmp_path / "one-machine.md").exists()  # records are missing
    for case, results in sums.items():
        (folder / f"{case}.json").write_text(json.dumps(record(results)))
    one_machine._write("one-machine", one_machine._one_machine)
    text = (tmp_path / "one-machine.md").read_text()
    assert "| onebit | 12.0 (0.80 × memcpy) | 12.0 | 12.0 (0.80 × memcpy) | 7 × numpy | 7 × numpy |" in text
    assert "| 64 KiB | 65 536 | 65 536 | 65 536 | 65 536 | 65 536 |" in text
    assert "| 4 B | 4.00 | 4.00 ring | 4.00 |" in text
    assert "2026-01-02, commit `abc1234`; others used 3 %\nof the machine.\n[All" in text
    assert "launch/mpirun -n 4 python -m osu_like_bench …" in text


def test_page_of_selection(one_machine: ModuleType) -> None:
    records = {"normal": record(choices(25)), "laplace": record(choices(25)), "gradients": record(choices(18))}
    text = "\n".join(one_machine._selection(records))
    assert "| 1 MiB | 30.0 | 10.0 | **20.0** | 30.0 | 25.0 | 50.0 | 40.0 | 12.0 | 60.0 | 500 | 2 000 | 1.50 |" in text
    assert "Every choice was checked: none was wrong." in text
    assert "exact against `argpartition`, at least 10 ×: 20 and 20 (normal, Laplacian): met." in text
    assert "above 64 KiB: met." in text
    slow = "\n".join(one_machine._selection(records | {"gradients": record(choices(18, slow="ldte"))}))
    assert "above 64 KiB: missed at 128 KiB of gradients, 256 KiB of gradients." in slow
