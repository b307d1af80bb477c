"""States of sparse methods, against their papers' arithmetic in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, largest, normals

from compcoll import ErrorFeedback
from compcoll.errors import InvalidArgument, InvalidBuffer
from compcoll.sparse import (
    DGCFeedback,
    Hybrid,
    RandomK,
    Strom,
    TopK,
    Variance,
    VarianceFeedback,
    warmup_density,
)


def run_steps(codec: Any, state: ErrorFeedback, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """One rank's results, call by call."""
    world = World(1)
    return [world.loopback.run([world.comms[0].iallreduce(g, codec=codec, feedback=state)])[0] for g in gradients]


def test_dgc_is_its_papers_algorithm() -> None:
    n, density, m, clip = 2000, 0.01, 0.9, 20.0
    rng = np.random.default_rng(0)
    gradients = [(rng.standard_normal(n) * (0.1 if step % 2 else 1)).astype(np.float32) for step in range(6)]
    state = DGCFeedback(momentum=m, clip=clip)
    results = run_steps(TopK(density, "exact"), state, gradients)
    u, v = np.zeros(n), np.zeros(n)
    for gradient, result in zip(gradients, results):
        norm = np.linalg.norm(gradient.astype(np.float64))
        u = m * u + gradient * min(1.0, clip / norm)
        v = v + u
        sent = largest(v, math.ceil(density * n))
        np.testing.assert_allclose(result, sent, rtol=1e-4, atol=1e-5)
        u[sent != 0] = 0
        v[sent != 0] = 0
    np.testing.assert_allclose(state.velocity, u, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.residual, v, rtol=1e-4, atol=1e-5)


def test_dgc_warmup_is_its_papers_schedule() -> None:
    assert [round(warmup_density(epoch), 3) for epoch in range(6)] == [0.25, 0.062, 0.016, 0.004, 0.001, 0.001]
    assert warmup_density(1, 0.1) == 0.1
    with pytest.raises(InvalidArgument):
        warmup_density(-1)


def test_strom_is_its_papers_algorithm() -> None:
    n, tau = 500, 1.0
    gradients = normals(4, n, np.float64)
    state = ErrorFeedback()
    results = run_steps(Strom(tau), state, gradients)
    r = np.zeros(n)
    for gradient, result in zip(gradients, results):
        r = r + gradient
        sent = np.where(np.abs(r) > tau, np.sign(r) * tau, 0)
        np.testing.assert_allclose(result, sent, atol=1e-12)
        r = r - sent
    np.testing.assert_allclose(state.residual, r, atol=1e-12)


@pytest.mark.parametrize("hybrid", [False, True])
def test_variance_and_hybrid_are_their_papers_algorithms(hybrid: bool) -> None:
    n, alpha, zeta, tau, samples = 800, 1.5, 0.99, 0.2, 8
    rng = np.random.default_rng(1)
    state = VarianceFeedback()
    codec = Hybrid(tau, alpha, zeta) if hybrid else Variance(alpha, zeta)
    r, v = np.zeros(n), np.zeros(n)
    sent_elements = 0
    for _ in range(6):
        per_sample = (rng.standard_normal((samples, n)) + rng.standard_normal(n)) / samples
        gradient, squares = per_sample.sum(axis=0), (per_sample**2).sum(axis=0)
        state.observe(squares)
        result = run_steps(codec, state, [gradient])[0]
        r, v = r + gradient, v + squares
        chosen = (r**2 > alpha * v) & (np.abs(r) > tau if hybrid else True)
        if hybrid:
            sent = np.where(chosen, np.sign(r) * tau, 0)
            v = np.where(chosen, np.maximum(v - 2 * np.abs(r) * tau + tau**2, 0), zeta * v)
            r = r - sent
        else:
            top = np.floor(np.log2(np.abs(r).max()))
            mantissa, exponent = np.frexp(np.abs(r))
            power = np.minimum(np.where(mantissa >= 0.75, exponent, exponent - 1), top)
            chosen &= top - power <= 7
            sent = np.where(chosen, np.sign(r) * 2.0**power, 0)
            r, v = np.where(chosen, 0, r), np.where(chosen, 0, zeta * v)
        sent_elements += np.count_nonzero(sent)
        np.testing.assert_allclose(result, sent, atol=1e-12)
        np.testing.assert_allclose(state.residual, r, atol=1e-12)
        np.testing.assert_allclose(state.variance, v, atol=1e-12)
    assert 100 < sent_elements < 6 * n


def test_powers_of_two_count_from_the_largest_of_all() -> None:
    """Section 4.2: M is the largest magnitude of the whole gradient, sent or not. With M = 1000 only 4 has d <= 7."""
    r = np.array([1000, 4, 1, 0.5, 0.25])
    for observed, expected in (([1e9, 0, 0, 0, 0], [0, 4, 0, 0, 0]), ([0] * 5, [512, 4, 0, 0, 0])):
        state = VarianceFeedback()
        state.observe(np.array(observed, float))
        assert run_steps(Variance(1.0), state, [r])[0].tolist() == expected
        assert state.residual.tolist() == [each * (sent == 0) for each, sent in zip(r, expected)]
    state = VarianceFeedback()
    state.observe(np.zeros(4))
    assert run_steps(Variance(1.0), state, [r[1:]])[0].tolist() == [4, 1, 0.5, 0.25]


@pytest.mark.parametrize("method", ["variance", "hybrid", "dgc"])
def test_a_mean_is_the_sum_divided(method: str) -> None:
    """Every rank chooses as it would for a sum: what states were given is in the unit of what the caller gave."""
    size, n, steps = 4, 600, 5
    world = World(size)
    rng = np.random.default_rng(2)
    tau, alpha, zeta, m, clip = 0.2, 1.5, 0.99, 0.9, 15.0
    codec: Any = {
        "variance": Variance(alpha, zeta),
        "hybrid": Hybrid(tau / size, alpha, zeta),
        "dgc": TopK(0.02, "exact"),
    }[method]
    states: list[Any] = [DGCFeedback(m, clip) if method == "dgc" else VarianceFeedback() for _ in range(size)]
    first, second = np.zeros((size, n)), np.zeros((size, n))  # r and v, or v and u
    for _ in range(steps):
        per_sample = (rng.standard_normal((size, 8, n)) + rng.standard_normal(n)) / 8
        gradients, squares = per_sample.sum(axis=1), (per_sample**2).sum(axis=1)
        if method != "dgc":
            for state, moment in zip(states, squares):
                state.observe(moment)
        results = world.loopback.run(
            [
                comm.iallreduce(g, op="mean", codec=codec, feedback=state)
                for comm, g, state in zip(world.comms, gradients, states, strict=True)
            ]
        )
        if method == "dgc":
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            second = m * second + gradients * np.minimum(1, clip / norms)
            first = first + second
            sent = np.array([largest(row, math.ceil(0.02 * n)) for row in first])
            first, second = np.where(sent, 0, first), np.where(sent, 0, second)
        else:
            first, second = first + gradients, second + squares
            chosen = (first**2 > alpha * second) & (np.abs(first) > tau if method == "hybrid" else True)
            if method == "hybrid":
                sent = np.where(chosen, np.sign(first) * tau, 0)
                left = np.maximum(second - 2 * np.abs(first) * tau + tau**2, 0)
                first, second = first - sent, np.where(chosen, left, zeta * second)
            else:
                top = np.floor(np.log2(np.abs(first).max(axis=1, keepdims=True)))
                mantissa, exponent = np.frexp(np.abs(first))
                power = np.minimum(np.where(mantissa >= 0.75, exponent, exponent - 1), top)
                chosen &= top - power <= 7
                sent = np.where(chosen, np.sign(first) * 2.0**power, 0)
                first, second = np.where(chosen, 0, first), np.where(chosen, 0, zeta * second)
        assert 0 < np.count_nonzero(sent) < size * n
        np.testing.assert_allclose(results[0], sent.sum(axis=0) / size, atol=1e-12)


@pytest.mark.parametrize("make", [ErrorFeedback, DGCFeedback, VarianceFeedback])
def test_states_can_be_stored_resized_and_forgotten(make: Any) -> None:
    codec = Variance() if make is VarianceFeedback else TopK(0.1)
    gradients = normals(4, 300)
    state, other = make(), make()
    run_steps(codec, state, gradients[:2])
    other.load_state_dict(state.state_dict())
    for known in (state, other):
        run_steps(codec, known, gradients[2:])
    for name in state.arrays:
        np.testing.assert_array_equal(getattr(state, name), getattr(other, name))
    kept = state.residual[:200].copy()
    state.resize(200)
    np.testing.assert_array_equal(state.residual, kept)
    state.resize(250)
    np.testing.assert_array_equal(state.residual, np.concatenate([kept, np.zeros(50, np.float32)]))
    run_steps(codec, state, [gradients[0][:250]])
    with pytest.raises(InvalidBuffer, match="300"):
        run_steps(codec, state, [gradients[0]])
    state.reset()
    run_steps(codec, state, [gradients[0]])
    bad = other.state_dict()
    bad["residual"][3] = np.nan
    with pytest.raises(InvalidBuffer, match="NaN"):
        other.load_state_dict(bad)
    with pytest.raises(InvalidBuffer, match="needed"):
        other.load_state_dict({"residual": None})


@pytest.mark.parametrize("codec", [TopK(0.05), RandomK(0.05)], ids=repr)
def test_feedback_finds_the_optimum_that_largest_elements_alone_miss(codec: Any) -> None:
    """Least squares on 4 ranks whose own optima differ: at the common one single gradients are large and sum to 0."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((4, 64, 60))
    targets = rng.standard_normal((4, 64)) * np.array([1, 2, 3, 4])[:, None]
    optimum = np.linalg.lstsq(features.reshape(256, 60), targets.reshape(256), rcond=None)[0]

    def remaining(feedback: bool) -> float:
        world, w = World(4), np.zeros(60)
        states = [ErrorFeedback() if feedback else None for _ in range(4)]
        for step in range(600):
            gradients = [f.T @ (f @ w - t) / 64 for f, t in zip(features, targets, strict=True)]
            requests = [
                comm.iallreduce(g, op="mean", codec=codec, algorithm="sparse_ring", feedback=state)
                for comm, g, state in zip(world.comms, gradients, states, strict=True)
            ]
            w = w - 0.03 * (1 - step / 600) * world.loopback.run(requests)[0]
        return float(np.linalg.norm(w - optimum) / np.linalg.norm(optimum))

    assert remaining(True) < 0.05 < 0.3 < remaining(False)


def test_second_moments_are_checked() -> None:
    state = VarianceFeedback()
    for bad in (np.array([1.0, -1.0]), np.array([np.nan, 1.0])):
        with pytest.raises(InvalidBuffer, match="finite"):
            state.observe(bad)
    state.observe(np.ones(5))
    with pytest.raises(InvalidBuffer, match="5 second moments"):
        run_steps(Variance(), state, [np.ones(6, np.float32)])


@pytest.mark.parametrize("clip", [0, -1.0, float("inf"), float("nan")])
def test_norms_to_clip_to_are_above_zero(clip: float) -> None:
    with pytest.raises(InvalidArgument, match="clip"):
        DGCFeedback(clip=clip)
    assert DGCFeedback(clip=1e-3).clip == 1e-3


@pytest.mark.parametrize("momentum", [-1e-9, -0.5, 1.0, float("nan")])
def test_momentum_is_below_one(momentum: float) -> None:
    with pytest.raises(InvalidArgument, match="momentum"):
        DGCFeedback(momentum=momentum)
    assert [DGCFeedback(momentum=m).momentum for m in (0, 0.999)] == [0, 0.999]
