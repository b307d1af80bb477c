"""The interfaces of codecs, and of coders: codecs bound to a device and an element type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ..dtypes import DTYPES
from ..host.encode_options import PLAIN, EncodeOptions
from ..host.quantizer import IntegerQuantizer
from .options import check_options

# A one-dimensional array of the device: a NumPy or CuPy array.
Array = Any

# Number of values from whose wire `bits_of` computes the bits per value.
_MANY = 1 << 16

# The collectives whose result all ranks have, so that a codec can send how it differs from the previous one.
UPDATING = ("allgather", "bcast")

# By `Codec.stochastic`: encoding errors from which on residuals grow without bound, as measured on normal values.
_MOST_FED_BACK = {True: 0.7, False: 1.01}


class Coder(Protocol):
    """A codec bound to a device and an element type. Arrays and wires are flat memory of that device.

    `encode` and `decode` take a sum of terms: an array ``add`` (or None) times ``scale``, and any number of wires,
    added in this order. So one pass can encode (an array), decode (a wire), accumulate (both), or recode: decode, add
    and encode without storing the sum.

    Attributes
    ----------
    fixed_size : bool
        As of the codec.
    knows_decoded : bool
        Whether encoding computes the decoded values anyway: ``decoded`` then costs less than a `decode` of the wire.

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
        """Return the bytes of the wire of ``n`` values: exact for codecs of fixed size, else an upper bound."""

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        """Write the wire of ``add · scale + D(wires[0]) + …`` and return its length in bytes.

        ``how`` holds the factor ``scale`` and the random numbers to use. The coder stores the decoded wire in
        ``how.decoded`` and the residual in ``how.residual``, unless they are None.
        """

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        """Store ``add · scale + D(wires[0]) + …`` in ``out``, which may be ``add``."""


class Coders(NamedTuple):
    """The coders of a collective.

    Attributes
    ----------
    coder : Coder
        The codec's coder.
    raw : Coder
        Sends values uncompressed, for algorithms that do so inside nodes.
    """

    coder: Coder
    raw: Coder

    def uncompressed(self) -> Coders:
        """Return the coders that compress nothing."""
        return Coders(self.raw, self.raw)


def bits_of(coder: Coder) -> float:
    """Return the bits per value on the wire of a codec of fixed size."""
    return 8 * coder.wire_nbytes(_MANY) / _MANY


class Device(Protocol):
    """A device's kernels, for codecs."""

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> IntegerQuantizer:
        """Return a quantizer that rounds to ``levels`` levels on either side of 0, in integers of ``bits`` bits."""

    def votes(self, ranks: int, block: int, dtype: str) -> IntegerQuantizer:
        """Return a quantizer that sends signs, in bit fields that can count up to ``ranks`` of them."""

    def szp(self, dtype: str, tolerance: float | None, relative: float | None, ranks: int) -> Coder:
        """Return a coder of multiples of a step; see `compcoll.host.szp.SzpCoder`."""

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> Coder:
        """Bind a kernel to an element type.

        Parameters
        ----------
        kernel : tuple of str, int, int
            The kernel's name in ``kernels/codecs.h``, ``first`` (which code) and ``second`` (values of a block).
        dtype : str
            The element type of arrays.
        variant : int
            How to encode, where decoding is the same.
        seed : int
            Selects the random numbers of stochastic rounding.
        """


@dataclass(frozen=True)
class ErrorBound:
    """A bound on the error of one encoding in each value: the sum of three terms.

    Attributes
    ----------
    block : int
        Number of consecutive values that share a bound.
    relative, spread, absolute : float
        Factor of the block's largest magnitude, factor of its largest minus its smallest value, and a constant.

    Examples
    --------
    >>> from compcoll.codecs import ErrorBound
    >>> ErrorBound(block=256, relative=0.5 / 127)  # half a step of 127 to the largest magnitude of 256 values
    ErrorBound(block=256, relative=0.003937007874015748, spread=0.0, absolute=0.0)
    """

    block: int = 1
    relative: float = 0.0
    spread: float = 0.0
    absolute: float = 0.0


class Example(NamedTuple):
    """A configuration of a codec for which the tests check every rule that codecs must follow.

    Attributes
    ----------
    options : mapping
        The codec's options.
    digests : str
        Digests by `compcoll.tools.selftest` of its wires of float16, bfloat16, float32 and float64. They must not
        change unless the codec does, or ranks of different versions could not decode each other's wires. Empty if
        wires may differ between machines.
    """

    options: Mapping[str, Any]
    digests: str = ""


@dataclass(frozen=True)
class Speed:
    """The speed of one rank's kernels while all ranks of its node are busy, in bytes of float32 values per second.

    Parameters
    ----------
    codec : str
        `Codec.kind` of the codec.
    bits : float
        Bits per value on the wire.
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
    """A compression method and its configuration: an immutable, hashable value without buffers or state.

    Its ``repr`` shows the whole configuration and is the same on all ranks. Subclasses are usually frozen dataclasses.
    To write a codec in NumPy, derive it from `NumpyCodec`. A subclass of this class needs a ``name`` and a `coder`
    method that returns a `compcoll.codecs.Coder`. `check_codec` checks both.

    Attributes
    ----------
    name : str
        The name that `get_codec` takes.
    examples : sequence of Example
        Configurations for the tests.
    for_auto : sequence of mapping
        Options of the configurations that ``codec="auto"`` chooses from; those whose errors are unknown, whose wires
        vary in size, or that compress nothing are left out.
    speeds : sequence of Speed
        Speeds of its kernels on a core with AVX2, for the cost model when there is no measured profile.
    block : int
        Elements of a block; chunks begin and end at multiples of it.
    fixed_size : bool
        Whether the length of a wire depends only on the number of values.
    additive : bool
        Whether `allreduce` adds wires without decoding them.
    homomorphic : bool
        Whether wires are added exactly, so that partial sums should travel encoded even where others travel raw.
    needs_reference : bool
        Whether wires hold how values differ from those that all ranks have: `Coder.encode` gets them in
        ``how.decoded``, and `Coder.decode` in ``out``. Only the collectives `UPDATING` take such codecs.
    needs_largest : bool
        Whether ranks whose values are added must agree on their largest magnitude first; see `for_largest`.
    stochastic : bool
        Whether the codec rounds at random, without bias.
    signs : bool
        Whether wires hold signs, which decode to means of values: the error is large by design, and decoded values have
        less variance than the values.
    conserves : str
        ``"exact"`` if, with its usual feedback, results and residuals add up to the sum of all inputs; else ``"none"``.

    Examples
    --------
    >>> codec = compcoll.get_codec("minmax", bits=4)
    >>> isinstance(codec, compcoll.Codec), codec
    (True, MinMax(bits=4, block=2048))
    """

    name: ClassVar[str]
    examples: ClassVar[Sequence[Example]] = (Example({}),)
    for_auto: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    speeds: ClassVar[Sequence[Speed]] = ()
    block: int = 1
    fixed_size: bool = True
    additive: bool = False
    homomorphic: bool = False
    needs_reference: bool = False
    needs_largest: bool = False
    stochastic: bool = False
    signs: bool = False
    conserves: str = "exact"

    __post_init__ = check_options

    @abstractmethod
    def coder(self, device: Device, dtype: str) -> Coder:
        """Bind the codec to a device and an element type, one of `compcoll.dtypes.DTYPES`.

        Raises
        ------
        UnsupportedDType, InvalidArgument
            If the codec does not support that element type, or not with this configuration.
        """

    def coder_of_sum(self, device: Device, dtype: str, ranks: int) -> Coder:
        """Bind the codec for a sum over a number of ranks; like `coder`, unless its options bound the sum's error."""
        return self.coder(device, dtype)

    def for_largest(self, largest: float) -> Codec:
        """Return the codec for values up to a magnitude: this one, unless it `needs_largest`."""
        return self

    def quantizer(self, device: Device, dtype: str, ranks: int) -> IntegerQuantizer | None:
        """Bind an `additive` codec to a device, an element type and a number of ranks; return None for others."""
        return None

    @property
    def kind(self) -> str:
        """The codec's name in profiles of kernel speeds."""
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
        """Return the bits per value on the wire; half of the value's own bits if wires vary in size."""
        if not self.fixed_size:
            return 4.0 * DTYPES[dtype].itemsize
        return bits_of(self.coder(device, dtype))

    def encoding_error(self, dtype: str) -> float | None:
        """Return the relative RMS error of one encoding of normally distributed values; None if unknown."""
        return None

    def sum_error(self, ranks: int) -> float | None:
        """Return the relative error of a sum over a number of ranks, for `additive` codecs."""
        return None

    def bias(self, *, recoded: bool) -> float:
        """Return the part of the error that is the same in every encoding, and so adds up.

        Parameters
        ----------
        recoded : bool
            Whether the encoded values have just been decoded.
        """
        return 0.0

    def feedback_converges(self, dtype: str) -> bool:
        """Return whether residuals of error feedback stay bounded: the error must be smaller than the values.

        This holds for codecs that round to nearest, cut bits off or send means, if 0 stays 0. Stochastic rounding to
        large steps has an error larger than the values. Measured on normal values in 512 calls, residuals stay small
        up to an encoding error of 0.6, and grow without bound at 0.9.
        """
        error = self.encoding_error(dtype)
        return error is None or error < _MOST_FED_BACK[self.stochastic]

    def error_bound(self, dtype: str) -> ErrorBound | None:
        """Return a bound on the error of one encoding; None if none is known."""
        return None
