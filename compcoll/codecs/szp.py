"""Integer multiples of a step: sums whose error is within a tolerance, whatever the ranks and the algorithm."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import computed_on
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import Reals, option, repr_of_mode, set_one_mode

_BLOCK = 512


@dataclass(frozen=True, repr=False)
class SZP(Codec):
    """Round each rank's values once, to multiples of a step, and add them as integers: an error-bounded sum.

    Give ``tolerance`` or ``relative``; the default is ``relative=1e-3``. The result of a reduction over p ranks is
    within the tolerance, plus half a unit in its last place. Each rank rounds its values to multiples of
    ``2 tolerance / p``. Partial sums travel as integers and are added without rounding, so all algorithms return the
    same bits. Collectives that add nothing have the same tolerance.

    Wires vary in size: neighbours are subtracted from each other, and a block of 512 differences takes the bits that
    its largest one needs. Smooth data becomes small. Blocks that hold NaN or Inf, or values above
    ``2**32 tolerance / p**2``, travel uncompressed, those of 16-bit floats as float32. Their sums are rounded as
    uncompressed sums are, and depend on the order of additions.

    Encoding and decoding use one thread.

    Parameters
    ----------
    tolerance : float, optional
        Largest absolute error of the result.
    relative : float, optional
        The same as a part of the largest finite magnitude of all ranks' values, which they agree on first. Without a
        reduction, it is that of each segment.

    References
    ----------
    J. Huang et al., "hZCCL: Accelerating Collective Communication with Co-Designed Homomorphic Compression", SC 2024;
    Y. Huang et al., "cuSZp: An Ultra-fast GPU Error-bounded Lossy Compression Framework with Optimized End-to-End
    Performance", SC 2023.

    Examples
    --------
    >>> x = np.sin(np.linspace(0, 1, 4096, dtype=np.float32))
    >>> y = compcoll.allreduce(x, codec="szp", tolerance=1e-3)
    >>> bool(np.abs(y - x).max() <= 1e-3)
    True
    >>> compcoll.encode(x, codec="szp", tolerance=1e-3).nbytes, x.nbytes
    (1072, 16384)
    """

    tolerance: float | None = option(None, Reals(0), "largest absolute error of the result")
    relative: float | None = option(None, Reals(0, 1), "largest error, as a part of the largest magnitude")

    name: ClassVar[str] = "szp"
    block = _BLOCK
    fixed_size = False
    homomorphic = True
    speeds = (Speed("szp", 16, 10e9, 8e9, 6e9, 8e9),)
    examples = (
        Example({}, "a71d8eb28da24051 b081f3bf2b80ec6f ee8155caae09ae6c 62050af61746745b"),
        Example({"tolerance": 1e-3}, "e7c24d13aec8e125 96d8e0f18862bc2a 513049b3e6d78a44 7d3865a4b1906069"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_one_mode(self, "relative", 1e-3)

    __repr__ = repr_of_mode

    @property
    def needs_largest(self) -> bool:  # type: ignore[override]
        return self.tolerance is None

    def for_largest(self, largest: float) -> SZP:
        if self.relative is None:
            return self
        return SZP(tolerance=max(self.relative * largest, sys.float_info.min))

    def coder(self, device: Device, dtype: str) -> Coder:
        return self.coder_of_sum(device, dtype, 1)

    def coder_of_sum(self, device: Device, dtype: str, ranks: int) -> Coder:
        return device.szp(dtype, self.tolerance, self.relative, ranks)

    def error_bound(self, dtype: str) -> ErrorBound:
        rounding = computed_on(dtype).rounding
        if self.tolerance is not None:
            return ErrorBound(1, rounding, absolute=self.tolerance)
        assert self.relative is not None
        return ErrorBound(1 << 40, self.relative + rounding)
