"""The contract of codecs, and of what binds one to a device and an element type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ..dtypes import DTYPES
from ..host.encode_options import PLAIN, EncodeOptions
from .options import check_options

# A one-dimensional array of the device: NumPy's, CuPy's.
Array = Any

# Values for which the length of a wire is asked, to know the bits of one.
_MANY = 1 << 16

# Errors of an encoding, at random or not, from which on residuals grow without end: as measured on normal values.
_MOST_FED_BACK = {True: 0.7, False: 1.01}


class Coder(Protocol):
    """A codec bound to a device and an element type. Arrays and wires are flat memory of that device.

    Both verbs take a sum of terms: an array ``add`` (or None) times ``scale``, and any number of wires, added in this
    order. Hence one pass encodes (an array), decodes (a wire), accumulates (both), or recodes: decode, add and encode
    without the sum ever being stored.

    Attributes
    ----------
    fixed_size : bool
        The codec's.
    knows_decoded : bool
        Whether encoding knows what others will decode: ``decoded`` then costs less than a `decode` of the wire.

    Examples
    --------
    >>> from compcoll.host.device import HostDevice
    >>> coder = compcoll.ZFP(rate=8).coder(HostDevice(), "float32")
    >>> coder.wire_nbytes(1024)
    1024
    """

    @property
    def fixed_size(self) -> bool: ...

    @property
    def knows_decoded(self) -> bool: ...

    def wire_nbytes(self, n: int) -> int:
        """Bytes of the wire of ``n`` values: exact for codecs of fixed size, else an upper bound."""

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        """Write the wire of ``add · scale + D(wires[0]) + …`` and return its length in bytes.

        ``how`` tells the factor ``scale`` and which random numbers to take, and where the coder must store the decoded
        wire (``how.decoded``) and what encoding loses (``how.residual``), unless they are None.
        """

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        """Store ``add · scale + D(wires[0]) + …`` in ``out``, which may be ``add``."""


def bits_of(coder: Coder) -> float:
    """Bits of a value on the wire of a codec of fixed size."""
    return 8 * coder.wire_nbytes(_MANY) / _MANY


class IntegerQuantizer(Protocol):
    """An additive codec bound to a device, an element type and a number of ranks. Values become numbers that any
    allreduce can add. First the ranks agree, by a maximum, on one item for each block, such as its scale.

    Attributes
    ----------
    shared_scale_dtype, number_dtype : numpy.dtype
        Of what ranks agree on, and of numbers.
    per_value : float
        Numbers for each value.
    feedback : bool
        Whether what encodings lose can be fed back.
    is_sum : bool
        Whether the result is a sum: if not, an uncompressed one never takes its place.
    gathered : GatheredVotes or None
        What is sent where gathering from all ranks is shorter than adding.
    """

    shared_scale_dtype: Any
    number_dtype: Any
    per_value: float
    feedback: bool
    is_sum: bool
    gathered: Any

    def shared_scale(self, n: int) -> int:
        """Return how many items the ranks agree on for ``n`` values."""

    def numbers(self, n: int) -> int:
        """Return how many numbers represent ``n`` values."""

    def survey(self, add: Array, scale: float, residual: Array | None, shared_scale: Array) -> None:
        """Store this rank's items; the maximum over ranks is then used by all."""

    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        """Store the numbers of ``add · scale`` plus the residual, and update the residual."""

    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        """Store the values that sums of numbers stand for."""


class Device(Protocol):
    """A device's kernels, for codecs."""

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> IntegerQuantizer:
        """Values rounded to that many levels on either side of 0, in integers of some bits."""

    def votes(self, ranks: int, block: int, dtype: str) -> IntegerQuantizer:
        """Signs, in fields that count so many."""

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> Coder:
        """Bind the kernel of that name and its two parameters to an element type.

        ``variant`` is a choice among the kernel's ways, ``seed`` that of its random numbers.
        """


@dataclass(frozen=True)
class ErrorBound:
    """A bound of one encoding's error of a value: the sum of three terms.

    Attributes
    ----------
    block : int
        Values that share a bound.
    relative, spread, absolute : float
        Factor of the block's largest magnitude, of its largest less its smallest value, and a constant.
    """

    block: int = 1
    relative: float = 0.0
    spread: float = 0.0
    absolute: float = 0.0


class Example(NamedTuple):
    """A configuration that tests take through every promise.

    Attributes
    ----------
    options : mapping
        Of the codec.
    digests : str
        Digests by `compcoll.tools.selftest` of its wires of float16, bfloat16, float32 and float64. They must not
        change unless the codec does: ranks of different versions would not understand each other. Empty if wires may
        differ from machine to machine.
    """

    options: Mapping[str, Any]
    digests: str = ""


@dataclass(frozen=True)
class Speed:
    """The speed of one rank's kernels while all ranks of its node are at work: bytes of float32 values per second.

    Parameters
    ----------
    codec : str
        What `Codec.kind` returns.
    bits : float
        Bits of a value on the wire.
    encode, decode, accumulate, recode : float
        Array to wire; wire to array; wire decoded and added to an array; wire decoded, added and encoded again.
    """

    codec: str
    bits: float
    encode: float
    decode: float
    accumulate: float
    recode: float


class Codec(ABC):
    """A compression method and its configuration: an immutable, hashable value without buffers or state. Its ``repr``
    shows the whole configuration and is the same on all ranks. Subclasses are usually frozen dataclasses.

    To write a codec in NumPy, derive it from `NumpyCodec`. A subclass of this class needs a ``name`` and a `coder`
    method, whose result fulfils `compcoll.codecs.Coder`. `check_codec` checks this.

    Attributes
    ----------
    name : str
        The name by which `get_codec` finds it.
    examples : sequence of Example
        Configurations to be tested.
    speeds : sequence of Speed
        Of its kernels on a core with AVX2, for the cost model where nothing was measured.
    block : int
        Elements of a block; bounds of chunks are multiples of it.
    fixed_size : bool
        Whether the length of a wire depends on the number of values alone.
    additive : bool
        Whether `allreduce` adds wires as they are.
    stochastic : bool
        Whether the codec rounds at random, without bias.
    conserves : str
        ``"exact"`` if, with its usual feedback, results and residuals add up to all that was put in; else ``"none"``.

    Examples
    --------
    >>> codec = compcoll.get_codec("minmax", bits=4)
    >>> isinstance(codec, compcoll.Codec), codec
    (True, MinMax(bits=4, block=2048))
    """

    name: ClassVar[str]
    examples: ClassVar[Sequence[Example]] = (Example({}),)
    speeds: ClassVar[Sequence[Speed]] = ()
    block: int = 1
    fixed_size: bool = True
    additive: bool = False
    stochastic: bool = False
    conserves: str = "exact"

    __post_init__ = check_options

    @abstractmethod
    def coder(self, device: Device, dtype: str) -> Coder:
        """Bind to a device and one of `compcoll.dtypes.DTYPES`.

        Raises
        ------
        UnsupportedDType, InvalidArgument
            If the codec cannot take that element type, or not with this configuration.
        """

    def quantizer(self, device: Device, dtype: str, ranks: int) -> IntegerQuantizer | None:
        """Bind an `additive` codec, whose wires are numbers to be added as they are, to a number of ranks, too."""
        return None

    @property
    def kind(self) -> str:
        """The codec's name in profiles of kernels' speeds."""
        return self.name

    @property
    def label(self) -> str:
        """The name, and the options that differ from their defaults."""
        if not is_dataclass(self):
            return repr(self)
        usual = {one.name: one.default for one in fields(self) if one.name != "seed"}
        given = [
            f"{name}={f'{value:g}' if isinstance(value, float) else value}"
            for name in usual
            if (value := getattr(self, name)) != usual[name] or name == "bits"
        ]
        return " ".join([self.name, ",".join(given)]).rstrip()

    def wire_bits(self, device: Device, dtype: str) -> float:
        """Return the bits of a value on the wire; half of the value's own if wires vary in size."""
        if not self.fixed_size:
            return 4.0 * DTYPES[dtype].itemsize
        return bits_of(self.coder(device, dtype))

    def encoding_error(self, dtype: str) -> float | None:
        """Return the relative error (root mean square) of one encoding of normal values; None if unknown."""
        return None

    def sum_error(self, ranks: int) -> float | None:
        """Return the relative error of a sum over a number of ranks, for `additive` codecs."""
        return None

    def bias(self, *, recoded: bool) -> float:
        """Return the part of the error that is alike in every encoding, and so adds up.

        Parameters
        ----------
        recoded : bool
            Whether the values were decoded just before.
        """
        return 0.0

    def feedback_converges(self, dtype: str) -> bool:
        """Return whether residuals of error feedback stay bounded: an encoding must lose less than it was given.

        This holds for codecs that round to nearest, cut bits off or send means, if 0 stays 0. Stochastic rounding to
        large steps loses more than the values themselves. Measured on normal values in 512 calls, residuals stay small
        up to an encoding error of 0.6, and grow without end at 0.9.
        """
        error = self.encoding_error(dtype)
        return error is None or error < _MOST_FED_BACK[self.stochastic]

    def error_bound(self, dtype: str) -> ErrorBound | None:
        """Return a bound of the error of one encoding; None if none is known."""
        return None
