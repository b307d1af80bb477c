"""Measure the errors of compressed sums, and compare them with the estimates: the page errors.md.

    python -m osu_like_bench.pages.errors --ranks 64 -m 1M

All ranks are in this process, and their values are normally distributed. Each codec's example configurations are summed
by each algorithm.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from compcoll import Communicator
from compcoll.algorithms import DENSE
from compcoll.codecs import ALL
from compcoll.layout import World
from compcoll.plan.accuracy import relative_error
from compcoll.tools.arguments import parse_bytes
from compcoll.transports.loopback import Loopback

from ..machine import describe
from ..report import write_json
from .documents import MET, Page, about, command, table
from .records import GPU, SENDING, Record, Row

LIMIT = 1.3
"""Measured and estimated errors may differ by this factor."""
_FLOAT32 = 1e-6
"""Rounding to float32 contributes to errors below this."""
_PER_NODE = 4
"""Ranks of a node for `hierarchical`, which compresses only between nodes."""


def measure(ranks: int, nbytes: int) -> Iterator[Row]:
    """Yield a row for each codec and algorithm: measured and estimated error of an allreduce of float32.

    Parameters
    ----------
    ranks : int
        A multiple of 4.
    nbytes : int
        Bytes of a rank's buffer.
    """
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(nbytes // 4, dtype=np.float32) for _ in range(ranks)]
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    norm = np.linalg.norm(exact)
    algorithms = [record for record in DENSE if "allreduce" in record.steps and not record.by_mpi]
    for codec in (cls(**one.options) for cls in ALL if not cls.needs_reference for one in cls.examples):
        for record in algorithms:
            world = World(ranks, _PER_NODE if record.name == "hierarchical" else 1)
            loopback = Loopback(ranks, world.per_node)
            result = loopback.run(
                Communicator(transport).iallreduce(x, codec=codec, algorithm=record.name)
                for transport, x in zip(loopback.transports, inputs, strict=True)
            )[0]
            estimate = relative_error(codec, "float32", "allreduce", record.name, world)
            error = float(np.linalg.norm(result - exact) / norm)
            yield {"codec": repr(codec), "algorithm": record.name, "error": error, "estimate": estimate}


def within(row: Row) -> bool | None:
    """Return whether measured and estimated error differ by at most `LIMIT`; None if that says nothing.

    That is so without an estimate, where only float32 rounds, or where both say that the result is worth nothing.
    """
    error, estimate = row["error"], row.get("estimate")
    if estimate is None or max(error, estimate) < _FLOAT32 or min(error, estimate) > 1 / LIMIT:
        return None
    return bool(1 / LIMIT <= error / estimate <= LIMIT)


def _table(record: Record) -> Iterator[str]:
    rows = record.cases["normal"].results
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    by_codec: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_codec.setdefault(row["codec"], {})[row["algorithm"]] = row
    yield from table(
        ("codec", *(f"`{name}`" for name in algorithms)),
        [(f"`{codec}`", *(_cell(found[name]) for name in algorithms)) for codec, found in by_codec.items()],
    )


def _cell(row: Row) -> str:
    text = f"{row['error']:.2g}" + (f" ({row['estimate']:.2g})" if row.get("estimate") is not None else "")
    return f"**{text}**" if within(row) is False else text


def _goal(record: Record) -> Iterator[str]:
    judged = [met for row in record.cases["normal"].results if (met := within(row)) is not None]
    yield f"{sum(judged)} of {len(judged)} estimates are within {LIMIT} ×, {MET[all(judged)]}"


def _about(record: Record) -> Iterator[str]:
    yield from command(record.cases["normal"])
    yield from ("", about(record.cases["normal"]))


PAGES = (
    Page(
        "errors",
        {"about": _about, "errors": _table, "goal": _goal},
        (
            *("compcoll/algorithms", ":!compcoll/algorithms/costs.py", "compcoll/plan/accuracy.py"),
            *("compcoll/codecs", ":!compcoll/codecs/sparse", "compcoll/kernels", *GPU, *SENDING),
            *(":!compcoll/kernels/sparse*", ":!compcoll/kernels/low_rank*"),
        ),
        columns=("codec", "algorithm", "error", "estimate"),
        merge=lambda launches: list(launches[-1]),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser("python -m osu_like_bench.pages.errors", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("-m", dest="nbytes", type=parse_bytes, default=1 << 20, help="bytes of a rank's buffer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    arguments = parser.parse_args()
    rows = []
    for row in measure(arguments.ranks, arguments.nbytes):
        rows.append(row)
        print(f"{row['codec']:70} {row['algorithm']:20} {_cell(row)}", flush=True)
    if arguments.json is not None:
        write_json(arguments.json, {"run": describe(), "results": rows})


if __name__ == "__main__":
    main()
