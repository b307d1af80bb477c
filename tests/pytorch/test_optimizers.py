"""Compressed Adams on threads as ranks, against PyTorch in one process and the papers; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

import torch
from fakes.threads import on_ranks
from oracles.training import RANKS, Vector, back_propagate, gradient, model_of, values_of
from torch import nn

from compcoll import QSGD, Codec, Communicator, MinMax, OneBit, decode, encode
from compcoll.errors import CollectiveMismatch, InvalidArgument
from compcoll.torch import DiLoCo, OneBitAdam, SparseLoCo, ZeroOneAdam
from compcoll.torch.optimizers.adam import CompressedAdam

pytestmark = pytest.mark.with_torch

Make = Callable[[nn.Module, Communicator], CompressedAdam]


def train(
    make: Make, steps: int, comm: Communicator, states: Any = None, values: np.ndarray | None = None
) -> tuple[np.ndarray, Any, CompressedAdam]:
    torch.set_num_threads(1)
    model = model_of(seed=comm.rank)  # all start from rank 0's
    optimizer = make(model, comm)
    if values is not None:
        nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), model.parameters())
    if states is not None:
        optimizer.load_state_dict(states)
    for step in range(optimizer.steps, steps):
        back_propagate(model, step, comm.rank)
        optimizer.step()
    return values_of(model), copy.deepcopy(optimizer.state_dict()), optimizer


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.02, "weight_decay": 0.0}, {"params": others}]


def test_the_warmup_is_adamw() -> None:
    def make(model: nn.Module, comm: Communicator) -> CompressedAdam:
        return OneBitAdam(model, 1e-2, weight_decay=0.1, warmup=50, params=groups(model), group=comm)

    found = on_ranks(RANKS, partial(train, make, 20))
    model = model_of()
    oracle = torch.optim.AdamW(groups(model), 1e-2, weight_decay=0.1)
    for step in range(20):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(RANKS):
            back_propagate(model, step, rank)
            for each, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                each += parameter.grad / RANKS
        for each, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = each
        oracle.step()
    assert all(values.tobytes() == found[0][0].tobytes() for values, *_ in found)
    np.testing.assert_allclose(found[0][0], values_of(model), rtol=1e-4, atol=1e-5)


BLOCK = 8
CODED = MinMax(bits=4, block=BLOCK)


def coded(values: np.ndarray, code: Codec) -> np.ndarray:
    return np.asarray(decode(encode(values, code), values.shape, "float64", code))


def mean_of(values: np.ndarray, code: Codec | None) -> np.ndarray:
    """The mean over the ranks; by a codec as `direct` sends it, where the owner of each part encodes its sum again."""
    if code is None:
        return np.asarray(values.mean(0))
    size, chunk = len(values), values.shape[1] // len(values)
    mean = np.empty(values.shape[1])
    for owner in range(size):
        part = slice(owner * chunk, (owner + 1) * chunk)
        sent = [values[rank, part] / size for rank in range(size)]
        mean[part] = coded(sum(own if rank == owner else coded(own, code) for rank, own in enumerate(sent)), code)
    return mean


def test_coded_gradients_are_adamws_on_their_mean() -> None:
    n, steps, lr, decay = RANKS * 4 * BLOCK, 12, 0.1, 0.01

    def run(code: Codec | None, comm: Communicator) -> np.ndarray:
        model = Vector(n)
        optimizer = OneBitAdam(model, lr, weight_decay=decay, warmup=50, gradient_codec=code, group=comm)
        for step in range(steps):
            model.x.grad = torch.from_numpy(gradient(step, comm.rank, n))
            optimizer.step()
        return values_of(model)

    model = Vector(n)
    oracle = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)
    for step in range(steps):
        gradients = np.array([gradient(step, rank, n) for rank in range(RANKS)])
        model.x.grad = torch.from_numpy(mean_of(gradients, CODED))
        oracle.step()
    for values, exact in zip(on_ranks(RANKS, partial(run, CODED)), on_ranks(RANKS, partial(run, None)), strict=True):
        np.testing.assert_allclose(values, values_of(model), rtol=1e-9, atol=1e-12)
        assert np.abs(values - exact).max() > 0.1


@pytest.mark.parametrize("of_gradients", [None, CODED])
def test_one_bit_adam_is_the_papers_pseudo_code(of_gradients: Codec | None) -> None:
    """In float64, with the owner of each part of the mean keeping that one's loss."""
    steps, warmup, lr, decay = 12, 4, 0.1, 0.01
    n, code = RANKS * 4 * BLOCK, OneBit(block=BLOCK)
    options = {"warmup": warmup, "codec": code, "gradient_codec": of_gradients}

    def run(comm: Communicator) -> np.ndarray:
        model = Vector(n)
        optimizer = OneBitAdam(model, lr, weight_decay=decay, group=comm, **options)
        for step in range(steps):
            model.x.grad = torch.from_numpy(gradient(step, comm.rank, n))
            model.x.grad[5] = 0.0  # this one never moves
            optimizer.step()
        return model.x.detach().numpy().copy()

    found = on_ranks(RANKS, run)
    x, m, v = np.zeros(n), np.zeros(n), np.zeros(n)
    lost = np.zeros((RANKS, n))
    chunk = n // RANKS
    for t in range(1, steps + 1):
        g = np.array([gradient(t - 1, rank, n) for rank in range(RANKS)])
        g[:, 5] = 0
        if t <= warmup:
            mean = mean_of(g, of_gradients)
            m, v = 0.9 * m + 0.1 * mean, 0.999 * v + 0.001 * mean**2
            held = np.sqrt(v / (1 - 0.999**t)) + 1e-8
        else:
            sent = (0.9 * m + 0.1 * g) / RANKS + lost
            m = np.empty(n)
            for owner in range(RANKS):
                part = slice(owner * chunk, (owner + 1) * chunk)
                total = np.array(sent[owner, part])
                for rank in (rank for rank in range(RANKS) if rank != owner):
                    wire = coded(sent[rank, part], code)
                    lost[rank, part] = sent[rank, part] - wire
                    total += wire
                m[part] = coded(total, code)
                lost[owner, part] = total - m[part]
            m[v == 0] = 0
        x = x * (1 - lr * decay) - lr / (1 - 0.9**t) * np.divide(m, held)
    assert (x[5] == 0) == (of_gradients is None) and np.abs(lost).max() > 0.1
    for values in found:
        np.testing.assert_allclose(values, x, rtol=1e-9, atol=1e-12)


def zero_one(n: int, rank_count: int, steps: int, lr: float, decay: float, of_gradients: Codec | None) -> np.ndarray:
    """0/1 Adam with exact averages, by METHODS' formulas: two updates of v at each distance up to step 6, then averages
    that are 2 and from 4 steps later on 4 steps apart.
    """
    x, m, u = (np.zeros((rank_count, n)) for _ in range(3))
    v, together, moved, updates, local = np.zeros(n), np.zeros(n), 0.0, 0, 0
    next_average = 0
    for t in range(1, steps + 1):
        g = np.array([gradient(t - 1, rank, n) for rank in range(rank_count)])
        rate, kept = lr / (1 - 0.9**t), 1 - lr * decay
        if t in (1, 2, 3, 5):  # distances 1, 1, 2, 2, then 4: 9 is beyond the last, 6
            m = 0.9 * m + 0.1 * mean_of(g, of_gradients)
            v, updates = 0.999 * v + 0.001 * mean_of(g, of_gradients) ** 2, updates + 1
            root = np.sqrt(v / (1 - 0.999**updates)) + 1e-8
            x = kept * x - rate * m / root
            continue
        if not local:
            together = x[0].copy()
            next_average = t if t <= 6 else t + (1 if t < 11 else 3)
        m = 0.9 * m + 0.1 * g
        x, u = kept * x - rate * m / root, kept * u + rate * m
        together, moved, local = kept * together, kept * moved + rate, local + 1
        if t == next_average:
            mean = u.mean(0)
            x, m = np.tile(together - mean / root, (rank_count, 1)), np.tile(mean / moved, (rank_count, 1))
            u, moved, local = np.zeros_like(u), 0.0, 0
    return x


@pytest.mark.parametrize("steps", [6, 10, 13, 18])
@pytest.mark.parametrize("of_gradients", [None, CODED])
def test_zero_one_adam_is_the_papers_pseudo_code(steps: int, of_gradients: Codec | None) -> None:
    n = RANKS * 2 * BLOCK

    def run(comm: Communicator) -> np.ndarray:
        model = Vector(n)
        options: dict[str, Any] = {"variance_updates": 2, "freeze": 6, "local_steps": 4, "local_limit": 4}
        options["gradient_codec"] = of_gradients
        optimizer = ZeroOneAdam(model, 0.1, weight_decay=0.01, codec=None, group=comm, **options)
        for step in range(steps):
            model.x.grad = torch.from_numpy(gradient(step, comm.rank, n))
            optimizer.step()
        return model.x.detach().numpy().copy()

    oracle = zero_one(n, RANKS, steps, 0.1, 0.01, of_gradients)
    for values, expected in zip(on_ranks(RANKS, run), oracle, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)


def one_bit(model: nn.Module, comm: Communicator, **options: Any) -> CompressedAdam:
    return OneBitAdam(model, 1e-2, **{"warmup": 6, "group": comm, **options})


def zero_one_adam(model: nn.Module, comm: Communicator, **options: Any) -> CompressedAdam:
    chosen = {"variance_updates": 3, "freeze": 8, "local_steps": 3, "local_limit": 4, "group": comm, **options}
    return ZeroOneAdam(model, 1e-2, **chosen)


@pytest.mark.parametrize(
    "make",
    [
        one_bit,
        partial(one_bit, codec="topk", density=0.1),
        partial(one_bit, warmup="auto", betas=(0.9, 0.75)),
        partial(one_bit, warmup=18, gradient_codec=QSGD(bits=4)),
        partial(one_bit, codec="qsgd", bits=8),
        partial(one_bit, codec="randomk", density=0.1),
        zero_one_adam,
        partial(zero_one_adam, codec="minmax", bits=4),
        partial(zero_one_adam, freeze=20, gradient_codec=QSGD(bits=4)),
    ],
)
def test_an_interrupted_run_has_the_same_bits(make: Make) -> None:
    ended = on_ranks(RANKS, partial(train, make, 23))
    before = on_ranks(RANKS, partial(train, make, 14))
    states = [state for _, state, _ in before]
    one = on_ranks(RANKS, lambda comm: train(make, 23, comm, states[comm.rank], before[0][0]))
    all_states = on_ranks(RANKS, lambda comm: train(make, 23, comm, states[::-1], before[0][0]))
    for (values, state, _), *resumed in zip(ended, one, all_states, strict=True):
        for again, state_again, _ in resumed:
            assert again.tobytes() == values.tobytes()
            for kind in ("residuals", "momentum", "variance"):
                assert all(torch.equal(state[kind][name], state_again[kind][name]) for name in state[kind])
    early = [{name: kept for name, kept in state.items() if name != "begun"} for state in states]
    on_ranks(RANKS, lambda comm: train(make, 14, comm, early[comm.rank], before[0][0]))


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def test_another_number_of_ranks_goes_on_together() -> None:
    states = [state for _, state, _ in on_ranks(RANKS, partial(train, zero_one_adam, 15))]
    assert not torch.equal(states[0]["parameters"]["0.weight"], states[1]["parameters"]["0.weight"])
    found = on_ranks(2, lambda comm: train(zero_one_adam, 15, comm, states))
    means = [torch.stack([s["parameters"][name].double() for s in states]).mean(0) for name in states[0]["parameters"]]
    for values, state, optimizer in found:
        assert isinstance(optimizer, ZeroOneAdam) and optimizer.synchronized
        np.testing.assert_allclose(values, flat(means).numpy(), rtol=1e-6)
        lost = torch.stack([flat(each["residuals"].values()) for _, each, _ in found]).sum(0)
        then = torch.stack([flat(each["residuals"].values()) for each in states]).sum(0)
        torch.testing.assert_close(lost, then)
        assert state["steps"] == 15


def test_the_papers_criterion_ends_the_warmup() -> None:
    """With β2 = 0.75 the variance's memory is 4 steps; the learning rate rises in the first 7."""

    def run(comm: Communicator) -> tuple[int, list[float]]:
        model = Vector(64)
        optimizer = OneBitAdam(model, 0.1, betas=(0.9, 0.75), group=comm)
        sums = []
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 0.1 * min(step + 1, 7)
            model.x.grad = torch.ones(64, dtype=torch.float64)
            optimizer.step()
            sums.append(float(optimizer.variance.sum()))
        return optimizer.frozen_at, sums

    v = [64 * (1 - 0.75**t) for t in range(1, 31)]
    expected = next(t for t in range(8, 31) if v[t - 1] / v[t - 5] >= 0.96)
    for frozen_at, sums in on_ranks(2, run):
        assert frozen_at == expected
        np.testing.assert_allclose(sums[:expected], v[:expected])
        assert sums[-1] == sums[expected - 1]


@pytest.mark.parametrize("of_gradients", [None, QSGD(bits=4)])
def test_what_is_sent_is_counted(of_gradients: Codec | None) -> None:
    n = 1 << 16

    def run(comm: Communicator) -> Any:
        model = Vector(n)
        optimizer = OneBitAdam(model, 0.1, warmup=2, gradient_codec=of_gradients, group=comm)
        for step in range(20):
            model.x.grad = torch.from_numpy(gradient(step, comm.rank, n))
            optimizer.step()
        return optimizer.stats

    for stats in on_ranks(2, run):
        # Two halves each, of doubles, for whose blocks one or two doubles go along.
        first, later = 8 * n if of_gradients is None else n / 2 + 8 * n / 512, n / 8 + 16 * n / 2048
        assert stats.steps == 20 and stats.peak_step_nbytes == pytest.approx(first, rel=1e-3)
        assert stats.wire_nbytes == pytest.approx(2 * first + 18 * later, rel=0.01)
        assert stats.mean_step_nbytes == stats.wire_nbytes / 20


BAD: list[tuple[str, Callable[[nn.Module, torch.optim.Optimizer, Communicator], Any], str]] = [
    ("H = 0", lambda m, i, c: DiLoCo(m, i, every=0, group=c), "every=0"),
    ("delay", lambda m, i, c: DiLoCo(m, i, every=3, delay=3, group=c), "delay=3.*below every=3"),
    ("fragments", lambda m, i, c: DiLoCo(m, i, every=9, fragments=3, group=c), "fragments=3: the model has 2 layers"),
    ("turns", lambda m, i, c: DiLoCo(m, i, every=1, fragments=2, group=c), "fragments=2 must be at most every=1"),
    ("alpha", lambda m, i, c: DiLoCo(m, i, every=3, alpha=1.0, group=c), "alpha=1.0"),
    ("feedback", lambda m, i, c: DiLoCo(m, i, every=3, codec="terngrad", group=c), "TernGrad.*grow"),
    ("moments", lambda m, i, c: DiLoCo(m, i, every=3, codec="variance", group=c), "second moments"),
    ("lacking", lambda m, i, c: DiLoCo(m, _of([m[0].weight]), every=3, group=c), r"lacks '0\.bias'"),
    ("foreign", lambda m, i, c: DiLoCo(m, _of([*m.parameters(), *model_of().parameters()]), every=3, group=c), "has 4"),
    (
        "way",
        lambda m, i, c: DiLoCo(m, i, every=3, group=c, transport="mpi"),
        "the given communicator has its own",
    ),
    ("density", lambda m, i, c: SparseLoCo(m, i, every=3, density=0.0, group=c), "density=0.0"),
    ("beta", lambda m, i, c: SparseLoCo(m, i, every=3, beta=1.5, group=c), "beta=1.5"),
    ("warm-up", lambda m, i, c: OneBitAdam(m, warmup=0, group=c), "warmup=0"),
    ("lr", lambda m, i, c: OneBitAdam(m, -1.0, group=c), "lr=-1.0"),
    ("betas", lambda m, i, c: OneBitAdam(m, betas=(0.9, 1.0), group=c), "betas="),
    ("momentum", lambda m, i, c: OneBitAdam(m, codec="terngrad", group=c), "TernGrad.*grow"),
    ("gradients", lambda m, i, c: OneBitAdam(m, gradient_codec="topk", group=c), "gradient_codec=TopK.*no variance"),
    ("no codec", lambda m, i, c: ZeroOneAdam(m, gradient_codec=4, group=c), "gradient_codec=4 is neither"),
    ("params", lambda m, i, c: OneBitAdam(m, params=model_of().parameters(), group=c), "not in the model"),
    ("updates", lambda m, i, c: ZeroOneAdam(m, variance_updates=0, group=c), "variance_updates=0"),
    ("limit", lambda m, i, c: ZeroOneAdam(m, local_limit=-1, group=c), "local_limit=-1"),
]


def _of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


@pytest.mark.parametrize(("make", "told"), [(make, told) for _, make, told in BAD], ids=[name for name, *_ in BAD])
def test_bad_input_is_named(make: Callable[..., Any], told: str) -> None:
    def run(comm: Communicator) -> None:
        model = model_of()
        with pytest.raises(InvalidArgument, match=told):
            make(model, torch.optim.AdamW(model.parameters()), comm)

    on_ranks(2, run)


def test_states_of_something_else_are_refused() -> None:
    def check(comm: Communicator) -> None:
        model, another = model_of(), model_of()
        state = DiLoCo(model, torch.optim.AdamW(model.parameters()), every=3, group=comm).state_dict()
        other = DiLoCo(another, torch.optim.AdamW(another.parameters()), every=4, group=comm)
        with pytest.raises(InvalidArgument, match=r"'every': 3.*this optimizer has.*'every': 4"):
            other.load_state_dict(state)
        with pytest.raises(InvalidArgument, match="no state of such"):
            other.load_state_dict({"steps": 3})
        adam = OneBitAdam(model_of(), group=comm)
        kept = adam.state_dict()
        kept["momentum"] = {"0.weight": torch.zeros(3)}
        with pytest.raises(InvalidArgument, match="momentum has"):
            adam.load_state_dict(kept)
        with pytest.raises(InvalidArgument, match="no state of such"):
            ZeroOneAdam(model_of(), group=comm).load_state_dict(adam.state_dict())
        with pytest.raises(InvalidArgument, match=f"rank {1 - comm.rank}|give the states of all ranks"):
            adam.load_state_dict(adam.state_dict() | {"rank": 1 - comm.rank})

    on_ranks(2, check)


def test_ranks_that_differ_are_named() -> None:
    def run(comm: Communicator) -> None:
        model = model_of()
        with pytest.raises(CollectiveMismatch, match=r"(?s)every 3.*every 4"):
            DiLoCo(model, torch.optim.AdamW(model.parameters()), every=3 + comm.rank, group=comm)
        with pytest.raises(CollectiveMismatch, match=r"(?s)gradient_codec None.*gradient_codec MinMax"):
            OneBitAdam(model, gradient_codec=MinMax(bits=4) if comm.rank else None, group=comm)

    on_ranks(2, run)
