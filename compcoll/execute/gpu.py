"""Collectives on arrays of an asynchronous device, such as a GPU.

They extend the collectives of `compcoll.execute.host`, and run in stream order with the caller's other work. Codec and
algorithm are chosen as for host arrays, so that some ranks of a collective may have host arrays and others GPU arrays.
Algorithms and codecs without kernels on the device run on copies in pinned host memory. So do MPI's own collectives: in
Open MPI, only point-to-point messages and blocking collectives take device memory (its FAQ, "Running CUDA-aware Open
MPI"), and it copies reductions to the host, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import config
from ..codecs.base import Array, Codec, Coders
from ..codecs.cast import uncompressed
from ..codecs.sparse.sparsifier import SparseCoder, SparseSum, Sparsifier
from ..dtypes import DTYPES, HALVES, numpy_dtype
from ..errors import CollectiveMismatch, InvalidArgument, UnsupportedDevice
from ..feedback import ErrorFeedback
from ..gpu.device_memory import DeviceBuffers, DeviceMemory
from ..gpu.device_transport import DeviceTransport
from ..gpu.ipc_transport import IPCTransport, Links
from ..gpu.selection import SparseDevice, StagedCopies
from ..gpu.stream_transport import HasBootstrap, StreamTransport
from ..gpu.streams import Timeline
from ..gpu.watchdog import NCCLBase
from ..kernels._host import PiggybackReduction
from ..pending import Steps
from ..plan import choose
from ..plan.call import Call
from ..plan.choose import COPY
from ..plan.plan import Plan, coder_on, with_checksum
from ..stats import UNKNOWN
from ..transports.base import Group, Transport
from .compiled_plan import Asked, Buffers, CompiledPlan, Order, Run, driven, feedback_refused
from .gpu_group import GpuGroup
from .host import Checked, Collectives
from .trace import with_messages


class DeviceCollectives(Collectives):
    """Prepares collectives on arrays of one device among some ranks.

    Parameters
    ----------
    device : CudaDevice
        The arrays' device.
    host : Collectives
        Collectives of the same ranks on host arrays. They choose the plans, and run what the device cannot.
    transport : Transport
        Transport between the ranks.
    direct : bool
        Whether the transport takes device memory. Wires with checksums use pinned memory nevertheless.
    threaded : bool
        Whether a separate thread advances the collectives.
    seconds : float
        Time limit of work on streams that waits for other ranks.
    """

    def __init__(
        self,
        device: Any,
        host: Collectives,
        transport: Transport,
        *,
        direct: bool,
        threaded: bool = False,
        seconds: float = config.DEFAULT_TIMEOUT,
    ) -> None:
        self._calls = DeviceBuffers(device)
        super().__init__(self._calls, host._ranks)  # type: ignore[arg-type]
        checksum = host._ranks.checksum
        self._host = host
        self._transport = transport
        self._direct = direct and not checksum
        self._threaded = threaded
        self._sealing = host._device if checksum else None
        self._here = device
        self._free: list[DeviceMemory] = []
        self._in_use: list[DeviceMemory] = []
        self._fetched = device.runtime.pinned_bytes(0)
        self._seconds = seconds
        bootstrap = transport.bootstrap(device) if isinstance(transport, HasBootstrap) else device.bootstrap()
        apart = isinstance(transport, HasBootstrap) or host._setting.world.nodes > 1
        self._gpu_group = GpuGroup(host._setting, bootstrap, None if apart else self._links, seconds)
        self.free = self._gpu_group.free

    @property
    def gpu_transport_known(self) -> bool:
        """Whether the ranks have already chosen how messages go from GPU to GPU."""
        return self._gpu_group.known

    def check(
        self, collective: str, x: Array, param: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        """Check a call as `Collectives.check` does; ``stream`` is one of the options."""
        codec, algorithm, options = asked
        stream = options.get("stream")
        options = {name: value for name, value in options.items() if name != "stream"}
        caller = self._calls.caller = self._here.caller(x, stream)
        if self._threaded and self._here.is_of_one_thread(caller):
            raise InvalidArgument(
                "the caller's stream is CUDA's per-thread default stream, which no other thread can use: launch on a "
                'stream that you created and pass it as stream=, or choose progress="wait" instead of "thread"'
            )
        with self._here.current_stream(caller):
            compiled, buffers = super().check(collective, x, param, out, feedback, (codec, algorithm, options))
        order = Order(caller, self._here.runtime.record(caller), x, stream, new=out is None)
        return compiled, buffers._replace(order=order)

    def _make(self, call: Call, *, has_timeout: bool) -> CompiledPlan:
        chosen, here, dtype = self._host._make(call, has_timeout=has_timeout), self._here, call.dtype
        chosen = chosen.unblocked or chosen
        plan, on_device = chosen.plan, True
        if chosen.piggyback is not None:
            stored = partial(self._stored, chosen.piggyback)
            return CompiledPlan(plan, lambda _, buffers, run: stored(buffers, run), chosen.piggyback)
        steps: Callable[[Buffers, Run], Steps] = partial(self._through_host, chosen)
        if plan.algorithm == COPY:
            on_device = False
            steps = self._copy if call.rows is None else partial(self._steps_of[call.collective], plan)
        elif plan.quantizer is not None and not plan.gathers:
            additive: Any = plan.codec
            steps = partial(self._add, additive.quantizer(here, dtype, self._size), plan)
        elif plan.algorithm in choose.SPARSE:
            steps = lambda buffers, run: self._sparse(compiled, buffers, run)  # noqa: E731
        else:
            moved = plan.coders is not None and not plan.gathers and not isinstance(plan.codec, Sparsifier)
            bound = self._on_device(plan, dtype) if moved else None
            on_device = bound is not None
            if bound is not None:
                steps = partial(self._steps_of[call.collective], bound)
        ordered = partial(self._ordered, steps, on_device)
        compiled = CompiledPlan(plan, lambda _, buffers, run: ordered(buffers, run))
        if GpuGroup.has_gpu_plan(plan) and self._bound(call, dtype):
            if plan.codec is None:  # only the plan on GPUs encodes, and has a residual
                compiled.steps = lambda _, buffers, run: ordered(buffers._replace(residual=None), run)
            compiled.on_gpus = partial(self._all_on_gpus, call, compiled)
        return compiled

    def _bound(self, call: Call, dtype: str) -> bool:
        """Return whether the call's codec has kernels on this device."""
        return call.codec is None or self._here.owns(call.codec.coder(self._here, dtype))

    def _all_on_gpus(self, call: Call, otherwise: CompiledPlan, buffers: Buffers, run: Run) -> Steps:
        """Run a collective, after its handshake, in which all ranks' arrays are on GPUs."""
        gpu_group, ticket = self._gpu_group, run.ticket
        if not gpu_group.known:
            yield from gpu_group.connect(Group(self._transport, run.group.tag))
        plan, gpu_transport, links = gpu_group.plan(call), gpu_group.gpu_transport, None
        on_the_host = not plan.setting.streamed and plan.algorithm in choose.ON_THE_HOST
        # `exceeds_max_error`: the first call was checked before the GPU transport was known.
        if on_the_host or plan.exceeds_max_error:
            ticket.used = otherwise.plan.algorithm not in choose.ORDERED
            return (yield from otherwise.steps(otherwise.plan, buffers, run))
        if not plan.setting.streamed:
            gpu_transport, ticket.used, links = None, True, gpu_group.links
        run.stats.algorithm, run.stats.codec, run.stats.error = plan.algorithm, plan.codec_text, plan.error
        if plan.codec is None:
            buffers = buffers._replace(residual=None)
        if plan.algorithm == choose.NATIVE:
            steps: Callable[[Buffers, Run], Steps] = partial(self._by_gpu_transport, call)
        else:
            bound = self._on_device(plan, call.dtype)
            assert bound is not None
            steps = partial(self._steps_of[call.collective], bound)
        if gpu_transport is not None:
            gpu_transport.check()
        result = yield from self._ordered(steps, True, buffers, run, gpu_transport, links)
        if links is not None:
            run.stats.gpu_transport = links.name
        elif gpu_transport is not None:
            assert buffers.order is not None and buffers.order.ending is not None
            run.stats.gpu_transport = gpu_transport.name
            what = f"{call.collective} by {plan.algorithm}"
            gpu_transport.watch(buffers.order.ending.last, what, self._limit(otherwise))
        ticket.used = True  # only now: all ranks must put work on their streams in the same order
        return result

    def _links(self) -> Links:
        """Create this rank's part of the memory that the GPUs of a node share."""
        if self._direct:
            raise UnsupportedDevice("MPI takes the GPU's memory itself")
        return Links(self._here.sharing(), self._here.streams)

    def _by_gpu_transport(self, call: Call, buffers: Buffers, run: Run) -> Steps:
        """Run the GPU transport's own allreduce."""
        timeline, gpu_transport = _of_device(run)[0], self._gpu_group.gpu_transport
        assert gpu_transport is not None
        stream = timeline.exchanging()
        gpu_transport.allreduce(buffers.x, buffers.out, call.dtype, mean=call.op == "mean", stream=stream)
        timeline.exchanged(())
        run.stats.wire_nbytes = UNKNOWN
        yield None

    def _on_device(self, plan: Plan, dtype: str) -> Plan | None:
        """Return the plan with the device's coders; None if the device has no kernels for them."""
        if dtype not in DTYPES:
            return None
        raw = uncompressed(self._here, dtype)
        coder = raw if plan.codec is None else coder_on(self._here, plan.codec, plan.call, plan.setting)
        if not self._here.owns(coder):
            return None
        if self._ranks.checksum:
            raw, coder = with_checksum(raw, self._device), with_checksum(coder, self._device)
        return replace(plan, coders=Coders(coder, raw))

    def _largest(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        """Return the largest finite magnitude of all ranks' values, which they agree on through the host."""
        timeline, pinned = _of_device(run)
        timeline.encoding((), of_result=False)
        own = self._here.largest(buffers.x, plan.call.dtype)
        run = replace(run, group=self._over_host(run), allocate=pinned, timeline=None)
        return (yield from self._host._agree_on_largest(own, plan, run))

    def _with_codec(self, plan: Plan, codec: Codec) -> Plan:
        bound = self._on_device(replace(plan, codec=codec), plan.call.dtype)
        assert bound is not None
        return bound

    def prepare_feedback(self, feedback: ErrorFeedback, x: Array) -> None:
        # Freed memory is reused in the order of the stream that is current at its allocation.
        with self._here.current_stream(self._here.caller(x, None)):
            super().prepare_feedback(feedback, x)

    def fed_back(self, plan: CompiledPlan, buffers: Buffers, feedback: ErrorFeedback) -> Buffers:
        fed = super().fed_back(plan, buffers, feedback)
        if plan.on_gpus is None or plan.plan.call.codec is None:
            return fed
        if refused := feedback_refused(replace(plan.plan, codec=plan.plan.call.codec)):
            raise InvalidArgument(refused)
        return buffers._replace(residual=feedback.residual)

    def running(self, compiled: CompiledPlan) -> Plan:
        plan = compiled.plan
        if compiled.on_gpus is None:
            return plan
        planned = self._gpu_group.plan(plan.call)
        return plan if planned.algorithm in choose.ON_THE_HOST and not planned.setting.streamed else planned

    def _ordered(
        self,
        inner: Callable[[Buffers, Run], Steps],
        on_device: bool,
        buffers: Buffers,
        run: Run,
        gpu_transport: NCCLBase | None = None,
        links: Links | None = None,
    ) -> Steps:
        """Run a collective in stream order, after the work that the caller has launched."""
        # Two memories alternate: the host launches the next call while the kernels of this one run.
        memory = self._free.pop(0) if len(self._free) > 1 else DeviceMemory(self._here.runtime)
        self._in_use.append(memory)  # stays there after an error, since MPI may still write to it
        yield from memory.guards
        memory.reset()
        order = buffers.order
        assert order is not None
        pinned = memory.pinned.allocate
        by_gpu = self._direct or gpu_transport is not None or links is not None
        timeline = Timeline(self._here.streams, order.caller, order.before, None if by_gpu else pinned)
        transport: Transport = DeviceTransport(self._transport, timeline, self._sealing)
        if gpu_transport is not None:
            transport = StreamTransport(gpu_transport, timeline, self._transport)
        elif links is not None:
            memory.shared = True
            transport = IPCTransport(links, self._transport, timeline, memory.here, pinned)
        group = Group(with_messages(self._here.shown(transport), run.stats.spans), run.group.tag)
        try:
            result = yield from inner(
                buffers, replace(run, group=group, allocate=memory.here.allocate, timeline=timeline, pinned=pinned)
            )
        except CollectiveMismatch:  # the previous values of a codec differ: all messages have come
            self._in_use.remove(memory)
            self._free.append(memory)
            raise
        if isinstance(transport, IPCTransport):
            yield from transport.finish(run.group.tag)
        order.ending, memory.guards = timeline.end(buffers.x, buffers.out, buffers.residual)
        self._in_use.remove(memory)
        self._free.append(memory)
        if on_device:
            run.stats.device = self._here.name
        return buffers.result if result is None else result

    def handed_over(self, order: Order, result: Any) -> Any:
        """Return the result as an array of the caller's kind.

        Later work in the caller's stream, which is the call's ``stream=`` or the current stream, waits for it.
        """
        assert order.ending is not None
        if self._gpu_group.gpu_transport is not None:
            self._gpu_group.gpu_transport.check()
        now = self._here.caller(order.x, order.stream)
        order.ending.order(now)
        if result is None or not order.new:
            return result
        back = partial(self._here.given_back, x=order.x, caller=now)
        if isinstance(result, SparseSum):
            return result._replace(indices=back(result.indices), values=back(result.values))
        return back(result)

    def fetch_small(self, buffers: Buffers) -> Steps:
        """Copy a small array, which travels with the handshake, to the host."""
        order, x = buffers.order, buffers.x
        assert order is not None
        if x.nbytes > self._fetched.nbytes:
            self._fetched = self._here.runtime.pinned_bytes(x.nbytes)
        copy = self._fetched[: x.nbytes]
        yield Timeline(self._here.streams, order.caller, order.before, None).fetch(x, copy)
        return copy.view(x.dtype)

    def _stored(self, reduction: PiggybackReduction, buffers: Buffers, run: Run) -> Steps:
        """Sum the arrays that arrived with the handshake, and store the result on the device."""
        sums = np.empty(buffers.x.size, buffers.x.dtype)
        # At once, since the next handshake overwrites the arrays.
        yield from driven(reduction, buffers._replace(out=sums), run)

        def store(buffers: Buffers, run: Run) -> Steps:
            timeline, pinned = _of_device(run)
            copy = pinned(sums.nbytes)
            copy[:] = sums.view(np.uint8)
            timeline.store(copy, buffers.out)
            yield None

        return (yield from self._ordered(store, False, buffers, run))

    def _empty(self, buffers: Buffers, run: Run, shape: tuple[int, ...]) -> Array:
        timeline, _ = _of_device(run)
        return timeline.allocated(lambda caller: self._here.empty_like(buffers.result, shape, caller))

    def _copy(self, buffers: Buffers, run: Run) -> Steps:
        if buffers.out is not buffers.x:
            _of_device(run)[0].store(buffers.x, buffers.out)
        yield None

    def _numbers_by_mpi(self, run: Run, numbers: Array, op: str) -> Steps:
        timeline, pinned = _of_device(run)
        copy = pinned(numbers.nbytes).view(numbers.dtype)
        yield timeline.fetch(numbers, copy)
        yield from super()._numbers_by_mpi(run, copy, op)
        timeline.store(copy, numbers)

    def _limit(self, plan: CompiledPlan) -> float:
        """Return the seconds that a wait of a plan's calls may last."""
        return self._seconds if plan.timeout is None else plan.timeout

    def _sparse(self, compiled: CompiledPlan, buffers: Buffers, run: Run) -> Steps:
        """Run a sparse allreduce. The device selects and sums values; the wires are in pinned memory."""
        plan, (timeline, pinned) = compiled.plan, _of_device(run)
        n = min(buffers.x.size, 1)
        assert plan.coders is not None and isinstance(plan.coders.coder, SparseCoder)
        # Wait for the caller's work, after which later copies to the host take little time.
        yield timeline.fetch(buffers.x[:n], pinned(n * buffers.x.itemsize))
        copies = StagedCopies(timeline, run.allocate, pinned, self._limit(compiled))
        coder = plan.coders.coder.on(SparseDevice(self._here, self._host._device, copies))
        plan = replace(plan, coders=plan.coders._replace(coder=coder))
        run = replace(run, group=self._over_host(run), allocate=pinned)
        made = yield from self._host._sparse_allreduce(plan, buffers, run)
        if made is None:
            return None
        indices, values = (self._uploaded(part, buffers, run) for part in (made.indices, made.values))
        return made._replace(indices=indices, values=values)

    def _through_host(self, chosen: CompiledPlan, buffers: Buffers, run: Run) -> Steps:
        """Run a collective on copies in pinned memory."""
        timeline, pinned = _of_device(run)
        dtype = chosen.plan.call.dtype
        stored = np.dtype(np.uint16 if dtype in HALVES else dtype)
        x = pinned(buffers.x.nbytes).view(stored)
        yield timeline.fetch(buffers.x, x)
        out, residual, result = buffers.out, buffers.residual, buffers.result
        if residual is not None:
            residual = pinned(residual.nbytes).view(residual.dtype)
            yield timeline.fetch(buffers.residual, residual)
        if out is not None:
            out = x if out is buffers.x else pinned(out.nbytes).view(stored)
            if chosen.plan.codec is not None and chosen.plan.codec.needs_reference:
                yield timeline.fetch(buffers.out, out)
        if result is not None:
            result = (x if out is None else out).view(numpy_dtype(dtype)).reshape(tuple(result.shape))
        host = buffers._replace(x=x, out=out, result=result, residual=residual, order=None)
        group = self._over_host(run)
        made = yield from chosen.steps(chosen.plan, host, replace(run, group=group, allocate=pinned, timeline=None))
        if residual is not None:
            timeline.store(residual, buffers.residual)
        if buffers.out is not None:
            timeline.store(out, buffers.out)
        elif result is not None:
            return self._uploaded(made, buffers, run)
        return None

    def _over_host(self, run: Run) -> Group:
        """Return the ranks of a run, whose messages are in host memory."""
        return Group(with_messages(self._transport, run.stats.spans), run.group.tag)

    def _uploaded(self, made: Array, buffers: Buffers, run: Run) -> Array:
        """Copy a host result to new device memory: its size was not known when the call was prepared."""
        timeline, pinned = _of_device(run)
        here, name = self._here, made.dtype.name
        whole = timeline.allocated(lambda caller: here.empty_like(buffers.result, made.shape, caller, name))
        source = pinned(made.nbytes)
        source[:] = made.reshape(-1).view(np.uint8)
        timeline.store(source, here.view(whole, "result")[1])
        return whole


def _of_device(run: Run) -> tuple[Timeline, Callable[[int], Array]]:
    """Return a device run's timeline and its allocator of pinned memory."""
    assert run.timeline is not None and run.pinned is not None
    return run.timeline, run.pinned
