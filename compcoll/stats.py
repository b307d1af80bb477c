"""Statistics of a collective: the codec and algorithm that ran, bytes, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .deprecated import renamed_attribute
from .layout import amount

QUEUE, HANDSHAKE, ENCODE, DECODE = "queue", "handshake", "encode", "decode"
WAIT, WIRE, OPERATION = "wait", "wire", "operation"

UNKNOWN = -1
"""Bytes that a collective of MPI, or of another library, sent, which it does not report."""

Span = tuple[str, float, float, int, str]
"""A step of a collective: its kind, its begin and end by `time.perf_counter`, its bytes, and its name if it has one.

The kinds: ``"queue"``, the wait for earlier requests; ``"handshake"``; ``"encode"``; ``"decode"``; ``"wait"`` for
messages; ``"wire"``, a message from its start to its completion; and ``"operation"``, a part that is not divided
further, such as MPI's own reduction.
"""


@dataclass(slots=True)
class Stats:
    """Statistics of one collective on this rank. ``print`` shows them on one line.

    Attributes
    ----------
    collective : str
        The collective, such as ``"allreduce"``.
    codec : str or None
        The codec that ran, with its configuration; None if values were sent uncompressed.
    algorithm : str
        The algorithm that ran.
    raw_nbytes : int
        Bytes of this rank's buffer, uncompressed.
    wire_format : str
        For sparse wires, the formats of this rank's indices and values; else empty.
    wire_nbytes : int
        Bytes that this rank sent. `UNKNOWN` if MPI's own collective moved them, since MPI does not report bytes. For
        ``sparse_native``, the bytes that a rank must send at least, averaged over all ranks.
    raw_sent_nbytes : int
        Bytes that this rank would have sent without a codec, by the same algorithm.
    error : float or None
        Estimated relative error of the result, for Gaussian values; None if it is unknown.
    device : str
        The device that ran the codec: ``"host"``, or the GPU's name.
    gpu_transport : str
        The transport between GPUs: ``"NCCL"``, ``"CUDA IPC"``, or empty.
    encode_seconds, decode_seconds, wait_seconds, total_seconds : float
        Host time spent encoding, decoding, waiting for other ranks, and from start to end. For kernels on a GPU, the
        time of their launches.
    spans : list of Span or None
        The steps so far, while a collective runs that COMPCOLL_TRACE records; else None.

    Examples
    --------
    >>> total = compcoll.allreduce(np.ones(4096, np.float32), codec="zfp", rate=8)
    >>> ran = compcoll.get_communicator().stats
    >>> ran.collective, ran.raw_nbytes, ran.device
    ('allreduce', 16384, 'host')
    """

    collective: str
    codec: str | None
    algorithm: str
    raw_nbytes: int = 0
    wire_nbytes: int = 0
    raw_sent_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0
    total_seconds: float = 0.0
    wire_format: str = ""
    error: float | None = 0.0
    device: str = "host"
    gpu_transport: str = ""
    spans: list[Span] | None = field(default=None, repr=False, compare=False)

    carrier = renamed_attribute("carrier", "gpu_transport")

    def __str__(self) -> str:
        values = f"{self.collective} of {amount(self.raw_nbytes)} by {self.algorithm}"
        lost = "error unknown" if self.error is None else f"estimated error {self.error:.1e}"
        coded = ", uncompressed" if self.codec is None else f" with {self.codec}: {lost}"
        fewer = "" if self.codec is None or self.wire_nbytes < 0 else f", {self.ratio:.1f} × fewer bytes"
        return f"{values}{coded}{fewer}, in {1e3 * self.total_seconds:.3g} ms"

    @property
    def ratio(self) -> float:
        """Raw bytes sent divided by wire bytes sent; 1 if nothing was compressed or the wire bytes are unknown."""
        return self.raw_sent_nbytes / self.wire_nbytes if self.wire_nbytes > 0 else 1.0
