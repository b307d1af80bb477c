"""Factors and losses of gradients in host memory in one pass, against NumPy's float64 and between instruction sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", "2.12")

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll.config import INSTRUCTION_SET
from compcoll.host.device import HostDevice
from compcoll.torch.low_rank.factors import OnePassGradient

Matrix = npt.NDArray[np.float64]

SETS = HostDevice.instruction_sets()
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LARGE, SMALL = 1 << 30, 0

shapes = st.tuples(st.integers(1, 70) | st.sampled_from([128, 301]), st.integers(1, 300) | st.sampled_from([576, 1031]))


@contextmanager
def running(instruction_set: str, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.dict(os.environ, {INSTRUCTION_SET: instruction_set}):
            yield
    finally:
        torch.set_num_threads(before)


def made(rows: int, columns: int, dtype: torch.dtype, rank: int, nbytes: int = LARGE) -> OnePassGradient:
    return OnePassGradient("weight", torch.Size((rows, columns)), dtype, rank, nbytes)


def normal(random: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.normal(size=shape)).to(dtype)


def exact(tensor: torch.Tensor) -> Matrix:
    return tensor.double().numpy()


def assert_close(got: torch.Tensor, wanted: Matrix, terms: Matrix, eps: float) -> None:
    """Each element within the rounding errors of a sum whose terms have these magnitudes."""
    assert (np.abs(exact(got) - wanted) <= eps * terms).all()


@examples(120)
@given(
    shape=shapes,
    rank=st.integers(1, 11),
    dtype=st.sampled_from(list(EPS)),
    instruction_set=st.sampled_from(SETS),
    threads=st.sampled_from([1, 2]),
    nbytes=st.sampled_from([LARGE, SMALL]),
    seed=st.integers(0, 99),
)
def test_against_numpy(
    shape: tuple[int, int], rank: int, dtype: torch.dtype, instruction_set: str, threads: int, nbytes: int, seed: int
) -> None:
    rows, columns = shape
    random = np.random.default_rng(seed)
    with running(instruction_set, threads):
        one = made(rows, columns, dtype, rank, nbytes)
        computed = EPS[one.dtype] * 4 * (rows + columns + rank)
        lost = np.zeros(shape)
        for step in range(4):
            gradient = normal(random, dtype, rows, columns)
            left, right = normal(random, one.dtype, rows, rank), normal(random, one.dtype, rank, columns)
            total = exact(gradient) + lost
            size = np.abs(exact(gradient)) + np.abs(lost) + 1
            # Into memory that holds something: and twice, as when more was added to a gradient.
            for values in (torch.full_like(gradient, 3), gradient):
                if step % 2:
                    found = torch.full_like(right, float("nan"))
                    one.project_right(values, left, found)
                else:
                    found = torch.full_like(left, float("nan"))
                    one.project_left(values, right, found)
            if step % 2:
                sent = left, found
                assert_close(found, exact(left).T @ total, np.abs(exact(left)).T @ size, computed)
            else:
                sent = found, right
                assert_close(found, total @ exact(right).T, size @ np.abs(exact(right)).T, computed)
            before = one.residual()
            mean = normal(random, one.dtype, rows, rank)
            one.finish(gradient, mean, right, None if step == 2 else sent)
            terms = np.abs(exact(mean)) @ np.abs(exact(right)) + torch.finfo(dtype).smallest_normal
            assert_close(gradient, exact(mean) @ exact(right), terms, max(computed, EPS[dtype] * 2))
            if step == 2:
                assert torch.equal(one.residual(), before)
                continue
            lost = total - exact(sent[0]) @ exact(sent[1])
            assert_close(one.residual(), lost, size + np.abs(exact(sent[0])) @ np.abs(exact(sent[1])), computed)
            lost = exact(one.residual())


@examples(60)
@given(shape=shapes, rank=st.integers(1, 9), dtype=st.sampled_from(list(EPS)), seed=st.integers(0, 99))
def test_same_bits(shape: tuple[int, int], rank: int, dtype: torch.dtype, seed: int) -> None:
    """Losses, right factors and means do not depend on instruction set, threads or what is past the caches; nor on
    whether losses were saved and loaded.
    """
    rows, columns = shape
    results = []
    for instruction_set in SETS:
        for threads, nbytes, reload in ((1, LARGE, False), (2, SMALL, True)):
            random = np.random.default_rng(seed)
            with running(instruction_set, threads):
                one = made(rows, columns, dtype, rank, nbytes)
                seen = []
                for _ in range(2):
                    gradient, left = normal(random, dtype, rows, columns), normal(random, one.dtype, rows, rank)
                    right = torch.empty(rank, columns, dtype=one.dtype)
                    one.project_right(gradient, left, right)
                    one.finish(gradient, left, right, (left, right))
                    seen += [gradient, right, one.residual()]
                    if reload:
                        one.set_residual(one.residual())
                results.append(seen)
    for seen in results[1:]:
        for tensor, wanted in zip(seen, results[0], strict=True):
            assert torch.equal(tensor, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("threads", [1, 2])
def test_larger_than_caches(instruction_set: str, threads: int) -> None:
    rows, columns = 1203, 9001
    random = np.random.default_rng(5)
    with running(instruction_set, threads):
        one = made(rows, columns, torch.float32, 4)
        gradient, given_right = normal(random, torch.float32, rows, columns), normal(random, torch.float32, 4, columns)
        left = torch.empty(rows, 4)
        one.project_left(gradient, given_right, left)
        total = exact(gradient)
        assert np.allclose(exact(left), total @ exact(given_right).T, atol=2e-2)
        one.finish(gradient, left, given_right, (left, given_right))
        product = exact(left) @ exact(given_right)
        assert np.allclose(exact(gradient), product, rtol=1e-5, atol=1e-3)
        assert np.allclose(exact(one.residual()), total - product, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("left_side", [True, False])
def test_not_finite(bad: float, left_side: bool) -> None:
    """It is in the factor, and losses stay bit by bit."""
    random = np.random.default_rng(3)
    one = made(37, 83, torch.float32, 3)
    one.set_residual(normal(random, torch.float32, 37, 83))
    before = one.residual()
    gradient = normal(random, torch.float32, 37, 83)
    gradient[36, 82] = bad
    left, right = torch.zeros(37, 3), torch.zeros(3, 83)  # zeros, too, do not hide it
    if left_side:
        one.project_left(gradient, right, left)
        assert not left[36].isfinite().any() and left[:36].isfinite().all()
    else:
        one.project_right(gradient, left, right)
        assert not right[:, 82].isfinite().any() and right[:, :82].isfinite().all()
    one.finish(gradient, left, right, None)
    assert torch.equal(one.residual(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_gradients(dtype: torch.dtype) -> None:
    """Convolutions' gradients may lie in another order of dimensions, or be negated lazily."""
    random = np.random.default_rng(4)
    shape = torch.Size((12, 5, 3, 3))
    plain = normal(random, dtype, *shape)
    strided = plain.to(memory_format=torch.channels_last)
    assert not strided.is_contiguous()
    results = []
    for gradient in (plain.clone(), strided, torch._neg_view(-plain)):
        one = OnePassGradient("weight", shape, dtype, 2, LARGE)
        left, right = torch.empty(12, 2), torch.ones(2, 45)
        one.project_left(gradient, right, left)
        one.finish(gradient, left, right, (left, right))
        results.append((gradient, left, one.residual()))
    for of_plain, *others in zip(*results, strict=True):
        for other in others:
            assert torch.equal(of_plain, other)
