"""Collectives as plain functions. Each MPI communicator gets one `Communicator`, cached as an MPI attribute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from .codecs.base import Codec
from .communicator import Communicator
from .errors import InvalidArgument
from .execute.engine import Request
from .execute.persistent import PersistentRequest
from .feedback import ErrorFeedback
from .transports.library import MPI
from .transports.mpi import MPITransport, check_running, check_usable


def _give_back(owner: MPI.Comm, key: int, kept: Communicator) -> None:
    """Free a cached `Communicator` when its MPI communicator is freed. Collective."""
    _world.clear()
    if not MPI.Is_finalized():
        kept.free()


@cache
def _keyval() -> int:
    """Return the key of the attribute of an MPI communicator that holds its `Communicator`."""
    check_running()  # before MPI.Init, Open MPI would end the process
    return MPI.Comm.Create_keyval(delete_fn=_give_back)


_world: list[Communicator] = []
"""The `Communicator` of MPI.COMM_WORLD, once created; a second cache, since MPI's attribute lookup takes 0.3 µs."""


def get_communicator(comm: MPI.Comm | None = None, timeout: float | None = None) -> Communicator:
    """Return the `Communicator` that the functions of `compcoll` use for an MPI communicator.

    The first call creates it, collectively. It lives until the MPI communicator is freed.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The MPI communicator; MPI.COMM_WORLD by default.
    timeout : float, optional
        Seconds that each step of the creation may last; by default COMPCOLL_TIMEOUT, or 1800.

    Raises
    ------
    InvalidArgument
        If ``comm`` is not an intracommunicator. For a `Communicator`, call its methods instead.
    PeerTimeout
        If not all ranks take part in the creation in time.

    Examples
    --------
    >>> comm = compcoll.get_communicator()
    >>> 0 <= comm.rank < comm.size
    True
    """
    if comm is None:
        if not _world:
            _world.append(get_communicator(MPI.COMM_WORLD, timeout))
        return _world[0]
    if isinstance(comm, Communicator):
        raise InvalidArgument("comm is a compcoll.Communicator: call its methods instead, such as comm.allreduce(x)")
    check_usable(comm)
    kept = comm.Get_attr(_keyval())
    if not isinstance(kept, Communicator):
        kept = Communicator(MPITransport(comm, timeout=timeout))
        comm.Set_attr(_keyval(), kept)
    return kept


def _of(comm: MPI.Comm | None, options: dict[str, Any]) -> Communicator:
    """Return the communicator for a call with these options."""
    return _world[0] if comm is None and _world else get_communicator(comm, options.get("timeout"))


def allreduce(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Any:
    """Reduce the arrays of all ranks, element by element; every rank gets the same bits.

    Parameters
    ----------
    x : numpy.ndarray, torch.Tensor, jax.Array, memoryview, cupy.ndarray …
        This rank's values: C-contiguous, of any shape, in host memory or on a GPU (see docs/gpu.md). Host arrays may
        come from NumPy or anything with DLPack or the buffer protocol. They are used without a copy if they are
        aligned. With a codec: float16, bfloat16 (ml_dtypes), float32 or float64. Without a codec: every type that MPI
        can send, float16 and bfloat16. 16-bit floats are added in float32, see docs/algorithms.md.
    op : str or mpi4py.MPI.Op
        ``"sum"`` or ``"mean"`` (also ``"avg"``). Without a codec also ``"max"``, ``"min"``, ``"prod"``, the logical
        and bitwise operations, and MPI's predefined operations.
    codec : str or Codec, optional
        A name such as ``"zfp"``, ``"minmax"`` or ``"qsgd"`` (see `list_codecs`), with the codec's options as further
        arguments or behind the name, such as ``"minmax:bits=4,block=64"``; or a codec such as ``ZFP(rate=8)``. None
        sends the values uncompressed. With ``"auto"`` the cost model also chooses the codec, and ``tolerance=`` gives
        the largest relative error of the result (``"auto:tolerance=1e-2"``): see docs/model.md. ``"topk"`` and the
        other sparse codecs send only some elements: see docs/sparse.md.
    algorithm : str
        ``"auto"`` weighs time and error, as a cost model predicts them: see docs/model.md. It may send values
        uncompressed in spite of ``codec``; `Communicator.stats` shows what ran. Other names, such as ``"ring"`` and
        ``"native"`` (MPI's own), and the collectives of each algorithm: docs/algorithms.md.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; MPI.COMM_WORLD by default.
    out : array, optional
        Receives the result: an array like ``x``, or ``x`` itself.
    feedback : ErrorFeedback, optional
        Keeps the residual (what compression loses) and adds it to the next call's values.
    **codec_options
        Options of a codec given by name, such as ``rate=8``. Also ``timeout=``, the seconds without progress after
        which the call raises `PeerTimeout`, and ``max_error=``, the largest relative error that the result may have by
        estimate: if it is larger or unknown, all ranks raise `InvalidArgument` before anything is sent. For arrays on
        a GPU also ``stream=``, by default the current stream.

    Returns
    -------
    array
        The result: ``out`` if given, else a new array of ``x``'s kind (a memoryview if ``x`` only has the buffer
        protocol). On a GPU, kernels launched later on the caller's stream can use it. A `compcoll.sparse.SparseSum`
        if a sparse codec has ``out_format="sparse"``.

    Raises
    ------
    CompcollError
        See `compcoll.errors`. ``x`` is unchanged, unless it is also ``out`` and the error came during the reduction.

    Warns
    -----
    AccuracyWarning
        On rank 0, once for each kind of call without feedback and ``max_error=``, if the estimated relative error of
        the result is above 0.1.

    Notes
    -----
    With one rank the result is a copy. With p ranks, the errors of p encodings add up in the result of ``"ring"``,
    those of log2 p encodings with ``"recursive_doubling"``, and of two with ``"direct"``: see docs/algorithms.md.

    Examples
    --------
    >>> gradient = np.random.randn(4096).astype(np.float32)
    >>> total = compcoll.allreduce(gradient, codec="int8")
    >>> total.shape
    (4096,)
    """
    return _of(comm, codec_options).call("allreduce", x, op, out, feedback, (codec, algorithm, codec_options))


def iallreduce(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Request:
    """Start an `allreduce` and return at once. Do not touch ``x`` or ``out`` until the request completes.

    Several requests may be in flight. They advance whenever one of them is waited for or tested. On a
    ``Communicator(comm, progress="thread")`` a background thread advances them.

    Returns
    -------
    Request
        ``wait()`` returns the result; see also ``test()`` and ``stats``.

    Examples
    --------
    >>> request = compcoll.iallreduce(np.ones(4, np.float32), op="mean")
    >>> request.wait()
    array([1., 1., 1., 1.], dtype=float32)
    """
    return _of(comm, codec_options).start("allreduce", x, op, out, feedback, (codec, algorithm, codec_options))


def reduce_scatter(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Any:
    """Reduce the arrays of all ranks; rank r keeps block r along the first axis.

    Parameters are those of `allreduce`; the length of ``x``'s first axis must be a multiple of the number of ranks.

    Returns
    -------
    array
        Of shape ``(x.shape[0] // size, *x.shape[1:])``.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.reduce_scatter(np.ones(2 * ranks, np.float32), op="mean")
    array([1., 1.], dtype=float32)
    """
    return _of(comm, codec_options).call("reduce_scatter", x, op, out, feedback, (codec, algorithm, codec_options))


def ireduce_scatter(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Request:
    """Start a `reduce_scatter` and return at once; see `iallreduce`.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.ireduce_scatter(np.ones(2 * ranks, np.float32), op="mean").wait()
    array([1., 1.], dtype=float32)
    """
    return _of(comm, codec_options).start("reduce_scatter", x, op, out, feedback, (codec, algorithm, codec_options))


def reduce(
    x: Any,
    root: int = 0,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Any:
    """Reduce the arrays of all ranks, element by element; only the root gets the result.

    Parameters are those of `allreduce`. ``root`` is the rank that gets the result; only there is ``out`` used.

    Returns
    -------
    array or None
        Like ``x`` on the root, None on the other ranks.

    Notes
    -----
    With p ranks, the errors of p encodings add up in the result of ``"ring"``. With ``"direct"`` a value is encoded
    twice at most. The root does not encode its own part of the sum.

    Examples
    --------
    >>> total = compcoll.reduce(np.ones(4096, np.float32), root=0, codec="int8")
    >>> (total is None) == (compcoll.get_communicator().rank != 0)
    True
    """
    return _of(comm, codec_options).call("reduce", x, (op, root), out, feedback, (codec, algorithm, codec_options))


def ireduce(
    x: Any,
    root: int = 0,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Request:
    """Start a `reduce` and return at once; see `iallreduce`.

    Examples
    --------
    >>> compcoll.ireduce(np.ones(2, np.float32), root=0, op="mean").wait()
    array([1., 1.], dtype=float32)
    """
    return _of(comm, codec_options).start("reduce", x, (op, root), out, feedback, (codec, algorithm, codec_options))


def allgather(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Any:
    """Stack the arrays of all ranks. Every rank gets the same bits: with a codec, its own array is decoded, too.

    Parameters are those of `allreduce`; all ranks' arrays must have the same shape. With ``codec="delta"``, ``out``
    holds the previous result, which the call updates; see `Delta`.

    Returns
    -------
    array
        Of shape ``(size, *x.shape)``.

    Examples
    --------
    >>> comm = compcoll.get_communicator()
    >>> compcoll.allgather(np.zeros(3, np.float32)).shape == (comm.size, 3)
    True
    """
    return _of(comm, codec_options).call("allgather", x, None, out, None, (codec, algorithm, codec_options))


def iallgather(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Request:
    """Start an `allgather` and return at once; see `iallreduce`.

    Examples
    --------
    >>> comm = compcoll.get_communicator()
    >>> compcoll.iallgather(np.zeros(3, np.float32)).wait().shape == (comm.size, 3)
    True
    """
    return _of(comm, codec_options).start("allgather", x, None, out, None, (codec, algorithm, codec_options))


def allgatherv(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    **codec_options: Any,
) -> Any:
    """Concatenate the arrays of all ranks along the first axis, whose length may differ between ranks.

    Parameters are those of `allreduce`. Above 2³¹ - 1 elements in all, which MPI cannot count, ``"ring"`` replaces
    ``"native"``.

    Returns
    -------
    array
        Of shape ``(sum of all ranks' x.shape[0], *x.shape[1:])``.

    Examples
    --------
    >>> rows = 1 + compcoll.get_communicator().rank  # 1 of rank 0, 2 of rank 1 …
    >>> joined = compcoll.allgatherv(np.zeros((rows, 5), np.float32))
    >>> joined.shape[1]
    5
    """
    return _of(comm, codec_options).call("allgatherv", x, None, None, None, (codec, algorithm, codec_options))


def iallgatherv(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    **codec_options: Any,
) -> Request:
    """Start an `allgatherv` and return at once; see `iallreduce`.

    Examples
    --------
    >>> rows = 1 + compcoll.get_communicator().rank  # 1 of rank 0, 2 of rank 1 …
    >>> compcoll.iallgatherv(np.zeros((rows, 5), np.float32)).wait().shape[1]
    5
    """
    return _of(comm, codec_options).start("allgatherv", x, None, None, None, (codec, algorithm, codec_options))


def gather(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Any:
    """Stack the arrays of all ranks on the root. With a codec, its own array is decoded, too.

    Parameters are those of `allreduce`; all ranks' arrays must have the same shape. ``root`` is the rank that gets the
    result; only there is ``out`` used.

    Returns
    -------
    array or None
        Of shape ``(size, *x.shape)`` on the root, None on the other ranks.

    Examples
    --------
    >>> comm = compcoll.get_communicator()
    >>> stacked = compcoll.gather(np.zeros(3, np.float32), root=0)
    >>> stacked is None if comm.rank else stacked.shape == (comm.size, 3)
    True
    """
    return _of(comm, codec_options).call("gather", x, root, out, None, (codec, algorithm, codec_options))


def igather(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Request:
    """Start a `gather` and return at once; see `iallreduce`.

    Examples
    --------
    >>> compcoll.igather(np.zeros(3, np.float32), root=0).wait().shape[1:]
    (3,)
    """
    return _of(comm, codec_options).start("gather", x, root, out, None, (codec, algorithm, codec_options))


def scatter(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Any:
    """Send block r along the first axis of the root's array to rank r.

    With a codec, the root's own block is decoded, too. Parameters are those of `allreduce`. The length of ``x``'s first
    axis must be a multiple of the number of ranks. On ranks other than the root, only the shape and type of ``x`` are
    used, not its values.

    Returns
    -------
    array
        Of shape ``(x.shape[0] // size, *x.shape[1:])``.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.scatter(np.ones((2 * ranks, 3), np.float32), root=0).shape
    (2, 3)
    """
    return _of(comm, codec_options).call("scatter", x, root, out, None, (codec, algorithm, codec_options))


def iscatter(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Request:
    """Start a `scatter` and return at once; see `iallreduce`.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.iscatter(np.ones((2 * ranks, 3), np.float32), root=0).wait().shape
    (2, 3)
    """
    return _of(comm, codec_options).start("scatter", x, root, out, None, (codec, algorithm, codec_options))


def bcast(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Any:
    """Broadcast the root's array. With a codec, the root also gets the decoded values, as all other ranks do.

    Parameters are those of `allreduce`. On ranks other than the root, only the shape and type of ``x`` are used, not
    its values; ``out=x`` receives in place. With ``codec="delta"``, ``out`` holds the previous result, which the call
    updates; see `Delta`.

    Returns
    -------
    array
        Like ``x``.

    Examples
    --------
    >>> compcoll.bcast(np.arange(3, dtype=np.float32), root=0)
    array([0., 1., 2.], dtype=float32)
    """
    return _of(comm, codec_options).call("bcast", x, root, out, None, (codec, algorithm, codec_options))


def ibcast(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Request:
    """Start a `bcast` and return at once; see `iallreduce`.

    Examples
    --------
    >>> compcoll.ibcast(np.arange(3, dtype=np.float32), root=0).wait()
    array([0., 1., 2.], dtype=float32)
    """
    return _of(comm, codec_options).start("bcast", x, root, out, None, (codec, algorithm, codec_options))


def alltoall(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Any:
    """Send block k along the first axis to rank k; block r of the result comes from rank r.

    Parameters are those of `allreduce`. The length of ``x``'s first axis must be a multiple of the number of ranks,
    and ``out`` must not overlap ``x``.

    Returns
    -------
    array
        Like ``x``.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.alltoall(np.zeros((ranks, 2), np.float32)).shape == (ranks, 2)
    True
    """
    return _of(comm, codec_options).call("alltoall", x, None, out, None, (codec, algorithm, codec_options))


def ialltoall(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> Request:
    """Start an `alltoall` and return at once; see `iallreduce`.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.ialltoall(np.zeros((ranks, 2), np.float32)).wait().shape == (ranks, 2)
    True
    """
    return _of(comm, codec_options).start("alltoall", x, None, out, None, (codec, algorithm, codec_options))


def alltoallv(
    x: Any,
    counts: Sequence[int],
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    **codec_options: Any,
) -> Any:
    """Send blocks of different lengths along the first axis to all ranks, and join what they send to this one.

    Parameters are those of `allreduce`, except that there is no ``out``. All ranks' arrays must have rows of the same
    shape. Above 2³¹ - 1 elements on some rank, which MPI cannot count, ``"pairwise"`` replaces ``"native"``.

    Parameters
    ----------
    counts : sequence of int
        ``counts[k]`` rows of ``x`` go to rank k, in the order of the ranks; 0 or more each, ``x.shape[0]`` in all.
        They may differ between ranks: each rank learns how many rows it gets.

    Returns
    -------
    array
        The rows from rank 0, then those from rank 1, and so on.

    Examples
    --------
    >>> comm = compcoll.get_communicator()
    >>> counts = [comm.rank] * comm.size  # none of rank 0, 1 row for each rank of rank 1 …
    >>> got = compcoll.alltoallv(np.zeros((sum(counts), 5), np.float32), counts)
    >>> got.shape == (sum(range(comm.size)), 5)
    True
    """
    return _of(comm, codec_options).call("alltoallv", x, counts, None, None, (codec, algorithm, codec_options))


def ialltoallv(
    x: Any,
    counts: Sequence[int],
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    **codec_options: Any,
) -> Request:
    """Start an `alltoallv` and return at once; see `iallreduce`.

    Examples
    --------
    >>> ranks = compcoll.get_communicator().size
    >>> compcoll.ialltoallv(np.zeros((ranks, 5), np.float32), [1] * ranks).wait().shape == (ranks, 5)
    True
    """
    return _of(comm, codec_options).start("alltoallv", x, counts, None, None, (codec, algorithm, codec_options))


def allreduce_init(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare an `allreduce` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `allreduce`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same array.

    Examples
    --------
    >>> x = np.ones(4096, np.float32)
    >>> request = compcoll.allreduce_init(x, codec="zfp", rate=8)
    >>> for step in range(3):
    ...     total = request.start().wait()
    >>> request.free()
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("allreduce", x, op, out, feedback, asked)


def reduce_scatter_init(
    x: Any,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare a `reduce_scatter` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `reduce_scatter`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same array.

    Examples
    --------
    >>> x = np.ones((compcoll.get_communicator().size, 4), np.float32)
    >>> request = compcoll.reduce_scatter_init(x)
    >>> request.start().wait().shape
    (1, 4)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("reduce_scatter", x, op, out, feedback, asked)


def reduce_init(
    x: Any,
    root: int = 0,
    *,
    op: Any = "sum",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare a `reduce` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `reduce`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same
        array; the other ranks get None.

    Examples
    --------
    >>> request = compcoll.reduce_init(np.ones(4, np.float32), root=0, op="mean")
    >>> request.start().wait()
    array([1., 1., 1., 1.], dtype=float32)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("reduce", x, (op, root), out, feedback, asked)


def allgather_init(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare an `allgather` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `allgather`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same array.

    Examples
    --------
    >>> request = compcoll.allgather_init(np.ones(4, np.float32), codec="cast")
    >>> request.start().wait().shape[1:]
    (4,)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("allgather", x, None, out, None, asked)


def bcast_init(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare a `bcast` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `bcast`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads the root's ``x`` anew and returns the
        same array.

    Examples
    --------
    >>> request = compcoll.bcast_init(np.arange(4.0), root=0)
    >>> request.start().wait()
    array([0., 1., 2., 3.])
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("bcast", x, root, out, None, asked)


def gather_init(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare a `gather` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `gather`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same
        array; the other ranks get None.

    Examples
    --------
    >>> request = compcoll.gather_init(np.ones(4, np.float32), codec="cast")
    >>> request.start().wait().shape[1:]
    (4,)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("gather", x, root, out, None, asked)


def scatter_init(
    x: Any,
    root: int = 0,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare a `scatter` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `scatter`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads the root's ``x`` anew and returns the
        same array.

    Examples
    --------
    >>> request = compcoll.scatter_init(np.ones((compcoll.get_communicator().size, 4), np.float32))
    >>> request.start().wait().shape
    (1, 4)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("scatter", x, root, out, None, asked)


def alltoall_init(
    x: Any,
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    comm: MPI.Comm | None = None,
    out: Any = None,
    **codec_options: Any,
) -> PersistentRequest:
    """Prepare an `alltoall` that runs repeatedly on the same arrays. Collective.

    Parameters and errors are those of `alltoall`.

    Returns
    -------
    PersistentRequest
        With ``start()``, ``wait()``, ``test()`` and ``free()``. Each run reads ``x`` anew and returns the same array.

    Examples
    --------
    >>> request = compcoll.alltoall_init(np.ones((compcoll.get_communicator().size, 4), np.float32))
    >>> request.start().wait().shape[1:]
    (4,)
    """
    asked = (codec, algorithm, codec_options)
    return _of(comm, codec_options).prepare("alltoall", x, None, out, None, asked)
