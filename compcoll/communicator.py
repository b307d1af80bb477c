"""Collectives on one communicator."""

from __future__ import annotations

from functools import partial
from threading import RLock
from time import perf_counter
from typing import Any, NoReturn

from . import config
from .codecs.base import Codec
from .deprecated import renamed_attribute, warn
from .errors import CommunicatorBroken, CompcollError, InvalidArgument, ReferenceMismatch
from .execute import observation
from .execute.compiled_plan import Asked, Buffers, CompiledPlan, Run, driven, named_codec, store_account
from .execute.engine import Engine, OneCall, Request, busy, under_way
from .execute.failure_detector import FailureDetector
from .execute.failures import as_failure
from .execute.gpu import DeviceCollectives
from .execute.handshake import Handshake
from .execute.host import Checked, Collectives
from .execute.methods import Methods
from .execute.persistent import PersistentRequest
from .execute.planned_steps import Ranks
from .execute.programs import Programs
from .execute.slots import AT_ONCE, Slot, Slots
from .execute.trace import Trace, recorded, steps_of
from .feedback import ErrorFeedback
from .gpu.discovery import cuda_device
from .host.cores import usable_cores
from .host.device import HostDevice, empty, ndarray
from .host.foreign import as_numpy, gpu_memory, is_foreign, like
from .kernels._host import Collective, Operation, sleeps_within
from .layout import World
from .lifetime import live
from .pending import OrderingTicket, Steps, keep_forever
from .plan import choose
from .plan.plan import Plan
from .plan.profile import profile_for
from .plan.signature import BUSY, FREE, ON_GPU, Signature, unmade
from .stats import QUEUE, Span, Stats
from .transports import transport_of
from .transports.base import Connection

_HANDSHAKE_TAG = 0  # tag 1 is for the descriptions of calls that differ
_MOST_KNOWN = 64
_SPINS_OF_START = 10  # about 10 µs, as long as it takes to store the request if the start does not wait


class Communicator(Methods):
    """Compressed collectives among the ranks of an MPI communicator.

    All ranks must call every collective in the same order, with the same arguments. The first messages of each
    collective, its handshake, check this. If the calls differ, or if a rank's arguments are refused, every rank raises
    an error, no buffer is changed, and the communicator stays usable.

    The methods take the same arguments as the functions of the same name in `compcoll`, without ``comm``. ``codec=``
    and ``algorithm=`` default to the communicator's. Methods whose name begins with an i return a `Request`. All
    collectives take ``timeout=``, which overrides the communicator's, and ``max_error=``: see `compcoll.allreduce`.

    If a rank is late, dies, or fails during a collective, every rank that is alive raises an error that says so. The
    communicator then cannot be used any more: see `shrink` and docs/reliability.md.

    Each thread needs a communicator of its own. A call while another thread is in one raises `CommunicatorBusy`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Connection, optional
        Communicator to duplicate, collectively; MPI.COMM_WORLD by default. A `Connection` is used as it is.
    codec : str or Codec, optional
        Default codec of the collectives, as in `compcoll.allreduce`; None: no compression.
    algorithm : str
        Default algorithm of the collectives.
    progress : {"wait", "sleep", "thread"}
        Collectives under way advance while the caller waits or tests. With ``"thread"``, a background thread advances
        them, too. With ``"sleep"``, waits sleep early, so that other threads get the core; latency grows a little.
    timeout : float, optional
        Seconds without progress after which a wait raises an error; by default COMPCOLL_TIMEOUT, or 1800. If this
        parameter or the variable is set, no call blocks in MPI, where a timeout has no effect. ``"auto"`` then uses
        other algorithms instead of MPI's reductions. With ``algorithm="native"``, reductions take up to three times as
        long, and longer with MPICH.
    checksum : bool
        Whether encoded segments carry a CRC-32C, so that bits that change in transit raise `WireCorrupted`. If so,
        MPI's own collectives, which have no checksum, are refused and never chosen. For arrays on a GPU, checksums are
        computed and verified in pinned host memory.
    **codec_options
        Options of a codec given by name.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    nodes : sequence of int
        Node index of each rank.

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
        if progress == "nap":
            warn('progress="nap"', 'progress="sleep"', stacklevel=2)
            progress = "sleep"
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
            self._connect(transport, codec, codec_options)
        live(self)

    def _connect(self, transport: Connection, codec: Any, codec_options: dict[str, Any]) -> None:
        """Create the state that this communicator's collectives share. Collective."""
        progress, timeout, checksum = (self._settings[name] for name in ("progress", "timeout", "checksum"))
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.nodes = transport.nodes
        neighbours = list(self.nodes).count(self.nodes[self.rank])
        cores = usable_cores() / neighbours if transport.cores is None else transport.cores
        if progress not in ("wait", "sleep", "thread"):
            raise InvalidArgument(f'progress={progress!r} is none of "wait", "sleep" and "thread"')
        if not isinstance(checksum, bool):
            raise InvalidArgument(f"checksum={checksum!r}: True or False is needed")
        seconds, self._debug = config.timeout(timeout), config.debug()
        observation.set_up()
        own_codec, tolerance = named_codec(codec, codec_options)
        device = HostDevice(config.threads(cores))
        profile = profile_for(transport, device.name)
        world = World.of(transport.nodes)
        self._handshake = Handshake(transport, _HANDSHAKE_TAG, transport.mail)
        self._failure_detector = FailureDetector(transport)
        # Between nodes, polling the network costs more than lending the core to other work.
        crowded = cores < 1 or world.nodes > 1
        self._engine = Engine(
            *(seconds, self._failure_detector),
            threaded=progress == "thread",
            crowded=crowded,
            lent=world.nodes > 1 and transport.lends_core,
            sleeps=progress == "sleep",
            private=transport.blocks,
        )
        self._one_call = OneCall()
        self._slots = Slots(transport, device.empty_bytes)
        self._trace = Trace.of(transport)
        self._programs = Programs(transport, self._handshake, traced=self._trace is not None)
        self._collectives = Collectives(
            device,
            Ranks(
                self.rank,
                transport.native,
                own_codec,
                tolerance,
                self._settings["algorithm"],
                profile,
                world,
                self._handshake.arrays,
                transport.shared if world.nodes == 1 else None,
                has_timeout=timeout is not None or config.timeout_is_set(),
                checksum=checksum and self.size > 1,
                blocks=transport.blocks,
            ),
        )
        self._gpu: DeviceCollectives | None = None
        self._broken: BaseException | None = None
        self._ticket: OrderingTicket | None = None  # the last one issued; None before the first
        self._sequence_number = 0
        self._last: Stats | tuple[str, CompiledPlan, Operation, int, float] | None = None
        self._logged: Stats | None = None
        self._shown = False
        self._known: dict[tuple[Any, ...], tuple[CompiledPlan, tuple[int, ...] | None]] = {}

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last collective that ended; None before the first."""
        last = self._last
        if isinstance(last, tuple):  # built only when it is read
            collective, plan, operation, nbytes, seconds = last
            stats = Stats(collective, plan.plan.codec_text, plan.plan.algorithm, nbytes, error=plan.plan.error)
            store_account(stats, operation)
            stats.total_seconds = seconds
            last = self._last = stats
        return last

    begun = renamed_attribute("begun", "sequence_number")

    @property
    def sequence_number(self) -> int:
        """Number of collectives that began. Codecs with random rounding derive their random numbers from it.

        To resume from a checkpoint with a new communicator, set the saved number on all ranks while no collective is
        under way.
        """
        return self._sequence_number

    @sequence_number.setter
    def sequence_number(self, number: int) -> None:
        self._sequence_number = number

    def _prepare_feedback(self, feedback: ErrorFeedback, x: Any) -> None:
        """Allocate the state of a feedback for buffers like ``x`` before its first call: zeros, on the device of ``x``.

        Raises
        ------
        InvalidBuffer
            If the feedback has state of another size or element type.
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
        """Return the plan of a blocking call without running it: nothing is sent, and no buffer is read.

        A printed plan shows the time that the cost model predicts for each variant of the call, why some are refused,
        and which one was chosen and why. Its ``algorithm`` and ``codec`` are those of the call's `Stats`.

        Parameters
        ----------
        x : array
            An array like the call's. Only its element type, shape and device matter.
        collective : str
            Name of the collective.
        op, root, codec, algorithm, **options
            The call's arguments, if the collective has them.

        Raises
        ------
        CompcollError
            If the call would be refused. Only this rank raises it.

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
        """Complete all collectives under way and free the private MPI communicator. Collective."""
        with self._one_call:
            if self._broken is None:
                self._engine.drain()
                self._programs.free()
                if self._gpu is not None:
                    self._gpu.free()
                self._transport.free()
        self._engine.close()
        self._broken = CommunicatorBroken("it was freed")

    def invalidate(self, error: CommunicatorBroken, forked: bool) -> None:
        """Make the communicator unusable without calling MPI (implements `compcoll.lifetime.Invalidatable`)."""
        if forked:
            self._engine.lock, self._one_call = RLock(), OneCall()
        if self._broken is None:
            self._broken = error
        self._engine.fail(error)

    def shrink(self) -> Communicator:
        """Return a communicator of the ranks that are alive, with the settings of this one.

        Collective among those ranks, which keep their order. This communicator cannot be used afterwards.

        Some of the ranks may have completed the collective in which a rank died, and others not. Use a collective of
        the new communicator to agree on where to continue. Error feedback belongs to the caller and stays valid.

        Raises
        ------
        UnsupportedRecovery
            If MPI cannot continue without a rank: start the job with Open MPI 5's ``mpirun --with-ft ulfm``.
        PeerTimeout
            If not all ranks that are alive call this in time.

        References
        ----------
        W. Bland et al., "Post-failure recovery of MPI communication capability: Design and rationale", International
        Journal of High Performance Computing Applications 27(3), 2013 (ULFM).
        """
        survivors = self._transport.survivors(self._engine.timeout)
        self._break(CommunicatorBroken("it was shrunk"))
        self._engine.close()
        return Communicator(survivors, **self._settings)

    def _agree(self, call: Signature, timeout: float | None = None) -> None:
        """Check that all ranks make the same call, which the caller then runs without this communicator.

        The check counts as a collective of the communicator: all ranks must make it at the same place in their order.

        Parameters
        ----------
        call : Signature
            One line that describes the call, equal on all ranks.
        timeout : float, optional
            As in collectives.

        Raises
        ------
        CollectiveMismatch
            On every rank, if the calls differ.
        PeerTimeout, PeerFailed, CommunicatorBroken
            As in collectives.
        """
        with self._one_call:
            self._check_usable()
            self._sequence_number += 1
            own = call.here() if self._debug else call
            ticket, steps = self._next_ticket(), self._handshake.agree(own, FREE)
            try:
                if ticket.before is not None:
                    self._engine.drive(ticket.Test, timeout, lambda: "the handshakes before")
                self._engine.follow(steps, call.call, timeout)
            except BaseException as error:
                self._failed(error)
            finally:
                ticket.used = True

    def call(self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked) -> Any:
        """Run a collective; see `Methods.call`.

        Equivalent to `start` and `Request.wait`, but faster: if no other collective is under way on this rank, no
        `Request` is created.
        """
        if type(x) is not ndarray and is_foreign(x):
            seen, memory = self._seen(collective, x, out)
            result = self.call(collective, seen, param, memory, feedback, asked)
            return _handed_over(result, x, out)
        if observation.watch._is_profiler_enabled and not self._shown:
            return self._show(collective, x, param, out, feedback, asked)
        one_call = self._one_call
        if one_call.entered:
            raise busy()
        one_call.entered = True  # as `with one_call` does, but faster
        try:
            return self._call(collective, x, param, out, feedback, asked)
        finally:
            one_call.entered = False

    def _call(self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked) -> Any:
        started = perf_counter()
        plan, buffers = self._check(collective, x, param, out, feedback, asked)
        spins, sleeps = self._engine.alone
        if plan.timeout is not None:
            sleeps = min(sleeps, sleeps_within(plan.timeout))
        begun = self._begin_alone(collective, plan, buffers, spins, sleeps)
        if begun is None:
            return self._wait(self._begin(collective, plan, buffers))
        call, operation = begun
        if call.done:
            self._last = collective, plan, operation, buffers.x.nbytes, perf_counter() - started
            if self._trace is not None and (ran := self.stats) is not None:
                ran.spans = recorded(call, operation, ran.algorithm, ran.raw_nbytes)
                self._trace.write(plan, ran, self._sequence_number - 1, started)
            return buffers.result
        stats = _stats(collective, plan, buffers, traced=self._trace is not None)
        signature, number = self._signature(plan), self._sequence_number - 1
        slot = self._slots.rotating[number % AT_ONCE]  # used if some rank has other collectives to advance
        run = Run(slot.group, slot.allocate, stats, OrderingTicket(None), number)
        try:
            steps = self._rest(plan, buffers, run, self._slots.alone, call, operation, signature)
            result = self._engine.follow(steps, signature, plan.timeout)
        except BaseException as error:
            self._failed(error, plan, *buffers)
        stats.total_seconds = perf_counter() - started
        self._last = stats
        if self._trace is not None:
            self._trace.write(plan, stats, number, started)
        return result

    def _begin_alone(
        self, collective: str, plan: CompiledPlan, buffers: Buffers, spins: int, sleeps: int
    ) -> tuple[Collective, Operation] | None:
        """Begin a call in the slot `Slots.alone`, and wait for its end for at most ``spins`` and ``sleeps``.

        Return None, without having begun, if other collectives are under way, or if no operation runs the call.
        """
        if under_way or self._engine.active or buffers.order is not None or buffers.apart:
            return None
        residual = buffers.residual
        try:
            call, operation, _ = self._programs.compiled(plan, self._slots.alone, FREE, residual is not None)
        except Exception as error:  # for example, no memory for the wires
            self._refuse(collective, error)
        if operation is None:
            return None
        number = self._sequence_number
        self._sequence_number = number + 1
        try:
            call.begin(buffers.x, buffers.out, residual, number, spins, sleeps)
        except BaseException as error:
            self._failed(error, plan, *buffers)
        return call, operation

    def start(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> Request:
        """Start a collective; the parameters are those of `call`."""
        if type(x) is not ndarray and is_foreign(x):
            seen, memory = self._seen(collective, x, out)
            request = self.start(collective, seen, param, memory, feedback, asked)
            request.finish = partial(_handed_over, x=x, out=out)
            return request
        with self._one_call:
            return self._start(collective, *self._check(collective, x, param, out, feedback, asked))

    def prepare(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> PersistentRequest:
        """Prepare a collective that can be started repeatedly; the parameters are those of `call`."""
        memory, result = (x, out) if type(x) is ndarray or not is_foreign(x) else self._seen(collective, x, out)
        with self._one_call:
            plan, buffers = self._check(collective, memory, param, result, feedback, asked)

        def begin(request: PersistentRequest) -> None:
            with self._one_call:
                self._check_usable()
                run = plan, buffers
                if buffers.order is not None:  # on a GPU: the run follows the work that the caller has launched so far
                    run = self._check(collective, memory, param, buffers.result, feedback, asked)
                elif feedback is not None:
                    run = plan, self._collectives.fed_back(plan, buffers, feedback)
                self._start(collective, *run, request)
            if memory is not x:
                request.finish = partial(_handed_over, x=x, out=out)

        return PersistentRequest(begin, _stats(collective, plan, buffers), buffers.result)

    def _start(
        self, collective: str, plan: CompiledPlan, buffers: Buffers, persistent: PersistentRequest | None = None
    ) -> Request:
        """Start a collective as `_begin` does, and show its start, and later its wait, in profiles."""
        if not observation.watch._is_profiler_enabled:
            return self._begin(collective, plan, buffers, persistent)
        name = self._name(plan, buffers)
        with observation.in_profiles(f"{name} start"):
            request = self._begin(collective, plan, buffers, persistent)
        request.range_name = name
        return request

    def _show(self, *given: Any) -> Any:
        """Run a blocking collective, and show it in profiles and in the log. Its arguments are those of `call`."""
        with self._one_call:
            name = self._name(*self._check(*given))
        self._shown = True
        try:
            with observation.in_profiles(name):
                result = self.call(*given)
        finally:
            self._shown = False
        self._log(self.stats)
        return result

    def _name(self, plan: CompiledPlan, buffers: Buffers) -> str:
        """Return the name of a collective in profiles."""
        collectives = self._collectives if buffers.order is None or self._gpu is None else self._gpu
        return observation.name_of(collectives.running(plan), buffers.x.nbytes)

    def _log(self, stats: Stats | None) -> None:
        """Log the end of a collective, once. A blocking call may have run as a request, which logs it, too."""
        if stats is not None and stats is not self._logged:
            self._logged = stats
            observation.log_end(self.rank, stats)

    def _begin(
        self, collective: str, plan: CompiledPlan, buffers: Buffers, persistent: PersistentRequest | None = None
    ) -> Request:
        """Start a collective and return its request: ``persistent`` if given, else a new one."""
        started, begun = perf_counter(), None
        if persistent is not None and plan.unblocked is None:  # a plan with `unblocked` may block in MPI
            begun = self._begin_alone(collective, plan, buffers, min(self._engine.alone[0], _SPINS_OF_START), 0)
            if begun is not None and begun[0].done:
                stats = _stats(collective, plan, buffers)
                store_account(stats, begun[1])
                stats.total_seconds = perf_counter() - started
                self._last = stats
                self._log(stats)
                if self._trace is not None:
                    stats.spans = recorded(*begun, stats.algorithm, stats.raw_nbytes)
                    self._trace.write(plan, stats, self._sequence_number - 1, started)
                persistent.has_ended(stats, buffers.result)
                return persistent
        signature, ticket = self._signature(plan), self._next_ticket()
        request = Request() if persistent is None else persistent
        if begun is None:
            self._sequence_number += 1
            plan = plan.unblocked or plan
        number = self._sequence_number - 1
        slot = self._slots.rotating[number % AT_ONCE]
        stats = _stats(collective, plan, buffers, traced=self._trace is not None)
        run = Run(slot.group, slot.allocate, stats, ticket, number)
        if begun is None:
            steps = self._steps(plan, buffers, run, slot, slot.last, signature)
        else:
            self._slots.alone.last = run
            steps = self._rest(plan, buffers, run, self._slots.alone, *begun, signature)
        slot.last = run

        def release(error: BaseException | None) -> BaseException | None:
            self._last = stats
            ticket.used = run.ended = True
            if error is None:
                self._log(stats)
                if self._trace is not None:
                    self._trace.write(plan, stats, number, started)
            return error and self._ended(error, plan, buffers)

        request.begin(steps, stats, self._engine, release=release, timeout=plan.timeout)
        if self._gpu is not None and buffers.order is not None:
            request.finish = partial(self._gpu.handed_over, buffers.order)
        try:
            self._engine.start(request)
        except BaseException as error:  # an interrupt: the caller never gets the request
            self._break(error, plan, buffers)
            raise
        return request

    def _steps(
        self, plan: CompiledPlan, buffers: Buffers, run: Run, slot: Slot, before: Run | None, signature: Signature
    ) -> Steps:
        """Run a collective, from its handshake to its result, while others may be under way."""
        queued = perf_counter()
        if run.ticket.before is not None:
            yield run.ticket
        if before is not None and not before.ended:  # wait before the handshake, so that later collectives wait, too
            yield before
        if run.stats.spans is not None:
            run.stats.spans.append((QUEUE, queued, perf_counter(), 0, ""))
        level, given = BUSY, buffers
        if buffers.order is not None:
            level = ON_GPU
            if plan.piggyback is not None:
                assert self._gpu is not None
                given = buffers._replace(x=(yield from self._gpu.fetch_small(buffers)))
        call, operation, _ = self._programs.compiled(plan, slot, level, buffers.residual is not None)
        call.begin(given.x, given.out, given.residual, run.number, 1, 0)
        return (yield from self._rest(plan, buffers, run, slot, call, operation, signature))

    def _rest(
        self,
        plan: CompiledPlan,
        buffers: Buffers,
        run: Run,
        slot: Slot,
        call: Collective,
        operation: Operation | None,
        signature: Signature,
    ) -> Steps:
        """Finish a call under way: its handshake, then its operation or its plan's steps."""
        while call.level is None and not call.ended:
            yield call
        if call.level is None:
            yield from self._handshake.compare(signature)
        if slot is self._slots.alone and call.level != FREE:  # some rank has other collectives to advance
            plan, slot = plan.unblocked or plan, self._slots.rotating[run.number % AT_ONCE]
            run.stats.algorithm = plan.plan.algorithm
            operation = self._programs.compiled(plan, slot, BUSY, buffers.residual is not None).operation
        if call.level == ON_GPU and plan.on_gpus is not None:
            result = yield from steps_of(partial(plan.on_gpus, buffers), run)
            if run.stats.spans is not None:
                run.stats.spans += recorded(call, None, run.stats.algorithm, 0)
            return buffers.result if result is None else result
        ordered = choose.ORDERED if operation is None else (choose.SHARED_MEMORY,)
        if plan.plan.algorithm not in ordered:
            run.ticket.used = True
        result = None
        if operation is None:
            slot.arena.rewind()
            result = yield from steps_of(partial(plan.steps, plan.plan, buffers.flat()), run)
        elif call.ended and not call.done:
            yield from driven(operation, buffers, run)
        else:
            while not call.done:
                yield call
            store_account(run.stats, operation)
        if run.stats.spans is not None:
            run.stats.spans += recorded(call, operation, run.stats.algorithm, buffers.x.nbytes)
        if buffers.apart:
            buffers.result.reshape(-1)[:] = buffers.out.view(buffers.result.dtype)
        return buffers.result if result is None else result

    def _signature(self, plan: CompiledPlan) -> Signature:
        """Return the signature to show if the ranks' calls differ; in debug mode it has the caller's file and line."""
        return plan.plan.signature.here() if self._debug else plan.plan.signature

    def _check(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        """Check the arguments, unless an earlier call had similar ones, and return the plan and the buffers.

        If they are refused, all ranks raise an error: the other ranks wait in the same collective.
        """
        if self._broken is not None:
            self._check_usable()
        try:
            key = None
            if type(x) is ndarray:
                codec, algorithm, options = asked
                key = (collective, x.shape, x.dtype, param, feedback is None, codec, algorithm, *options.items())
                try:
                    known = self._known.get(key)
                except TypeError:  # unhashable: refused below
                    known = key = None
                in_place = out is not None and collective == "alltoall"  # refused below
                if known is not None and not in_place and (buffers := self._like_known(x, out, known[1])) is not None:
                    plan = known[0]
                    return plan, buffers if feedback is None else self._collectives.fed_back(plan, buffers, feedback)
            collectives = self._collectives if key is not None or not gpu_memory(x) else self._on_gpu(x)
            plan, buffers = collectives.check(collective, x, param, out, feedback, asked)
            observation.log_first_call(self.rank, plan, collectives.running, feedback=feedback is not None)
            if key is not None and buffers.x.dtype is x.dtype and _can_be_known(plan.plan, buffers):
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = plan, None if buffers.result is None else buffers.result.shape
            return plan, buffers
        except Exception as error:
            self._refuse(collective, error)

    @staticmethod
    def _like_known(x: Any, out: Any, shape: tuple[int, ...] | None) -> Buffers | None:
        """Return the buffers of a call that equals a known one except for the arrays; None if a check is needed.

        ``shape`` is that of the result; None on a rank without a result.
        """
        flags = x.flags
        if not (flags.c_contiguous and flags.aligned):
            return None
        if shape is None:
            return Buffers(x, None, None)
        if out is None:
            out = empty(shape, x.dtype)
        elif not HostDevice.fits(out, x, shape):
            return None
        return Buffers(x, out, out)

    def _seen(self, collective: str, x: Any, out: Any) -> tuple[Any, Any]:
        """View another library's host arrays as NumPy arrays. If that fails, all ranks raise an error."""
        self._check_usable()
        try:
            return as_numpy(x, "x"), as_numpy(out, "out") if is_foreign(out) else out
        except Exception as error:
            with self._one_call:
                self._refuse(collective, error)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommunicatorBroken(f"this communicator cannot be used any more: {self._broken!r}") from self._broken

    def _on_gpu(self, x: Any) -> DeviceCollectives:
        """Return the collectives for GPU arrays. They use the GPU of the first such array that was passed."""
        if self._gpu is None:
            direct = self._transport.takes_device_memory()
            self._gpu = DeviceCollectives(
                cuda_device(x),
                self._collectives,
                self._transport,
                direct=direct,
                threaded=self._settings["progress"] == "thread",
                seconds=self._engine.timeout,
            )
        return self._gpu

    def _refuse(self, collective: str, error: Exception) -> NoReturn:
        """Inform all ranks that this rank cannot make its call, and raise the error."""
        signature = Signature(unmade(collective, error), f"by rank {self.rank}")
        self._sequence_number += 1
        ticket = self._next_ticket()

        def steps() -> Steps:
            yield ticket
            yield from self._handshake.agree(signature, BUSY)

        def release(failure: BaseException | None) -> BaseException | None:
            ticket.used = True
            return self._ended(failure)

        request = Request()
        request.begin(steps(), Stats(collective, None, "refused"), self._engine, release=release)
        self._engine.start(request)
        others: Exception | None = None
        try:
            self._wait(request)
        except CompcollError as raised:
            others = raised
        failure = as_failure(error, self.rank, collective)
        raise failure from others if failure is error else error

    def _wait(self, request: Request) -> Any:
        """Wait for a request that the caller never gets. An interrupt breaks the communicator."""
        try:
            return request.wait()
        except BaseException as error:
            if not request.done:
                self._break(error)
            raise

    def _failed(self, error: BaseException, *parts: Any) -> NoReturn:
        """Raise the error that ended a collective. Break the communicator first, unless the ranks' calls differed."""
        failure = self._ended(error, *parts)
        if failure is error or failure is None:
            raise error
        raise failure from error

    def _ended(self, error: BaseException | None, *parts: Any) -> BaseException | None:
        """Return the error to raise after a collective has ended; None if it ended without an error.

        Any error except a mismatch of the ranks' calls breaks the communicator.
        """
        if error is None or error is self._handshake.mismatch or isinstance(error, ReferenceMismatch):
            return error
        return self._break(error, *parts)

    def _break(self, error: BaseException, *parts: Any) -> BaseException:
        """Make the communicator unusable: inform the other ranks, and end all requests under way.

        Memory that MPI may still write to is never freed. Return the error to raise, which names the dead rank or the
        call where possible.
        """
        keep_forever((self._handshake, self._slots, *parts))
        broken, error = error, as_failure(error, self.rank, *parts)
        if self._broken is None:
            error = self._transport.failure(broken) or error
            self._broken = error
            self._failure_detector.announce(error)
            self._engine.fail(error)
        return error

    def _next_ticket(self) -> OrderingTicket:
        self._ticket = OrderingTicket(self._ticket)
        return self._ticket


def _stats(collective: str, plan: CompiledPlan, buffers: Buffers, *, traced: bool = False) -> Stats:
    about, spans = plan.plan, list[Span]() if traced else None
    return Stats(collective, about.codec_text, about.algorithm, buffers.x.nbytes, error=about.error, spans=spans)


def _handed_over(result: Any, x: Any, out: Any) -> Any:
    """Return a result as the caller's array ``out``, or as one of x's kind; None on a rank without a result."""
    return like(result, x) if result is None or out is None else out


def _can_be_known(plan: Plan, buffers: Buffers) -> bool:
    """Return whether calls with equal arguments can reuse the plan, so that only their arrays need a check."""
    codec = plan.call.codec
    return (
        plan.call.rows is None
        and plan.algorithm not in choose.SPARSE
        and not buffers.apart
        and not (codec is not None and codec.needs_reference)
    )
