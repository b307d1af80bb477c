"""A codec taken through all that collectives rely on, without MPI."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from ..codecs.base import Codec
from ..dtypes import DTYPES
from ..errors import CodecError, InvalidArgument, UnsupportedDType
from ..registry import as_codec
from . import check_coder, check_collectives
from .check_coder import Found, Promises, Trial


def check_codec(codec: str | Codec, **codec_options: Any) -> None:
    """Check that a codec does all that collectives rely on, by every algorithm, on a few ranks in this process.

    The promises are the keys of ``compcoll.tools.check.PROMISES``. It takes about a second for a codec with kernels.

    Parameters
    ----------
    codec : str or Codec
        A codec or its name.
    **codec_options
        Configuration of a codec given by name.

    Raises
    ------
    CodecError
        If the codec breaks promises: the message says which, what was found, and what is right.

    Examples
    --------
    >>> compcoll.check_codec("zfp", rate=8)
    """
    chosen = as_codec(codec, codec_options)
    if chosen is None:
        raise InvalidArgument("codec=None: a codec is needed here")
    trials, refused = [], "none"
    for dtype in sorted(DTYPES, key=lambda name: name != "float32"):
        try:
            trials.append(Trial(chosen, dtype))
        except (UnsupportedDType, InvalidArgument) as error:
            refused = str(error)
    if not trials:
        raise CodecError(f"{chosen!r} takes none of {', '.join(DTYPES)}: {refused}")
    broken: dict[str, str] = {}
    with np.errstate(all="ignore"):
        for name, promise in PROMISES.items():
            for trial in () if chosen.additive and name in check_coder.PROMISES else trials:
                try:
                    found = next(promise(trial), None)
                except Exception as error:  # of the codec, too
                    found = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if found is not None:
                    broken[name] = f"{trial.dtype}: {found}"
                    break
    if broken:
        lines = "".join(f"\n  {name}: {text}" for name, text in broken.items())
        raise CodecError(f"{chosen!r} breaks {len(broken)} of {len(PROMISES)} promises:{lines}", broken)


def _configuration(trial: Trial) -> Found:
    codec = trial.codec
    name, text = getattr(codec, "name", None), repr(codec)
    if not isinstance(name, str) or not name:
        yield f"its name is {name!r}: give the class a name, a string"
    hash(codec)  # plans are kept by codec
    twin = dataclasses.replace(codec) if dataclasses.is_dataclass(codec) else copy.copy(codec)
    if twin != codec or hash(twin) != hash(codec) or repr(twin) != text or " at 0x" in text:
        yield f"a codec of the same options is not equal to it, or shows as {twin!r}: ranks compare them by repr"
    if not dataclasses.is_dataclass(codec) or not type(codec).__dataclass_params__.frozen:
        yield "its options may change: make the class a frozen dataclass"


PROMISES: Promises = {"configuration": _configuration, **check_coder.PROMISES, **check_collectives.PROMISES}
"""What a codec promises, by name. An additive one, whose wires are added as they are, has no coder."""
