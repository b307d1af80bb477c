"""docs/solvers.md, run on ranks as printed: what codecs cost a solver, and how the page's remedies make up for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi.environments import MPI, Completed

PAGE = (Path(__file__).parents[2] / "docs" / "solvers.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
RTOL = 1e-8

ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.split("|")[1:-1]]) == 7
    if cells[0] != "codec"
}
"""The table's rows by codec; "none" is MPI's own sums."""

MEASURE = """
import hashlib, json, sys

def counted(comm, shares, total=None):
    def product(p):
        result = matrix(comm) @ p
        shares.append(1.0 if total is None else 1 / compcoll.get_communicator(comm).stats.ratio)
        return result
    return LinearOperator((n, n), matvec=product, dtype=np.float64)

def digest(*values):
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()

found = {"the page": [info, float(true), float(np.linalg.norm(b - exact @ x)), digest(x)]}
for codec in sys.argv[1:]:
    name = None if codec == "none" else codec
    shares, exacts, path = [], [], [np.zeros(n)]
    A = counted(compcoll.Intracomm(MPI.COMM_WORLD, codec=name, min_bytes=0), shares, name)
    exact = counted(compcoll.Intracomm(MPI.COMM_WORLD), exacts)
    x, info = cg(A, b, rtol=1e-8, maxiter=500, callback=lambda x: path.append(x.copy()))
    steps, share = len(shares), float(MPI.COMM_WORLD.allreduce(np.mean(shares)) / MPI.COMM_WORLD.size)
    true = float(np.linalg.norm(b - exact @ x))
    moved = float(sum(np.linalg.norm(after - before) for before, after in zip(path, path[1:])))
    shares.clear(), exacts.clear()
    y, told = solve(A, exact, b, rtol=1e-8)
    inexact, replaced = len(shares), len(exacts)
    found[codec] = {
        "share": share, "info": info, "steps": steps, "true": true, "moved": moved,
        "inexact": inexact, "exact": replaced, "told": float(told),
        "replaced": float(np.linalg.norm(b - exact @ y)), "bits": digest(x, y),
    }
print(json.dumps(found))
"""


Found = dict[str, Any]
_FOUND: dict[str, list[Found]] = {}


CHECK = """
import compcoll
for one in (comm, compcoll.Intracomm(MPI.COMM_WORLD)):
    print(abs(matrix(one) @ b - sp.kronsum(line, line) @ b).max())
"""


@pytest.fixture
def ranks(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> list[Found]:
    """What each rank found, in one start of ranks for all tests of an MPI."""
    if mpi.name not in _FOUND:
        program = tmp_path / "program.py"
        program.write_text("\n".join([*CODE, MEASURE]))
        done = mpirun(4, program, *ROWS, env={"OMP_NUM_THREADS": "1"}, timeout=200)
        _FOUND[mpi.name] = [json.loads(rank.stdout.splitlines()[-1]) for rank in done.ranks]
        assert done.stdout.splitlines()[0] == "solved"
    return _FOUND[mpi.name]


def test_all_ranks_have_the_same_bits_after_the_same_steps(ranks: list[Found]) -> None:
    assert all(found == ranks[0] for found in ranks)


def test_the_page_has_a_row_of_each_kind() -> None:
    kinds = {re.sub(r"=.*", "", codec) for codec in ROWS}
    bounded = {"zfp:tolerance", "szp:tolerance", "szp:relative", "auto:tolerance"}
    assert kinds >= {"none", "zfp:lossless", "zfp:rate", "cast:dtype"} | bounded


@pytest.mark.parametrize("codec", ROWS)
def test_the_table_is_what_comes_out(ranks: list[Found], codec: str) -> None:
    share, says, steps, true, products, replaced = ROWS[codec]
    found = ranks[0][codec]
    assert found["share"] == pytest.approx(float(share), abs=0.02)
    assert (found["info"] == 0) == (says == "solved")
    assert found["steps"] == pytest.approx(int(steps), rel=0.1)
    assert float(true) / 2 < found["true"] < float(true) * 2
    inexact, exact = map(int, products.split(" + "))
    assert found["inexact"] == pytest.approx(inexact, rel=0.1) and abs(found["exact"] - exact) <= 1
    assert found["replaced"] <= RTOL and float(replaced) <= RTOL


def test_the_solver_hides_what_a_codec_costs(ranks: list[Found]) -> None:
    found = ranks[0]["zfp:rate=16"]
    assert found["info"] == 0 and found["true"] > 1e4 * RTOL


def test_residual_replacement_makes_up_for_it(ranks: list[Found]) -> None:
    for codec in ROWS:
        found = ranks[0][codec]
        assert found["replaced"] == pytest.approx(found["told"]) and found["told"] <= RTOL, codec
        assert 2 <= found["exact"] <= 6 < found["inexact"], codec  # few of the products are exact


def test_a_budget_keeps_the_error_below_the_tolerance(ranks: list[Found]) -> None:
    uncompressed = ranks[0]["none"]
    info, _, true, _ = ranks[0]["the page"]  # its last block
    assert info == 0 and true < 1.01 * RTOL
    bounded = ("zfp:tolerance=3e-12", "szp:tolerance=1e-10", "szp:relative=5e-9")
    for codec in ("zfp:lossless=True", "auto:tolerance=1e-10", *bounded):
        assert ranks[0][codec]["true"] < 1.01 * RTOL and ranks[0][codec]["steps"] == uncompressed["steps"], codec


def test_the_residuals_differ_by_less_than_the_bound(ranks: list[Found]) -> None:
    # The estimate of zfp at 16 bits is 5.5e-4 on 4 ranks; the norm of the matrix is below 8.
    for codec, eta in {"auto:tolerance=1e-10": 1e-10, "zfp:rate=16": 6e-4}.items():
        found = ranks[0][codec]
        assert found["info"] == 0 and found["true"] <= RTOL + eta * 8 * found["moved"], codec


def test_the_program_runs_unchanged(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    (command,) = re.findall(r"^mpirun -n (4) python (-m compcoll run .*) (poisson\.py)$", PAGE, re.MULTILINE)
    program = tmp_path / command[2]
    program.write_text(CODE[0] + CHECK)
    done = mpirun(4, *command[1].split()[1:], program)
    solved, compressed, exact = done.stdout.splitlines()
    assert solved == "solved" and float(compressed) > 1e-6 and float(exact) < 1e-14
    assert "saved" in done.stderr
