"""The pages of one machine and of selectors, from figures that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.records import RUN

from osu_like_bench.pages import one_machine
from osu_like_bench.pages.records import Case, Record


def record(cases: dict[str, list[dict[str, Any]]]) -> Record:
    found = Record(Path("page.json"))
    found.cases = {name: Case("bench …", run=RUN, results=rows, others_percent=3.4) for name, rows in cases.items()}
    return found


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


def test_page_of_one_machine() -> None:
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
        for case, (names, _) in one_machine.TABLES.items()
    }
    page = record({"codecs": kernels, **sums})
    line = "| onebit | 12.0 (0.80 × memcpy) | 12.0 | 12.0 (0.80 × memcpy) | 7 × numpy | 7 × numpy |"
    assert line in list(one_machine._codecs(page))
    four, two = (list(one_machine._allreduces(page, case)) for case in ("4-ranks", "2-ranks"))
    assert "| 64 KiB | 65 536 | 65 536 | 65 536 | 65 536 | 65 536 |" in four
    assert "| 4 B | 4.00 | 4.00 ring | 4.00 |" in two and len(two) == 2 + 12
    text = "\n".join(one_machine._about(page, "4-ranks"))
    assert text.startswith(
        "```sh\nbench …\n```\n\nSome, 2 cores, avx2, MPI 1, 2026-01-02, commit `abc1234`; others used 3 %"
    )


def test_page_of_selection() -> None:
    cases = {"normal": choices(25), "laplace": choices(25), "gradients": choices(18)}
    page = record(cases)
    line = "| 1 MiB | 30.0 | 10.0 | **20.0** | 30.0 | 25.0 | 50.0 | 40.0 | 12.0 | 60.0 | 500 | 2 000 | 1.50 |"
    assert any(each.startswith(line) for each in one_machine._choices(page, "normal"))
    assert list(one_machine._wrong(page)) == ["Every choice was checked: none was wrong."]
    text = "\n".join(one_machine._goals(page))
    assert "exact against `argpartition`, at least 10 ×: 20 and 20 (normal, Laplacian): met." in text
    assert "above 64 KiB: met." in text
    slow = "\n".join(one_machine._goals(record(cases | {"gradients": choices(18, slow="ldte")})))
    assert "above 64 KiB: missed at 128 KiB of gradients, 256 KiB of gradients." in slow
