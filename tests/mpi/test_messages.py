"""Messages as mpi4py's programs specify them. The oracle is mpi4py itself: what it receives from the same message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from compcoll.mpi.messages import is_in_place, is_left, kind_of, nbytes_of, read, read_blocks

KINDS = ("e", "f", "d", "F", "D")
OTHERS = ("b", "B", "h", "i", "q", "g")


def datatype(kind: str) -> MPI.Datatype:
    return MPI.Datatype.fromcode(kind)


def by_mpi(spec: Any, kind: str) -> np.ndarray | None:
    """What mpi4py gathers from a message on one rank; None if it refuses it."""
    out = np.zeros(64, kind)
    status = MPI.Status()
    try:
        MPI.COMM_SELF.Sendrecv(spec, 0, recvbuf=[out, datatype(kind)], status=status)
    except (TypeError, ValueError, MPI.Exception):
        return None
    return out[: status.Get_count(datatype(kind))]


@st.composite
def specs(draw: st.DrawFn) -> tuple[Any, str]:
    """A message in one of the forms of mpi4py, which may reach beyond the end of its array, and its element type."""
    kind = draw(st.sampled_from(KINDS + OTHERS))
    n = draw(st.integers(0, 12))
    x = np.arange(1, 64).astype(kind)[:n]
    data = (x, memoryview(x), MPI.memory.frombuffer(x), x.view(np.uint8))[draw(st.integers(0, 3))]
    count = draw(st.one_of(st.none(), st.integers(0, n + 2)))
    displacement = draw(st.one_of(st.none(), st.integers(0, n + 1)))
    typed = (None, datatype(kind), kind)[draw(st.integers(0, 2))]
    known = data is x or (isinstance(data, memoryview) and data.format != "B")
    spec: list[Any] = [data]
    if displacement is not None and count is not None:
        spec += (
            [(count, displacement)] if draw(st.booleans()) or (typed is None and not known) else [count, displacement]
        )
    elif count is not None:
        spec.append(count)
    if typed is not None or not known or len(spec) in (1, 3):
        spec.append(typed or datatype(kind))
    elif draw(st.booleans()):
        spec.append(None)
    return (x if len(spec) == 1 else spec), kind


@given(specs())
def test_messages_are_those_of_mpi4py(given_: tuple[Any, str]) -> None:
    spec, kind = given_
    expected, message = by_mpi(spec, kind), read(spec)
    if expected is None:
        assert message is None
        return
    assert message is not None, spec
    assert message.nbytes == expected.nbytes
    if kind in KINDS:
        np.testing.assert_array_equal(message.values, expected.view(message.values.dtype))
        assert message.values.dtype.kind == "f"
    else:
        assert message.values is None


@given(st.sampled_from(KINDS), st.integers(0, 20))
def test_messages_are_read_without_a_copy(kind: str, n: int) -> None:
    x = np.zeros(n, kind)
    for spec in (x, [x, datatype(kind)], [x, n], [x, n, datatype(kind)], [MPI.memory.frombuffer(x), n, kind]):
        message = read(spec)
        assert message is not None
        message.values[:] = 7
        assert (x.view(message.values.dtype) == 7).all()
        x[:] = 0


@pytest.mark.parametrize("order", "CF")
def test_arrays_in_the_order_of_memory(order: Any) -> None:
    x = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    message = read(x)
    assert message is not None and np.shares_memory(message.values, x)
    np.testing.assert_array_equal(message.values, x.ravel("K"))


def test_what_mpi4py_must_look_at() -> None:
    x = np.zeros(3)
    for spec in (
        None,
        MPI.IN_PLACE,
        "text",
        3,
        [],
        [x] * 5,
        [x, "no type"],
        np.zeros((4, 4))[:, 1],
        [None, MPI.DOUBLE],
    ):
        assert read(spec) is None
    assert read([x, -1]) is None


def test_types_that_no_codec_takes() -> None:
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for spec in (np.zeros(4, ">f4"), np.zeros(4, "i"), [np.zeros(4), 1, vector]):
        message = read(spec)
        assert message is None or message.values is None
    vector.Free()


def test_small_messages_are_not_read() -> None:
    x = np.zeros(4, np.float32)
    assert read(x, 17) is None and read([x, 4, MPI.FLOAT], 17) is None and read([x, 4], 17) is None
    assert read(x, 16) is not None and read([x, 4, MPI.FLOAT], 16) is not None
    assert read([x, 1, MPI.FLOAT], 16, blocks=4) is not None


@given(st.sampled_from([*KINDS, *OTHERS]), st.integers(0, 2000), st.sampled_from([0, 1, 4096]))
def test_kinds_of_messages_left_to_mpi(kind: str, n: int, least: int) -> None:
    """The short cut by a message's kind answers as reading it does."""
    x = np.zeros(n, kind)
    for spec in (x, [x, n, datatype(kind)], [x, datatype(kind)], [x, n]):
        found, message = kind_of(spec), read(spec, least)
        assert found is not None
        assert is_left(found, least) == (message is None or message.values is None)
    for unknown in (memoryview(x), [], [x], None, [x, (n, 0)], [x, n, 0], [x, n, 0, datatype(kind)], [x, n, None]):
        assert kind_of(unknown) is None
    for unknown in ([x, n], [x, n, datatype(kind)]):
        assert kind_of(unknown, in_blocks=True) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from(KINDS), st.booleans(), st.data())
def test_blocks_are_joined_and_stored(counts: list[int], kind: str, spaced: bool, data: st.DataObject) -> None:
    gap = data.draw(st.integers(0, 3)) if spaced else 0
    at = [sum(counts[:block]) + gap * block for block in range(len(counts))]
    x = np.arange(1, sum(counts) + gap * len(counts) + 1).astype(kind)
    mpi = datatype(kind)
    forms: list[Any] = [[x, (counts, at), mpi], [x, counts, at, mpi], [x, (counts, at)]]
    if not gap:
        forms += [[x, counts, mpi], [x, counts]]
    expected = np.concatenate([x[begin : begin + count] for begin, count in zip(at, counts, strict=True)])
    for spec in forms:
        message = read_blocks(spec, len(counts))
        assert message is not None and message.nbytes == expected.nbytes
        np.testing.assert_array_equal(message.joined(), expected.view(message.values.dtype))
        before = x.copy()
        message.store(-message.joined())
        for begin, count in zip(at, counts, strict=True):
            np.testing.assert_array_equal(x[begin : begin + count], -before[begin : begin + count])
        x[:] = before


def test_blocks_that_do_not_fit() -> None:
    x = np.arange(20.0)[:6]
    for spec in ([x, [3, 4]], [x, ([3, 3], [0, 9])]):  # beyond the end of x, as mpi4py takes them
        message = read_blocks(spec, 2)
        assert message is not None and message.displacements is not None and message.counts is not None
        at = message.displacements[1]
        np.testing.assert_array_equal(message.joined(), [*range(3), *range(at, at + message.counts[1])])
    for spec in ([x, [3]], [x, [-1, 3]], [x, ([3, 3], [-1, 3])]):
        assert read_blocks(spec, 2) is None
    inferred = read_blocks(np.zeros(7), 3)
    assert inferred is not None and inferred.counts == [3, 2, 2]  # as mpi4py shares them out


def test_bytes_for_statistics() -> None:
    assert nbytes_of(None) == nbytes_of(MPI.IN_PLACE) == nbytes_of("text") == 0
    assert nbytes_of([np.zeros(6), 2, MPI.DOUBLE]) == 16 and nbytes_of(np.zeros(3, "i")) == 12
    assert is_in_place(None) and is_in_place(MPI.IN_PLACE) and not is_in_place(np.zeros(1))
