"""How gradients lie in buckets and in fusion buffers: which travel how, and what comes back where. Without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

import torch
from fakes.loopback import World
from fakes.threads import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from promises import EVERY, Case, error_bound, is_vote, one_of_each
from properties import examples
from torch import Tensor

from compcoll import ZFP, Cast, Codec, Communicator
from compcoll.feedback import ErrorFeedback
from compcoll.sparse import Sparsifier, TopK, VarianceFeedback
from compcoll.stats import Stats
from compcoll.torch.buffers import array_of
from compcoll.torch.gradients.bucket import Bucket, Feedback, Kept, average_sparse
from compcoll.torch.low_rank.factors import Gradient
from compcoll.torch.low_rank.fusion import Buffer, Kind
from compcoll.torch.states import from_memory, layout_of, residuals_of, state_of, to_memory
from compcoll.torch.training_stats import TrainingStats

CPU = torch.device("cpu")
RAW = Cast("float32")  # which changes no float32
DENSE = [
    each
    for each in one_of_each(EVERY)
    if not (is_vote(each) or isinstance(each, Sparsifier) or each.needs_reference)
    and each.feedback_converges("float32")
]
LARGE = (1 << 16) // 4  # elements of float32 from which on an exact gradient splits what is compressed


def bucket_of(
    sizes: dict[str, tuple[int, bool | Codec]],
    feedback: Feedback = False,
    *,
    codec: Codec = RAW,
    by_parameter: bool = False,
    kept: Kept | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Bucket, Tensor]:
    """A bucket of parameters by name, and its gradients 1, 2, 3 …

    Each has so many elements, and is exact (True), or has a codec of its own or the common one (False).
    """
    gradients = torch.arange(1, sum(size for size, _ in sizes.values()) + 1).to(dtype)
    codecs = {
        name: (None if given else codec) if isinstance(given, bool) else given for name, (_, given) in sizes.items()
    }
    numbers = [size for size, _ in sizes.values()]
    (comm,) = World(1).comms
    made = Bucket(tuple(sizes), numbers, gradients, comm, codecs, by_parameter, feedback, {} if kept is None else kept)
    return made, gradients


def spans(bucket: Bucket) -> list[tuple[int, int, list[str]]]:
    return [(span.begin, span.end, [part.name for part in span.parts]) for span in bucket.spans]


def test_exact_gradients_are_lifted_out_and_put_back() -> None:
    bucket, gradients = bucket_of({"a": (5, False), "bias": (3, True), "b": (4, False), "end": (2, True)})
    assert spans(bucket) == [(0, 12, ["a", "b"])]
    values = gradients.numpy()
    exact = bucket.lift(values)
    assert exact is not None and exact.tolist() == [6, 7, 8, 13, 14]
    assert values.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 9, 10, 11, 12, 0, 0]
    exact *= 10
    bucket.put_back(values)
    assert values.tolist() == [1, 2, 3, 4, 5, 60, 70, 80, 9, 10, 11, 12, 130, 140]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(LARGE, [(0, 5, ["a"]), (LARGE + 5, LARGE + 9, ["b"])]), (LARGE - 1, [(0, LARGE + 8, ["a", "b"])])],
)
def test_large_exact_gradients_split_what_is_compressed(size: int, expected: list[Any]) -> None:
    bucket, _ = bucket_of({"a": (5, False), "exact": (size, True), "b": (4, False)})
    assert spans(bucket) == expected


def test_parameters_by_themselves_take_small_ones_before_along() -> None:
    sizes = {
        "bias": (9, False),
        "weight": (1024, False),
        "less": (1023, False),
        "last": (2000, False),
        "rest": (1, False),
    }
    assert [names for _, _, names in spans(bucket_of(sizes, codec=TopK(0.1), by_parameter=True)[0])] == [
        ["bias", "weight"],
        ["less", "last"],
        ["rest"],
    ]
    for codec, by_parameter in ((RAW, True), (TopK(0.1), False)):
        together, _ = bucket_of(sizes, codec=codec, by_parameter=by_parameter)
        assert [names for _, _, names in spans(together)] == [list(sizes)]


def test_nothing_but_exact_gradients_and_nothing_exact() -> None:
    bucket, gradients = bucket_of({"a": (3, True), "b": (2, True)})
    assert spans(bucket) == [] and bucket.lift(gradients.numpy()) is not None
    assert gradients.tolist() == [1, 2, 3, 4, 5]  # they travel from where they are
    bucket.put_back(gradients.numpy())
    assert gradients.tolist() == [1, 2, 3, 4, 5]
    bucket, gradients = bucket_of({"a": (3, False)})
    assert bucket.lift(gradients.numpy()) is None and gradients.tolist() == [1, 2, 3]
    # Halves are summed in float32, also if all are exact.
    bucket, gradients = bucket_of({"a": (3, True)}, dtype=torch.bfloat16)
    exact = bucket.lift(array_of(gradients))
    assert exact is not None and exact.dtype == np.float32 and exact.tolist() == [1, 2, 3]


def test_what_is_kept_is_known_by_name() -> None:
    sizes = {"a": (5, False), "bias": (3, True), "b": (4, False)}
    first: Kept = {"residual": {"b": np.arange(4, dtype=np.float32)}}
    bucket, gradients = bucket_of(sizes, ErrorFeedback, kept=first)
    (span,) = bucket.spans
    assert span.feedback is not None
    residual = span.feedback.residual
    assert residual.tolist() == [0] * 8 + [0, 1, 2, 3] and set(first["residual"]) == {"a", "b"}
    residual[:] = range(1, 13)  # what is kept are views
    assert first["residual"]["a"].tolist() == [1, 2, 3, 4, 5] and first["residual"]["b"].tolist() == [9, 10, 11, 12]
    stats = TrainingStats()
    bucket.average(gradients, World(1).comms[0], "auto", stats)
    assert residual[5:8].tolist() == [0, 0, 0], "what is lost of the zeros in a hole is no gradient"
    assert gradients.tolist() == list(range(1, 13))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(
    ("sizes", "codec"),
    [
        ({"a": (60, False)}, None),
        ({"a": (60, False), "bias": (10_000, True), "b": (90, False)}, None),
        ({"a": (60, False), "large": (LARGE, True), "b": (90, False)}, None),
        ({"bias": (10_000, True)}, None),
        ({"a": (600, False)}, ZFP(rate=16)),
        ({"a": (600, False), "large": (LARGE, True), "b": (900, False), "bias": (10_000, True)}, ZFP(rate=16)),
    ],
    ids=["one", "with a hole", "two", "exact", "compressed", "two compressed"],
)
def test_averages_and_their_account(ranks: int, sizes: dict[str, tuple[int, bool]], codec: Any) -> None:
    """All ranks' mean, and 2(p-1)/p of each buffer sent by every rank: of an allreduce nothing less will do."""
    compressed = [size for size, exact in sizes.values() if not exact]
    exact = sum(size for size, exact in sizes.values() if exact)
    split = any(exact and size >= LARGE for size, exact in sizes.values())
    spans = (compressed if split else [sum(size for size, _ in sizes.values())]) if compressed else []

    def average(comm: Communicator) -> tuple[Tensor, TrainingStats]:
        bucket, gradients = bucket_of(sizes, codec=codec or RAW)
        gradients *= comm.rank + 1
        stats = TrainingStats()
        bucket.average(gradients, comm, "ring", stats)
        return gradients, stats

    once = torch.arange(1, sum(size for size, _ in sizes.values()) + 1, dtype=torch.float64)
    for gradients, stats in on_ranks(ranks, average):
        torch.testing.assert_close(gradients.double(), once * (ranks + 1) / 2, rtol=1e-2 if codec else 1e-6, atol=1.0)
        assert stats.raw_nbytes == 4 * (sum(spans) + exact)
        least = 2 * (ranks - 1) / ranks
        if not codec:
            assert stats.wire_nbytes == stats.raw_sent_nbytes
        assert stats.raw_sent_nbytes == pytest.approx(least * stats.raw_nbytes, rel=0.3 if codec else 1e-2)
        assert stats.calls.total() == len(spans) + bool(exact) and stats.total_seconds > 0


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([None, *DENSE])), min_size=2, max_size=8), st.integers(0)
)
def test_codecs_alternate_in_a_bucket(parameters: list[tuple[int, Codec | None]], seed: int) -> None:
    """One collective for each codec: errors within its bound, and what is lost is kept; exact means beside them."""
    sizes: dict[str, tuple[int, bool | Codec]] = {
        f"{number}": (size, True if codec is None else codec) for number, (size, codec) in enumerate(parameters)
    }
    ends = np.cumsum([size for size, _ in parameters])
    random = np.random.default_rng(seed)
    drawn = random.standard_normal((2, 2, ends[-1])).astype(np.float32)  # of each step and rank

    def average(comm: Communicator) -> tuple[list[np.ndarray], Kept, TrainingStats]:
        kept: Kept = {}
        bucket, _ = bucket_of(sizes, True, kept=kept)
        stats, means = TrainingStats(), [torch.from_numpy(step[comm.rank].copy()) for step in drawn]
        for mean in means:
            bucket.average(mean, comm, "direct", stats)
        return [mean.numpy() for mean in means], kept, stats

    (means, kept, stats), (others, other_kept, _) = on_ranks(2, average)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(means, others, strict=True))
    codecs = {codec for _, codec in parameters}
    compressed = {call.partition(", ")[2] for call in stats.calls if ", " in call}
    assert compressed == {repr(codec) for codec in codecs if codec is not None}
    assert stats.calls.total() == 2 * len(codecs)
    wanted = drawn.astype(np.float64).mean(1)
    for number, (size, codec) in enumerate(parameters):
        part = slice(ends[number] - size, ends[number])
        off = [step[part] - mean[part] for step, mean in zip(wanted, means, strict=True)]
        if codec is None:
            assert np.abs(off).max() < 1e-6
            continue
        largest = [np.abs(each).max(keepdims=True) for each in drawn[0]]  # of any block
        assert np.abs(off[0]).max() <= error_bound(Case(codec, op="mean"), largest, 2), codec
        lost = kept["residual"][f"{number}"].astype(np.float64) + other_kept["residual"][f"{number}"]
        np.testing.assert_allclose(lost, off[0] + off[1], atol=1e-5)


def test_accounts_begin_at_nothing() -> None:
    stats = TrainingStats()
    assert {name: value for name, value in vars(stats).items() if value} == {}
    assert stats.ratio == 1 and stats.mean_step_nbytes == 0


def test_accounts_are_sums() -> None:
    """Of what collectives tell; of MPI's own, which do not, what is least for a buffer of that size."""
    stats = TrainingStats()
    coded = Stats("allreduce", "MinMax()", "ring", 1000, 300, 1500, 1.0, 2.0, 4.0, 8.0)
    stats.add(coded, 4)
    stats.add(coded, 4)
    stats.add(Stats("allreduce", None, "ring", 100, 150, 150, 0.5, 0.25, 0.125, 1.0), 4)
    stats.add(Stats("allreduce", None, "native", 11, -1, 0, 0.0, 0.0, 0.0, 0.5), 4)
    assert dict(stats.calls) == {"ring, MinMax()": 2, "ring": 1, "native": 1}
    assert (stats.raw_nbytes, stats.wire_nbytes, stats.raw_sent_nbytes) == (2111, 766, 3166)
    seconds = stats.encode_seconds, stats.decode_seconds, stats.wait_seconds, stats.total_seconds
    assert seconds == (2.5, 4.25, 8.125, 17.5) and stats.ratio == 3166 / 766
    stats.steps = 4
    assert stats.mean_step_nbytes == 766 / 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sparse_gradients_are_averaged_over_all_rows(ranks: int, dtype: torch.dtype) -> None:
    """Rows of which a rank has some several times, or none."""
    rows = [[0, 3, 3], [3, 7], []]

    def own(rank: int) -> Tensor:
        values = torch.arange(1, 2 * len(rows[rank]) + 1).reshape(-1, 2).to(dtype) * (rank + 1)
        return torch.sparse_coo_tensor(
            torch.tensor([rows[rank]], dtype=torch.int64), values, (9, 2), check_invariants=True
        )

    def average(comm: Communicator) -> tuple[Tensor, TrainingStats]:
        stats = TrainingStats()
        return average_sparse(own(comm.rank), comm, stats), stats

    expected = sum(own(rank).to_dense().double() for rank in range(ranks)) / ranks
    for found, stats in on_ranks(ranks, average):
        assert found.dtype == dtype and found.is_coalesced() and stats.calls.total() == 2
        torch.testing.assert_close(found.to_dense().double(), expected, rtol=1e-2, atol=0)


def test_second_moments_go_where_the_gradients_are() -> None:
    bucket, _ = bucket_of({"a": (2, False), "bias": (3, True), "b": (2, False)}, VarianceFeedback)
    moments = {"a": np.array([1, 2], np.float32), "b": np.array([3, 4], np.float32)}
    bucket.observe(moments)
    (span,) = bucket.spans
    assert isinstance(span.feedback, VarianceFeedback)
    assert span.feedback._observed.tolist() == [1, 2, 0, 0, 0, 3, 4]


def gradient(name: str, shape: tuple[int, ...], rank: int = 0, dtype: torch.dtype = torch.float32) -> Gradient:
    return Gradient(name, torch.Size(shape), dtype, CPU, rank, feedback=False)


def test_a_buffer_holds_factors_then_exact_gradients_then_flags() -> None:
    exact, low, complex_one = (
        gradient("bias", (3,)),
        gradient("weight", (4, 5), 2),
        gradient("c", (2,), dtype=torch.complex64),
    )
    buffer = Buffer([exact, low, complex_one], Kind.LEFT, CPU, flags=3)
    assert buffer.factors == 8 and buffer.wire.numel() == 8 + 3 + 4 + 3 and buffer.due == {"bias", "weight", "c"}
    assert buffer.own_factor(low).shape == (4, 2) and not buffer.has_factor(exact)
    assert Buffer([low], Kind.RIGHT, CPU).own_factor(low).shape == (2, 5)
    assert not Buffer([low], Kind.EXACT, CPU).has_factor(low)
    values, numbers = torch.tensor([3.0, 6.0, 9.0]), torch.tensor([3 + 6j, -9 + 12j])
    buffer.put(exact, values, 3)
    buffer.put(complex_one, numbers, 3)
    assert buffer.wire[8:15].tolist() == [1, 2, 3, 1, 2, -3, 4]
    buffer.get(exact, values)
    buffer.get(complex_one, numbers)
    assert values.tolist() == [1, 2, 3] and numbers.tolist() == [1 + 2j, -3 + 4j]
    buffer.put(exact, None, 3)
    assert buffer.wire[8:15].tolist() == [0, 0, 0, 1, 2, -3, 4]
    buffer.put_flags([True, False, True])
    assert buffer.get_flags() == [True, False, True]
    buffer.due.clear()
    buffer.sent = True
    buffer.restart()
    assert buffer.due == {"bias", "weight", "c"} and not buffer.sent


def test_a_buffer_is_averaged_and_knows_what_was_lost() -> None:
    """Own factors are divided by the ranks before they are summed; a codec's loss is found where the factor is."""
    first, second = gradient("a", (4, 5), 2), gradient("b", (3, 6), 1)
    buffer = Buffer([first, second], Kind.LEFT, CPU)
    buffer.own_factor(first).fill_(3.0)
    buffer.own_factor(second).fill_(6.0)
    started: list[Any] = []
    stats = TrainingStats()

    class Sums:
        def start(self, buffer: Buffer, stats: TrainingStats) -> Any:
            started.append((buffer, stats))
            return "wait"

    assert buffer.start(Sums(), stats, 3) == "wait" and started == [(buffer, stats)]  # type: ignore[arg-type]
    assert buffer.wire.tolist() == [1.0] * 8 + [2.0] * 3 and buffer.own.tolist() == [3.0] * 8 + [6.0] * 3
    assert (buffer.mean_factor(first) == 1).all() and buffer.mean_factor(second).shape == (3, 1)
    assert buffer.lost_factor(first) is None
    buffer.feedback = ErrorFeedback()
    assert buffer.lost_factor(first) is None
    buffer.feedback.residual = np.arange(11, dtype=np.float32)
    lost = buffer.lost_factor(second)
    assert lost is not None and lost.tolist() == [[8], [9], [10]]


def test_a_rank_without_a_gradient_takes_part_with_what_it_lost() -> None:
    one = Gradient("weight", torch.Size((6, 5)), torch.float32, CPU, 2, feedback=True)
    draws = torch.Generator().manual_seed(0)
    lost, right, left, own = (torch.randn(shape, generator=draws) for shape in ((6, 5), (2, 5), (6, 2), (6, 5)))
    one.set_residual(lost)
    for values, matrix in ((None, lost), (own, own + lost)):
        out = torch.full((6, 2), 7.0)
        one.project_left(values, right, out)
        torch.testing.assert_close(out, matrix @ right.t())
        out = torch.full((2, 5), 7.0)
        one.project_right(values, left, out)
        torch.testing.assert_close(out, left.t() @ matrix)
    one.set_residual(torch.zeros(()))
    assert not one.residual().any()


def test_states_of_more_ranks_are_shared_out() -> None:
    """Of four ranks to two, each once: nothing is lost or counted twice. And to more than they are of."""
    states = [state_of(rank, 4, {"a": np.full(3, 10.0**rank)}) for rank in range(4)]
    found = [residuals_of(states, rank, 2, {"a": (3,)})["a"].tolist() for rank in range(2)]
    assert found == [[101] * 3, [1010] * 3]
    assert [bool(residuals_of(states, rank, 6, {"a": (3,)})) for rank in range(6)] == [True] * 4 + [False] * 2


def test_layouts_are_of_the_same_parameters() -> None:
    state = {"buckets": [["a", "b"], ["c"]]}
    assert layout_of(state, ["c", "b", "a"]) == layout_of([state, state], ["c", "b", "a"]) == [["a", "b"], ["c"]]
    assert layout_of({"buckets": []}, ["a"]) is None
    assert layout_of(state, ["a", "b", "c", "d"]) is layout_of({"buckets": [["a"], ["a"]]}, ["a"]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(4, 6, 3, 5),
        torch.zeros(4, 6, 3, 5).to(memory_format=torch.channels_last),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 1, 6).transpose(0, 2),
        torch.zeros(3, 8)[:, ::2],  # leaves gaps
        torch.zeros(3, 1).expand(3, 4),  # overlaps
        torch.zeros(()),
        torch.zeros(0, 3),
    ],
    ids=lambda p: f"{tuple(p.shape)}-{p.stride()}",
)
def test_losses_have_the_parameters_own_order(parameter: Tensor, dtype: torch.dtype) -> None:
    """Whatever that of its memory is, in which DistributedDataParallel lays gradients out."""
    values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    memory = to_memory(values, parameter.to(dtype) if parameter.is_contiguous() else parameter)
    dense = torch.empty_strided(parameter.shape, parameter.stride()) if memory.size > 1 else parameter
    bucket = torch.from_numpy(memory)
    if dense.untyped_storage().nbytes() == 4 * memory.size:  # a view like DDP's has all elements, each once
        assert torch.equal(bucket.as_strided(parameter.shape, parameter.stride()).double(), values)
    else:
        assert torch.equal(bucket.view(parameter.shape).double(), values)
    back = from_memory(memory, parameter)
    assert torch.equal(back.double(), values) and back.is_contiguous()
    assert not from_memory(None, parameter).any()
