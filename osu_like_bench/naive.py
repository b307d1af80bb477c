"""Allreduces that compress inside send and receive, as a library that only wraps point-to-point messages can.

Each hop encodes, sends the wire while it receives another one, decodes that wire and then adds it with NumPy. When
compcoll's collectives forward a received wire, these allreduces decode and encode it again. They use the same kernels,
and allocate buffers once. Ranks do not get the same bits: the owner of a chunk keeps its own values, while every hop
adds an encoding error for other ranks.

Q. Zhou et al., "Accelerating MPI AllReduce Communication with Efficient GPU-Based Compression Schemes on Modern GPU
Clusters", ISC 2024, uses both algorithms as baselines.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from compcoll.codecs.base import Coder
from compcoll.layout import Lengths, balanced_chunks

from .data import Array


class CompressedMessages:
    """Sends and receives blocking messages that are encoded.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    coder : Coder
        The codec's kernels.
    largest : int
        Values of the longest message.
    """

    def __init__(self, comm: MPI.Intracomm, coder: Coder, largest: int) -> None:
        self._comm = comm
        self._coder = coder
        self._outgoing, self._incoming = (np.empty(coder.wire_nbytes(largest), np.uint8) for _ in range(2))
        self._status = MPI.Status()
        self.wire_nbytes = 0
        self.raw_nbytes = 0

    def exchange(self, values: Array, dest: int, into: Array, source: int) -> None:
        """Send values to ``dest`` while receiving others from ``source``."""
        nbytes = self._encode(values)
        self._comm.Sendrecv(
            [self._outgoing, nbytes, MPI.BYTE], dest, 0, [self._incoming, MPI.BYTE], source, 0, self._status
        )
        self._decode(into)

    def send(self, values: Array, dest: int) -> None:
        """Encode values and send them."""
        self._comm.Send([self._outgoing, self._encode(values), MPI.BYTE], dest)

    def recv(self, into: Array, source: int) -> None:
        """Receive values and decode them."""
        self._comm.Recv([self._incoming, MPI.BYTE], source, 0, self._status)
        self._decode(into)

    def _encode(self, values: Array) -> int:
        nbytes = self._coder.encode(len(values), _stored(values), (), self._outgoing)
        self.wire_nbytes += nbytes
        self.raw_nbytes += values.nbytes
        return nbytes

    def _decode(self, into: Array) -> None:
        wire = self._incoming[: self._status.Get_count(MPI.BYTE)]
        self._coder.decode(len(into), None, (wire,), _stored(into))


def _stored(values: Array) -> Array:
    """View an array as kernels need it: 16-bit floats as uint16."""
    return values.view(np.uint16) if values.itemsize == 2 else values


class Ring:
    """Ring allreduce: p-1 hops of partial sums, then p-1 hops of finished chunks, each encoded again.

    Parameters
    ----------
    comm, coder
        As of `CompressedMessages`.
    block : int
        Number of values in the codec's block. Chunks begin and end at multiples of it.
    like : numpy.ndarray
        An array with the shape and type of those to reduce.
    """

    def __init__(self, comm: MPI.Intracomm, coder: Coder, block: int, like: Array) -> None:
        self._rank, self._size = comm.rank, comm.size
        chunks = balanced_chunks(like.size, comm.size, Lengths(block, max(like.size, 1)))
        self._chunks = [slice(chunk[0][0], chunk[-1][1]) if chunk else slice(0, 0) for chunk in chunks]
        longest = max(chunk.stop - chunk.start for chunk in self._chunks)
        self.messages = CompressedMessages(comm, coder, longest)
        self._scratch = np.empty(longest, like.dtype)

    def __call__(self, x: Array, out: Array) -> None:
        np.copyto(out, x)
        rank, size = self._rank, self._size
        right, left = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            sums = out[self._chunks[(rank - step - 1) % size]]
            scratch = self._scratch[: len(sums)]
            self.messages.exchange(out[self._chunks[(rank - step) % size]], right, scratch, left)
            np.add(sums, scratch, out=sums)
        for step in range(size - 1):
            finished, coming = (out[self._chunks[(rank - step + ahead) % size]] for ahead in (1, 0))
            self.messages.exchange(finished, right, coming, left)


class RecursiveDoubling:
    """Recursive doubling allreduce: exchanges of the whole buffer with partners at distance 1, 2, 4 …

    If p is not a power of two, each even rank below 2(p - 2^⌊log2 p⌋) sends its values to the next odd rank, and gets
    the result back.

    Parameters are those of `Ring`.
    """

    def __init__(self, comm: MPI.Intracomm, coder: Coder, block: int, like: Array) -> None:
        self._rank, self._size = comm.rank, comm.size
        self.messages = CompressedMessages(comm, coder, like.size)
        self._scratch = np.empty_like(like)

    def __call__(self, x: Array, out: Array) -> None:
        np.copyto(out, x)
        rank, messages, scratch = self._rank, self.messages, self._scratch
        power = 1 << (self._size.bit_length() - 1)
        folded = self._size - power
        paired = rank < 2 * folded
        if paired and rank % 2 == 0:
            messages.send(out, rank + 1)
            messages.recv(out, rank + 1)
            return
        if paired:
            messages.recv(scratch, rank - 1)
            np.add(out, scratch, out=out)
        inside = rank // 2 if paired else rank - folded
        distance = 1
        while distance < power:
            partner = inside ^ distance
            partner = 2 * partner + 1 if partner < folded else partner + folded
            messages.exchange(out, partner, scratch, partner)
            np.add(out, scratch, out=out)
            distance *= 2
        if paired:
            messages.send(out, rank - 1)


ALLREDUCE: dict[str, type[Ring] | type[RecursiveDoubling]] = {
    "p2p_ring": Ring,
    "p2p_recursive_doubling": RecursiveDoubling,
}
"""Contenders that compress inside send and receive."""
