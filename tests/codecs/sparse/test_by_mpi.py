"""Sums of sparse contributions by MPI's own allgatherv, between threads; and what ranks tell each other first."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from fakes import threads
from fakes.loopback import exact_sum
from fakes.threads import on_ranks

from compcoll import Communicator
from compcoll.algorithms.gather import _checked
from compcoll.errors import WireCorrupted
from compcoll.sparse import TopK
from compcoll.stats import Stats


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_contributions_are_added_and_accounted_for(ranks: int) -> None:
    """Pairs of four bytes each; every rank's wire reaches p - 1 others, which MPI does not tell."""
    n, k = 20_000, 200
    rng = np.random.default_rng(ranks)
    inputs = [np.zeros(n, np.float32) for _ in range(ranks)]
    for x in inputs:
        x[rng.choice(n, k, replace=False)] = rng.integers(1, 100, k)
    codec = TopK(k / n, wire="pairs")

    def sums(comm: Communicator) -> tuple[np.ndarray, Stats | None]:
        return comm.allreduce(inputs[comm.rank], codec=codec, algorithm="sparse_native"), comm.stats

    for result, stats in on_ranks(ranks, sums):
        np.testing.assert_array_equal(result, exact_sum(inputs))
        assert stats is not None and stats.algorithm == "sparse_native"
        assert (ranks - 1) * 8 * k <= stats.wire_nbytes <= (ranks - 1) * (8 * k + 64)
        assert stats.raw_sent_nbytes == (ranks - 1) * inputs[0].nbytes


def test_the_next_begins_while_mpi_has_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here neither ends before both have begun."""
    begun, start = [0, 0], threads._Native.iallgatherv

    class Held:
        def __init__(self, rank: int, pending: Any) -> None:
            self._rank, self._pending = rank, pending

        def Test(self) -> bool:
            return begun[self._rank] == 2 and self._pending.Test()

    def held(native: Any, *given: Any, **more: Any) -> Held:
        begun[native._rank] += 1
        return Held(native._rank, start(native, *given, **more))

    monkeypatch.setattr(threads._Native, "iallgatherv", held)
    x = np.arange(1000, dtype=np.float32)

    def sums(comm: Communicator) -> list[np.ndarray]:
        how: dict[str, Any] = {"codec": TopK(1.0), "algorithm": "sparse_native", "timeout": 20}
        return [request.wait() for request in [comm.iallreduce(x, **how), comm.iallreduce(2 * x, **how)]]

    for results in on_ranks(2, sums):
        np.testing.assert_array_equal(results, [2 * x, 4 * x])


def test_every_changed_bit_of_what_ranks_tell_is_found() -> None:
    """Of the text and of its checksum (zlib's CRC-32, little-endian), whichever of the two is the larger then."""
    for text in (b"\0" * 8, bytes(range(8)), b"\xff" * 16):
        told = text + zlib.crc32(text).to_bytes(4, "little")
        assert _checked(told, 3) == text
        for bit in range(8 * len(told)):
            changed = bytearray(told)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireCorrupted, match="rank 3"):
                _checked(bytes(changed), 3)
