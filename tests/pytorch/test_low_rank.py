"""ACP-SGD and Power-SGD: checks on ranks, and orthonormalisation and fusion by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi.checks import CheckJob
from mpi.environments import MPI
from mpi.run import expand
from properties import examples

from compcoll.torch.low_rank.factors import Gradient, orthonormal, orthonormalize
from compcoll.torch.low_rank.fusion import Kind, fuse, numbers_of

pytestmark = pytest.mark.with_torch

HERE = Path(__file__).parent / "low_rank"
CHECKS = expand([], HERE)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 1))])
def job(request: pytest.FixtureRequest, mpi: MPI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckJob]:
    if mpi.name != "openmpi" and request.param != 2:
        pytest.skip("on 1 and 4 ranks by Open MPI")
    folder = tmp_path_factory.mktemp(f"low-rank-{mpi.name}-{request.param}-")
    with closing(CheckJob(request.param, CHECKS, folder, mpi.prefix, checks=HERE, timeout=100.0)) as job:
        yield job


@pytest.mark.timeout(200)
@pytest.mark.parametrize("check", CHECKS)
def test_check(job: CheckJob, check: str) -> None:
    job.report(check)


@examples(60)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 9),
    rank=st.integers(0, 9),
    exponent=st.sampled_from([-35, -3, 0, 15]),
    double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_orthonormal(rows: int, columns: int, rank: int, exponent: int, double: bool, seed: int) -> None:
    """Columns are orthonormal whatever the rank, and span the matrix's columns: projecting it changes nothing."""
    columns, rank = min(rows, columns), min(rank, rows, columns)
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns)) * 10.0**exponent
    given_matrix = torch.from_numpy(matrix).to(torch.float64 if double else torch.float32)
    (found,) = orthonormal(given_matrix.unsqueeze(0)).double().numpy()
    eps = 1e-13 if double else 1e-4
    assert np.abs(found.T @ found - np.eye(columns)).max() < eps
    exact = given_matrix.double().numpy()
    assert np.linalg.norm(found @ (found.T @ exact) - exact) <= 10 * eps * np.linalg.norm(exact)
    assert np.array_equal(orthonormal(given_matrix.unsqueeze(0))[0].double().numpy(), found)


def test_dead_columns_reach_everywhere() -> None:
    """An identity, which a QR decomposition gives, would see the first rows alone: for ever, were these dead."""
    matrices = torch.zeros(2, 8, 2)
    matrices[1, 0, 0] = 3.0
    nothing, one = orthonormal(matrices)
    assert (nothing != 0).all()
    assert one[:, 0].abs().tolist() == [1, *[0] * 7] and (one[1:, 1] != 0).all()


def test_directions_depend_on_no_other_matrix() -> None:
    matrices = torch.zeros(3, 8, 2)
    matrices[1, :, 0] = 1.0
    for found, matrix in zip(orthonormal(matrices), matrices, strict=True):
        assert torch.equal(found, orthonormal(matrix.unsqueeze(0))[0])


def test_orthonormalize_keeps_the_order() -> None:
    shapes = [(5, 2), (9, 3), (5, 2), (9, 2)]
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)]
    for matrix, found in zip(matrices, orthonormalize(matrices), strict=True):
        q = np.linalg.qr(matrix.double().numpy())[0]
        assert np.allclose(found.double().numpy() @ found.double().numpy().T, q @ q.T, atol=1e-5)
    assert orthonormalize([]) == []


@examples(60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=20),
    kind=st.sampled_from(Kind),
    nbytes=st.sampled_from([0, 100, 4000, 10**9]),
)
def test_fusion(sizes: list[tuple[int, int, bool]], kind: Kind, nbytes: int) -> None:
    """Every gradient is in one buffer, in order; a buffer is closed by the gradient that fills it."""
    gradients = [
        Gradient(
            str(number),
            torch.Size((rows, columns) if columns else (rows,)),
            torch.float64 if double else torch.float32,
            CPU,
            2 if min(rows, columns) >= 2 else 0,
            feedback=False,
        )
        for number, (rows, columns, double) in enumerate(sizes)
    ]
    buffers = fuse(gradients, kind, nbytes, CPU, flagged=True)
    raw = sum(gradient.nbytes for gradient in gradients)
    sent = {g.name: g.dtype.itemsize * numbers_of(g, kind) for g in gradients}
    limit = nbytes * sum(sent.values()) / raw
    for dtype in (torch.float32, torch.float64):
        of_type = [buffer for buffer in buffers if buffer.wire.dtype == dtype]
        names = [gradient.name for buffer in of_type for gradient in buffer.gradients]
        assert names == [gradient.name for gradient in gradients if gradient.dtype == dtype]
        for buffer in of_type:
            held = [sent[gradient.name] for gradient in buffer.gradients]
            assert sum(held[:-1]) < limit or len(held) == 1
            assert buffer is of_type[-1] or sum(held) >= limit
            flags = len(gradients) if buffer is buffers[-1] else 0
            assert buffer.wire.numel() == sum(held) // dtype.itemsize + flags
            low = [numbers_of(g, kind) for g in buffer.gradients if g.rank and kind is not Kind.EXACT]
            assert buffer.own.numel() == buffer.factors == sum(low)
