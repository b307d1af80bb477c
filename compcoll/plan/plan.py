"""Plans: the decision how a call runs, after checking its arguments against each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..algorithms import native
from ..algorithms.dissemination import largest
from ..codecs.base import UPDATING, Codec, Coder, Coders, Device, bits_of
from ..codecs.cast import uncompressed
from ..codecs.checksum import CheckedCoder
from ..codecs.registry import without_reference
from ..codecs.sparse.sparsifier import MOST_ELEMENTS, SparseCoder, Sparsifier
from ..dtypes import DTYPES
from ..errors import InvalidArgument, InvalidBuffer, UnknownAlgorithm, UnsupportedDType
from ..host.device import HostDevice
from ..host.quantizer import IntegerQuantizer, NumberCoder
from ..layout import Lengths
from . import choose, explanation
from .accuracy import relative_error
from .call import NO_REDUCTION, SUMS, Call, Setting
from .signature import Signature

LARGE_ERROR = 0.1
"""The estimated relative error above which calls without feedback warn."""


@dataclass(frozen=True)
class Plan:
    """The decision how a collective runs. ``str(plan)`` lists the options with their predicted times, and the reason.

    Attributes
    ----------
    call, setting : Call, Setting
        The call and its environment.
    codec : Codec or None
        The codec that will run; None if values travel uncompressed.
    algorithm : str
        The algorithm that will run.
    coders : Coders or None
        Encode and decode the values; None if MPI, shared memory or the handshake moves them.
    lengths : Lengths
        Elements of a block of the codec, and of a segment.
    signature : Signature
        The description of the call that ranks exchange.
    unblocked : Plan or None
        The plan that runs instead if some rank must not block in MPI; None: this plan.
    """

    call: Call
    setting: Setting
    codec: Codec | None
    algorithm: str
    coders: Coders | None
    lengths: Lengths
    signature: Signature
    unblocked: Plan | None = None

    @property
    def scale(self) -> float:
        """The factor by which values are multiplied: 1/p for a mean over p ranks, else 1."""
        return 1.0 / self.setting.world.size if self.call.op == "mean" else 1.0

    @property
    def homomorphic(self) -> bool:
        """Whether partial sums should stay encoded; see `compcoll.codecs.base.Codec`."""
        return self.codec is not None and self.codec.homomorphic

    @cached_property
    def codec_text(self) -> str | None:
        """The codec's name in `Stats`."""
        return None if self.codec is None else repr(self.codec)

    @cached_property
    def error(self) -> float | None:
        """The estimated relative error of the result; None if it is unknown."""
        return relative_error(self.codec, self.call.dtype, self.call.collective, self.algorithm, self.setting.world)

    @property
    def exceeds_max_error(self) -> bool:
        """Whether the error is above the call's ``max_error=``, or unknown although that was given."""
        limit = self.call.max_error
        return limit is not None and (self.error is None or self.error > limit)

    @property
    def loses_much(self) -> bool:
        """Whether calls without feedback warn of the error: it is large, not by design as with signs, and the caller
        has not said which error is acceptable.
        """
        if self.call.max_error is not None or self.call.tolerance is not None:
            return False
        return (self.error or 0.0) > LARGE_ERROR and self.codec is not None and not self.codec.signs

    @cached_property
    def quantizer(self) -> IntegerQuantizer | None:
        """The quantizer of an additive codec, whose numbers the algorithm adds; None with other codecs."""
        return choose.quantizer_of(self.codec, self.call, self.setting)

    @property
    def gathers(self) -> bool:
        """Whether each rank gathers an additive codec's numbers and adds them itself."""
        return choose.gathers(self.algorithm, self.quantizer)

    @property
    def summary(self) -> str:
        """One line: what was asked for, what runs and why, what it loses, and what it saves."""
        return explanation.summary(self.call, self.setting, self.algorithm, self.codec, self.error)

    def __repr__(self) -> str:
        return f"Plan({self.signature})"

    def __str__(self) -> str:
        unblocked = None if self.unblocked is None else self.unblocked.algorithm
        return explanation.text(self.call, self.setting, self.algorithm, self.codec, unblocked)


def _detail(algorithm: str, coders: Coders | None, segment: int) -> str:
    return algorithm if coders is None else f"{algorithm} in segments of {segment}"


def with_checksum(coder: Coder, device: HostDevice) -> Coder:
    """Return a coder whose wires carry checksums."""
    return coder.checked() if isinstance(coder, SparseCoder) else CheckedCoder(coder, device)


def coder_on(device: Device, codec: Codec, call: Call, setting: Setting) -> Coder:
    """Bind a call's codec to a device, for as many terms as the call adds."""
    return codec.coder_of_sum(device, call.dtype, 1 if call.op == NO_REDUCTION else setting.world.size)


def coders_of(codec: Codec | None, call: Call, setting: Setting) -> Coders:
    """Return the coders of a call that uses a codec, or none."""
    device, known = setting.device, call.dtype in DTYPES
    raw: Coder = uncompressed(device, call.dtype) if known else NumberCoder(np.dtype(call.dtype), "sum")
    coder = raw if codec is None else coder_on(device, codec, call, setting)
    if call.checksum:
        coder, raw = with_checksum(coder, device), with_checksum(raw, device)
    return Coders(coder, raw)


def make_plan(call: Call, setting: Setting) -> Plan:
    """Decide how a call runs. Collectives and `explain` share this decision.

    Parameters
    ----------
    call, setting : Call, Setting
        The call and its environment.

    Raises
    ------
    InvalidArgument, InvalidBuffer, UnknownAlgorithm, UnsupportedDType
        If the arguments are invalid, alone or together.
    """
    choose.check(call.collective, call.algorithm)
    _check_operation(call)
    algorithm, codec, unblocked = _chosen(call, setting)
    world = setting.world
    quantizer = choose.quantizer_of(codec, call, setting)
    _check_choice(call, setting, algorithm, codec, quantizer)
    coders, block, ratio = None, 1, 1.0
    if algorithm not in (choose.NATIVE, *choose.RESTRICTED) or (codec is not None and not quantizer):
        coders = coders_of(None if quantizer else codec, call, setting)
        if codec is not None and not quantizer:
            ratio = 8 * call.itemsize / bits_of(coders.coder)
        if codec is not None:
            block = codec.block
    segment = max(choose.segment(codec, ratio, call, setting) // call.itemsize, 1)
    detail = _detail(algorithm, coders, segment)
    instead = None
    if unblocked != algorithm and world.size > 1:
        instead = make_plan(call._replace(codec=None, tolerance=None, algorithm=unblocked), setting)
        detail += f" or {_detail(unblocked, instead.coders, instead.lengths.segment)}"
    signature = Signature(_line(call, detail, codec))
    if world.size == 1 and algorithm not in choose.SPARSE and (quantizer is None or quantizer.is_sum):
        algorithm, codec = choose.COPY, None
    elif algorithm == choose.HIERARCHICAL and world.nodes == 1 and not (quantizer or (codec and codec.homomorphic)):
        codec = None  # nothing is compressed inside a node
    if instead is not None:
        instead = replace(instead, call=call, signature=signature)
    return Plan(call, setting, codec, algorithm, coders, Lengths(block, segment), signature, instead)


def _chosen(call: Call, setting: Setting) -> tuple[str, Codec | None, str]:
    """Return the algorithm, the codec, and the algorithm that runs instead if MPI must not block.

    The choice depends only on facts that are equal on all ranks.
    """
    if call.algorithm != choose.AUTO and (call.tolerance is None or not call.movable):
        return call.algorithm, call.codec, call.algorithm
    if not call.movable:
        algorithm = choose.DISSEMINATION if choose.small(call, setting) else choose.NATIVE
        return algorithm, None, algorithm
    unblocked = option = choose.chosen(call, setting, blocks=not setting.gpus)
    if not setting.gpus and option.algorithm == choose.NATIVE and call.op != NO_REDUCTION:
        unblocked = choose.chosen(call._replace(codec=None, tolerance=None), setting, blocks=False)
    return option.algorithm, option.codec, unblocked.algorithm


def _check_choice(
    call: Call, setting: Setting, algorithm: str, codec: Codec | None, quantizer: IntegerQuantizer | None
) -> None:
    """Raise an error if the algorithm cannot run the call."""
    if call.collective == "allreduce" and (algorithm in choose.SPARSE) != isinstance(codec, Sparsifier):
        raise UnknownAlgorithm(
            f"codec={codec!r} and algorithm={algorithm!r} do not go together in an allreduce: sparse codecs need "
            f"one of {', '.join(choose.SPARSE)}, which other codecs cannot use"
        )
    if algorithm in choose.SPARSE and call.n > MOST_ELEMENTS:
        raise InvalidBuffer(f"{call.n} elements: sparse wires hold at most {MOST_ELEMENTS}, so send x in parts")
    if call.checksum and algorithm in choose.BY_MPI:
        other = "another algorithm, or " if call.movable else ""
        raise InvalidArgument(
            f"checksum=True: {setting.own} {call.collective} of {call.dtype} has no checksums: use {other}a "
            "communicator without checksums"
        )
    if algorithm == choose.NATIVE:
        _check_native(call, setting, None if quantizer else codec)
    elif call.algorithm == choose.DISSEMINATION and (codec is not None or not choose.small(call, setting)):
        raise UnknownAlgorithm(
            f"algorithm={algorithm!r} takes uncompressed arrays of up to {largest(setting.world.size)} bytes, without "
            f"checksums, of numbers of 8 to 128 bits by sum, mean, prod, max or min: not {_line(call, algorithm)}"
        )
    elif algorithm == choose.SHARED_MEMORY and (codec is not None or not choose.may_share(call, setting)):
        raise UnknownAlgorithm(
            f"algorithm={algorithm!r} takes uncompressed {', '.join(DTYPES)}, by {' or '.join(SUMS)}, without "
            f"checksums, among ranks of one node that can open each other's memory: not {_line(call, algorithm)}"
        )
    elif not call.movable and algorithm != choose.DISSEMINATION:
        without = " and without checksums" * call.checksum
        raise UnsupportedDType(
            f"algorithm {algorithm!r} takes {', '.join(DTYPES)} and reduces them by {' or '.join(SUMS)}, not "
            f'{call.op} of {call.dtype}: use codec=None with algorithm="native", under MPI{without}'
        )
    elif algorithm in choose.BY_MPI and not setting.library:
        raise UnknownAlgorithm(f"algorithm={algorithm!r} needs MPI, but this transport has none")


def _line(call: Call, algorithm: str, codec: Codec | None = None) -> str:
    """Describe the call and the decision on one line."""
    asked = "no codec" if call.codec is None else repr(call.codec)
    if call.tolerance is not None:
        asked = f"codec for tolerance {call.tolerance:g}"
    if codec is not call.codec and codec != call.codec:
        algorithm += " without codec" if codec is None else f" with {codec!r}"
    values = [call.op, "of"] if call.op else []
    values += [str(call.n)] * (call.rows is None) + [call.dtype]
    detail = f"root {call.root}" if call.root is not None else ""
    if call.rows is not None:
        detail = f"rows of shape {call.rows}"
    limit = "" if call.max_error is None else f"max_error {call.max_error!r}"
    parts = [" ".join(values), asked, algorithm, detail, "with checksums" * call.checksum, limit]
    return f"{call.collective}({', '.join(filter(None, parts))})"


_NUMBERS = ("int", "uint", "float", "bfloat", "complex")
_ORDERED = ("int", "uint", "float", "bfloat")
_WHOLE = ("int", "uint")

_KINDS = {
    "sum": _NUMBERS,
    "prod": _NUMBERS,
    "mean": ("float", "bfloat", "complex"),
    "max": _ORDERED,
    "min": _ORDERED,
    "land": ("bool", *_WHOLE),
    "lor": ("bool", *_WHOLE),
    "lxor": ("bool", *_WHOLE),
    "band": _WHOLE,
    "bor": _WHOLE,
    "bxor": _WHOLE,
}
"""The kinds of elements that MPI can reduce by each operation (MPI-4.1, section 6.9.2)."""


def _check_operation(call: Call) -> None:
    floating = call.dtype in DTYPES
    if call.op != NO_REDUCTION and not call.dtype.startswith(_KINDS[call.op]):
        kinds = ", ".join(kind for kind in _KINDS[call.op] if kind != "bfloat")
        raise UnsupportedDType(f"{call.op} of {call.dtype}: elements of type {kinds} are needed")
    if call.codec is None:
        return
    if not floating:
        raise UnsupportedDType(
            f"{call.codec!r} compresses {', '.join(DTYPES)}, not {call.dtype}: convert x, or use codec=None"
        )
    if call.collective not in UPDATING:
        without_reference(call.codec, call.collective)
    if call.op not in (*SUMS, NO_REDUCTION):
        raise InvalidArgument(f"op={call.op!r} cannot be compressed: use codec=None, or op {' or '.join(SUMS)}")


def _check_native(call: Call, setting: Setting, codec: Codec | None) -> None:
    if codec is not None:
        others = [
            name
            for name in choose.NAMES[call.collective]
            if (name != choose.NATIVE if setting.library else name not in choose.BY_MPI)
            and (call.collective != "allreduce" or (name in choose.SPARSE) == isinstance(codec, Sparsifier))
        ]
        raise UnknownAlgorithm(
            f'algorithm="native" is {setting.own} and uncompressed, but codec={codec!r} was given: '
            f"use codec=None, or algorithm {', '.join(others)}"
        )
    if not setting.library:
        other = ": use another algorithm" * call.movable
        raise UnknownAlgorithm(f"{call.collective} of {call.dtype} needs {setting.own}; this transport has none{other}")
    if not setting.countable(call):
        most, counted = native.MOST, setting.counted(call)
        other = "use another algorithm, or send parts" if call.movable else "send parts"
        raise InvalidBuffer(f"{setting.own} {call.collective} takes at most {most} elements, not {counted}: {other}")
