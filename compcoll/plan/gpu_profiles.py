"""Profiles of GPUs, for calls in which all ranks' arrays are on GPUs.

Kernel speeds were measured on an H200 with 256 MB of float32 values (docs/gpu.md), but for the codecs of `ESTIMATED`,
which ``codec="auto"`` leaves out there. Links, latencies and launch costs are modelled: the link inside a node is
NCCL's bus bandwidth over NVLink between eight H100 (nccl-tests).
"""

from __future__ import annotations

from dataclasses import replace

from ..codecs import ALL
from .cost import RAW, Link, Profile, Speed

# Seconds per byte between a GPU and pinned host memory, in one direction: PCIe 4.0, 16 lanes.
COPY_PER_BYTE = 1 / 25e9

_NVLINK = Link(latency=8e-6, per_byte=1 / 370e9)
# Host seconds to launch a kernel, with its events and waits.
_LAUNCH = 12e-6

# Host seconds of a message through pinned memory.
_HOP = 50e-6

# Host seconds of a message that another GPU reads over IPC: events, a copy and a notice at both ends.
_TAKEN = 30e-6

_CALL = 30e-6

_SPEEDS = {
    # encode, decode, accumulate, recode: bytes of float32 values per second
    "zfp": (2.4e12, 1.8e12, 1.2e12, 0.99e12),
    "minmax": (3.2e12, 2.8e12, 1.8e12, 1.4e12),
    "qsgd": (2.6e12, 3.2e12, 1.8e12, 1.6e12),
    "terngrad": (2.4e12, 3.1e12, 1.8e12, 1.2e12),
    "onebit": (3.4e12, 3.2e12, 1.9e12, 1.9e12),
    "int8": (3.1e12, 3.0e12, 1.8e12, 1.7e12),
    "fp8": (3.2e12, 3.0e12, 1.8e12, 1.4e12),
    "cast": (2.7e12, 2.3e12, 1.6e12, 1.5e12),
}
_ESTIMATE = (1.0e12, 1.2e12, 1.0e12, 0.6e12)

MEASURED = frozenset(_SPEEDS)
"""Names of the codecs whose kernels were timed on a GPU."""

ESTIMATED = tuple(sorted({codec.name for codec in ALL if codec.speeds} - MEASURED))
"""Names of the codecs whose kernels were not timed on a GPU: all have the same estimated speeds, which are slow."""

# Copies were measured. Additions are computed from the bytes that a kernel reads and writes, at the same speed.
_RAW = Speed(RAW, 32, 2.0e12, 2.0e12, 1.4e12, 1.0e12)

_CODECS = tuple(
    Speed(known.codec, known.bits, *_SPEEDS.get(known.codec.split()[0], _ESTIMATE))
    for codec in ALL
    for known in codec.speeds
)


_SOURCE = f"GPUs as measured on an H200, {', '.join(ESTIMATED)} estimated"


def by_nccl(host: Profile) -> Profile:
    """Return the profile of GPUs that communicate by NCCL; the network between nodes is that of ``host``."""
    source = f"{_SOURCE}, NVLink modelled"
    return replace(by_the_host(host), inside=_NVLINK, speeds=(_RAW, *_CODECS), message=_LAUNCH, source=source)


def by_the_host(host: Profile) -> Profile:
    """Return the profile of GPUs whose wires travel through pinned memory and the hosts' transport."""
    raw = next(speed for speed in host.speeds if speed.codec == RAW)
    source = f"{_SOURCE}; between ranks as {host.source}"
    speeds = (raw, *_CODECS)
    return replace(host, speeds=speeds, message=_HOP, call=_CALL, per_node=0, timings=(), source=source)


def by_ipc(host: Profile) -> Profile:
    """Return the profile of GPUs of one node that read wires from each other's memory.

    For algorithms that run on the host, `by_the_host` is the profile.
    """
    source = f"GPUs that read each other's memory over NVLink, modelled; MPI's own and shared memory: {host.source}"
    return replace(host, inside=_NVLINK, speeds=(_RAW, *_CODECS), message=_TAKEN, source=source)
