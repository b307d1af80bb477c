"""The page of the simulated cluster, and reliability's rows, from figures that are made up."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from osu_like_bench.pages import reliability, scaling
from osu_like_bench.pages.records import Case, Record


@pytest.mark.parametrize(
    ("acp", "worst", "order"), [(250.0, "20%", "the same"), (600.0, "50%", "another (a: S-SGD before")]
)
def test_ratios_and_order(acp: float, worst: str, order: str) -> None:
    """S-SGD takes 500 ms, as published; ACP-SGD takes 300 in the paper: a ratio of 1.67."""
    ms = dict.fromkeys(scaling.METHODS, 500.0) | {scaling.ACP: acp}
    rows: list[dict[str, Any]] = [
        {"work": "a", "method": method, "ms": ms[method], "between": scaling.PAPERS, "ranks": ranks}
        | ({"published": 300 if method == scaling.ACP else 500} if ranks == 32 else {})
        for ranks, method in product(scaling.COUNTS, scaling.METHODS)
    ]
    record = Record(Path("scaling.json"))
    record.cases["simulated"] = Case("simulate", results=rows)
    text = " ".join(scaling._goal(record))
    assert f"off by {worst}" in text and order in text and ("missed" in text) == (order != "the same")
    assert f"| a | ACP-SGD | 300 | {acp:.0f} | 1.67 | {500 / acp:.2f} |" in "\n".join(scaling._table_iii(record))
    assert f"|  | **S-SGD / ACP-SGD** | {' | '.join([f'**{500 / acp:.2f}**'] * 4)} |" in list(scaling._counts(record))


def test_rows_of_reliability() -> None:
    run = {"date": "2026-01-02T03", "commit": "abc", "seconds": 3.4, "cpu": "one", "cores": 2, "instruction_set": "x"}
    record = Record(Path("reliability.json"))
    outputs = {"1": {"passed": 2, "failed": 0}, "2": {"passed": 2, "failed": 1}, "3": {}}
    for name, outcomes in outputs.items():
        results = reliability._rows({"outcomes": outcomes, "figures": ["a|b", "c"]})
        record.cases[name] = Case("pytest", remark="promised", run=run, results=results, others_percent=7.0)
    record.cases["4"] = Case("pytest", remark="promised", missing="failed with exit status 124")
    lines = list(reliability._table(record))[2:]
    assert lines[0] == "| 1 | promised | 2 passed in 3 s | a/b<br>c | 2026-01-02, `abc`, others used 7 % |"
    assert "**2 passed, 1 failed** in 3 s" in lines[1] and "**no test ran** in 3 s" in lines[2]
    assert "**failed with exit status 124** |" in lines[3]
