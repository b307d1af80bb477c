"""Options that define what a process group compresses."""

from __future__ import annotations

from typing import Any

from .. import config
from ..codecs.base import Codec
from ..codecs.registry import as_codec
from ..errors import InvalidArgument
from ..plan import choose

MIN_BYTES = 512 * 1024


class Options:
    """Compression of a process group: ``init_process_group("compcoll", pg_options=Options(codec="int8"))``.

    All forms of all_reduce and reduce_scatter compress sums and means of at least ``min_bytes`` of floating-point
    elements. Other collectives do not compress.

    Parameters
    ----------
    codec : str or Codec, optional
        As in `compcoll.allreduce`; None compresses nothing.
    min_bytes : int
        Smallest buffer to be compressed, in bytes; 512 KiB by default.
    algorithm : str
        As in `compcoll.allreduce`, for buffers that may be compressed. ``"auto"`` compresses only where this saves
        time, and so mostly not on one machine. If reduce_scatter has no algorithm of this name, it uses ``"auto"``.
    **codec_options
        Configuration of a codec given by name, such as ``rate=8``.

    Raises
    ------
    InvalidArgument
        If the codec, ``min_bytes`` or the algorithm is not allowed.

    Examples
    --------
    >>> compcoll.torch.Options(codec="minmax:bits=4").codec
    MinMax(bits=4, block=2048)
    """

    def __init__(
        self,
        codec: str | Codec | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        algorithm: str = choose.AUTO,
        **codec_options: Any,
    ) -> None:
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
            raise InvalidArgument(f"min_bytes={min_bytes!r}: a number of bytes, 0 or more, is needed")
        self.codec = as_codec(codec, codec_options)
        self.min_bytes = min_bytes
        choose.check("allreduce", algorithm)
        self.algorithm = algorithm

    @classmethod
    def from_environment(cls) -> Options:
        """Make the options that COMPCOLL_CODEC and COMPCOLL_ALGORITHM define."""
        return cls(config.codec(), algorithm=config.algorithm() or choose.AUTO)

    @classmethod
    def given(cls, pg_options: object) -> Options:
        """Return the options given to `torch.distributed.init_process_group`; for None those of the environment.

        Raises
        ------
        InvalidArgument
            If they are options of another backend.
        """
        if pg_options is None:
            return cls.from_environment()
        if not isinstance(pg_options, cls):
            raise InvalidArgument(f"pg_options={pg_options!r}: compcoll.torch.Options are needed")
        return pg_options

    def __repr__(self) -> str:
        return f"Options(codec={self.codec!r}, min_bytes={self.min_bytes}, algorithm={self.algorithm!r})"
