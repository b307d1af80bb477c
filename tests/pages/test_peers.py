"""The page of peers says what was not measured."""

from __future__ import annotations

from pathlib import Path

from osu_like_bench.pages import peers
from osu_like_bench.pages.documents import machines, runs
from osu_like_bench.pages.records import Case, Record


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
