"""Quantizers: random numbers, feedback, and golden wires. `test_formulas.py` compares them with their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.loopback import World, normals
from oracles.quantizers import philox
from promises import ALGORITHMS, FLAT

import compcoll
from compcoll import FP8, QSGD, Codec, OneBit, Sign, TernGrad
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions


def test_philox_gives_the_published_numbers() -> None:
    """Of Random123's kat_vectors, philox4x32 10."""
    known = {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0xFFFFFFFF,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
            *(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    }
    for (*counter, first, second), words in known.items():
        assert tuple(philox(np.array([counter], np.uint64), (first, second))[0]) == words


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_stochastic_rounding_has_no_bias(bits: int, norm: str) -> None:
    """The mean over 10⁴ draws is the value within four standard deviations of such a mean, for each of many values."""
    x = np.concatenate([np.random.default_rng(bits).standard_normal(61), [0.0, 2.0**-12, -3.0]])
    draws, codec = 10_000, QSGD(bits, 64, norm, seed=bits)
    coder = codec.coder(HostDevice(), "float64")
    total, squares = np.zeros_like(x), np.zeros_like(x)
    wire, got = np.empty(coder.wire_nbytes(x.size), np.uint8), np.empty_like(x)
    for rng_counter in range(draws):
        coder.encode(x.size, x, (), wire, EncodeOptions(rng_counter=rng_counter))
        coder.decode(x.size, None, (wire,), got)
        total += got
        squares += (got - x) ** 2
    size = np.linalg.norm(x) if norm == "l2" else np.abs(x).max()
    step = 2 * size / (1 if bits == 1 else 2**bits - 2)
    place = x / step + (0.5 if bits == 1 else 0.0)
    part = place - np.floor(place)
    deviation = step * np.sqrt(part * (1 - part) / draws)
    # 64 values: one in 250 of such tests has one beyond four deviations; the numbers are the same in every run.
    assert (np.abs(total / draws - x) <= 4 * deviation + step * 2.0**-16).all()
    # And the variance is that of rounding at random to one of two neighbours.
    variance = step**2 * part * (1 - part)
    assert squares.sum() / draws == pytest.approx(variance.sum(), rel=0.03)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", [QSGD(4), TernGrad()], ids=repr)
def test_sums_have_no_bias(algorithm: str, codec: Codec) -> None:
    inputs = normals(4, 512)
    world = World(4, ranks_per_node=2)
    exact, runs = np.sum(inputs, axis=0, dtype=np.float64), 400
    errors = np.array([world.allreduce(inputs, codec=codec, algorithm=algorithm)[0] - exact for _ in range(runs)])
    deviation = errors.std(axis=0) / np.sqrt(runs)
    # Of 512 means one is beyond 4.5 deviations in one of 300 such tests.
    assert (np.abs(errors.mean(axis=0)) <= 4.5 * deviation + 1e-6).all()


def test_random_numbers_depend_on_seed_call_rank_and_place() -> None:
    inputs = [np.where(np.arange(4096) % 512 == 0, 1.0, 0.3).astype(np.float32)] * 2

    def results(seed: int) -> list[bytes]:
        world = World(2)
        codec = QSGD(2, norm="max", seed=seed)
        runs = [world.run(lambda c, x: c.iallgather(x, codec=codec, algorithm="direct"), inputs) for _ in range(2)]
        assert all(run[0].tobytes() == run[1].tobytes() for run in runs)
        return [run[0][rank].tobytes() for run in runs for rank in range(2)]

    first = results(1)
    assert first == results(1)
    assert not set(first) & set(results(2))
    assert len(set(first)) == 4
    halves = np.frombuffer(first[0], np.float32).reshape(2, -1)
    assert (halves[0] != halves[1]).any()


def test_segments_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, codec = normals(3, 50_000), QSGD(4)
    whole = World(3).allreduce(inputs, codec=codec, algorithm="ring")
    monkeypatch.setenv("COMPCOLL_SEGMENT", "8192")
    parts = World(3).allreduce(inputs, codec=codec, algorithm="ring")
    assert whole[0].tobytes() == parts[0].tobytes()


@pytest.mark.parametrize("algorithm", FLAT)
@pytest.mark.parametrize("codec", [OneBit(), OneBit(block=64), Sign(scale="mean")], ids=repr)
def test_feedback_makes_up_for_what_signs_lose(algorithm: str, codec: Codec) -> None:
    """Slowly: the largest of 2048 values takes as many calls as it is larger than their mean."""
    inputs, world = normals(4, 3000), World(4)
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    feedbacks = [compcoll.ErrorFeedback() for _ in inputs]
    total, errors = np.zeros(3000), {}
    for call in range(1, 401):
        requests = [
            c.iallreduce(x, codec=codec, algorithm=algorithm, feedback=f)
            for c, x, f in zip(world.comms, inputs, feedbacks)
        ]
        total += world.loopback.run(requests)[0]
        errors[call] = np.linalg.norm(total / call - exact)
    assert errors[400] < errors[1] / 10 and errors[400] < errors[50] / 2


@pytest.mark.parametrize("codec", [QSGD(norm="l2"), TernGrad(), QSGD(2)], ids=repr)
def test_feedback_that_would_grow_without_end_is_refused(codec: Codec) -> None:
    world = World(1)
    with pytest.raises(InvalidArgument, match=r"feedback with .* would grow"):
        world.comms[0].allreduce(np.ones(8, np.float32), codec=codec, feedback=compcoll.ErrorFeedback())


BY_SIGNS = [
    OneBit(),
    *(pytest.param(codec, marks=pytest.mark.slow) for codec in (OneBit(block=64), Sign(scale="mean"))),
]


@pytest.mark.parametrize("codec", BY_SIGNS, ids=repr)
def test_feedback_trains_where_signs_alone_do_not(codec: Codec) -> None:
    """Least squares by gradient descent on 4 ranks: with feedback it converges as without a codec."""
    rng = np.random.default_rng(0)
    features = [rng.standard_normal((64, 192)).astype(np.float32) for _ in range(4)]
    true = rng.standard_normal(192).astype(np.float32)
    true[:4] *= 30  # a few large gradients, which signs cannot tell
    targets = [f @ true for f in features]

    def remaining(with_codec: Codec | None, feedback: bool) -> float:
        world, w = World(4), np.zeros(192, np.float32)
        feedbacks = [compcoll.ErrorFeedback() if feedback else None for _ in range(4)]
        for _ in range(1000):
            gradients = [f.T @ (f @ w - t) / 64 for f, t in zip(features, targets)]
            requests = [
                c.iallreduce(g, op="mean", codec=with_codec, algorithm="direct", feedback=fb)
                for c, g, fb in zip(world.comms, gradients, feedbacks)
            ]
            w = w - np.float32(0.05) * world.loopback.run(requests)[0]
        return float(np.linalg.norm(w - true) / np.linalg.norm(true))

    exact, fed, alone = remaining(None, False), remaining(codec, True), remaining(codec, False)
    assert fed < 10 * exact + 1e-3
    assert alone > 10 * fed


def test_golden_wires() -> None:
    """Bytes on the wire do not change from version to version without being told."""
    x = np.array([0.0, 1.0, 0.5, 0.25, -1.0], np.float32)
    for codec, wire in GOLDEN.items():
        assert compcoll.encode(x, codec).tobytes().hex() == wire, codec


GOLDEN: dict[Codec, str] = {
    QSGD(norm="l2"): "9074de3dc79a03",
    QSGD(bits=8): "0402813b7ffebf9f00",
    QSGD(bits=1, norm="l2", seed=5): "fea5c23f02",
    QSGD(bits=3, norm="l2", rounding="nearest"): "fec3813e2b17",
    TernGrad(): "0000003fa900",
    OneBit(): "0000e03e000080bf10",
    FP8(): "7f0000706860f0",
    FP8("e5m2"): "7f000074706cf4",
}
