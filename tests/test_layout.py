"""Cutting buffers into chunks and segments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compcoll.layout import Lengths, balanced_chunks, consecutive_chunks

lengths = st.one_of(st.integers(0, 300), st.integers(0, 10**7))


@given(n=lengths, parts=st.integers(1, 40), block=st.sampled_from([1, 4, 64, 2048]), segment=st.integers(1, 10**6))
def test_balanced_chunks_cover_everything_once(n: int, parts: int, block: int, segment: int) -> None:
    segment = max(segment, n // 100)
    chunks = balanced_chunks(n, parts, Lengths(block, segment))
    assert len(chunks) == parts
    flat = [piece for chunk in chunks for piece in chunk]
    assert [begin for begin, _ in flat] == [0, *(end for _, end in flat)][: len(flat)]
    assert (flat[-1][1] if flat else 0) == n
    assert all(begin < end for begin, end in flat)
    assert all(end % block == 0 for _, end in flat[:-1])
    assert all(end - begin <= max(segment, block * 64) for begin, end in flat)
    sizes = [chunk[-1][1] - chunk[0][0] if chunk else 0 for chunk in chunks]
    assert max(sizes) - min(sizes) <= 2 * block * 64


@given(counts=st.lists(st.integers(0, 5000), min_size=1, max_size=9), block=st.sampled_from([1, 4, 64]))
def test_consecutive_chunks(counts: list[int], block: int) -> None:
    begin = 0
    for count, chunk in zip(counts, consecutive_chunks(counts, Lengths(block, 256)), strict=True):
        assert sum(end - first for first, end in chunk) == count
        assert all((first - begin) % block == 0 for first, _ in chunk)
        assert not chunk or (chunk[0][0], chunk[-1][1]) == (begin, begin + count)
        begin += count
