"""Selectors against NumPy, on every instruction set."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.host.device import HostDevice

SETS = HostDevice.instruction_sets()
KINDS = ["normal", "laplace", "shifted", "zeros", "ties", "constant", "few", "huge", "tiny"]
MOST = {"exact": 1.0, "trimmed": 1.0, "ldte": 1.5, "hierarchical": 2.0, "bisection": 2.0}


def values(kind: str, n: int, dtype: Any, seed: int, bad: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = {
        "normal": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "shifted": lambda: rng.standard_normal(n) + 3,
        "zeros": lambda: np.zeros(n),
        "ties": lambda: rng.integers(-3, 4, n),
        "constant": lambda: np.full(n, -0.7),
        "few": lambda: rng.standard_normal(n) * (rng.random(n) < 0.003),
        "huge": lambda: rng.standard_normal(n) * 1e37,
        "tiny": lambda: rng.standard_normal(n) * 1e-41,
    }[kind]()
    x = np.asarray(x, np.float64).astype(dtype)
    if n:
        x[rng.integers(0, n, bad)] = rng.choice([np.nan, np.inf, -np.inf], bad)
    return x


def check_largest(x: np.ndarray, indices: np.ndarray, k: int, most: float) -> None:
    """Promises of every selector: NumPy's order of magnitudes is the oracle."""
    magnitude = np.where(np.isfinite(x), np.abs(x), np.inf)
    chosen = np.zeros(x.size, bool)
    chosen[indices] = True
    assert np.all(np.diff(indices.astype(np.int64)) > 0)
    assert chosen[~np.isfinite(x)].all()
    assert not chosen[x == 0].any()
    infinite, nonzero = int(np.count_nonzero(~np.isfinite(x))), int(np.count_nonzero(x))
    assert min(k, nonzero) <= indices.size <= max(math.ceil(most * k), k + (most > 1), infinite)
    if 0 < indices.size < nonzero:
        assert magnitude[chosen].min() >= magnitude[~chosen].max()


arrays = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "n": st.one_of(st.integers(1, 300), st.integers(300, 20000), st.sampled_from([65536, 70001, 200_003])),
        "dtype": st.sampled_from([np.float32, np.float64]),
        "seed": st.integers(0, 1000),
        "bad": st.sampled_from([0, 0, 0, 1, 5]),
    }
)


@pytest.mark.parametrize("select", list(SELECTORS))
@examples(60)
@given(array=arrays, density=st.sampled_from([1e-4, 1e-3, 0.01, 0.1, 0.3, 0.9, 1.0]))
def test_the_largest(select: str, array: dict[str, Any], density: float) -> None:
    x = values(**array)
    k = min(math.ceil(density * x.size), x.size)
    found = []
    for instruction_set in SETS:
        kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
        found.append(SELECTORS[select](kernels, x, k))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    check_largest(x, found[0], k, MOST[select])
    if select in ("exact", "trimmed") and np.isfinite(x).all():
        nonzero = np.flatnonzero(x)
        order = np.lexsort((nonzero, -np.abs(x[nonzero])))
        assert np.array_equal(found[0], np.sort(nonzero[order[:k]]))


@pytest.mark.parametrize(("k", "passes"), [(1, 1), (20, 1), (21, 2), (40, 2), (60, 3), (80, 4), (100, 5)])
def test_the_threshold_of_redsync_falls_in_steps(k: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the mean, 50, to the largest, 100: above 90, 80, 70, 60 and 50 are 10 values each of both signs.

    J. Fang et al., JPDC 133, 2019, algorithm 2, with steps of a fifth.
    """
    kernels = HostDevice(1, SETS[0]).selection("float64")
    x = np.r_[np.arange(51, 101), -np.arange(51, 101), np.full(100, 24.5)].astype(np.float64)
    assert np.abs(x).mean() == 50
    thresholds: list[float] = []
    above = type(kernels).above

    def count(self: Any, values: Any, threshold: float, limit: int) -> Any:
        thresholds.append(threshold)
        return above(self, values, threshold, limit)

    monkeypatch.setattr(type(kernels), "above", count)
    found = SELECTORS["trimmed"](kernels, x, k)
    assert list(dict.fromkeys(thresholds)) == pytest.approx([90, 80, 70, 60, 50][:passes])
    assert sorted(np.abs(x[found]))[0] == 100 - (k - 1) // 2
    assert found.size == k


@examples(60)
@given(array=arrays)
def test_passes(array: dict[str, Any]) -> None:
    x = values(**array)
    finite = x[np.isfinite(x)].astype(np.float64)
    threshold = float(np.median(np.abs(finite))) if finite.size else 1.0
    infinite = ~np.isfinite(x)
    above = np.flatnonzero(infinite | (np.abs(x) > x.dtype.type(threshold)))
    variances = np.abs(values("laplace", x.size, x.dtype, array["seed"] + 1, 0)) * x.dtype.type(threshold)
    with np.errstate(all="ignore"):
        wanted = (np.abs(x) > 0) & (x * x > x.dtype.type(1.5) * variances) | infinite
    known = []
    for instruction_set in SETS:
        kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
        known.append(kernels.moments(x))
        assert kernels.count(x, threshold) == above.size
        got, count = kernels.above(x, threshold, x.size)
        assert count == above.size and np.array_equal(got, above)
        assert kernels.above(x, threshold, max(above.size - 1, 0))[0] is None or above.size == 0
        assert np.array_equal(kernels.unambiguous(x, variances, 1.5, 0.0), np.flatnonzero(wanted))
    assert len({repr(moments) for moments in known}) == 1  # sums of what is huge may be NaN
    scale = np.abs(finite).sum()
    # Sums of what is huge, and squares of what is huge or tiny, leave the range of float32.
    if array["kind"] != "huge":
        assert abs(known[0][0] - finite.sum()) <= 1e-4 * scale and abs(known[0][1] - scale) <= 1e-4 * scale
    assert known[0][3] == np.abs(finite).max(initial=0)
    if array["kind"] not in ("huge", "tiny"):
        assert known[0][2] == pytest.approx((finite**2).sum(), rel=1e-4)


@examples(60)
@given(array=arrays, part=st.floats(0.0, 1.0), k=st.integers(1, 300), wider=st.floats(1.0, 3.0))
def test_choices_of_a_search(array: dict[str, Any], part: float, k: int, wider: float) -> None:
    assert_choices(values(**array), part, k, wider)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_choices_among_subnormal_values(part: float) -> None:
    """Thresholds between them are no numbers of float32: kernels compare with the nearest one."""
    assert_choices(np.array([np.inf, 1.3e-42, 6.4e-42], np.float32), part, 1, 1.0)


def assert_choices(x: np.ndarray, part: float, k: int, wider: float) -> None:
    magnitude = np.where(np.isfinite(x), np.abs(x), np.inf).astype(np.float64)
    finite = magnitude[np.isfinite(magnitude)]
    largest = float(finite.max(initial=0.0))
    computed = np.float64 if x.dtype == np.float64 else np.float32  # what kernels compare in
    threshold = float(computed(np.quantile(finite, part))) if finite.size else 0.0
    most = max(math.ceil(wider * k), k)
    wanted = np.flatnonzero(magnitude > threshold)
    for room in (x.size, max(wanted.size - 1, 0)):
        for instruction_set in SETS:
            kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
            found, above = kernels.chosen(x, (k, most, threshold, largest, 0.3 * largest, 1.2 * k), room)
            assert above == wanted.size
            if above < k or above > room:
                assert found is None
                continue
            assert found is not None and np.all(np.diff(found.astype(np.int64)) > 0)
            left_out = np.delete(magnitude, found)
            assert left_out.max(initial=0.0) < magnitude[found].min() or above == found.size
            assert k <= found.size <= most or np.array_equal(found, wanted)
    if x.size:
        bound = HostDevice().selection(x.dtype.name).bisected(x, k, most, 0.0, largest, threshold, 0.7 * largest)
        assert bound is None or k <= np.count_nonzero(magnitude > float(computed(bound))) <= most


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fitted_distributions(dtype: Any) -> None:
    """Against the formulas in float64, and what they are estimates of."""
    rng, n, density = np.random.default_rng(3), 1 << 16, 0.01
    kernels, quantile = HostDevice().selection(np.dtype(dtype).name), NormalDist().inv_cdf(1 - density / 2)
    for x in (rng.laplace(0.4, 2.0, n).astype(dtype), rng.laplace(-3.0, 0.5, n).astype(dtype)):
        mean, b = x.mean(dtype=np.float64), np.sqrt(x.var(dtype=np.float64) / 2)
        expected = b * np.log(np.cosh(mean / b) / density)
        got = kernels.laplacian(x, n, density, quantile)
        if np.mean(np.abs(x)) / np.sqrt(np.mean(np.square(x, dtype=np.float64))) < 0.753:
            np.testing.assert_allclose(got[:4], [expected, abs(mean), np.abs(x).max(), b], rtol=1e-4)
        else:
            np.testing.assert_allclose(got[4], min(expected, np.abs(x).max()), rtol=1e-4)
    normal = rng.standard_normal(n).astype(dtype)
    for m in (n, n // 32):
        assert np.mean(np.abs(normal) > kernels.laplacian(normal, m, density, quantile)[0]) == pytest.approx(
            0.01, rel=0.3
        )
    assert kernels.laplacian(np.zeros(64, dtype), 64, density, quantile) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert kernels.laplacian(np.full(64, np.nan, dtype), 64, density, quantile) == (0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("nbytes", [0, 4, 100, (8 << 20) - 4, 8 << 20, (8 << 20) + 68])
@pytest.mark.parametrize("begin", [0, 1, 15])
def test_cleared_memory(nbytes: int, begin: int) -> None:
    """All of it, and no more, past the caches, too."""
    memory = np.full(nbytes // 4 + 48, 7.0, np.float32)
    HostDevice().selection("float32").clear(memory[begin : begin + nbytes // 4])
    assert not memory[begin : begin + nbytes // 4].any()
    assert (memory[:begin] == 7).all() and (memory[begin + nbytes // 4 :] == 7).all()


def test_random_indices_are_a_uniform_choice() -> None:
    n, k, kernels = 1000, 50, HostDevice().selection("float32")
    counts = np.zeros(n)
    for key in range(2000):
        indices = kernels.random(n, k, key)
        assert np.unique(indices).size == k and indices.max() < n
        counts[indices] += 1
    expected, deviation = 2000 * k / n, math.sqrt(2000 * k / n * (1 - k / n))
    assert np.abs(counts - expected).max() < 5 * deviation
    assert counts.std() == pytest.approx(deviation, rel=0.15)
    assert np.array_equal(kernels.random(n, n, 7), np.arange(n))
