"""PyTorch's CUDA as the deferred device has it: what is launched is done as late, or as early, as its events allow.

Tensors are PyTorch's own in host memory, whose operations go to the stream that is current in their thread. Streams,
events and futures are stand-ins, so that what compcoll.torch does with them is what runs.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from fakes import deferred
from fakes.deferred import DeviceArray
from torch import Tensor

from compcoll import communicator
from compcoll.dtypes import DTYPES
from compcoll.errors import MPIMissing
from compcoll.gpu.streams import Streams
from compcoll.torch import agreement, buffers, hooks, job_queue

try:
    from compcoll.torch.backend import gpu, reductions
    from compcoll.transports import mpi as transports_mpi
except MPIMissing:  # of ranks of a process group alone
    BY_MPI = False
else:
    BY_MPI = True

Site = tuple[str, int]
"""The module of compcoll.torch and the line of a wait."""

LOCK = threading.RLock()
"""Of all streams: a rank's threads launch on them and wait for them."""

_UNTOUCHED = {"new_empty", "empty_like", "detach"}
_BY_HANDLE: WeakValueDictionary[int, Stream] = WeakValueDictionary()


class Stream(deferred.Stream):
    """PyTorch's, and the deferred device's."""

    def __init__(self, cuda: LateCUDA | None = None, *, early: bool = False) -> None:
        super().__init__(early=early)
        self._cuda = cuda

    def add(self, work: Any) -> None:
        with LOCK:
            super().add(work)

    def run_up_to(self, place: int) -> bool:
        with LOCK:
            return super().run_up_to(place)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: deferred.Event) -> None:
        if self._cuda is None or not self._cuda.leaves_out(sys._getframe(1)):
            self.add(event)

    def synchronize(self) -> None:
        if self._cuda is None or not self._cuda.leaves_out(sys._getframe(1)):
            self.run_up_to(self.added)

    def query(self) -> bool:
        return self.done == self.added

    @property
    def ptr(self) -> int:
        """CUDA's handle."""
        _BY_HANDLE[id(self)] = self
        return id(self)


class Event(deferred.Event):
    """PyTorch's."""

    stream: Stream

    def synchronize(self) -> None:
        cuda = self.stream._cuda
        if cuda is None or not cuda.leaves_out(sys._getframe(1)):
            self.stream.run_up_to(self.place)


class Runtime(deferred.Runtime):
    def stream(self) -> Stream:
        return Stream(early=self._early)

    @staticmethod
    def place() -> bytes:
        return dist.get_rank().to_bytes(16, "little")


class Device(deferred.Device):
    """The deferred device on tensors: the caller's stream is PyTorch's current one."""

    index = 0

    def __init__(self, cuda: LateCUDA, *, early: bool) -> None:
        super().__init__()
        self.runtime = Runtime(early=early)
        self.streams = Streams(self.runtime)
        self._cuda = cuda

    def caller(self, x: Any, stream: Any) -> Any:
        return self._cuda.current_stream()

    def view(self, x: Any, what: str) -> tuple[str, DeviceArray]:
        return super().view(memory_of(x) if isinstance(x, OnGPU) else x, what)

    def empty_like(self, x: Any, shape: tuple[int, ...], caller: Any, dtype: str | None = None) -> OnGPU:
        kind = x.dtype if dtype is None else getattr(torch, dtype)
        return torch.full(shape, 7, dtype=kind).as_subclass(OnGPU)


class Future:
    """PyTorch's for tensors on a GPU: callbacks have a stream of their own, and waiting orders the current one."""

    cuda: LateCUDA

    def __init__(self, devices: Any = None) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._behind: deferred.Event | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def set_result(self, value: Any) -> None:
        with self._lock:
            self._value = value
            self._ended.set()
        for callback in self._callbacks:
            callback()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        child = Future()

        def run() -> None:
            stream = Stream()
            with self.cuda.stream(stream):
                try:
                    value = callback(self)
                except BaseException as error:
                    value, child._error = None, error
            child._behind = stream.record_event()
            child.set_result(value)

        with self._lock:
            ended = self._ended.is_set()
            if not ended:
                self._callbacks.append(run)
        if ended:
            run()
        return child

    def wait(self) -> Any:
        assert self._ended.wait(60)
        if self._error is not None:
            raise self._error
        if self._behind is not None:
            self.cuda.current_stream().add(self._behind)
        return self._value


class LateCUDA:
    """The GPU of one rank.

    Parameters
    ----------
    without : Site, optional
        The wait that is left out.
    early : bool
        Whether the streams of the communicator do what they can at once.
    aware : bool
        Whether MPI takes the GPU's memory in a process group.

    Attributes
    ----------
    sites : set of Site
        The waits that were asked for.
    pinned : int
        Tensors for which pinned memory was asked.
    """

    def __init__(self, without: Site | None = None, *, early: bool = False, aware: bool = False) -> None:
        self._default = Stream()
        self._thread = threading.local()
        self._without = without
        self._early = early
        self._aware = aware
        self.sites: set[Site] = set()
        self.pinned = 0

    def leaves_out(self, frame: FrameType) -> bool:
        site = Path(frame.f_code.co_filename).stem, frame.f_lineno
        self.sites.add(site)
        return site == self._without

    def current_stream(self, device: Any = None) -> Any:
        return getattr(self._thread, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextlib.contextmanager
    def installed(self) -> Iterator[LateCUDA]:
        """In PyTorch's place, and in compcoll's device layer's."""
        gathered = agreement._gathered
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in (
                (torch.cuda, "Stream", lambda device: Stream(self)),
                (torch.cuda, "stream", self.stream),
                (torch.cuda, "ExternalStream", lambda ptr, device: _BY_HANDLE[ptr]),
                (torch.cuda, "current_stream", self._watched),
                (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
                (torch, "from_dlpack", lambda array: on_gpu(torch.from_numpy(deferred.memory_of(array)))),
                (job_queue, "Future", Future),
                (hooks, "Future", Future),
                (Future, "cuda", self),
                (OnGPU, "cuda", self),
                (agreement, "_gathered", lambda values, group, device: gathered(values, group, torch.device("cpu"))),
                (communicator, "cuda_device", lambda x: Device(self, early=self._early)),
                (buffers, "gpus", lambda: (["late"], "")),
                *(self._of_mpi() if BY_MPI else ()),
            ):
                stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
            yield self

    def _of_mpi(self) -> list[tuple[Any, str, Any]]:
        """What stands in for the backend over MPI."""
        return [
            (transports_mpi, "gpu_awareness", lambda: SimpleNamespace(aware=False)),
            (gpu, "gpu_awareness", lambda: SimpleNamespace(aware=self._aware)),
            (gpu, "pinned", self._pinned),
            (reductions, "gpu_can_encode", lambda: True),
        ]

    def _watched(self, device: Any = None) -> Any:
        """The current stream, whose waits are compcoll's."""
        stream = self.current_stream()
        stream._cuda = self
        return stream

    def _pinned(self, tensor: Tensor) -> Tensor:
        self.pinned += 1
        return torch.full(tensor.shape, 7, dtype=tensor.dtype)

    # The caller's side.

    def upload(self, values: Tensor) -> OnGPU:
        """A tensor that a kernel of the caller's will fill some time."""
        there = on_gpu(torch.full_like(values, -2))
        self.current_stream().add(lambda: plain(there).copy_(values))
        return there

    def download(self, there: Tensor) -> Tensor:
        """What is in a tensor when all that the caller's stream must come after is done."""
        stream = self.current_stream()
        stream.run_up_to(stream.added)
        return plain(there).clone()


class OnGPU(Tensor):
    """A tensor that says it is a GPU's, and does what it is asked for later."""

    cuda: LateCUDA
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def record_stream(self, stream: Any) -> None:
        pass

    def cpu(self) -> Tensor:
        return self.cuda.download(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, stream = func.__name__, kwargs or {}, cls.cuda.current_stream()
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
            # What is in pinned memory is copied when the stream comes to it.
            given = [plain(x) for x in args] if kwargs.get("non_blocking") else _operands(args)
            stream.add(lambda: func(*given, **kwargs))
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, OnGPU) and name not in _UNTOUCHED and not _is_view(result, args):
            given, target = _operands(args), plain(result)
            if name != "__get__":
                target.fill_(-2)
            stream.add(lambda: target.copy_(func(*given, **kwargs)))
        return result


def _operands(given: Any) -> Any:
    """What an operation will read: of tensors on the host, what is in them now."""
    if isinstance(given, (list, tuple)):
        return type(given)(_operands(one) for one in given)
    if isinstance(given, Tensor):
        return plain(given) if isinstance(given, OnGPU) else given.clone()
    return given


def _is_view(result: Tensor, args: Any) -> bool:
    owner = plain(result).untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and plain(x).untyped_storage().data_ptr() == owner for x in args)


def waits(module: Any, *names: str) -> set[Site]:
    """Where a module of compcoll.torch has a stream, or the host, wait."""
    return {
        (module.__name__.rpartition(".")[2], node.lineno)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    }


def plain(x: Tensor) -> Tensor:
    """The tensor itself, in host memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(Tensor)


def on_gpu(tensor: Tensor) -> OnGPU:
    return tensor.as_subclass(OnGPU)


def memory_of(tensor: Tensor) -> DeviceArray:
    """A tensor's memory as the deferred device has it."""
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    memory = plain(tensor).reshape(-1)
    values: np.ndarray = memory.view(torch.uint8).numpy().view(dtype.numpy) if dtype is not None else memory.numpy()
    return DeviceArray(values.reshape(tuple(tensor.shape)))
