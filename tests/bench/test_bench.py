"""The benchmark: its arguments, what it computes, and short runs of every command."""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi.environments import Completed
from promises import ALGORITHMS, ENCODED

import compcoll
from compcoll import ZFP
from compcoll.codecs import Codec
from compcoll.codecs.sparse.sparsifier import WIRES
from compcoll.errors import InvalidArgument
from compcoll.plan.choose import NAMES, SPARSE
from compcoll.sparse import TopK
from compcoll.tools.arguments import add_codec_options, chosen_codec
from osu_like_bench import UsageError, bounds, data, parser, selection
from osu_like_bench.codecs import USUAL
from osu_like_bench.report import Record, SweepTable, conclusion, fastest
from osu_like_bench.timing import Limits, Times, measure

MPIRun = Callable[..., Completed]
TOP = Path(__file__).parents[2]


def bench(*words: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command that needs no mpirun."""
    command = [sys.executable, "-m", "osu_like_bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def results(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("text", "itemsize", "expected"),
    [
        ("4:64", 4, [4, 8, 16, 32, 64]),
        ("16M", 4, [1 << 24]),
        ("1K:5KiB", 8, [1024, 2048, 4096]),
        (":32", 8, [8, 16, 32]),
        ("512k:", 4, [1 << 19, 1 << 20]),
        ("2m:", 4, [1 << 21]),
    ],
)
def test_sizes(text: str, itemsize: int, expected: list[int]) -> None:
    assert parser.sweeps(parser.parse_ranges(text), itemsize) == expected


def test_several_ranges_of_sizes() -> None:
    assert parser.sweeps(parser.parse_ranges("4,64K:128K,1M"), 4) == [4, 1 << 16, 1 << 17, 1 << 20]
    with pytest.raises(UsageError, match="needed"):
        parser.parse_ranges("4,,1M")


@pytest.mark.parametrize("text", ["", ":", "x", "0", "4:2", "-4", "4:8:16", "6", ":2"])
def test_sizes_that_cannot_be_right(text: str) -> None:
    with pytest.raises((UsageError, InvalidArgument), match=r"needed|multiple|larger|smallest"):
        parser.sweeps(parser.parse_ranges(text), 4)


@pytest.mark.parametrize("codec", [*ENCODED, compcoll.ZFP(rate=4), compcoll.ZFP(precision=10)], ids=repr)
@pytest.mark.parametrize("kind", list(data.KINDS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_encoding_loses_no_more_than_its_bound(codec: Codec, kind: str, dtype: str) -> None:
    x = data.make(kind, 10_007, dtype, (1, 2))
    lost = np.abs(compcoll.decode(compcoll.encode(x, codec), x.shape, x.dtype, codec=codec).astype(float) - x)
    bound = bounds.bound_of(codec, dtype)
    allowed = bounds.spread_out(bound, bounds.of_blocks(bound, x.astype(float)), x.size)
    assert (lost <= allowed).all()
    if isinstance(codec, compcoll.Cast | compcoll.MinMax):
        assert lost.max() > 0.4 * allowed.max() or not lost.any()  # and the bound is no wider than it must be


def test_bounds_grow_with_the_encodings_on_the_way() -> None:
    once = bounds.bound_of(compcoll.MinMax(), "float32")
    direct, ring, p2p = (
        bounds.result_bound(once, bounds.encodings_of("allreduce", name, 8, 1), "float32", 8).spread
        for name in ("direct", "ring", "p2p_ring")
    )
    assert 0 < direct < ring < p2p
    assert bounds.encodings_of("allreduce", "recursive_doubling", 5, 1) == bounds.Encodings(3, 7)
    assert bounds.encodings_of("allreduce", "hierarchical", 8, 1) == bounds.Encodings(0, 0)


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    times = measure([lambda: calls.append("a"), lambda: calls.append("b")], Limits(1, 5, float("inf")))
    assert [taken.iterations for taken in times] == [5, 5]
    assert all(taken.min <= taken.median <= taken.max for taken in times)
    assert {frozenset(calls[i : i + 2]) for i in range(0, len(calls), 2)} == {frozenset("ab")}
    assert {tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)} == {("a", "b"), ("b", "a")}


@pytest.mark.parametrize("n", [1, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 101, 400))])
def test_the_interval_of_a_median_holds_the_true_one_as_often_as_it_says(n: int) -> None:
    """Of a skewed distribution whose median is ln 2."""
    draws = np.random.default_rng(n).exponential(size=(2000, n))
    intervals = [(times.low, times.high) for times in map(Times.of, draws)]
    held = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert held == pytest.approx(1 - 0.5 ** (n - 1), abs=0.03) if n < 6 else 0.92 < held < 0.99
    assert all(times.min <= times.low <= times.median <= times.high <= times.max for times in map(Times.of, draws))


def test_the_time_cap_ends_a_measurement_on_all_ranks_at_once() -> None:
    def slowest(seconds: Any) -> Any:
        return seconds + 1.0  # some other rank took a second longer

    (taken,) = measure([lambda: None], Limits(0, 1000, 10.0), slowest=slowest)
    assert 3 <= taken.iterations <= 12
    assert taken.min >= 1.0


COMMANDS = ["", *NAMES, "codecs", "selection", "ddp", "plot"]
BAD = [
    ("allreduce -m 6", "multiple of the element's 4 bytes: give 8"),
    ("allreduce -m 4:x", "such as 4096, 64K"),
    ("allreduce --compare native,rings", "no contender 'rings': there are native, auto, ring"),
    ("allreduce --compare p2p", "needs a --codec"),
    ("allreduce --compare ring,ring", "different names"),
    ("alltoall --algorithm ring", "there are native, auto, pairwise"),
    ("allreduce --rate 8", "--rate without a codec"),
    ("allreduce --codec zfp --bits 8", "codec 'zfp' has no option 'bits'"),
    ("allreduce --codec zfp --rate 40", "out of range for float32"),
    ("allreduce --show speed", "no column 'speed': all, or some of ratio"),
    ("allreduce -i 0", "an integer of at least 1"),
    ("allreduce --burner-nice 5", "also give --burners K"),
    ("allreduce --burners 1 --burner-nice 20", "0 to 19"),
    ("allreduce --json nowhere/b.json", "a file in an existing folder"),
    ("codecs --instruction-set sse9", "cannot run instruction set 'sse9': best, all, or"),
    ("codecs --size 2", "multiple of the 4 bytes of a float32"),
    ("allreduce --codec intsum --compare p2p", "p2p_ring: intsum has no wire of its own"),
    ("bcast --codec intsum", "only allreduce can use it"),
    ("alltoallv --codec int8", "without a codec only"),
    ("plot missing.json -o plot.png", "missing.json cannot be read"),
]
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from osu_like_bench.__main__ import main

told = {}
for words in json.load(sys.stdin):
    output, status = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(words.split())
        except SystemExit as end:
            status = end.code
    told[words] = status, output.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int, str]]:
    """What commands that run nothing end with, and say: all in one process, whose imports take longest."""
    words = [*(f"{command} --help".strip() for command in COMMANDS), *(words for words, _ in BAD)]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, told: dict[str, tuple[int, str]]) -> None:
    status, said = told[f"{command} --help".strip()]
    assert status == 0, said
    assert f"python -m osu_like_bench {command}".strip() in said.split("example", 1)[1]


@pytest.mark.parametrize(("words", "allowed"), BAD)
def test_bad_arguments_are_told_what_is_allowed(words: str, allowed: str, told: dict[str, tuple[int, str]]) -> None:
    status, said = told[words]
    assert status == 2
    assert allowed in said and "Traceback" not in said


def test_bad_arguments_of_a_program() -> None:
    done = bench("allreduce", "-m", "6")
    assert done.returncode == 2
    assert "multiple of the element's 4 bytes: give 8" in done.stderr and "Traceback" not in done.stderr


def test_bad_arguments_under_mpirun_are_told_once(mpirun: MPIRun) -> None:
    for words, said in [("--codec zfp --rate 40", "out of range"), ("--compare none", "no contender 'none'")]:
        done = mpirun(2, "osu_like_bench", "allreduce", *words.split(), check=False)
        assert done.ranks[0].status == 2 and done.returncode != 0
        assert said in done.stderr and done.ranks[1].stderr == ""


def test_codecs(tmp_path: Path) -> None:
    done = bench(
        *("codecs", "--size", "64K", "--instruction-set", "all", "-i", "3"),
        *("--json", tmp_path / "codecs.json", "--csv", tmp_path / "codecs.csv"),
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "codecs.json")
    kernels = {record["implementation"] for record in found}
    assert {"memcpy", "zfpy", "numpy", "portable"} <= kernels
    zfp = next(r for r in found if r["codec"] == "zfp rate=8" and r["implementation"] == "portable")
    assert zfp["ratio"] == 4.0 and zfp["wrong"] == 0 and 0.01 < zfp["error"] < 0.2
    assert {"memcpy", "zfpy"} <= set(zfp["versus"])
    assert {r["operation"] for r in found} == {"", "encode", "decode", "accumulate", "feedback", "recode", "add"}
    sets = kernels - {"memcpy", "zfpy", "numpy", "torch"}
    assert len(rows(done.stdout)) == sum(6 if codec.homomorphic else 4 for codec in USUAL) * len(sets)
    with (tmp_path / "codecs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found)


def test_plot_wants_results_of_a_collective(tmp_path: Path) -> None:
    written = tmp_path / "codecs.json"
    assert bench("codecs", "--codec", "cast", "--size", "4K", "-i", "3", "--json", written).returncode == 0
    done = bench("plot", written, "-o", tmp_path / "plot.png")
    assert done.returncode == 2 and "holds no results of a collective" in done.stderr


def test_allreduce_prints_osus_columns(mpirun: MPIRun) -> None:
    words = "allreduce -m 4:64K --codec zfp --rate 8 --algorithm ring -i 3 --full"
    done = mpirun(2, "osu_like_bench", *words.split())
    heads = next(line for line in done.stdout.splitlines() if line.startswith("# Size"))
    assert heads.split("  ")[0] == "# Size"
    assert [h.strip() for h in heads.split("  ") if h.strip()] == [
        *("# Size", "Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations"),
        *("Median Latency(us)", "P99 Latency(us)"),
    ]
    table = rows(done.stdout)
    assert [int(row[0]) for row in table] == [4 << i for i in range(15)]
    for _, mean, low, high, iterations, median, late in table:
        assert float(low) <= float(mean) <= float(high)
        assert float(low) <= float(median) <= float(late) <= float(high)
        assert iterations == "3"
    assert done.ranks[1].stdout == ""


FIELDS = {
    *("collective", "size", "total_bytes", "dtype", "op", "data", "ranks", "nodes", "contender", "algorithm", "codec"),
    *("avg_us", "median_us", "p99_us", "median_low_us", "median_high_us", "min_us", "max_us", "iterations"),
    *("algbw", "busbw", "speedup", "ratio", "error", "error_max", "wrong", "different", "seconds"),
}
"""Of a collective's record: readers of JSON and CSV files rely on them."""


def test_allreduce_contenders_and_records(mpirun: MPIRun, tmp_path: Path) -> None:
    ours = ["native", "auto", *ALGORITHMS, "p2p_ring", "p2p_recursive_doubling", "ring_uncompressed"]
    names = ",".join(ours)
    words = f"allreduce -m 4:32K --codec minmax --compare {names} -i 3 --op mean --show all"
    written = tmp_path / "bench.json"
    done = mpirun(3, "osu_like_bench", *words.split(), "--json", written, "--csv", tmp_path / "bench.csv")
    content = json.loads(written.read_text())
    assert content["kind"] == "collective" and content["schema"] == 1
    assert {"date", "command", "cpu", "mpi", "ranks", "nodes", "instruction_set"} <= set(content["run"])
    found = content["results"]
    assert len(found) == 14 * len(ours) == len(rows(done.stdout))
    for record in found:
        assert set(record) == FIELDS
        assert record["wrong"] == 0
        names = ("min_us", "median_low_us", "median_us", "median_high_us", "max_us")
        assert [record[name] for name in names] == sorted(record[name] for name in names)
        assert record["median_us"] <= record["p99_us"] <= record["max_us"]
        assert record["algbw"] == pytest.approx(record["size"] / record["avg_us"] / 1e3)
        assert record["busbw"] == pytest.approx(record["algbw"] * 4 / 3)
    last = {record["contender"]: record for record in found[-len(ours) :]}
    assert list(last) == ours
    assert last["native"]["codec"] is None and last["native"]["speedup"] == 1.0
    assert last["ring"]["ratio"] > 3.9 and last["p2p_ring"]["ratio"] > 3.9
    assert last["ring"]["different"] == 0 < last["p2p_ring"]["different"]
    assert last["direct"]["error"] < last["ring"]["error"] < 0.05
    assert last["ring_uncompressed"]["error"] < 1e-6
    with (tmp_path / "bench.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found) and lines[0]["mpi"] == content["run"]["mpi"]
    picture = tmp_path / "plot.png"
    drawn = bench("plot", written, "-o", picture)
    if drawn.returncode:
        assert "plot needs matplotlib" in drawn.stderr
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("words", "factor"),
    [
        # nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n for allreduce, (n-1)/n for those that move parts, 1 for broadcast.
        slow("allreduce --codec cast --dtype bfloat16 --codec-dtype float16", 2 * 3 / 4),
        slow("allreduce --codec intsum --bits 8 --dtype float16", 2 * 3 / 4),
        slow("allreduce --codec intsum --bits 16 --op mean", 2 * 3 / 4),
        ("allreduce --codec sign", 2 * 3 / 4),
        ("allgather --codec zfp --rate 16", 3 / 4),
        ("reduce --codec int8", 1.0),
        slow("reduce --codec zfp --rate 16 --dtype bfloat16 --op mean", 1.0),
        slow("gather --codec int8", 3 / 4),
        ("scatter --codec int8", 3 / 4),
        slow("reduce_scatter --codec zfp --rate 16 --dtype float64", 3 / 4),
        slow("bcast --codec minmax --bits 4", 1.0),
        slow("alltoall --codec zfp --tolerance 1e-5", 3 / 4),
    ],
)
def test_collectives(words: str, factor: float, mpirun: MPIRun, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    collective, additive = words.split()[0], "intsum" in words or "sign" in words
    own = [name for name in NAMES[collective] if name not in ("native", "hierarchical", *SPARSE)]
    others = "p2p,direct" if collective == "allreduce" and not additive else ",".join(own[-2:])
    compare = f"--compare native,auto,{others}"
    mpirun(4, "osu_like_bench", *f"{words} -m 64:32K {compare} -i 2 -x 1".split(), "--json", written)
    found = results(written)
    # What all ranks agree on cannot be made before they have met.
    uncompressed = {"native", "shared_memory"} | ({"dissemination"} if additive else set())
    assert found[-1]["size"] == 1 << 15
    parts = 4 if collective in ("allgather", "alltoall", "gather", "scatter") else 1
    for record in found:
        assert record["wrong"] == 0
        assert record["total_bytes"] == parts * record["size"]
        assert record["algbw"] == pytest.approx(record["total_bytes"] / record["avg_us"] / 1e3)
        assert record["busbw"] == pytest.approx(record["algbw"] * factor)
        if record["contender"] != "auto" or "float16" not in words:  # auto may add halves by an algorithm of ours
            assert (record["codec"] is None) == (record["algorithm"] in uncompressed)


SABOTAGE = """
import sys
import numpy as np
import osu_like_bench.contenders as contenders
from osu_like_bench.__main__ import main

def make(name, case, ranks, x, out, **options):
    contender = honest(name, case, ranks, x, out, **options)
    def run():
        contender.run()
        HARM
    return contenders.Contender(contender.name, run, contender.ran, contender.same_bits)

honest, contenders.make = contenders.make, make
main(sys.argv[1:])
"""


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("harm", "wrong"),
    [
        slow("out[0, 5] = np.nan", 2),
        slow("out[0, 5] += 1.0", 2),
        ("if ranks.comm.rank == 1: out[0, 5] = np.nextafter(out[0, 5], np.float32(1))", 1),
        ("out[...] = 0", 2 * 8192),
    ],
)
def test_wrong_results_are_counted_and_end_with_status_1(harm: str, wrong: int, mpirun: MPIRun, tmp_path: Path) -> None:
    script, written = tmp_path / "sabotage.py", tmp_path / "bench.json"
    script.write_text(SABOTAGE.replace("HARM", harm))
    words = "allreduce -m 32K --codec zfp --rate 8 --algorithm ring -i 2"
    done = mpirun(2, script, *words.split(), "--json", written, check=False)
    assert done.ranks[0].status == 1
    assert "WRONG: ring at 32768 bytes" in done.stderr
    (record,) = results(written)
    if "rank == 1" in harm:
        assert record["different"] == 1
    assert record["wrong"] in (wrong, wrong + record["different"])


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("collective", "wrong"), [("gather", 3 * 1024), slow("reduce", 1024), slow("scatter", 3 * 1024)]
)
def test_wrong_results_count_on_ranks_that_get_one(collective: str, wrong: int, mpirun: MPIRun, tmp_path: Path) -> None:
    script, written = tmp_path / "sabotage.py", tmp_path / "bench.json"
    script.write_text(SABOTAGE.replace("HARM", "out[...] = 0"))
    done = mpirun(3, script, collective, "-m", "4K", "-i", "2", "--json", written, check=False)
    assert done.ranks[0].status == 1
    assert [record["wrong"] for record in results(written)] == [wrong]


def test_every_collective_of_the_library_is_a_case() -> None:
    """In a process of its own, since the cases start MPI."""
    program = "from osu_like_bench.cases import CASES; print(*CASES)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == set(NAMES)
    page = (TOP / "docs/benchmark.md").read_text()
    assert not [name for name in NAMES if f"`{name}`" not in page.split("## Contenders")[0]]


def test_one_rank_and_sizes_in_any_order(mpirun: MPIRun) -> None:
    words = "allreduce -m 8K,4:4K --codec zfp --compare native,ring,ring_one_thread,p2p,p2p_recursive_doubling -i 2"
    done = mpirun(1, "osu_like_bench", *words.split())
    assert len(rows(done.stdout)) == 12


CODEC = str(ZFP(rate=8))


def at(
    size: int, *, nodes: int = 1, ran: str = "shared_memory", collective: str = "allreduce", **microseconds: float
) -> list[Record]:
    """Records of contenders at one size; auto ran ``ran``. Only ring and direct compress."""
    first = next(iter(microseconds.values()))
    found = []
    for name, us in microseconds.items():
        algorithm = ran if name == "auto" else name
        coded = algorithm in ("ring", "direct")
        about = {"collective": collective, "size": size, "ranks": 4, "nodes": nodes, "contender": name}
        quality = {"algorithm": algorithm, "codec": CODEC if coded else None, "ratio": 4.0 if coded else 1.0}
        times = {"avg_us": us, "median_us": 10 * us, "median_low_us": 9.9 * us, "median_high_us": 10.1 * us}
        found.append(about | quality | times | {"speedup": first / us})
    return found


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_which_contender_is_fastest_at_which_sizes(statistic: str) -> None:
    records = at(1 << 10, native=10, ring=20) + at(1 << 20, native=30, ring=15) + at(1 << 21, native=60, ring=20)
    assert fastest(records, statistic) == "# Fastest: native up to 1 KiB, ring from 1 MiB on"
    assert fastest(at(4096, native=100, direct=98), statistic) == "# Fastest: native at 4 KiB"
    assert fastest(at(4, native=10, ring=5) + at(8, native=10, ring=5), statistic) == "# Fastest: ring at all sizes"
    many = [each for k in range(6) for each in at(1 << (10 + k), native=10, ring=(5, 20)[k % 2])]
    assert fastest(many, statistic) == "# Fastest: ring at 3 of 6 sizes, native at 3"


PREDICT = (
    "Between nodes at 1 to 25 Gb/s it can; for a prediction: "
    "python -m compcoll choose --bytes 16MiB --ranks 4 --link 10gbit"
)
TUNE = "measure this machine for auto by: mpirun -n 4 python -m compcoll tune"
USE = 'use algorithm="auto" (the default): it ran'
CONCLUSIONS: dict[str, tuple[list[Record], str]] = {
    "auto is the fastest, and compression loses": (
        at(16 << 20, native=19, auto=10, ring=17, direct=18),
        f"On one node, at 16 MiB, {USE} shared_memory without compression, 1.9 times as fast as native. "
        f"Compression does not pay: ring takes 1.7 times as long as auto. {PREDICT}",
    ),
    "auto runs native": (
        at(16 << 20, ran="native", native=10, auto=10.2, direct=15),
        f"On one node, at 16 MiB, {USE} native, about as fast as native. "
        f"Compression does not pay: direct takes 1.5 times as long as native. {PREDICT}",
    ),
    "only the largest size counts": (
        at(4096, native=10, auto=90) + at(16 << 20, ran="native", native=10, auto=9.9),
        f"On one node, at 16 MiB, {USE} native, about as fast as native.",
    ),
    "compression wins by auto": (
        at(16 << 20, nodes=4, ran="direct", native=200, auto=50, ring=52),
        f"Between these 4 nodes, at 16 MiB, {USE} direct with compression, 4.0 times as fast as native. "
        "Compression pays: auto sends 4.0 times fewer bytes and is 4.0 times as fast as native.",
    ),
    "compression wins on one node": (
        at(16 << 20, ran="native", native=200, auto=201, ring=100),
        "On one node, at 16 MiB, ring is the fastest, 2.0 times as fast as auto, which ran native; "
        f"{TUNE}. Compression pays: ring sends 4.0 times fewer bytes and is 2.0 times as fast as native.",
    ),
    "auto compresses, and loses": (
        at(16 << 20, nodes=2, ran="ring", native=10, auto=15),
        "Between these 2 nodes, at 16 MiB, native is the fastest, 1.5 times as fast as auto, which ran ring with "
        f"compression; {TUNE}. Compression does not pay: auto takes 1.5 times as long as native.",
    ),
    "compression changes nothing": (
        at(16 << 20, nodes=2, native=100, ring=95),
        "Between these 2 nodes, at 16 MiB, no contender is clearly faster than native. "
        "Compression does not pay: ring is about as fast as native.",
    ),
    "another library is the fastest": (
        at(16 << 20, native=20, gloo=10, auto=15),
        "On one node, at 16 MiB, gloo is the fastest, 1.5 times as fast as auto, which ran shared_memory without "
        "compression.",
    ),
    "a call of compcoll costs more than MPI's": (
        at(16 << 20, ran="native", native=10, auto=12),
        "On one node, at 16 MiB, native is the fastest, 1.2 times as fast as auto, which ran native, too.",
    ),
    "auto is not there": (
        at(16 << 20, native=20, shared_memory=10),
        "On one node, at 16 MiB, shared_memory is the fastest, 2.0 times as fast as native.",
    ),
    "auto is the first": (
        at(16 << 20, nodes=2, auto=20, ring=10, ran="native"),
        "Between these 2 nodes, at 16 MiB, ring is the fastest, 2.0 times as fast as auto. "
        "Compression pays: ring sends 4.0 times fewer bytes and is 2.0 times as fast as auto.",
    ),
    "another collective": (
        at(16 << 20, collective="bcast", ran="native", native=10, auto=10, ring=20),
        f"On one node, at 16 MiB, {USE} native, about as fast as native. "
        "Compression does not pay: ring takes 2.0 times as long as native. Between nodes on a slow network it can.",
    ),
}


@pytest.mark.parametrize("statistic", ["mean", "median"])
@pytest.mark.parametrize(("records", "said"), CONCLUSIONS.values(), ids=CONCLUSIONS)
def test_what_to_conclude(records: list[Record], said: str, statistic: str) -> None:
    assert conclusion(records, statistic) == f"# {said}"


def test_noise_is_no_conclusion() -> None:
    """No contender is faster than another if the confidence intervals of their medians overlap."""
    noisy = [row | {"median_low_us": 0.0} for row in at(16 << 20, nodes=2, native=20, auto=15, ring=10)]
    assert conclusion(noisy, "mean") == (
        f"# Between these 2 nodes, at 16 MiB, {USE} shared_memory without compression, not clearly faster than native, "
        "since the times scatter. Compression does not pay: ring is not clearly faster than auto, since the times "
        "scatter."
    )


def test_make_bench_compares_what_a_user_gets() -> None:
    words = re.search(r"^BENCH +\?= (.*)$", (TOP / "Makefile").read_text(), re.M)
    assert words is not None
    arguments = parser.build_parser().parse_args(words[1].split())
    compared = arguments.compare.split(",")
    assert compared[:2] == ["native", "auto"] and {"ring", "direct"} <= set(compared)
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.split("[<>=]", package)[0] for package in extras["bench"]] == ["tqdm"], "make bench installs little"


def test_times_stand_beside_their_ratio_to_the_first() -> None:
    table = SweepTable(["native", "ring"], "mean", full=False, show=[])
    note, heads = table.head().splitlines()
    assert note == "# in brackets: how many times as fast as native"
    assert heads.split("  ")[0] == "# Size" and heads.split()[2:] == ["native(us)", "ring(us)"]
    (line,) = table.rows(at(4096, native=10, ring=20))
    assert line.split() == ["4096", "10.00", "20.00", "(0.50)"]


@pytest.mark.slow
def test_selection(tmp_path: Path) -> None:
    out = tmp_path / "selection.json"
    words = ["selection", "-m", "64K:128K", "--data", "laplace", "--density", "0.01", "-i", "3", "-x", "0"]
    command = [sys.executable, "-m", "osu_like_bench", *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())["results"]
    assert {"copy", "read", "exact", "ldte", "argpartition"} < {record["method"] for record in records}
    assert {record["size"] for record in records} == {65536, 131072}
    assert all(record["wrong"] == 0 and record["throughput"] > 0 for record in records)
    for line in done.stdout.splitlines()[3:]:
        assert line.split()[-1] == "0"


def test_values_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gradients.npy"
    np.save(path, np.arange(20.0).reshape(4, 5))
    assert data.make(data.kind_of(str(path)), 3, "float32", (0,)).tolist() == [0, 1, 2]
    np.save(tmp_path / "whole.npy", np.arange(20))
    for name, said in (("gradients.npy", "of float64, but 21"), ("whole.npy", "int64"), ("none.npy", "none.npy")):
        with pytest.raises(UsageError, match=said):
            data.make(data.kind_of(str(tmp_path / name)), 21 if name == "gradients.npy" else 1, "float32", (0,))
    with pytest.raises(UsageError, match="normal, laplace"):
        data.kind_of("gaussian")


def test_wrong_choices_are_counted() -> None:
    x = np.arange(100, dtype=np.float32)
    right = np.arange(90, 100, dtype=np.uint32)
    assert selection._wrong("exact", x, 10, right) == 0
    assert selection._wrong("exact", x, 10, right[1:]) == 1
    assert selection._wrong("exact", x, 10, np.arange(85, 100)) == 5
    assert selection._wrong("ldte", x, 10, np.arange(86, 100)) == 0
    assert selection._wrong("exact", x, 10, np.concatenate([right[1:], [3]])) == 87


@pytest.mark.parametrize(
    ("collective", "spread"),
    [
        ("allgatherv", "linear"),
        ("alltoallv", "linear"),
        *(slow(name, spread) for name in ("allgatherv", "alltoallv") for spread in ("equal", "one")),
    ],
)
def test_parts_of_different_lengths(mpirun: MPIRun, tmp_path: Path, collective: str, spread: str) -> None:
    out = tmp_path / "parts.json"
    names = ["native", *(name for name in NAMES[collective] if name != "native")]
    words = ["-m", "4K:8K", "--spread", spread, "--compare", ",".join(names), "-i", "3", "-x", "1"]
    mpirun(3, "osu_like_bench", collective, *words, "--json", out)
    records = json.loads(out.read_text())["results"]
    assert [record["contender"] for record in records] == names * 2
    assert all(record["wrong"] == 0 for record in records)


def test_sparse_allreduce(mpirun: MPIRun, tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    names = "native,sparse_ring,sparse_native,sparse_direct"
    words = ["-m", "64K", "--codec", "topk", "--density", "0.01", "--compare", names, "-i", "3", "-x", "1"]
    mpirun(3, "osu_like_bench", "allreduce", *words, "--json", out)
    records = json.loads(out.read_text())["results"]
    assert [record["algorithm"] for record in records] == names.split(",")
    assert all(record["wrong"] == record["different"] == 0 for record in records)
    assert records[1]["ratio"] > 30


@pytest.mark.parametrize("wire", ["auto", *WIRES])
def test_wire_formats_by_name(wire: str) -> None:
    parser = argparse.ArgumentParser()
    add_codec_options(parser.add_argument_group("codec"), "")
    words = f"--codec topk --density 0.1 --wire {wire}".split()
    assert chosen_codec(parser.parse_args(words)) == TopK(density=0.1, wire=wire)
