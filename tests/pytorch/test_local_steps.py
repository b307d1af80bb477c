"""Local steps on threads as ranks: against a loop in one process, and the papers' pseudo-code."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

import torch
from fakes.threads import on_ranks, world
from oracles.training import RANKS, Vector, back_propagate, gradient, model_of, values_of
from torch import nn

from compcoll import QSGD, Codec, Communicator, MinMax, get_codec
from compcoll.torch import DiLoCo, SparseLoCo
from compcoll.torch.optimizers.sparse_loco import CHUNK, ChunkedTopK
from compcoll.torch.training_stats import RecentSteps

pytestmark = pytest.mark.with_torch

MakeLocal = Callable[[nn.Module, torch.optim.Optimizer, Communicator], DiLoCo]
FOUR_BITS = MinMax(bits=4)


def local(
    make: MakeLocal, steps: int, comm: Communicator, states: Any = None
) -> tuple[np.ndarray, dict[str, Any], DiLoCo]:
    torch.set_num_threads(1)
    model = model_of(seed=comm.rank)
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    diloco = make(model, inner, comm)
    if states is not None:
        diloco.load_state_dict(states)
    for step in range(diloco.steps, steps):
        back_propagate(model, step, comm.rank)
        inner.step()
    state = copy.deepcopy(diloco.state_dict())
    return values_of(model), state, diloco


def alone(steps: int, every: int, fragments: int, delay: int, alpha: float, warmup: int) -> list[np.ndarray]:
    """DiLoCo with exact means, in a loop over all ranks' models; a fragment is one of the two layers, or all."""
    models = [model_of() for _ in range(RANKS)]
    inner = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    parts = [[0, 1], [2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
    outer = [p.detach().clone() for p in models[0].parameters()]
    moving = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    flying: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            back_propagate(model, step - 1, rank)
        every_one = [list(model.parameters()) for model in models]
        for same in zip(*every_one, strict=True) if step <= warmup else ():
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad = mean
        for optimizer in inner:
            optimizer.step()
        if step <= warmup:
            for common, own in zip(outer, every_one[0], strict=True):
                common.copy_(own.detach())
            continue
        for number, part in enumerate(parts):
            if step % every == every * (number + 1) // fragments % every:
                means = [torch.stack([outer[i] - each[i].detach() for each in every_one]).mean(0) for i in part]
                flying[number] = step + delay, means
            if number in flying and flying[number][0] == step:
                for i, mean in zip(part, flying.pop(number)[1], strict=True):
                    outer[i].grad = mean
                moving.step()
                for i in part:
                    outer[i].grad = None
                    for each in every_one:
                        each[i].data.copy_(alpha * each[i].data + (1 - alpha) * outer[i])
    return [values_of(model) for model in models]


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "warmup"),
    [(1, 0, None, 0), (2, 0, 0.25, 0), (2, 3, None, 0), (1, 2, 0.0, 0), (1, 0, None, 7), (2, 3, None, 5)],
)
def test_diloco_is_a_loop_in_one_process(fragments: int, delay: int, alpha: float | None, warmup: int) -> None:
    def make(model: nn.Module, inner: torch.optim.Optimizer, comm: Communicator) -> DiLoCo:
        options = {"fragments": fragments, "delay": delay, "warmup": warmup}
        return DiLoCo(model, inner, every=5, alpha=alpha, group=comm, **options)

    found = on_ranks(RANKS, partial(local, make, 18))
    oracle = alone(18, 5, fragments, delay, (0.5 if delay else 0.0) if alpha is None else alpha, warmup)
    for (values, *_), expected in zip(found, oracle, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=2e-4)


def streaming(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    comm: Communicator,
    codec: Codec = FOUR_BITS,
    feedback: bool = True,
) -> DiLoCo:
    return DiLoCo(model, inner, every=6, fragments=2, delay=2, codec=codec, feedback=feedback, group=comm)


def sparse(model: nn.Module, inner: torch.optim.Optimizer, comm: Communicator) -> DiLoCo:
    return SparseLoCo(model, inner, every=6, warmup=3, fragments=2, delay=2, density=0.05, group=comm)


@pytest.mark.parametrize(
    "make",
    [
        streaming,
        sparse,
        partial(streaming, codec=QSGD(bits=4)),
        partial(streaming, codec=get_codec("terngrad"), feedback=False),
        partial(streaming, codec=get_codec("randomk", density=0.1)),
    ],
)
@pytest.mark.parametrize("at", [13, 17])  # 13: a fragment is under way
def test_interrupted_local_steps_have_the_same_bits(make: MakeLocal, at: int) -> None:
    ended = on_ranks(RANKS, partial(local, make, 26))
    states = [state for _, state, _ in on_ranks(RANKS, partial(local, make, at))]
    assert (at == 13) == bool(states[0]["under_way"])
    resumed = on_ranks(RANKS, lambda comm: local(make, 26, comm, states[comm.rank]))
    for (values, state, _), (again, state_again, _) in zip(ended, resumed, strict=True):
        assert values.tobytes() == again.tobytes()
        assert all(torch.equal(state["outer"][name], state_again["outer"][name]) for name in state["outer"])
    early = [{name: kept for name, kept in state.items() if name != "begun"} for state in states]
    on_ranks(RANKS, lambda comm: local(make, at, comm, early[comm.rank]))
    fewer = on_ranks(2, lambda comm: local(make, at, comm, states))
    outer = torch.cat([values.flatten() for values in states[0]["outer"].values()]).numpy()
    assert all(values.tobytes() == outer.tobytes() for values, *_ in fewer)


def test_all_ranks_end_alike_and_hear_of_their_traffic() -> None:
    def run(comm: Communicator) -> tuple[np.ndarray, Any]:
        values, _, diloco = local(streaming, 23, comm)
        stats = diloco.stats
        diloco.synchronize()
        return torch.cat([f.outer for f in diloco._fragments]).numpy(), (values, stats)

    found = on_ranks(2, run)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    for _, (_, stats) in found:
        assert stats.steps == 23 and 0 < stats.mean_step_nbytes < stats.peak_step_nbytes


@pytest.mark.parametrize("event", ["none", "resumed", "failed on rank 1"])
def test_what_was_just_averaged_is_not_moved_again_by_the_outer_momentum(event: str) -> None:
    def make(model: nn.Module, inner: torch.optim.Optimizer, comm: Communicator) -> DiLoCo:
        return DiLoCo(model, inner, every=5, group=comm)

    def run(comm: Communicator) -> None:
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), 1e-2)
        diloco = make(model, inner, comm)
        for step in range(10):
            back_propagate(model, step, comm.rank)
            inner.step()
        before = values_of(model)
        if event == "resumed":
            diloco.load_state_dict(copy.deepcopy(diloco.state_dict()))
        elif event == "failed on rank 1":
            if comm.rank == 1:
                (fragment,) = diloco._fragments
                fragment.outer.add_(1.0)
                fragment.version, fragment.sent, diloco._rounds = 1, -1, 1
            diloco.group = comm
        diloco.synchronize()
        assert values_of(model).tobytes() == before.tobytes()
        back_propagate(model, 10, comm.rank)
        inner.step()
        diloco.synchronize()
        assert values_of(model).tobytes() != before.tobytes()

    on_ranks(2, run)


def test_ranks_that_die_and_that_join() -> None:
    """The survivors of an average that did not end on all of them agree; a rank that joins has their parameters."""
    before = world(3)

    def start(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
        model = model_of(seed=comm.rank)
        inner = torch.optim.AdamW(model.parameters(), 1e-2)
        diloco = DiLoCo(model, inner, every=4, codec="minmax", bits=2, group=comm)
        for step in range(9):
            back_propagate(model, step, comm.rank)
            inner.step()
        return model, inner, diloco

    ranks = on_ranks(before, start)
    lost = [diloco.state_dict()["residuals"] for *_, diloco in ranks]
    # Rank 2 dies; rank 1's last average has not ended, as an error in it would leave it.
    behind = ranks[1][2]._fragments[0]
    behind.outer.add_(1.0)
    behind.version -= 1
    ranks[1][2]._rounds -= 1

    def go_on(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        if comm.rank < 2:
            model, inner, diloco = ranks[comm.rank]
            diloco.group = comm
        else:
            model = model_of(seed=9)
            inner = torch.optim.AdamW(model.parameters(), 1e-2)
            diloco = DiLoCo(model, inner, every=4, codec="minmax", bits=2, group=comm)
        common = diloco._fragments[0].outer.numpy().copy()
        assert diloco.steps == 9 and diloco._fragments[0].version == 2
        if comm.rank:
            assert values_of(model).tobytes() == common.tobytes()
        for step in range(diloco.steps, 12):
            back_propagate(model, step, comm.rank)
            inner.step()
        return common, values_of(model)

    found = on_ranks(world(3), go_on)
    for common, values in found:
        assert common.tobytes() == found[0][0].tobytes()
        assert values.tobytes() == found[0][1].tobytes() and np.isfinite(values).all()
    assert all(bool(part.isfinite().all()) for state in lost for part in state.values())


class Broken(RuntimeError):
    pass


def test_a_failed_average_takes_back_its_losses() -> None:
    def run(comm: Communicator) -> bool:
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), 1e-2)
        diloco = DiLoCo(model, inner, every=2, codec="onebit", group=comm)
        for step in range(3):
            back_propagate(model, step, comm.rank)
            inner.step()
        averager, fragment = diloco._fragments[0].averager, diloco._fragments[0]
        kept, outer = averager.residual.copy(), fragment.outer.clone()

        def failing(*_: Any) -> int:
            averager.residual[...] = 7
            raise Broken

        averager.average = failing
        back_propagate(model, 3, comm.rank)
        with pytest.raises(Broken):
            inner.step()
        assert fragment.under_way is None and torch.equal(fragment.outer, outer)
        return bool(np.array_equal(averager.residual, kept))

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("density", [0.0003, 0.01, 0.03, 0.3, 0.5])
def test_the_largest_elements_of_each_chunk(density: float) -> None:
    values = np.random.default_rng(3).standard_normal((7, CHUNK)).astype(np.float32)
    values[3, 5:] = 0
    values[4] = 0
    code = ChunkedTopK(density)
    wire = code.encode(values)
    found = code.decode(wire)
    low = int(math.log2(CHUNK // code.k))  # bits of an index that are written as they are, after Elias
    assert wire.shape == (7, 8 + math.ceil((code.k + (CHUNK >> low) + code.k * (low + 2)) / 8))
    for row, got in zip(values.astype(np.float64), found, strict=True):
        largest = np.argsort(-np.abs(row), kind="stable")[: code.k]
        assert np.abs(row[got != 0]).min(initial=np.inf) >= np.abs(row[largest]).min()
        magnitudes = np.abs(row[largest])
        large = magnitudes > magnitudes.mean()
        expected = np.zeros(CHUNK)
        for part in (large, ~large):
            expected[largest[part]] = np.sign(row[largest[part]]) * magnitudes[part].mean() if part.any() else 0
        if np.count_nonzero(row) >= code.k:
            np.testing.assert_allclose(got, expected, rtol=1e-5)
        else:
            assert np.abs(got).sum() == pytest.approx(np.abs(row).sum(), rel=1e-5)
    if density == 0.01:
        assert 8 * wire.shape[1] / code.k < 12.5  # two means, 8.6 bits of index, 2 of value


def test_sparse_loco_is_its_pseudo_code() -> None:
    n, density, beta, lr = 6000, 0.02, 0.9, 0.65
    code = ChunkedTopK(density)

    def start(comm: Communicator) -> np.ndarray:
        model = Vector(n)
        inner = torch.optim.SGD(model.parameters(), 1.0)
        SparseLoCo(model, inner, every=1, density=density, beta=beta, lr=lr, group=comm)
        for step in range(5):
            model.x.grad = torch.from_numpy(gradient(step, comm.rank, n))
            inner.step()
        return model.x.detach().numpy().copy()

    x, kept = np.zeros(n), np.zeros((RANKS, n))
    for step in range(5):
        total, senders = np.zeros(n), np.zeros(n)
        for rank in range(RANKS):
            kept[rank] = beta * kept[rank] + gradient(step, rank, n)
            padded = np.zeros(2 * CHUNK, np.float32)
            padded[:n] = kept[rank]
            sent = code.decode(code.encode(padded.reshape(2, CHUNK))).reshape(-1)[:n]
            kept[rank] -= sent
            total += sent
            senders += sent != 0
        assert {0, 1, 2} <= set(senders)
        x -= lr * total / np.maximum(senders, 1)
    for found in on_ranks(RANKS, start):
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_reaches_all() -> None:
    values = np.random.default_rng(1).standard_normal((1, CHUNK)).astype(np.float32)
    values[0, 7] = np.nan
    code = ChunkedTopK(0.01)
    assert np.isnan(code.decode(code.encode(values))[0, 7])


def test_what_is_sent_while_several_steps_run_counts_for_each() -> None:
    recent = RecentSteps(3)
    most = []
    for nbytes in (12, 6, 3, 0):  # the first step is forgotten when the fourth begins
        recent.begin()
        most.append(recent.spread(nbytes))
    assert most == [12.0, 15.0, 16.0, 4.0]
