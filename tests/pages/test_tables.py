"""Tables of the pages of one machine, selectors, peers, reliability and the simulated cluster: figures are made up."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fakes.records import RUN

from osu_like_bench.pages import one_machine, peers, reliability, scaling
from osu_like_bench.pages.documents import machines, runs
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


def test_the_page_of_peers_says_what_was_not_measured(tmp_path: Path) -> None:
    run = {"cpu": "Some", "cores": 2, "instruction_set": "avx2", "commit": "abc1234", "mpi": "MPI 1", "date": "2026"}
    results = [
        {"contender": name, "size": size, "median_us": us, "ratio": ratio}
        for name, size, us, ratio in (
            ("native", 65536, 100.0, 1.0),
            ("auto", 65536, 50.0, 4.0),
            ("native", 1 << 20, 4000.0, 1.0),
        )
    ]
    record = Record(tmp_path / "peers.json")
    record.cases = {
        "memory-openmpi": Case("bench", run=run, results=results, others_percent=3.0),
        "memory-mpich": Case("bench"),
        "memory-impi": Case("bench", missing="not installed: make MPI=impi install"),
        "memory-gloo": Case("bench"),
        "ddp-memory": Case("bench"),
    }
    text = "\n".join(peers._allreduces(record, "memory"))
    assert "| | 64 KiB | 1 MiB |" in text
    assert "| Open MPI | 0.1 (1.00) | 4 (1.00) |" in text
    assert "| compcoll on Open MPI, `auto` with ZFP at rate 8 | 0.05 (0.50), 4.0 × fewer bytes | not measured |" in text
    assert "| Intel MPI | not measured: not installed: make MPI=impi install |" in text
    assert "| MPICH | not measured: never run |" in text
    assert list(peers._steps(record, "ddp-memory")) == ["Not measured: never run."]
    (line,) = machines(record)
    assert line == "Machine: Some, 2 cores, avx2; 2026, commit `abc1234`. Others used up to 3 % of it."
    lines = list(runs(record))
    assert "| memory-openmpi | MPI 1 | 2026 | `abc1234` | 3 % | `bench` |" in lines
    assert "| memory-mpich |  |  |  |  | not measured: never run |" in lines


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
        results = reliability._rows({"outcomes": outcomes, "figures": []})
        record.cases[name] = Case("pytest", remark="promised", run=run, results=results, others_percent=7.0)
    record.cases["4"] = Case("pytest", remark="promised", missing="failed with exit status 124")
    lines = list(reliability._table(record))[2:]
    assert lines[0] == "| 1 | promised | 2 passed in 3 s | 2026-01-02, `abc`, others used 7 % |"
    assert "**2 passed, 1 failed** in 3 s" in lines[1] and "**no test ran** in 3 s" in lines[2]
    assert "**failed with exit status 124** |" in lines[3]
    assert not list(reliability._figures(record)), "no case has figures"


def test_figures_of_reliability_have_rows_of_their_own() -> None:
    figures = ["a|b: 1", "spin, 2 ranks: 2.50 s (sleeps came up to 0.01 s late)", "alone", "c: 2: 3"]
    record = Record(Path("reliability.json"))
    record.cases = {
        "1": Case("pytest", remark="promised", results=reliability._rows({"outcomes": {}, "figures": figures})),
        "2": Case("pytest", remark="nothing to show", results=reliability._rows({"outcomes": {}, "figures": []})),
    }
    text = "\n".join(reliability._figures(record))
    assert text.startswith("### Case 1\n\npromised.\n\n| figure | value |\n|---|---|\n| a/b | 1 |\n| c | 2: 3 |\n")
    assert (
        "| wait | ranks | error after, s | sleeps late by up to, s |\n|---|---|---|---|\n| spin | 2 | 2.50 | 0.01 |"
        in text
    )
    assert text.endswith("| figure |\n|---|\n| alone |") and "Case 2" not in text


def test_each_figure_of_reliability_is_shown_once_in_short_cells() -> None:
    record = reliability.PAGES[0].record()
    lines = [line for case in record.measured().values() for row in case.results for line in row["seen"]]
    shown = [line for line in reliability._figures(record) if line.startswith("| ")]
    heads = {head for _, head in reliability._KINDS}
    rows = [line for line in shown if tuple(line[2:-2].split(" | ")) not in heads]
    assert len(rows) == len(lines) > 100
    assert max(len(cell) for line in rows for cell in line.split("|")) <= 300
    for _, head in reliability._KINDS[:-1]:
        assert f"| {' | '.join(head)} |" in shown, "no figure of the record has this form"
