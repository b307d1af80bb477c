"""A device with CUDA's rules on the CPU: what is put on a stream is done as late, or as early, as its events allow.

Memory of the device is NumPy's behind a wrapper that nobody else can touch. Late, nothing runs until somebody waits for
an event that guards it; then everything that this event must come after runs, and no more. Early, everything runs as
soon as the events before it are done. A wait that is missing in the device layer thus shows as a wrong result. Kernels
are the host's.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakes.deferred_kernels import Coder, DeviceArray, IntegerQuantizer, Passes, SzpCoder, memory_of
from fakes.loopback import World

from compcoll.dtypes import numpy_dtype
from compcoll.errors import InvalidBuffer, UnsupportedDevice
from compcoll.execute.gpu import DeviceCollectives
from compcoll.gpu.device_transport import Arriving
from compcoll.gpu.stream_transport import Bootstrap
from compcoll.gpu.streams import Streams
from compcoll.host.device import HostDevice
from compcoll.transports.base import Wire
from compcoll.transports.loopback import LoopbackTransport

BLOCKED = object()
"""What work returns that cannot be done yet, since it waits for another rank's stream; it is tried again."""

Site = tuple[int, str]
"""The line of a wait in compcoll/gpu/streams.py, and what it is part of: the method that others call."""


class Event:
    """A place in a stream's order."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.place = stream.added


class SharedEvent:
    """An event that is recorded again and again: who waits for it waits for the latest record at that time.

    Attributes
    ----------
    recorded : Event or None
        The latest.
    """

    def __init__(self) -> None:
        self.recorded: Event | None = None


class Stream:
    """Work in order, done when an event behind it is waited for; or, if ``early``, as soon as nothing is before it."""

    def __init__(self, *, early: bool = False) -> None:
        self.work: deque[Callable[[], Any] | Event] = deque()
        self.added = self.done = 0
        self._early = early

    def add(self, work: Callable[[], Any] | Event) -> None:
        self.work.append(work)
        self.added += 1
        while self._early and self.work:
            first = self.work[0]
            if isinstance(first, Event) and first.stream.done < first.place:
                break
            if not self.run_up_to(self.done + 1):
                break

    def run_up_to(self, place: int) -> bool:
        """Do what can be done before a place; tell whether that is all."""
        while self.done < place:
            work = self.work.popleft()
            self.done += 1
            over = work.stream.run_up_to(work.place) if isinstance(work, Event) else work() is not BLOCKED
            if not over:  # what fails is over
                self.work.appendleft(work)
                self.done -= 1
                return False
        return True


class Pending:
    """The host's wait for an event, which takes its time."""

    def __init__(self, event: Event, chance: random.Random, *, ignored: bool) -> None:
        self._event = event
        self._chance = chance
        self._ignored = ignored

    def Test(self) -> bool:
        if self._ignored:
            return True
        if self._chance.random() < 0.3:
            return False
        return self._event.stream.run_up_to(self._event.place)


class Runtime:
    """Streams and events of one rank's device (the contract is `compcoll.gpu.runtime.CudaRuntime`).

    Parameters
    ----------
    without : Site, optional
        A wait that is not done.
    early : bool
        Whether streams made here do what they can at once, while the caller's still does nothing before it must.
    seed : int
        Of how long the host finds events not done.

    Attributes
    ----------
    sites : set of Site
        The waits that were asked for.
    """

    def __init__(self, without: Site | None = None, *, early: bool = False, seed: int = 0) -> None:
        self._without = without
        self._early = early
        self._chance = random.Random(seed)
        self.sites: set[Site] = set()
        self.launching = Stream()

    def leave_out(self, site: Site | None) -> None:
        """Leave a wait out from now on."""
        self._without = site

    def _is_left_out(self) -> bool:
        frame = sys._getframe(2)
        line = frame.f_lineno
        while frame.f_code.co_name.startswith(("_", "<")):  # a comprehension, or a method for methods
            assert frame.f_back is not None
            frame = frame.f_back
        site = line, frame.f_code.co_name
        self.sites.add(site)
        return site == self._without

    current = nullcontext()

    def stream(self) -> Stream:
        return Stream(early=self._early)

    def record(self, stream: Stream, event: SharedEvent | None = None) -> Event | SharedEvent:
        if event is None:
            return Event(stream)
        event.recorded = Event(stream)
        return event

    def wait(self, stream: Stream, event: Event | SharedEvent) -> None:
        if not self._is_left_out():
            record = event.recorded if isinstance(event, SharedEvent) else event
            if record is not None:
                stream.add(record)

    def pending(self, event: Event) -> Pending:
        return Pending(event, self._chance, ignored=self._is_left_out())

    def copy(self, source: Any, target: Any, nbytes: int, stream: Stream) -> None:
        source, target = memory_of(source).view(np.uint8), memory_of(target).view(np.uint8)

        def copy() -> None:
            target[:nbytes] = source[:nbytes]

        stream.add(copy)

    @staticmethod
    def address(array: Any) -> int:
        return int(memory_of(array).ctypes.data)

    def device_bytes(self, nbytes: int) -> DeviceArray:
        return DeviceArray(np.full(nbytes, 0xFF, np.uint8))

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xFF, np.uint8)


class NothingJoins:
    """The `Bootstrap` of devices that nothing joins."""

    name = "none"

    def identity(self) -> Any:
        raise UnsupportedDevice("the deferred device joins nothing")

    unique_id = join = identity


class Device:
    """The deferred device of one rank, with a stream of the caller's."""

    name = "deferred"

    def __init__(self, without: Site | None = None, *, early: bool = False, seed: int = 0) -> None:
        self.runtime = Runtime(without, early=early, seed=seed)
        self.streams = Streams(self.runtime)
        self.current = Stream()
        self.joins: Bootstrap = NothingJoins()
        self.shares: Any = None
        self._host = HostDevice()

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> Coder:
        return Coder(self.runtime, self._host.coder(kernel, dtype, variant=variant, seed=seed))

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> IntegerQuantizer:
        return IntegerQuantizer(self.runtime, self._host.integers(bits, levels, block, dtype))

    def votes(self, ranks: int, block: int, dtype: str) -> IntegerQuantizer:
        return IntegerQuantizer(self.runtime, self._host.votes(ranks, block, dtype))

    def szp(self, dtype: str, tolerance: float | None, relative: float | None, ranks: int) -> SzpCoder:
        return SzpCoder(self.runtime, self._host.szp(dtype, tolerance, relative, ranks))

    def largest(self, x: DeviceArray, dtype: str) -> float:
        found: list[float] = []
        self.runtime.launching.add(lambda: found.append(self._host.largest(memory_of(x), dtype)))
        assert self.runtime.launching.run_up_to(self.runtime.launching.added)
        return found[0]

    def passes(self, dtype: str) -> Passes:
        return Passes(self.runtime, self._host.selection(dtype))

    def number_coder(self, numbers: DeviceArray, op: str) -> Coder:
        return Coder(self.runtime, self._host.number_coder(memory_of(numbers), op))

    def bootstrap(self) -> Bootstrap:
        return self.joins

    def sharing(self) -> Any:
        if self.shares is None:
            raise UnsupportedDevice("the deferred device shares nothing")
        return self.shares

    def caller(self, x: Any, stream: Any) -> Stream:
        return stream or self.current

    @staticmethod
    def current_stream(stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def view(self, x: Any, what: str) -> tuple[str, DeviceArray]:
        if not isinstance(x, DeviceArray):
            raise InvalidBuffer(f"{what} is on the host")
        name = self._host.dtype_name(memory_of(x))
        return name, DeviceArray(self._host.flat(memory_of(x), name))

    def flat_out(self, out: Any, x: Any, flat: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        if out is x:
            return flat
        return self.view(out, "out")[1]

    def empty_like(
        self, x: DeviceArray, shape: tuple[int, ...], caller: Stream, dtype: str | None = None
    ) -> DeviceArray:
        kind = x.dtype if dtype is None else numpy_dtype(dtype)
        return DeviceArray(np.full(shape, 7, kind))

    @staticmethod
    def given_back(result: Any, x: Any, caller: Stream) -> Any:
        return result

    def zeros_residual(self, n: int, dtype: str) -> DeviceArray:
        return DeviceArray(self._host.zeros_residual(n, dtype))

    @staticmethod
    def owns(coder: Any) -> bool:
        return isinstance(coder, Coder)

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, DeviceArray)

    @staticmethod
    def shown(transport: Any) -> Any:
        return transport

    # The caller's side.

    def upload(self, values: np.ndarray) -> DeviceArray:
        """An array that a kernel of the caller's will fill some time."""
        array = DeviceArray(np.full(values.shape, -2, values.dtype))
        self.current.add(lambda: memory_of(array).__setitem__(..., values))
        return array

    def download(self, array: DeviceArray) -> np.ndarray:
        """What is in an array when all that the caller's stream must come after is done."""
        got: list[np.ndarray] = []
        self.current.add(lambda: got.append(memory_of(array).copy()))
        assert self.current.run_up_to(self.current.added), "some rank's stream waits for others in vain"
        return got[0]


class AwareTransport(LoopbackTransport):
    """A transport that takes device memory."""

    def isend(self, wire: Wire, dest: int, tag: int) -> Any:
        return super().isend(unwrapped(wire), dest, tag)

    def irecv(self, wire: Wire, source: int, tag: int) -> Any:
        received = unwrapped(wire)
        return Arriving(super().irecv(received, source, tag), lambda: setattr(wire, "nbytes", received.nbytes))


def unwrapped(wire: Wire) -> Wire:
    assert wire.staging is None
    if not isinstance(wire.buffer, DeviceArray):
        return wire
    memory = Wire(memory_of(wire.buffer), exact=wire.exact)
    memory.nbytes = wire.nbytes
    return memory


class LoopbackMPI:
    """MPI's own allreduces among ranks in one process: each reads a rank's memory when that rank starts it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._given: dict[int, list[np.ndarray]] = {}

    def of_rank(self) -> Any:
        """What one rank has of it."""
        starts = iter(range(10**9))

        def reductions(collective: str, op: str, root: None = None) -> Any:
            combine = {"sum": np.add, "mean": np.add, "max": np.maximum}[op]
            return None, lambda x, out: self._start(next(starts), combine, x, out)

        return SimpleNamespace(library="MPI", reductions=reductions)

    def _start(self, number: int, combine: Any, x: np.ndarray, out: np.ndarray) -> Any:
        given = self._given.setdefault(number, [])
        given.append(x.copy())

        def come() -> bool:
            if len(given) == self._ranks:
                out[...] = combine.reduce(given)
            return len(given) == self._ranks

        return SimpleNamespace(Test=come)


class DeferredWorld(World):
    """A communicator for each rank whose arrays are on the deferred device.

    Parameters
    ----------
    direct : bool
        Whether the transport takes device memory.
    without : Site, optional
        A wait that is left out.
    early : bool, optional
        Whether devices are early; by default the odd ranks'.
    on_host : collection of int
        Ranks whose arrays are on the host.
    mpi : bool
        Whether there is an MPI, for allreduces of its own.
    bootstrap : callable, optional
        Gives each rank's way to join other GPUs.
    sharing : callable, optional
        Gives what each rank shares of its GPU.
    """

    def __init__(
        self,
        size: int,
        *,
        direct: bool,
        without: Site | None = None,
        early: bool | None = None,
        on_host: Sequence[int] = (),
        mpi: bool = False,
        bootstrap: Callable[[int], Bootstrap] | None = None,
        sharing: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(size, **settings)
        by_mpi = LoopbackMPI(size)
        self.devices: list[Device | None] = []
        for comm, transport in zip(self.comms, self.loopback.transports):
            if mpi:
                comm._collectives._ranks = replace(comm._collectives._ranks, native=by_mpi.of_rank())
                comm._collectives._setting = comm._collectives._setting._replace(library="MPI")
            device = None
            if comm.rank not in on_host:
                device = Device(without, early=comm.rank % 2 == 1 if early is None else early, seed=comm.rank)
            self.devices.append(device)
            if device is None:
                continue
            if bootstrap is not None:
                device.joins = bootstrap(comm.rank)
            if sharing is not None:
                device.shares = sharing(comm.rank)
            if direct:
                transport = AwareTransport(self.loopback, transport.rank, transport.size, transport.nodes)
            comm._gpu = DeviceCollectives(device, comm._collectives, transport, direct=direct)

    def upload(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        return [x if device is None else device.upload(x) for device, x in zip(self.devices, inputs)]

    def download(self, results: Sequence[Any]) -> list[np.ndarray]:
        return [x if device is None or x is None else device.download(x) for device, x in zip(self.devices, results)]

    @property
    def sites(self) -> set[Site]:
        """The waits that were asked for."""
        return {site for device in self.devices if device is not None for site in device.runtime.sites}
