"""Compressed gradients on a GPU, on a stand-in whose work is done as late as its events allow: the host's bits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fakes.late_cuda import LateCUDA, OnGPU, on_gpu, plain, waits
from mpi.world import raised
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import communicator
from compcoll.errors import CompcollError, InvalidArgument, UnsupportedDevice
from compcoll.gpu import discovery as gpu
from compcoll.sparse import DGCFeedback
from compcoll.torch import buffers, streams
from compcoll.torch.low_rank.fusion import CodedSums
from osu_like_bench.training.processes import start

WAYS: list[dict[str, Any]] = [
    {"codec": None},
    {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    {"codec": "zfp", "tolerance": 1e-3, "algorithm": "ring"},
    {"codec": "minmax", "bits": 4, "algorithm": "direct"},
    {"codec": "cast", "dtype": "bfloat16", "algorithm": "recursive_doubling"},
    {"codec": "onebit", "algorithm": "ring"},
    {"codec": "sign", "scale": "mean", "algorithm": "ring"},
    {"codec": "fp8", "algorithm": "direct", "feedback": False},
    {"codec": "intsum", "algorithm": "ring"},
    {"codec": "minmax"},  # which "auto" does not compress here
    {"codec": "topk", "density": 0.01, "algorithm": "sparse_ring"},
    {"codec": "topk", "density": 0.02, "algorithm": "sparse_direct", "feedback": partial(DGCFeedback, 0.9)},
    {"codec": "strom", "threshold": 0.5, "algorithm": "sparse_ring"},
    {"codec": {"second": "cast:dtype=bfloat16", "*": "minmax:bits=4"}, "algorithm": "direct"},
]
SIZES = {"exact": 40_000, "first": 3000, "second": 2048, "bias": 7, "third": 1999}
LAYOUTS = ([["exact", "first"], ["second", "third", "bias"]], [["third", "second"], ["bias", "first", "exact"]])
"""Of buckets: at first, and as they are made anew."""


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, *, there: bool) -> None:
        super().__init__()
        for name, size in SIZES.items():
            values = torch.zeros(size, dtype=dtype)
            self.register_parameter(name, nn.Parameter(on_gpu(values) if there else values))


class Model(DistributedDataParallel):
    """Keeps the hook, for whoever has gradients."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.process_group = dist.group.WORLD
        self.bucket_bytes_cap, self._comm_hooks = 1 << 20, list[Any]()
        self.find_unused_parameters = self.static_graph = False

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.hook = hook


def gradients(comm: MPI.Intracomm, step: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * comm.rank + size)
    return torch.randn(size, generator=generator).to(dtype)


def average(comm: MPI.Intracomm, model: Model, step: int, upload: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Both buckets in flight, as in a back-propagation: what the hook's futures give, by parameter."""
    futures = []
    parameters = dict(model.module.named_parameters())
    layout = LAYOUTS[step > 0]
    for number, names in enumerate(layout):
        held = [parameters[name] for name in names]
        sizes = [SIZES[name] for name in names]
        values = upload(gradients(comm, 2 * step + number, sum(sizes), held[0].dtype))
        bucket = SimpleNamespace(
            buffer=lambda values=values: values,
            index=lambda number=number: number,
            parameters=lambda held=held: held,
            gradients=lambda values=values, sizes=sizes: values.split(sizes),
            is_last=lambda number=number: number == len(layout) - 1,
        )
        futures.append(model.hook(None, bucket))
    means = [(names, future.wait()) for names, future in zip(layout, futures, strict=True)]
    return {
        name: part
        for names, mean in means
        for name, part in zip(names, mean.split([SIZES[name] for name in names]), strict=True)
    }


def compressed(model: Model, way: dict[str, Any]) -> Any:
    return compcoll.torch.compress(model, **way, exclude=["exact", "biases"])


def downloaded(cuda: LateCUDA, means: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: cuda.download(mean) if isinstance(mean, OnGPU) else mean for name, mean in means.items()}


def on_host(comm: MPI.Intracomm, way: dict[str, Any], dtype: torch.dtype, steps: int = 3) -> Any:
    """Means of each step, and what is kept at the end."""
    model = Model(Net(dtype, there=False))
    compression = compressed(model, way)
    means = [average(comm, model, step, torch.clone) for step in range(steps)]
    state = compression.state_dict()
    compression.free()
    return means, state


def on_late_gpu(
    comm: MPI.Intracomm, way: dict[str, Any], dtype: torch.dtype, cuda: LateCUDA, steps: int = 3
) -> tuple[list[dict[str, Tensor]], Any]:
    with cuda.installed():
        model = Model(Net(dtype, there=True))
        compression = compressed(model, way)
        try:
            means = []
            for step in range(steps):
                got = average(comm, model, step, cuda.upload)
                assert all(isinstance(mean, OnGPU) for mean in got.values())
                means.append(downloaded(cuda, got))
            kept = compression._residuals.arrays.values()
            assert all(isinstance(losses, OnGPU) for part in kept for losses in part.values())
            return means, compression.state_dict()
        finally:
            compression.free()


def assert_same(one: Any, other: Any, what: Any, *, exact: Collection[str] = ("exact", "bias")) -> None:
    for step, (expected, got) in enumerate(zip(one[0], other[0], strict=True)):
        for name, mean in expected.items():
            if name in exact:  # MPI's nonblocking sums may add in another order
                torch.testing.assert_close(got[name], mean)
            else:
                assert torch.equal(got[name], mean), (what, step, name)
    assert one[1].keys() == other[1].keys()
    for kind in one[1]:
        if isinstance(one[1][kind], dict):
            assert one[1][kind].keys() == other[1][kind].keys(), (what, kind)
            for name, losses in one[1][kind].items():
                assert torch.equal(losses, other[1][kind][name]), (what, kind, name)


def ready() -> None:
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)


def check_the_hosts_bits(comm: MPI.Intracomm) -> None:
    ready()
    for number, way in enumerate(WAYS):
        dtype = (torch.float32, torch.bfloat16, torch.float64, torch.float16)[number % 4]
        cuda = LateCUDA(early=(comm.rank + number) % 2 == 1)
        exact = ("exact", "bias") if way["codec"] and "algorithm" in way else SIZES
        assert_same(on_host(comm, way, dtype), on_late_gpu(comm, way, dtype, cuda), (way, dtype), exact=exact)


def check_no_wait_can_be_left_out(comm: MPI.Intracomm) -> None:
    ready()
    way = WAYS[1]
    expected = on_host(comm, way, torch.float32)
    complete = LateCUDA()
    on_late_gpu(comm, way, torch.float32, complete)
    assert complete.sites == waits(streams, "wait_event") and len(complete.sites) == 2
    for site in sorted(complete.sites):
        means, _ = on_late_gpu(comm, way, torch.float32, LateCUDA(without=site))
        same = [torch.allclose(one[name], other[name]) for one, other in zip(expected[0], means) for name in SIZES]
        assert not all(comm.allgather(all(same))), f"nothing shows that the wait in {site} is needed"


def check_losses_are_saved_and_go_on(comm: MPI.Intracomm) -> None:
    """On a GPU what was lost on the host, and the other way round."""
    ready()
    way = {"codec": "minmax", "bits": 2, "algorithm": "ring"}
    _, state = on_host(comm, way, torch.float32)
    states = comm.allgather(state)
    results = []
    for there in (False, True):
        cuda = LateCUDA()
        with cuda.installed():
            model = Model(Net(torch.float32, there=there))
            compression = compressed(model, way)
            compression.load_state_dict(states if comm.size > 1 else state)
            for name, losses in compression.state_dict()["residuals"].items():
                assert torch.equal(losses, state["residuals"][name])
            got = average(comm, model, 7, cuda.upload if there else torch.clone)
            results.append(([downloaded(cuda, got)], compression.state_dict()))
            compression.free()
    assert_same(*results, "after a restart")


def check_methods_with_more_state(comm: MPI.Intracomm) -> None:
    """Second moments, and Deep Gradient Compression around an optimizer."""
    ready()
    results = []
    for there in (False, True):
        cuda = LateCUDA()
        with cuda.installed():
            upload = cuda.upload if there else torch.clone
            model = Model(Net(torch.float32, there=there))
            compression = compressed(model, {"codec": "hybrid", "threshold": 0.5, "algorithm": "sparse_ring"})
            means = []
            for step in range(2):
                moments = {
                    name: upload(gradients(comm, 50 + step, p.numel(), p.dtype).square() / 4)
                    for name, p in model.module.named_parameters()
                }
                compression.observe(moments)
                got = average(comm, model, step, upload)
                means.append(downloaded(cuda, got))
            states = [compression.state_dict()]
            compression.free()

            model = Model(Net(torch.float32, there=there))
            optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1, momentum=0.9)
            dgc = compcoll.torch.DGC(model, optimizer, 0.05, exclude=["exact", "biases"], algorithm="sparse_ring")
            for step in range(3):
                dgc.density = 0.1 / (step + 1)
                got = average(comm, model, step, upload)
                means.append(downloaded(cuda, got))
            states.append(dgc.state_dict())
            dgc.free()
        results.append([(means, state) for state in states])
    for one, other in zip(*results, strict=True):
        assert_same(one, other, "hybrid, DGC")


def check_refusals_on_a_gpu(comm: MPI.Intracomm) -> None:
    ready()
    with LateCUDA().installed():
        mixed = Net(torch.float32, there=True)
        mixed.first = nn.Parameter(plain(mixed.first))
        error = raised(lambda: compressed(Model(mixed), WAYS[1]))
        assert isinstance(error, InvalidArgument) and "one device" in str(error), error
    cuda = LateCUDA()
    with cuda.installed():
        model = Model(Net(torch.float32, there=True))
        for way in (WAYS[0], WAYS[1]):
            with no_cupy():
                error = raised(lambda way=way: compressed(model, way))
            assert isinstance(error, UnsupportedDevice) and "CuPy" in str(error), error
        for way, kind, said in (
            ({"codec": "terngrad"}, InvalidArgument, "grow without end"),
            ({"codec": "topk", "algorithm": "ring"}, CompcollError, "sparse_ring"),
        ):
            error = raised(lambda way=way: compressed(model, way))
            assert isinstance(error, kind) and said in str(error), error
        compressed(model, WAYS[1]).free()  # a refusal leaves it as it was
    gpu0, codec = torch.device("cuda", 0), compcoll.MinMax()
    for call, said in (
        (lambda: CodedSums(dist.group.WORLD, gpu0, codec, "ring", feedback=True), "codec=None"),
        (lambda: buffers.check_device(torch.device("meta")), "CUDA"),
    ):
        error = raised(call)
        assert isinstance(error, UnsupportedDevice) and said in str(error), error


def no_cupy() -> Any:
    """The way to a GPU as it is here."""
    return mock.patch.object(communicator, "cuda_device", gpu.cuda_device)
