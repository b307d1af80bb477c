"""The line below a sweep: who was fastest, by how much, and why."""

from __future__ import annotations

import pytest

from compcoll import ZFP
from osu_like_bench.report import Record, verdict

CODEC = str(ZFP(rate=8))


def rows(size: int, **microseconds: float) -> list[Record]:
    """Records of contenders at one size; what is named ring compresses, half of its time."""
    first = next(iter(microseconds.values()))
    return [
        {
            **{"collective": "allreduce", "size": size, "contender": name, "algorithm": name},
            "codec": CODEC if name == "ring" else None,
            "ratio": 4.0 if name == "ring" else 1.0,
            "avg_us": us,
            "median_us": 10 * us,
            "speedup": first / us,
            "seconds": {"encode": us / 4e6, "decode": us / 4e6, "wait": 0.0} if name == "ring" else {},
        }
        for name, us in microseconds.items()
    ]


def test_ranges_gains_and_why() -> None:
    records = rows(1 << 10, native=10, ring=20) + rows(1 << 20, native=30, ring=15) + rows(1 << 21, native=60, ring=20)
    assert verdict(records, "mean") == (
        "# Fastest: native up to 1 KiB, ring from 1 MiB on; "
        "ring is 2.0 to 3.0 times as fast as native, with 4.0 times fewer bytes"
    )


def test_the_first_counts_as_fastest_unless_another_is_clearly_faster() -> None:
    assert verdict(rows(4096, native=100, direct=98), "mean") == "# Fastest: native at 4 KiB"
    assert verdict(rows(4096, native=100, shared_memory=90), "mean").endswith(
        "; shared_memory is 1.1 times as fast as native, uncompressed, through memory that the ranks share"
    )


def test_what_became_of_compression_where_it_was_not_fastest() -> None:
    records = rows(1 << 20, native=2000, ring=4000)
    assert verdict(records, "mean") == (
        "# Fastest: native at 1 MiB; "
        "ring sends 4.0 times fewer bytes, but encodes and decodes for 2 of its 4 ms at 1 MiB"
    )


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_many_ranges_are_counted(statistic: str) -> None:
    records = [each for k in range(6) for each in rows(1 << (10 + k), native=10, ring=(5, 20)[k % 2])]
    assert verdict(records, statistic).startswith("# Fastest: ring at 3 of 6 sizes, native at 3; ring is 2.0 times")
