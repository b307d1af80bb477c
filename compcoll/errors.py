"""The exceptions that compcoll raises.

::

    CompcollError
    ├── InvalidArgument (ValueError)        an option, operation or codec setting that is not allowed
    │   ├── UnknownCodec                    no codec of that name
    │   └── UnknownAlgorithm                no algorithm of that name for this collective
    ├── InvalidBuffer (ValueError)          not contiguous, read-only, overlapping, or of the wrong shape
    ├── UnsupportedDType (TypeError)        an element type that the codec or operation cannot take
    ├── UnsupportedDevice (RuntimeError)    memory of a device that compcoll cannot reach
    ├── CollectiveMismatch (RuntimeError)   the ranks' calls do not match, or a rank rejected its arguments
    │   └── ReferenceMismatch               the ranks' previous results, of which differences are sent, do not match
    ├── PeerTimeout (TimeoutError)          a rank did not send its message in time
    ├── PeerFailed (RuntimeError)           a rank has died
    ├── CommunicatorBroken (RuntimeError)   used after a collective failed, or after free()
    ├── CommunicatorBusy (RuntimeError)     used by two threads at the same time
    ├── CollectiveFailed (RuntimeError)     another error, such as MPI's, on a rank: see its cause
    ├── UnsupportedRecovery (RuntimeError)  MPI cannot continue without a rank that has died
    ├── MPIMissing (RuntimeError)           mpi4py is not installed, or finds no MPI library
    ├── NotUnderMPI (RuntimeError)          this process, or PyTorch's ranks, are not ranks of the MPI job
    ├── ThreadsUnavailable (RuntimeError)   MPI was initialised without MPI_THREAD_MULTIPLE
    ├── HookTaken (RuntimeError)            something else already reduces this model's gradients
    ├── GradientsPending (RuntimeError)     gradients are used, or added to, while they are being averaged
    ├── WireCorrupted (ValueError)          received bytes are not a valid message
    ├── CodecError (RuntimeError)           a user's codec breaks a rule that collectives rely on
    └── ProfileError (ValueError)           a stored profile that cannot be read, used or written

    UserWarning
    └── AccuracyWarning                     a collective whose result loses much: see docs/algorithms.md
"""

from __future__ import annotations

from collections.abc import Mapping


class CompcollError(Exception):
    """Base class of all errors raised by compcoll.

    Examples
    --------
    >>> try:
    ...     compcoll.get_codec("zfp", rate=99)
    ... except compcoll.CompcollError as error:
    ...     print(type(error).__name__)
    InvalidArgument
    """


class AccuracyWarning(UserWarning):
    """The estimated relative error of a collective's result is above 0.1, and no feedback makes up for it.

    Rank 0 warns once for each kind of call. Calls with ``max_error=`` do not warn.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", compcoll.AccuracyWarning)
    ...     total = compcoll.allreduce(np.ones(64, np.float32), codec="minmax", bits=2)
    """


class InvalidArgument(CompcollError, ValueError):
    """An option, operation or codec setting is not allowed."""


class UnknownCodec(InvalidArgument):
    """No codec of that name is registered."""


class UnknownAlgorithm(InvalidArgument):
    """The collective has no algorithm of that name."""


class InvalidBuffer(CompcollError, ValueError):
    """A buffer that is not contiguous, not writable, overlapping or of the wrong shape."""


class UnsupportedDType(CompcollError, TypeError):
    """An element type that the codec or the operation cannot take."""


class UnsupportedDevice(CompcollError, RuntimeError):
    """Memory of a device that compcoll cannot reach."""


class CollectiveMismatch(CompcollError, RuntimeError):
    """The ranks' calls do not match, or some rank rejected its arguments."""


class ReferenceMismatch(CollectiveMismatch):
    """The ranks' previous results differ, but the codec sends how the new one differs from them. No buffer has changed.

    Make the call once with ``codec=None``, which sends all values.
    """


class PeerTimeout(CompcollError, TimeoutError):
    """A rank did not send its message in time.

    Attributes
    ----------
    missing : tuple of int
        Ranks that did not answer when every rank was asked what it is waiting for.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class PeerFailed(CompcollError, RuntimeError):
    """A rank has died. The surviving ranks can continue: see `Communicator.shrink`.

    Attributes
    ----------
    failed : tuple of int
        The ranks that are known to have died.
    """

    def __init__(self, message: str, failed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed


class CommunicatorBroken(CompcollError, RuntimeError):
    """The communicator cannot be used: a collective failed, another rank gave up, or it or MPI has ended."""


class CommunicatorBusy(CompcollError, RuntimeError):
    """Another thread is in a call of this communicator. The call was refused on this rank; the other thread's goes on.

    Give each thread a communicator of its own, or let the threads take turns, in the same order on all ranks.
    """


class CollectiveFailed(CompcollError, RuntimeError):
    """A collective failed on one rank with an error from outside compcoll, such as MPI's or a `MemoryError`.

    On that rank ``__cause__`` is the original exception. On the other ranks, whose calls could not begin, there is no
    cause; the message names the failed rank.
    """


class UnsupportedRecovery(CompcollError, RuntimeError):
    """MPI cannot continue without a rank that has died."""


class MPIMissing(CompcollError, RuntimeError):
    """mpi4py is not installed, or it finds no MPI library."""


class NotUnderMPI(CompcollError, RuntimeError):
    """PyTorch's ranks are not the ranks of one MPI job, or this process is a child of a rank."""


class ThreadsUnavailable(CompcollError, RuntimeError):
    """MPI was initialised without MPI_THREAD_MULTIPLE."""


class HookTaken(CompcollError, RuntimeError):
    """Something else already reduces this model's gradients."""


class GradientsPending(CompcollError, RuntimeError):
    """Gradients are used, or added to, while they are being averaged."""


class WireCorrupted(CompcollError, ValueError):
    """The received bytes are not a valid message."""


class CodecError(CompcollError, RuntimeError):
    """A codec breaks a rule that collectives rely on: see `compcoll.check_codec`.

    Attributes
    ----------
    broken : mapping of str to str
        For the name of each broken rule, what the check found; empty if a collective detected the error.
    """

    def __init__(self, message: str, broken: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.broken = dict(broken or {})


class ProfileError(CompcollError, ValueError):
    """A stored profile that cannot be read, used or written."""
