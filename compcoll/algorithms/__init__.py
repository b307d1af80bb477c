"""The algorithms. Each has its own file with a generator and a record; listing the record here registers it.

The names that calls accept, the choice of ``auto``, the cost model, error estimates and bounds, the simulator, `tune`,
`doctor` and the benchmark all use these records.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    bcast,
    direct,
    dissemination,
    hierarchical,
    linear,
    native,
    pairwise,
    recursive_doubling,
    ring,
    shared_memory,
)
from . import sparse as of_sparsifiers
from .job import Job
from .record import Algorithm
from .sparse import SparseJob

DENSE: tuple[Algorithm[Job], ...] = (
    ring.RING,
    recursive_doubling.RECURSIVE_DOUBLING,
    direct.DIRECT,
    hierarchical.HIERARCHICAL,
    bcast.BINOMIAL,
    pairwise.PAIRWISE,
    linear.LINEAR,
    native.NATIVE,
    dissemination.DISSEMINATION,
    shared_memory.SHARED_MEMORY,
)
"""The algorithms for whole buffers: for all codecs except sparsifiers."""

SPARSE: tuple[Algorithm[SparseJob], ...] = of_sparsifiers.ALL
"""The algorithms for sparsifiers only."""

ALGORITHMS: Mapping[str, Algorithm[Job] | Algorithm[SparseJob]] = {
    **{record.name: record for record in DENSE},
    **{record.name: record for record in SPARSE},
}
