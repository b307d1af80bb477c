"""What a method gives and what it keeps add up to the means of all gradients, whatever happens to a training run.

Hypothesis on rank 0 draws what happens; all ranks do it, and tell rank 0 what is wrong.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from mpi4py import MPI
from promises import EVERY, one_of_each
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import ErrorFeedback, IntSum
from compcoll.codecs.sparse.sparsifier import Sparsifier
from compcoll.torch.gradients.ddp import GradientCompression
from compcoll.torch.low_rank.methods import LowRank
from compcoll.torch.optimizers.diloco import DiLoCo
from osu_like_bench.training.processes import start

SHAPES = {"first": (30, 20), "bias": (20,), "kernels": (12, 6, 3, 3), "last": (18, 33)}
FORMATS = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}
SEQUENCES = int(os.environ.get("COMPCOLL_SEQUENCES", "6"))
MOMENTUM, BETA = 0.5, 0.9
PUBLIC = [getattr(compcoll.torch, name) for name in compcoll.torch.__all__]

Make = Callable[[nn.Module, torch.optim.Optimizer], Any]
ALL: dict[str, Any] = {"exclude": (), "min_numel": 1, "timeout": 30.0}


def compressing(codec: Any) -> Make:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        sparse = isinstance(codec, Sparsifier) and not isinstance(model, FSDPModule)
        return compcoll.torch.compress(model, codec, algorithm="sparse_ring" if sparse else "direct", **ALL)

    return make


def wrappers(codec: Any) -> tuple[str, ...]:
    if not isinstance(codec, Sparsifier):
        return ("ddp", "fsdp", "hsdp")
    return ("ddp", "fsdp") if codec.state is ErrorFeedback else ("ddp",)


def low_rank(method: type[LowRank]) -> Make:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        group = {} if isinstance(model, DistributedDataParallel) else {"process_group": GROUPS[model.ranks]}
        return method(model, rank=2, min_compression_rate=1, exclude=(), **group)

    return make


def local_steps(kind: type[DiLoCo], fragments: int) -> Make:
    """With a delay, where there are fragments."""
    options: dict[str, Any] = {"density": 0.01, "beta": BETA} if kind.conserves == "decay" else {"codec": "onebit"}

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        group = GROUPS[model.ranks]
        return kind(model, optimizer, every=2, fragments=fragments, delay=fragments - 1, group=group, **options)

    return make


METHODS: dict[str, tuple[tuple[str, ...], Make]] = {
    f"compress {codec.name}": (wrappers(codec), compressing(codec))
    for codec in one_of_each(EVERY)
    if codec.conserves == "exact" and not isinstance(codec, IntSum) and codec.feedback_converges("float32")
}
METHODS |= {
    method.__name__: (("ddp", "plain"), low_rank(method))
    for method in PUBLIC
    if isinstance(method, type) and issubclass(method, LowRank) and method.conserves == "exact"
}
METHODS["compress mapping"] = (
    ("ddp", "fsdp", "hsdp"),
    compressing({"first": "minmax:bits=4", "kernels": "int8", "*": "onebit"}),
)
METHODS["DGC"] = (("ddp",), lambda model, optimizer: compcoll.torch.DGC(model, optimizer, density=0.1, **ALL))
METHODS |= {
    f"{kind.__name__}, {fragments} fragments": (("ddp", "plain"), local_steps(kind, fragments))
    for kind in PUBLIC
    if isinstance(kind, type) and issubclass(kind, DiLoCo)
    for fragments in (1, 2)
}
"""Under which wrappers each method that conserves runs, and what makes it."""


class Model(nn.Module):
    """Its parameters' gradients are what is given."""

    def __init__(self, dtype: torch.dtype, memory_format: str) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        self.to(memory_format=FORMATS[memory_format])  # type: ignore[call-overload]

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(((p * gradients[name]).sum() for name, p in self.named_parameters() if name in gradients), ZERO)


ZERO = torch.zeros((), requires_grad=True)


class Run:
    """A training run on all ranks, and what its method owes.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of all ranks, of which some may take no part in the training for a while.
    method : str
        Of `METHODS`.
    dtype : torch.dtype
        Of the parameters.
    scale : float or None
        The first one of a GradScaler.
    """

    def __init__(self, comm: MPI.Intracomm, method: str, dtype: torch.dtype, scale: float | None) -> None:
        self.comm, self.dtype, self.steps = comm, dtype, 0
        self.make = METHODS[method][1]
        self.mean = not method.startswith("compress") and method != "DGC"
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**9)
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(()))  # makes its scale
        self.other: torch.amp.GradScaler | None = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.other.scale(torch.zeros(()))  # another model's
        self.due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.size = dict.fromkeys(SHAPES, 0.0)
        self.frozen: list[str] = []
        self.compression: Any = None
        self.states: list[Any] = []
        self.ranks = 0

    def wrap(
        self, wrapper: str, ranks: int, memory_format: str, bucket_mb: float, view: bool, dim: int, frozen: list[str]
    ) -> None:
        """Go on under another wrapper, on other ranks: with the states of those before."""
        if wrapper == "hsdp":
            ranks = self.comm.size
        self.close()
        self.due, self.size = self.comm.bcast((self.due, self.size))  # to ranks that took no part
        if self.scaler is not None:
            self.scaler.update(self.comm.bcast(self.scaler.get_scale()))
        self.ranks = ranks
        self.mine = SUBS[ranks]
        self.frozen = frozen
        if self.comm.rank >= ranks:
            return
        group = GROUPS[ranks]
        model: nn.Module = Model(self.dtype, "rows" if wrapper in ("fsdp", "hsdp") else memory_format)
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        if wrapper == "ddp":
            model = DistributedDataParallel(
                model,
                process_group=group,
                find_unused_parameters=True,
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=view,
            )
        elif wrapper in ("fsdp", "hsdp"):
            shards = ranks if wrapper == "fsdp" else 2

            def placement(p: nn.Parameter) -> Shard | None:
                return Shard(dim) if p.ndim > dim and not p.shape[dim] % shards else None

            mesh = dist.DeviceMesh.from_group(group, "cpu") if wrapper == "fsdp" else MESHES[0]
            model = fully_shard(model, mesh=mesh, shard_placement_fn=placement)
        self.deferred = wrapper == "hsdp"
        model.ranks = ranks
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = self.optimizer_of(trained)
        self.model = model
        self.compression = self.make(model, self.optimizer)
        if self.states:
            self.other = None  # or else it could be the one whose scale residuals are to have
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*values of .* which are not trained here")
                self.compression.load_state_dict(self.states)
        self.check()

    def optimizer_of(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(trained, lr=0.0, momentum=MOMENTUM)

    def close(self) -> None:
        """Save, and end what runs."""
        if not self.ranks:
            return
        self.other = None
        own = None if self.compression is None else self.compression.state_dict()
        self.states = [state for state in self.comm.allgather(own) if state is not None]
        if self.compression is not None:
            self.compression.free()
        self.compression = None

    def end(self) -> None:
        self.close()
        self.scaler = None  # another run's is not to be taken for it

    def total(self, values: np.ndarray) -> np.ndarray:
        out = np.empty(values.shape)
        self.mine.Allreduce(np.ascontiguousarray(values, np.float64), out)
        return out

    def step(
        self,
        used: dict[str, list[bool]],
        overflow: tuple[str, int] | None,
        passes: int,
        joined: int,
        to_none: bool,
        defer: bool = False,
        factor: float = 1.0,
    ) -> None:
        """One step of the optimizer; with what overflows in it: a parameter and a rank."""
        self.steps += 1
        if self.compression is None:
            return
        rank, ranks, model = self.comm.rank, self.ranks, self.model
        sharded = isinstance(model, FSDPModule)
        joins = isinstance(model, DistributedDataParallel) and passes == 1 and joined
        joins = joins and self.other is None  # which scaler it is is known from a rank's first step on
        active = ranks - min(joined, ranks - 1) if joins else ranks
        live = [name for name in SHAPES if name not in self.frozen]
        for each in range(ranks):  # PyTorch needs one on every rank
            if not any(used[name][each] for name in live):
                used[live[0]] = [True] * self.comm.size
        if sharded:  # its ranks must use the same parameters, one at least
            used = {name: [used[name][0]] * self.comm.size for name in SHAPES}
            if not any(used[name][0] for name in live):
                used[live[0]] = [True] * self.comm.size
        generator = np.random.default_rng([self.steps, rank])
        gradients = [self.draw(generator, [name for name in live if used[name][rank]], factor) for _ in range(passes)]
        before = self.compression.state_dict()
        # Averaged in every pass: where all ranks use all, as PyTorch takes zeros for what a rank uses in an earlier one
        # only; and without momentum, which every pass would have.
        every_pass = defer and isinstance(self.compression, GradientCompression) and all(map(all, used.values()))
        every_pass = every_pass and not {"velocity", "variance"} & before.keys()
        bad = False
        if overflow is not None and self.scaler is not None and overflow[0] in live:
            name, where = overflow[0], overflow[1] % active
            bad = used[name][where]
            if bad and rank == where:
                gradients[generator.integers(passes)][name].view(-1)[
                    generator.integers(gradients[-1][name].numel())
                ] = np.inf
        if "variance" in before:
            self.compression.observe({name: torch.full(SHAPES[name], 1e-9) for name in live})
        self.optimizer.zero_grad(set_to_none=to_none)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        with ExitStack() as stack:
            if joins:
                stack.enter_context(Join([model]))
            if rank < active:
                for number, each in enumerate(gradients, 1):
                    self.backward(each, last=number == passes or every_pass, sharded=sharded, defer=defer)
        given: dict[str, np.ndarray] = {}
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for name, p in inner.named_parameters():
            if p.grad is not None and rank < active:
                whole = p.grad.full_tensor() if sharded else p.grad
                given[name] = whole.double().numpy() / scale
        skipped = self.stepped(rank < active)
        infinite = not all(np.isfinite(values).all() for values in given.values())  # a cast may overflow by itself
        assert skipped or not bad, f"step {self.steps}: {overflow} overflowed, but the step was not skipped"
        assert rank >= active or skipped == infinite, f"step {self.steps}: skipped: {skipped}, but not {infinite}"
        after = self.compression.state_dict()
        if skipped:
            for kind in ("residuals", "between", "velocity", "variance"):
                for name, kept in before.get(kind, {}).items():
                    text = f"a skipped step changed {kind} of {name}"
                    close = 4 * torch.finfo(kept.dtype).eps  # shards may keep thirds
                    np.testing.assert_allclose(after[kind][name], kept, rtol=close, atol=0, err_msg=text)
            return
        for name in live:
            own = sum(each[name].double().numpy() for each in gradients if name in each) if rank < active else 0.0
            mean = self.total(np.zeros(SHAPES[name]) + own) / ranks
            anywhere = any(used[name][:active])
            carried = 0.0
            if "velocity" in before and anywhere:
                carried = self.total(MOMENTUM * before["velocity"][name].double().numpy())
            got = self.mine.bcast(given.get(name), 0)
            if not anywhere:
                assert got is None or not got.any(), f"{name} was given though no rank used it"
                continue
            self.due[name] += mean + carried - got
            self.size[name] = max(self.size[name], float(np.abs(mean).max()), float(np.abs(self.due[name]).max()))
        self.check()

    def draw(self, generator: np.random.Generator, names: list[str], factor: float = 1.0) -> dict[str, torch.Tensor]:
        """A rank's gradients of a pass, of a size that changes from step to step."""
        scale = factor * 10.0 ** (self.steps % 5 - 2)
        return {
            name: torch.from_numpy(scale * generator.normal(size=shape)).to(self.dtype)
            for name, shape in SHAPES.items()
            if name in names
        }

    def drain(self) -> None:
        """Steps without gradients, in which what a quantizer lost comes out: on each rank, wherever it is kept."""
        codec = getattr(self.compression, "codec", None)
        if codec is None or isinstance(codec, Sparsifier):
            self.steps += 5
            return
        before = self.compression.state_dict()["residuals"]
        for _ in range(5):
            self.step({name: [True] * self.comm.size for name in SHAPES}, None, 1, 0, to_none=True, factor=0.0)
        after = self.compression.state_dict()["residuals"]
        for name in set(SHAPES) - set(self.frozen):
            lost = before[name].abs() > 1e-4 * self.size[name]  # smaller ones may be below what a half resolves
            stuck = lost & (before[name] == after[name])
            assert stuck.sum() <= 0.1 * lost.sum(), f"of {name} {int(stuck.sum())} elements are stuck"

    def backward(self, gradients: dict[str, torch.Tensor], *, last: bool, sharded: bool, defer: bool) -> None:
        with ExitStack() as stack:
            if sharded and defer and self.deferred:
                self.model.set_requires_all_reduce(last)
            elif sharded:
                self.model.set_requires_gradient_sync(last)
            elif not last:
                plain = not isinstance(self.model, DistributedDataParallel)
                stack.enter_context((self.compression if plain else self.model).no_sync())
            loss = self.model(gradients)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def stepped(self, active: bool) -> bool:
        """Step the optimizer; tells whether its scaler skipped the step, on all ranks or on none."""
        if self.scaler is None:
            self.optimizer.step()
            return False
        before = self.scaler.get_scale()
        if active:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        now = self.mine.bcast(self.scaler.get_scale(), 0)
        assert not active or self.scaler.get_scale() == now, "ranks have other scales"
        self.scaler.update(now * (2 if self.steps % 3 == 0 else 1))
        return bool(now < before)

    def check(self) -> None:
        if self.compression is None:
            return
        state = self.compression.state_dict()
        kept = {name: values + state.get("between", {}).get(name, 0) for name, values in state["residuals"].items()}
        exact = {name for name in SHAPES if self.compression.exact.get(name)}
        assert set(SHAPES) - set(self.frozen) - exact <= set(kept), sorted(kept)
        room = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4 * 2.0**-8}[self.dtype]
        for name, shape in SHAPES.items():
            values = kept.get(name, torch.zeros(shape))
            assert tuple(values.shape) == shape, values.shape
            total = self.total(values.double().numpy()) / (self.ranks if self.mean else 1)
            off = np.abs(total - self.due[name]).max()
            assert off <= room * max(self.steps, 1) * max(self.size[name], 1e-30), (
                f"{name}: given and kept are off by {off:.2e}, and gradients have up to {self.size[name]:.2e}"
            )


class LocalRun(Run):
    """One of local steps: what the ranks average are outer gradients, the common parameters minus a rank's own."""

    def __init__(self, comm: MPI.Intracomm, method: str, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__(comm, method, dtype, scale)
        self.whole = method.endswith(" 1 fragments")
        self.decays = method.startswith("SparseLoCo")
        self.coming: dict[str, np.ndarray] = {}

    def optimizer_of(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(trained, lr=1.0)
        optimizer.register_step_post_hook(self.see)  # before the method's
        return optimizer

    def see(self, *_: Any) -> None:
        """This rank's parameters after its own step."""
        self.own = self.parameters()

    def note(self, *_: Any) -> None:
        """What the outer optimizer is given."""
        for fragment in self.compression._fragments:
            if (given := fragment.outer.grad) is not None:
                self.given |= {
                    name: each.numpy().astype(np.float64) for name, each in fragment.flat.by_name(given).items()
                }

    def parameters(self) -> dict[str, np.ndarray]:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return {name: p.detach().double().numpy().copy() for name, p in inner.named_parameters()}

    def wrap(self, wrapper: str, ranks: int, *, frozen: list[str], **place: Any) -> None:
        frozen = self.frozen or frozen  # a state without a parameter's values is refused where it is trained
        if not self.whole:
            frozen = []  # or else the fragments would be others than those of means under way
        for name in frozen:
            self.due[name] = np.zeros(SHAPES[name])  # is dropped, with a warning
            self.coming.pop(name, None)
        self.coming = self.comm.bcast(self.coming)  # to ranks that took no part
        super().wrap(wrapper, ranks, frozen=frozen, **place)
        if self.compression is not None:
            self.compression.outer.register_step_pre_hook(self.note)

    def step(
        self,
        used: dict[str, list[bool]],
        overflow: tuple[str, int] | None,
        passes: int,
        joined: int,
        to_none: bool,
        defer: bool = False,
    ) -> None:
        self.steps += 1
        if self.compression is None:
            return
        rank, kept = self.comm.rank, self.compression
        live = [name for name in SHAPES if name not in self.frozen]
        if not any(used[name][rank] for name in live):
            used[live[0]] = [True] * self.comm.size
        generator = np.random.default_rng([self.steps, rank])
        before, own = kept.state_dict(), self.parameters()
        bad = False
        self.given: dict[str, np.ndarray] = {}
        self.optimizer.zero_grad(set_to_none=to_none)
        for _ in range(passes):
            gradients = self.draw(generator, [name for name in live if used[name][rank]])
            if overflow is not None and self.scaler is not None and overflow[0] in gradients:
                bad = rank == overflow[1] % self.ranks
                if bad:
                    gradients[overflow[0]].view(-1)[0] = torch.inf
            self.backward(gradients, last=True, sharded=False, defer=False)
        if self.scaler is None:
            self.optimizer.step()
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            assert self.scaler.get_scale() < scale or not bad, "an overflow was not seen"
        if bad:
            for name in live:
                np.testing.assert_array_equal(self.own[name], own[name], f"a skipped step moved {name}")
        after = kept.state_dict()
        for fragment in kept._fragments:
            for name in fragment.parameters:
                self.follow(name, before, after, begins=kept.steps % 2 == fragment.phase)
        self.check()

    def follow(self, name: str, before: dict[str, Any], after: dict[str, Any], *, begins: bool) -> None:
        """What a step owes, and what it gave."""
        delta = before["outer"][name].to(self.dtype).double().numpy() - self.own[name]
        largest = [delta, self.own[name], self.due[name]]
        self.size[name] = max(self.size[name], *self.comm_max([np.abs(each).max() for each in largest]))
        if begins and self.decays:
            then, now = (state["residuals"][name].double().numpy() for state in (before, after))
            sent = BETA * then + delta - now
            sent[np.abs(sent) < 1e-6 * self.size[name]] = 0
            self.coming[name] = self.total(sent) / np.maximum(self.total(sent != 0), 1)
            self.due[name] = self.total(now) / self.ranks
        elif begins:
            self.due[name] += self.total(delta) / self.ranks
        got = self.given.get(name)
        if got is None:
            return
        assert np.array_equal(self.mine.bcast(got, 0), got), f"ranks were given other means of {name}"
        if self.decays:
            self.is_near(name, got, self.coming.pop(name))
        else:
            self.due[name] -= got

    def comm_max(self, values: list[float]) -> list[float]:
        return [float(max(each)) for each in zip(*self.mine.allgather(values), strict=True)]

    def is_near(self, name: str, values: np.ndarray, expected: np.ndarray) -> None:
        off, largest = np.abs(values - expected).max(), np.abs(values).max()
        self.size[name] = max(self.size[name], float(largest))  # a codec may give of one what its neighbours have
        room = 1e-12 if self.dtype is torch.float64 else 1e-6
        assert off <= room * max(self.steps, 1) * max(self.size[name], 1e-30), (
            f"{name}: given and kept are off by {off:.2e}, and outer gradients have up to {self.size[name]:.2e}"
        )

    def check(self) -> None:
        if self.compression is None:
            return
        state = self.compression.state_dict()
        assert state["residuals"].keys() == set(SHAPES) - set(self.frozen)
        for name, lost in state["residuals"].items():
            assert tuple(lost.shape) == SHAPES[name]
            total = self.total(lost.double().numpy())
            coming = state["under_way"].get(name)
            under_way = 0.0 if coming is None else coming.double().numpy()
            if self.decays:
                self.is_near(name, total / self.ranks, self.due[name])
                assert (coming is None) == (name not in self.coming)
                self.is_near(name, under_way, self.coming.get(name, 0.0))
            else:
                self.is_near(name, total + under_way, self.due[name])


GROUPS: dict[int, dist.ProcessGroup] = {}
SUBS: dict[int, MPI.Intracomm] = {}
MESHES: list[dist.DeviceMesh] = []


def on_all(comm: MPI.Intracomm, command: tuple[Any, ...] | None, run: list[Run]) -> bool:
    """Run rank 0's command on all ranks; False for the last one."""
    name, arguments, options = comm.bcast(command)
    wrong = ""
    try:
        if name == "begin":
            if run:
                run.pop().end()
            gc.freeze()  # scalers are looked for among what comes from now on: many times faster
            local = METHODS[arguments[0]][1].__qualname__.startswith(local_steps.__name__)
            run.append((LocalRun if local else Run)(comm, *arguments))
        elif name == "end":
            while run:
                run.pop().end()
        elif name != "quit":
            getattr(run[0], name)(*arguments, **options)
    except BaseException:
        wrong = traceback.format_exc()
        print(f"rank {comm.rank}: {wrong}", flush=True)  # others may wait for this rank until their time is out
    found = [f"rank {rank}:\n{text}" for rank, text in enumerate(comm.allgather(wrong)) if text]
    if found and comm.rank == 0:
        raise AssertionError("\n".join(found))
    return name != "quit"


NAMES = st.sampled_from(sorted(SHAPES))
OVERFLOWS = st.none() | st.tuples(NAMES, st.integers(0, 3))
MOST = min(MPI.COMM_WORLD.size, 4)
PLACES = st.fixed_dictionaries(
    {
        "ranks": st.integers(2, MOST),
        "memory_format": st.sampled_from(sorted(FORMATS)),
        "bucket_mb": st.sampled_from([0.001, 25.0]),
        "view": st.booleans(),
        "dim": st.integers(0, 1),
        "frozen": st.lists(NAMES, unique=True, max_size=1),
    }
)


def check_given_and_kept_are_all(comm: MPI.Intracomm) -> None:
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)
    if not MESHES and comm.size == 4:
        MESHES.append(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    for ranks in range(2, comm.size + 1):
        GROUPS[ranks] = dist.new_group(list(range(ranks)))
        SUBS[ranks] = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
    run: list[Run] = []
    if comm.rank:
        while on_all(comm, None, run):
            pass
        return

    class Machine(RuleBasedStateMachine):
        @initialize(
            method=st.sampled_from(sorted(METHODS)),
            dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
            scale=st.sampled_from([None, 2.0**8, 2.0**16]),
            place=PLACES,
            data=st.data(),
        )
        def begin(self, method: str, dtype: torch.dtype, scale: float | None, place: dict[str, Any], data: Any) -> None:
            self.method = method
            self.do("begin", method, dtype, scale)
            self.move(place, data)

        @rule(place=PLACES, data=st.data())
        def move(self, place: dict[str, Any], data: Any) -> None:
            able = [each for each in METHODS[self.method][0] if MOST == 4 or each != "hsdp"]
            self.do("wrap", data.draw(st.sampled_from(able)), **place)

        @rule(
            used=st.fixed_dictionaries({name: st.lists(st.booleans(), min_size=4, max_size=4) for name in SHAPES}),
            overflow=OVERFLOWS,
            passes=st.integers(1, 2),
            joined=st.integers(0, 3),
            to_none=st.booleans(),
            defer=st.booleans(),
        )
        def step(self, **drawn: Any) -> None:
            self.do("step", **drawn)

        @rule(overflow=OVERFLOWS, passes=st.integers(1, 2))
        def full_step(self, **drawn: Any) -> None:
            everywhere = {name: [True] * 4 for name in SHAPES}
            self.do("step", used=everywhere, joined=0, to_none=True, defer=True, **drawn)

        @rule()
        def drain(self) -> None:
            self.do("drain")

        def do(self, name: str, *arguments: Any, **options: Any) -> None:
            on_all(comm, (name, arguments, options), run)

        def teardown(self) -> None:
            self.do("end")

    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=SEQUENCES,
                stateful_step_count=8,
                deadline=None,
                derandomize="COMPCOLL_SEQUENCES" not in os.environ,
                database=None,
                phases=(Phase.explicit, Phase.generate),  # after a failure ranks may be out of step
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        on_all(comm, ("quit", (), {}), run)
