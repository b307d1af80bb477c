"""Collectives on one communicator."""

from __future__ import annotations

from threading import RLock
from typing import Any

from .codecs.base import Codec
from .collectives import choose
from .collectives.handshake import agreed, settle
from .collectives.plan import Plan
from .collectives.recipe import tell_account
from .collectives.runs import Runs
from .collectives.signature import FREE, Signature
from .devices.foreign import as_numpy, is_foreign
from .devices.host import ndarray
from .devices.memory import gpu_memory
from .errors import (
    CommunicatorBroken,
    UnsupportedRecovery,
)
from .feedback import ErrorFeedback
from .lifetime import live
from .stats import Stats
from .transports.base import Recoverable, transport_of


class Communicator(Runs):
    """Compressed collectives among the ranks of an MPI communicator.

    Every collective is called by all ranks, in the same order, with the same arguments. The first messages of each
    tell whether that is so; when it is not, or when some rank's arguments are refused, every rank raises, no buffer
    is touched, and the communicator stays usable.

    The methods take the arguments of the functions of the same name in `compcoll`, less ``comm``; without ``codec=``
    and ``algorithm=`` they use the communicator's. Those with an i in front return a `Request`. All take ``timeout=``,
    as the communicator does, for themselves.

    When a rank is late, or has died, or fails halfway, everybody raises an error that tells so, and the communicator
    cannot be used any more: see `shrink` and docs/reliability.md.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Connection, optional
        Duplicated, collectively; MPI.COMM_WORLD by default. A transport of another kind is taken as it is.
    codec : str or Codec, optional
        What collectives compress with unless they name a codec; nothing by default.
    algorithm : str
        The algorithm of collectives that name none.
    progress : {"wait", "nap", "thread"}
        Whether collectives under way advance when the caller waits or tests, or by a thread of their own. With
        ``"nap"`` a wait leaves the core to other threads, for a little more latency.
    timeout : float, optional
        Seconds without progress after which a wait gives up; by default COMPCOLL_TIMEOUT, or 1800. When given, here or
        by the variable, nothing blocks in MPI, where no time-out would end it: sums that ``"auto"`` would leave to MPI
        go by other algorithms, and MPI's own, asked for by name, take up to three times as long, with MPICH more.
    checksum : bool
        Whether encoded segments carry a CRC-32C, so that bits that change on their way raise `WireCorrupted`. MPI's own
        collectives have none: they are then refused, and never chosen. Of arrays on a GPU, wires are sealed and looked
        at in pinned host memory.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    rank, size : int
        As in MPI.
    nodes : sequence of int
        Each rank's node.

    Examples
    --------
    >>> comm = compcoll.Communicator(codec="zfp", rate=8)  # settings held once
    >>> total = comm.allreduce(np.ones(4096, np.float32))
    >>> comm.stats.collective, comm.stats.raw_nbytes
    ('allreduce', 16384)
    >>> comm.free()
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        codec: str | Codec | None = None,
        algorithm: str = choose.AUTO,
        progress: str = "wait",
        timeout: float | None = None,
        checksum: bool = False,
        **codec_options: Any,
    ) -> None:
        self._settings: dict[str, Any] = {
            "codec": codec,
            "algorithm": algorithm,
            "progress": progress,
            "timeout": timeout,
            "checksum": checksum,
            **codec_options,
        }
        transport = transport_of(comm, threads=progress == "thread", timeout=timeout)
        with transport.together():
            super().__init__(transport, codec, algorithm, progress, timeout, checksum, codec_options)
        live(self)

    @property
    def stats(self) -> Stats | None:
        """Account of the collective that ended last; None before the first."""
        account = self._executor.account
        if isinstance(account, tuple):  # that nobody reads is not made
            collective, recipe, body, nbytes, seconds = account
            stats = Stats(collective, recipe.plan.codec_text, recipe.plan.algorithm, nbytes)
            tell_account(stats, body)
            stats.total_seconds = seconds
            account = self._executor.account = stats
        return account  # type: ignore[no-any-return]

    @property
    def begun(self) -> int:
        """The number of collectives that began. Codecs that round at random draw by that number, so that who goes on
        from a saved state, with a communicator of its own, sets what it was then: on all ranks alike, while none is
        under way.
        """
        return self._executor.begun

    @begun.setter
    def begun(self, number: int) -> None:
        self._executor.begun = number

    def prepare_feedback(self, feedback: ErrorFeedback, x: Any) -> None:
        """Make what a feedback keeps of buffers such as ``x``, where these are, before its first call: zeros.

        Raises
        ------
        InvalidBuffer
            If it keeps another number of elements, or those of another type.
        """
        x = as_numpy(x, "x") if is_foreign(x) else x
        collectives = self._collectives if type(x) is ndarray or not gpu_memory(x) else self._on_gpu(x)
        collectives.prepare_feedback(feedback, x)

    def explain(
        self,
        x: Any,
        *,
        collective: str = "allreduce",
        op: Any = "sum",
        root: int = 0,
        codec: Any = ...,
        algorithm: str | None = None,
        **options: Any,
    ) -> Plan:
        """Tell what a blocking call would do, and why, without doing it: nothing is sent, and no buffer is read.

        Printed, a plan shows what the cost model predicts for each way to run the call, why some are refused, which one
        was chosen, and why. Its ``algorithm`` and ``codec`` are those of the `Stats` that the call would have, unless
        others want some rank's core: then that of its ``other``, if there is one, may run, which is shown, too.

        Parameters
        ----------
        x : array
            Such as the call's: its element type, size and place count.
        collective : str
            The one to explain.
        op, root, codec, algorithm, **options
            The call's, as far as the collective has them.

        Raises
        ------
        CompcollError
            If the call would be refused, on this rank alone.

        Examples
        --------
        >>> x = np.zeros(4096, np.float32)
        >>> plan = compcoll.get_communicator().explain(x, codec="zfp", rate=8)
        >>> "choice:" in str(plan)
        True
        """
        x = as_numpy(x, "x") if is_foreign(x) else x
        collectives = self._collectives if type(x) is ndarray or not gpu_memory(x) else self._on_gpu(x)
        return collectives.explain(collective, x, op, root, (codec, algorithm, options))

    def free(self) -> None:
        """Finish what is under way and give the private MPI communicator back, collectively."""
        if self._broken is None:
            self._engine.drain()
            self._recordings.free()
            if self._gpu is not None:
                self._gpu.free()
            self._transport.free()
        self._engine.close()
        self._broken = CommunicatorBroken("it was freed")
        self._executor.ready = False

    def end(self, error: CommunicatorBroken, forked: bool) -> None:
        """Break the communicator without a call of MPI's (the contract is `compcoll.lifetime.Mortal`)."""
        if forked:
            self._engine.lock = RLock()
        if self._broken is None:
            self._broken = error
        self._executor.ready = False
        self._engine.fail(error)

    def shrink(self) -> Communicator:
        """A communicator of the ranks that are alive, with the settings of this one, which is used no more. Collective
        among those ranks; they keep their order.

        Some of them may have finished the collective in which a rank died, and others not: agree, by a collective of
        the new communicator, on where to go on. Error feedback is the caller's, and goes on as it is.

        Raises
        ------
        UnsupportedRecovery
            If MPI cannot go on without a rank: start the job by Open MPI 5's ``mpirun --with-ft ulfm``.
        PeerTimeout
            If not all ranks that are alive come in time.

        References
        ----------
        W. Bland et al., "Post-failure recovery of MPI communication capability: Design and rationale", International
        Journal of High Performance Computing Applications 27(3), 2013 (ULFM).
        """
        if not isinstance(self._transport, Recoverable):
            raise UnsupportedRecovery(f"{type(self._transport).__name__} cannot go on without a rank: MPI can")
        survivors = self._transport.survivors(self._engine.timeout)
        self._break(CommunicatorBroken("it was shrunk"))
        self._engine.close()
        return Communicator(survivors, **self._settings)

    def handshake(self, call: Signature, timeout: float | None = None) -> None:
        """Make sure that all ranks make the same call, which is none of this communicator's: the caller runs it then.
        It has its place in the order of the communicator's own collectives.

        Parameters
        ----------
        call : Signature
            One line on it, equal on all ranks.
        timeout : float, optional
            As of collectives.

        Raises
        ------
        CollectiveMismatch
            On every rank, if the calls differ.
        PeerTimeout, PeerFailed, CommunicatorBroken
            As of collectives.
        """
        self._check_usable()
        self._executor.begun += 1
        self._openings_before(timeout)
        own = call.here() if self._debug else call
        try:
            if not agreed(self._opening, own, FREE, None, self._engine.patience):
                self._engine.follow(settle(self._opening, own, FREE, None), call.call, timeout)
        except BaseException as error:
            self._failed(error)
