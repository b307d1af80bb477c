"""At how much of a buffer selectors look, and what the cost model and others suppose of sparsifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

from compcoll import Codec
from compcoll.codecs.base import ErrorBound
from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.codecs.sparse.sparsifier import FULL, POWER, SIGN, Sparsifier
from compcoll.errors import InvalidBuffer
from compcoll.host.device import HostDevice
from compcoll.host.selection import HostSelection
from compcoll.sparse import DGCFeedback, Hybrid, RandomK, Strom, TopK, Variance, VarianceFeedback

Look = tuple[str, int]


class Looks:
    """Kernels that note at how many values each pass looks, and for how many indices there is room."""

    def __init__(self, dtype: str = "float32") -> None:
        self._kernels: HostSelection = HostDevice(1).selection(dtype)
        self.passes: list[Look] = []
        self.rooms: list[int] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        run = getattr(self._kernels, name)

        def noted(values: np.ndarray, *arguments: Any) -> Any:
            self.passes.append((name, arguments[0] if name in ("sample", "laplacian") else values.size))
            if name in ("above", "chosen"):
                self.rooms.append(arguments[1])
            self.arguments[name] = arguments
            return run(values, *arguments)

        return noted


def looks(select: str, x: np.ndarray, k: int) -> Looks:
    kernels = Looks(x.dtype.name)
    found = SELECTORS[select](kernels, x, k)  # type: ignore[arg-type]
    assert found.size >= k
    return kernels


def normal(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# Of n values, to find k: the sample, in whole runs of 16. Of an eighth, 16384, or a 128th of long buffers, and no more
# than about 128 times as many as will be above: whichever is least. None of 4096, nor for half of all.
SAMPLES = [
    *((4096, 4, 0), (4097, 4, 512), (20_000, 200, 2496), (20_000, 9999, 256), (20_000, 10_000, 0)),
    *((1 << 18, 26, 16384), (1 << 18, 2622, 12784), (2_200_000, 1000, 17184), (2_200_000, 22_000, 12800)),
]


@pytest.mark.parametrize(("n", "k", "sample"), SAMPLES)
def test_the_exact_choice_looks_at_all_once_and_at_a_sample(n: int, k: int, sample: int) -> None:
    told = looks("exact", normal(n), k).passes
    if not sample:
        assert told == [("largest", n)]
        return
    assert told[:4] == [("sample", sample), ("laplacian", sample), ("bisected", sample), ("above", n)]
    # The choice is made among little more than k.
    assert [name for name, _ in told[4:]] == ["take", "largest", "take"] and told[4] == ("take", n)
    expected = k * sample / n
    assert k <= told[5][1] <= k + 1.3 * n / sample * (10 + 8 * expected**0.5) + 0.8 * k


def test_the_exact_choice_seldom_looks_again() -> None:
    again = 0
    for seed in range(40):
        told = looks("exact", normal(20_000, seed), 40).passes
        again += told.count(("above", 20_000)) - 1
    assert again <= 1


@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [
        (3000, 30, [("laplacian", 3000)]),
        (16384, 30, [("laplacian", 16384)]),
        (16385, 30, [("laplacian", 512)]),
        (200_000, 300, [("laplacian", 6240)]),
        (1 << 18, 300, [("laplacian", 8192)]),
        # Of long buffers a sample, in which the threshold is tried if eight of it shall be above.
        ((1 << 18) + 1, 129, [("sample", 16384), ("laplacian", 16384), ("bisected", 16384)]),
        ((1 << 18) + 1, 128, [("sample", 16384), ("laplacian", 16384)]),
        (1 << 20, 1000, [("sample", 16384), ("laplacian", 16384), ("bisected", 16384)]),
    ],
)
def test_the_fitted_threshold_is_that_of_a_part(n: int, k: int, expected: list[Look]) -> None:
    told = looks("ldte", normal(n), k).passes
    assert [each for each in told if each[0] not in ("chosen", "above")][: len(expected)] == expected
    assert 1 <= told.count(("chosen", n)) <= 2 and len(told) <= len(expected) + 2


@pytest.mark.parametrize(("select", "most"), [("ldte", 1500), ("bisection", 2000), ("hierarchical", 2000)])
def test_more_than_wanted_are_taken(select: str, most: int) -> None:
    """Instead of a look for fewer; of more than the limit no more than wanted."""
    for equal, taken in ((1001, 1001), (most, most), (most + 1, 1000)):
        x = np.r_[np.zeros(10_000), np.ones(equal)].astype(np.float32)
        assert SELECTORS[select](HostDevice(1).selection("float32"), x, 1000).size == taken


def test_of_a_sample_more_are_wanted_than_there_may_be() -> None:
    """By two to six standard deviations of their number, so that all wanted are above the threshold."""
    low, high = looks("ldte", normal(1 << 20), 1024).arguments["bisected"][:2]
    assert (low, high) == (16 + 2 * 4, 16 + 6 * 4)


@pytest.mark.parametrize(
    ("n", "count", "indices"), [(0, 0, 2), (8, 0, 2), (24, 0, 3), (100, 10, 40), (1000, 2, 125), (1000, 400, 1600)]
)
def test_room_for_wires_of_so_many(n: int, count: int, indices: int) -> None:
    """Four bytes of an index, or a bit of a mask, or two bytes of a gap and of what ends them, whichever takes most."""
    coder = TopK(0.1).coder(HostDevice(1), "float32")
    assert coder.longest(n, count) == 32 + indices + 4 * count
    assert coder.longest(n, n + 1) == coder.longest(n) == coder.longest(n, n)


@pytest.mark.parametrize(
    ("n", "nbytes"), [(1, 4), (3, 8), (100, 202), (0xFFFE, 0x1FFFE), (0xFFFF, 0x20002), (1 << 17, (1 << 18) + 6)]
)
def test_room_for_runs(n: int, nbytes: int) -> None:
    """Two bytes of a gap for each, and for each 65535 that are left out."""
    assert TopK(0.1, wire="runs").coder(HostDevice(1), "float32").wire_nbytes(n) == 32 + nbytes + 4 * n


@pytest.mark.parametrize(
    ("n", "sample"), [(1024, 0), (1025, 1024), (100_000, 1024), (103_999, 1024), (104_000, 1040), (250_000, 2496)]
)
def test_dgc_looks_at_a_hundredth(n: int, sample: int) -> None:
    told = looks("hierarchical", normal(n), n // 50).passes
    assert told[:2] == ([("sample", sample), ("kth_largest", sample)] if sample else [("largest", n)])


@pytest.mark.parametrize("select", ["exact", "ldte", "bisection"])
@pytest.mark.parametrize(
    ("n", "k", "room"), [(20_000, 10, 1250), (20_000, 1000, 4000), (20_000, 6000, 20_000), (2_200_000, 10, 1 << 17)]
)
def test_memory_for_indices(select: str, n: int, k: int, room: int) -> None:
    """Four times as many as wanted, or a 16th of the buffer up to 2**17."""
    assert looks(select, normal(n), k).rooms[0] == room


def test_a_search_among_equal_values_ends_at_a_millionth() -> None:
    """Nothing lies between 0 and 1: from a half on, the interval is halved 19 times; then the choice is exact."""
    x = np.r_[np.zeros(800), np.ones(800)]
    told = looks("bisection", x, 16).passes
    assert told.count(("chosen", 1600)) == 19 and told[-1] == ("largest", 1600)


PROPERTIES: list[tuple[Sparsifier, int, bool, float]] = [
    (TopK(0.05), FULL, True, 0.05),
    (TopK(0.3, wire="packed"), POWER, True, 0.3),
    (RandomK(0.2), FULL, False, 0.2),
    (RandomK(0.2, wire="packed"), POWER, False, 0.2),
    (Strom(1.0), SIGN, False, 0.01),
    (Hybrid(1.0), SIGN, False, 0.01),
    (Variance(), POWER, False, 0.01),
]


@pytest.mark.parametrize(("codec", "values", "largest_first", "density"), PROPERTIES, ids=repr)
def test_what_is_supposed_of_sparsifiers(codec: Sparsifier, values: int, largest_first: bool, density: float) -> None:
    """Of those that do not say how much they send, a hundredth: an index of 4 bytes and a value of 4, or 8, each."""
    assert (codec.sent_values, codec.largest_first) == (values, largest_first)
    assert (codec.kind, codec.fixed_size, codec.additive) == ("sparse", False, False)
    for dtype, bits in (("float16", 64), ("bfloat16", 64), ("float32", 64), ("float64", 96)):
        assert codec.wire_bits(HostDevice(1), dtype) == pytest.approx(density * bits)
    codec.check_call(codec.state(), None)
    codec.check_call(codec.state(), np.zeros(3))


@pytest.mark.parametrize("codec", [Strom(0.5), RandomK(0.25), RandomK(0.25, wire="mask")], ids=repr)
def test_sums_of_what_is_not_the_largest_are_not_cut_down(codec: Codec) -> None:
    """Every element that some rank sends is in the sum, without feedback, too: by regions as around a ring."""
    inputs = normals(4, 3000)
    ring, direct = (
        World(4).allreduce(inputs, codec=codec, algorithm=name) for name in ("sparse_ring", "sparse_direct")
    )
    np.testing.assert_allclose(direct[0], ring[0], atol=1e-5)
    if isinstance(codec, Strom):
        sent = [np.where(np.abs(x) > 0.5, np.sign(x) * 0.5, 0) for x in inputs]
        np.testing.assert_allclose(direct[0], exact_sum(sent), atol=1e-6)
    else:
        kept = direct[0] != 0
        assert np.count_nonzero(kept) == 750
        np.testing.assert_allclose(direct[0][kept], exact_sum(inputs)[kept], atol=1e-5)


def test_formats_fit_up_to_their_limits() -> None:
    """28 bits of an index beside a value of 4; 2**32 - 1 elements, whose indices have 32 bits."""
    coder = TopK(0.5, wire="packed").coder(HostDevice(1), "float32")
    values, first = np.ones(1, np.float32), np.zeros(1, np.uint32)
    for n, name in ((1 << 28, "packed"), ((1 << 28) + 1, "runs")):
        assert coder._formatted(n, first, values, POWER, 0.0, 127).formats == f"{name} of power values"
    assert coder._formatted(8, first, values, FULL, 0.0, 0).formats == "mask of full values"

    class Buffer:
        def __init__(self, size: int) -> None:
            self.size = size

    with pytest.raises(InvalidBuffer, match="4294967296 elements: sparse wires hold at most 4294967295"):
        coder._chosen(Buffer(1 << 32), None)
    with pytest.raises(TypeError):  # nobody chooses from what is no array
        coder._chosen(Buffer((1 << 32) - 1), None)


@pytest.mark.parametrize("seed", range(4))
def test_regions_hold_equally_many_elements(seed: int) -> None:
    """Below the beginning of region r lie count r / p of the elements sent; without any, regions are equally long."""
    rng = np.random.default_rng(seed)
    coder, n, parts = TopK(0.1).coder(HostDevice(1), "float32"), 5003, int(rng.integers(2, 9))
    chosen = coder.select(n, rng.standard_normal(n).astype(np.float32), 1.0, None)
    bounds, count = coder.quantiles(chosen, parts), chosen.indices.size
    below = [int(np.count_nonzero(chosen.indices < bound)) for bound in bounds]
    assert below == [count * part // parts for part in range(1, parts)]
    nothing = coder.select(n, np.zeros(n, np.float32), 1.0, None)
    assert coder.quantiles(nothing, parts) == [n * part // parts for part in range(1, parts)]


def test_sums_are_cut_down_to_the_largest() -> None:
    """And what is left is told, element by element; as many as allowed are not cut."""
    coder = TopK(0.1).coder(HostDevice(1), "float64")
    merged = np.arange(0, 50, 10, dtype=np.uint32), np.array([1.0, -5.0, 3.0, -2.0, 4.0])
    kept, left = coder.reduced(merged, 50, 3)
    assert kept.indices.tolist() == [10, 20, 40] and kept.values.tolist() == [-5, 3, 4] and kept.n == 50
    assert left is not None and left[0].tolist() == [0, 30] and left[1].tolist() == [1, -2]
    assert (kept.value_format, kept.step, kept.top) == (FULL, 0.0, 0)
    for most in (5, 6):
        whole, left = coder.reduced(merged, 50, most)
        assert left is None and whole.indices.tolist() == merged[0].tolist()
    assert Strom(1.0).coder(HostDevice(1), "float64").reduced(merged, 50, 1)[1] is None


def test_sparsifiers_are_named_and_bounded() -> None:
    assert TopK(0.05, "exact").label == "topk 0.05 exact" and Strom(1.0).label == "strom threshold=1"
    assert TopK().error_bound("float32") == ErrorBound(1, 1.0, 0.0, 0.0) and Strom().error_bound("float32") is None


def test_coders_are_made_anew_with_their_settings() -> None:
    device = HostDevice(1)
    for coder in (TopK(0.1).coder(device, "float16"), TopK(0.1).coder(device, "float16").checked()):
        other = coder.on(HostDevice(2))
        assert other.wire_nbytes(100) == coder.wire_nbytes(100) and other._device is not coder._device
    stored = coder.stored(np.array([1.0, 70000.0, -2.5], np.float32))
    assert stored.dtype == np.float16 and stored.tolist() == [1.0, np.inf, -2.5]


def test_what_was_observed_is_forgotten() -> None:
    state = VarianceFeedback()
    state.observe(np.ones((2, 3), np.float32))
    state.observe(np.full(6, 2, np.float32))
    assert state._observed.tolist() == [3] * 6
    state.reset()
    assert state._observed is None and state.residual is None and state.variance is None and state.calls == 0
    with pytest.raises(InvalidBuffer, match="finite and not negative"):
        state.observe(np.array([0, -1e-30]))
    state.observe(np.zeros(4))
    with pytest.raises(InvalidBuffer, match="4 second moments were observed, but this buffer has 5"):
        state.prepare(5, "float32", lambda n, dtype: np.zeros(n, dtype))
    assert repr(DGCFeedback(0.5, 2.0)) == "DGCFeedback(momentum=0.5, clip=2.0)"
