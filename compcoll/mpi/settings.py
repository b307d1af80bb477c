"""The settings that a program's communicators share, and the choice of codec and algorithm for a call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..codecs.base import Codec
from ..codecs.registry import without_reference
from ..communicator import Communicator
from ..errors import InvalidArgument, InvalidBuffer, UnsupportedDType
from ..plan import choose
from .totals import Totals

_LEAST_NBYTES = 4096
"""Bytes below which no message is compressed unless ``min_bytes`` says so: a message's latency outweighs its length."""


_log = logging.getLogger("compcoll")


class Choice(NamedTuple):
    """How a kind of call runs.

    Attributes
    ----------
    codec, algorithm : Codec, str
        The codec and the algorithm.
    speedup : float
        Predicted time of MPI's own collective divided by that of this one.
    error : float or None
        Estimated relative error of the result; None if it is unknown.
    ratio : float
        Raw bytes divided by compressed ones; 1 if they are not known before.
    """

    codec: Codec
    algorithm: str
    speedup: float
    error: float | None
    ratio: float


@dataclass
class Settings:
    """Settings of an `Intracomm` and of all communicators that are made from it.

    Attributes
    ----------
    codec : str, Codec or None
        The codec; None: nothing is compressed.
    options : dict
        Options of a codec given by name.
    min_bytes : int or None
        The bytes from which messages are compressed; None: if the cost model predicts that it pays.
    moved : bool
        Whether values that are only moved are compressed, too.
    dry_run : bool
        Whether nothing is compressed, and the totals count what compression would have done.
    totals : Totals or None
        Counts the calls.
    sums : bool
        Whether sums may be compressed.
    least : int
        The bytes below which messages are left to MPI without further thought.
    """

    codec: str | Codec | None
    options: dict[str, Any]
    min_bytes: int | None
    moved: bool
    dry_run: bool = False
    totals: Totals | None = None

    def __post_init__(self) -> None:
        # Attributes, since every call looks at them.
        self.sums = self.codec is not None
        self.moved = self.moved and self.sums
        self.least = _LEAST_NBYTES if self.min_bytes is None else max(self.min_bytes, 1)

    def choice(self, communicator: Communicator, collective: str, x: Any, root: int) -> Choice | None:
        """Return how a call runs; None if it is left to MPI. The answer is the same on all ranks.

        Parameters
        ----------
        communicator : Communicator
            The ranks.
        collective : str
            Name of the collective.
        x : array
            An array like the call's.
        root : int
            The root, if the collective has one.
        """
        try:
            return self._choice(communicator, collective, x, root)
        except (InvalidArgument, InvalidBuffer, UnsupportedDType) as error:  # the codec does not take the call
            if communicator.rank == 0:
                _log.warning("%s of %d %s is left to MPI: %s", collective, x.size, x.dtype, error)
            return None

    def _choice(self, communicator: Communicator, collective: str, x: Any, root: int) -> Choice | None:
        like = np.empty(x.size, x.dtype)  # on the host on all ranks, since some may have x on a GPU, and others not
        explain = partial(communicator.explain, like, collective=collective, root=root)
        plan = explain(codec=self.codec, **self.options)
        if plan.call.codec is not None:  # the receive buffers of programs hold anything
            without_reference(plan.call.codec, "compcoll.Intracomm")
        found = choose.options(plan.call, plan.setting)
        coded = [option for option in found if option.codec is not None]
        option = next((each for each in coded if (each.codec, each.algorithm) == (plan.codec, plan.algorithm)), None)
        if option is None and self.min_bytes is not None and plan.setting.world.size > 1:
            allowed = [each for each in coded if not each.refused] or [each._replace(refused="") for each in coded]
            option = choose.best(allowed, tolerant=plan.call.tolerance is not None) if allowed else None
            if option is not None:  # raise an error if the codec cannot run the call at all
                explain(codec=option.codec, algorithm=option.algorithm)
        if option is None or option.codec is None:
            return None
        ratio = 1.0
        if option.codec.fixed_size:
            ratio = choose.format_on_wire(option.algorithm, option.codec, plan.call, plan.setting).ratio
        native = next((each.seconds for each in found if each.algorithm == choose.NATIVE), option.seconds)
        return Choice(option.codec, option.algorithm, native / option.seconds, option.error, ratio)
