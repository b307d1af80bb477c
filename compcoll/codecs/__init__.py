"""Codecs: compression methods, independent of MPI.

To add a codec to compcoll, import its class here, which adds it to `ALL`. `get_codec`, command lines, the cost model,
self-tests, the names in ``compcoll`` and the tests all read `ALL`.
"""

from .additive import IntSum as IntSum
from .additive import Sign as Sign
from .base import Codec as Codec
from .base import Coder as Coder
from .base import ErrorBound as ErrorBound
from .cast import Cast as Cast
from .delta import Delta as Delta
from .fp8 import FP8 as FP8
from .int8 import Int8 as Int8
from .minmax import MinMax as MinMax
from .mx import MX as MX
from .numpy_codec import NumpyCodec as NumpyCodec
from .onebit import OneBit as OneBit
from .qsgd import QSGD as QSGD
from .qsgd import TernGrad as TernGrad
from .szp import SZP as SZP
from .zfp import ZFP as ZFP

_IMPORTED = [value for value in tuple(vars().values()) if isinstance(value, type) and issubclass(value, Codec)]

#: compcoll's own codecs except sparsifiers, sorted by name.
ALL = tuple(sorted((cls for cls in _IMPORTED if cls not in (Codec, NumpyCodec)), key=lambda cls: cls.name))

# Type checkers cannot read such a list, and take the imports above for public without it.
globals()["__all__"] = ["ALL", "Codec", "Coder", "ErrorBound", "NumpyCodec", *(cls.__name__ for cls in ALL)]
