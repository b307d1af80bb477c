"""What every optimizer of compcoll.torch keeps to, on threads as ranks: skipped and compiled steps, logical states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

import torch
from fakes.threads import on_ranks
from torch import nn

import compcoll.torch
from compcoll import Communicator
from compcoll.errors import CollectiveMismatch, InvalidArgument
from compcoll.torch.optimizers.adam import CompressedAdam

pytestmark = pytest.mark.with_torch

PUBLIC = [getattr(compcoll.torch, name) for name in compcoll.torch.__all__]
KINDS = [kind for kind in PUBLIC if ".optimizers." in kind.__module__ and hasattr(kind, "conserves")]
LOCAL = [kind for kind in KINDS if not issubclass(kind, CompressedAdam)]
FORMATS = [torch.contiguous_format, torch.channels_last]
OPTIONS = {
    "OneBitAdam": {"warmup": 3},
    "ZeroOneAdam": {"variance_updates": 2, "freeze": 3, "local_steps": 50, "local_limit": 3},
    "DiLoCo": {"codec": "minmax", "bits": 4},
}


def model_of(rank: int = 0, memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    random = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.empty(())))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model.to(memory_format=memory_format)


def made(
    kind: Any,
    model: nn.Module,
    comm: Communicator,
    fused: bool = True,
    inner_kind: Any = torch.optim.AdamW,
    **more: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer that is stepped, and that of compcoll."""
    torch.set_num_threads(1)
    options = {**OPTIONS.get(kind.__name__, {}), "group": comm, **more}
    trained = [p for p in model.parameters() if p.requires_grad]
    if issubclass(kind, CompressedAdam):
        optimizer = kind(model, 1e-2, **options)
        return optimizer, optimizer
    inner = inner_kind(trained, 1e-2, fused=fused)
    return inner, kind(model, inner, **{"every": 3, "delay": 1, "fragments": 2, **options})


def set_gradients(model: nn.Module, step: int, rank: int, factor: float = 1.0) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in model.parameters():
        values = factor * torch.randn(parameter.shape, generator=random)
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter).copy_(values)


def values_of(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(each)


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize(
    ("kind", "warmup", "fused"),
    [
        *((kind, warmup, fused) for kind in LOCAL for warmup, fused in ((0, False), (6, False), (6, True))),
        *((kind, 3, False) for kind in KINDS if kind not in LOCAL),
    ],
)
def test_ranks_skip_steps_that_overflow_together(kind: Any, warmup: int, fused: bool, unscaled_before: bool) -> None:
    """An Adam's ranks all skip; of local steps the rank's own changes nothing, but counts; in the warm-up all do."""
    adam = issubclass(kind, CompressedAdam)
    options = {} if adam else {"warmup": warmup}
    overflows = {(2, 1), (7, 0), (8, 1), (8, 2)}  # iterations and ranks

    def run(scaled: bool, comm: Communicator) -> tuple[np.ndarray, int]:
        model = model_of()
        optimizer, kept = made(kind, model, comm, fused, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
        for at in range(13):
            scaler.scale(torch.zeros(1))  # which makes the scale
            mine = (at, comm.rank) in overflows
            together = any(step == at for step, _ in overflows) and (adam or at < warmup)
            if scaled:
                set_gradients(model, at, comm.rank, scaler.get_scale())
                if mine:
                    model[0].weight.grad[0, 0, 0, 0] = torch.inf
                if unscaled_before:
                    scaler.unscale_(optimizer)
            else:
                set_gradients(model, at, comm.rank)
                if mine or together:
                    model.zero_grad()
            if scaled or not (adam and together):
                scaler.step(optimizer)
            if scaled:
                scaler.update()
        state = kept.state_dict()
        assert all(bool(each.isfinite().all()) for each in tensors_in(state))
        return values_of(model), kept.steps

    for (values, steps), (expected, expected_steps) in zip(
        on_ranks(3, partial(run, True)), on_ranks(3, partial(run, False)), strict=True
    ):
        assert steps == expected_steps == (10 if adam else 13)
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_step_leaves_nothing_of_the_scaler(kind: Any) -> None:
    def run(comm: Communicator) -> None:
        model = model_of()
        optimizer, kept = made(kind, model, comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scaler.scale(torch.zeros(1))
        set_gradients(model, 0, comm.rank)
        frozen = model[0].weight.requires_grad_(False)
        with pytest.raises(InvalidArgument, match=r"'0\.weight' was frozen"):
            scaler.step(optimizer)
        frozen.requires_grad_(True)
        optimizer.step()
        assert kept.steps == 1 and not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
        if kind in LOCAL:
            kept.free()
            assert vars(optimizer).get("_step_supports_amp_scaling") is True  # as fused=True has it

    on_ranks(2, run)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_uncompiled_ones(kind: Any) -> None:
    def run(compiled: bool, comm: Communicator) -> np.ndarray:
        model = model_of()
        optimizer, kept = made(kind, model, comm, False, torch.optim.SGD)  # which is traced in a second
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for at in range(8):
            set_gradients(model, at, comm.rank)
            step()
        assert kept.steps == 8
        return values_of(model)

    (compiled,), (plain,) = on_ranks(1, partial(run, True)), on_ranks(1, partial(run, False))
    np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("saved_in", "loaded_in"), list(itertools.permutations(FORMATS)))
@pytest.mark.parametrize("at", [7, 9])  # 7: of local steps an average is under way
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_logical(kind: Any, at: int, saved_in: torch.memory_format, loaded_in: torch.memory_format) -> None:
    """A run that goes on in another memory format goes on as if nothing had happened; what is saved stays as it is."""

    def save(comm: Communicator) -> tuple[Any, Any, np.ndarray]:
        model = model_of(memory_format=saved_in)
        optimizer, kept = made(kind, model, comm)
        for step in range(13):
            if step == at:
                state, weights = kept.state_dict(), copy.deepcopy(model.state_dict())
            set_gradients(model, step, comm.rank)
            optimizer.step()
        return state, weights, values_of(model)

    def load(saved: list[Any], comm: Communicator) -> np.ndarray:
        model = model_of(memory_format=loaded_in)
        optimizer, kept = made(kind, model, comm)
        state, weights, _ = saved[comm.rank]
        model.load_state_dict(weights)
        kept.load_state_dict(state)
        assert kept.state_dict()["begun"] == state["begun"]
        for step in range(at, 13):
            set_gradients(model, step, comm.rank)
            optimizer.step()
        return values_of(model)

    shapes = {name: p.shape for name, p in model_of().named_parameters()}
    saved = on_ranks(2, save)
    for (state, _, values), again in zip(saved, on_ranks(2, partial(load, saved)), strict=True):
        np.testing.assert_allclose(again, values, rtol=1e-5, atol=1e-6)
        for name, tensor in named_in(state):
            assert tensor.shape == shapes[name] and tensor.is_contiguous()
        assert all(tensor.ndim == 0 or tensor.shape in shapes.values() for tensor in tensors_in(state))


def named_in(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor) and key in dict(model_of().named_parameters()):
            yield key, value
        yield from named_in(value)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_residuals_go_on_with_other_ranks_and_without_frozen_parameters(kind: Any, ranks: int) -> None:
    """Of what is averaged the sum over the ranks stays, and of what a rank sends for itself the mean."""

    def save(comm: Communicator) -> Any:
        model = model_of()
        optimizer, kept = made(kind, model, comm)
        for step in range(9):
            set_gradients(model, step, comm.rank)
            optimizer.step()
        return kept.state_dict()

    def load(states: Any, comm: Communicator) -> Any:
        model = model_of()
        model[2].weight.requires_grad_(False)
        frozen = model[2].weight.clone()
        optimizer, kept = made(kind, model, comm)
        kept.load_state_dict(states)
        found = kept.state_dict()["residuals"]
        assert all(each.any() for each in found.values()) or comm.rank >= 3
        for step in range(9, 13):
            set_gradients(model, step, comm.rank)
            optimizer.step()
        assert torch.equal(model[2].weight, frozen) and np.isfinite(values_of(model)).all()
        return found

    states = on_ranks(3, save)
    with pytest.warns(UserWarning, match=r"'2\.weight', which are not trained here"):
        found = on_ranks(ranks, partial(load, states))
    wanted = {name for name, p in model_of().named_parameters() if name != "2.weight"}
    combine = np.mean if kind.conserves == "decay" else np.sum
    for name in wanted:
        then = combine([state["residuals"][name].double().numpy() for state in states], axis=0)
        now = combine([each[name].double().numpy() for each in found], axis=0)
        np.testing.assert_allclose(now, then, rtol=1e-5, atol=1e-7)
    assert all(each.keys() == wanted for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_different_steps_are_found_out(kind: Any) -> None:
    def run(loads: tuple[int, int], comm: Communicator) -> None:
        model = model_of()
        optimizer, kept = made(kind, model, comm, delay=0, fragments=1) if kind in LOCAL else made(kind, model, comm)
        states = {}
        for step in range(1, 6):
            set_gradients(model, step, comm.rank)
            optimizer.step()
            states[step] = kept.state_dict()
        if loads[comm.rank]:
            kept.load_state_dict(states[loads[comm.rank]])
        set_gradients(model, 0, comm.rank)
        with pytest.raises(CollectiveMismatch, match="goes on from a state of step"):
            _ = [optimizer.step() for _ in range(3)]

    on_ranks(2, partial(run, (3, 5)))
    on_ranks(2, partial(run, (0, 5)))


@pytest.mark.parametrize("every_one", [False, True])
@pytest.mark.parametrize("kind", LOCAL)
def test_ranks_synchronize_after_the_same_step(kind: Any, every_one: bool) -> None:
    def run(comm: Communicator) -> None:
        model = model_of()
        inner, kept = made(kind, model, comm)
        for step in range(4 + comm.rank):
            set_gradients(model, step, comm.rank)
            if step < 4 or every_one:
                inner.step()
        if not every_one:
            kept.synchronize()
            return
        with pytest.raises(CollectiveMismatch, match="synchronize after step 4"):
            kept.synchronize()

    on_ranks(2, run)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_model_has_becomes_rank_0s(kind: Any) -> None:
    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        model = model_of(comm.rank)
        model[0].bias.requires_grad_(False)
        assert isinstance(model[1], nn.BatchNorm2d) and model[1].running_mean is not None
        model[1].running_mean.fill_(comm.rank)
        made(kind, model, comm)
        return model.state_dict()

    wanted = model_of().state_dict()
    for state in on_ranks(2, run):
        assert all(torch.equal(values, wanted[name]) for name, values in state.items())


@pytest.mark.parametrize("kind", LOCAL)
def test_rounding_of_parameters_is_no_step(kind: Any) -> None:
    """Outer parameters are wider than bfloat16: what these round away is not taken back from them."""

    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        model = model_of().to(torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), 1e-2)
        kept = kind(model, inner, every=2, group=comm)
        before = None
        for step in range(8):
            set_gradients(model, step, comm.rank, 1.0 if step < 2 else 0.0)
            inner.step()
            if step == 1:
                kept.outer.param_groups[0]["momentum"] = 0.0
                kept._fragments[0].averager.residual = (
                    None if kind is compcoll.torch.DiLoCo else np.zeros_like(kept._fragments[0].averager.residual)
                )
                before = kept.state_dict()["outer"]
        assert before is not None
        after = kept.state_dict()["outer"]
        return tuple(torch.cat([v.flatten() for v in each.values()]).numpy() for each in (before, after))

    for before, after in on_ranks(2, run):
        assert np.abs(before - torch.from_numpy(before).bfloat16().float().numpy()).max() > 1e-5
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("kind", LOCAL)
def test_what_no_rank_uses_keeps_no_gradient_in_the_warmup(kind: Any) -> None:
    def run(comm: Communicator) -> np.ndarray:
        model = model_of()
        inner, _ = made(kind, model, comm, warmup=3)
        for step in range(3):
            set_gradients(model, step, comm.rank)
            model[0].bias.grad = None
            if comm.rank:
                model[2].weight.grad = None
            inner.step()
        assert torch.equal(model[0].bias, model_of()[0].bias)
        return values_of(model)

    first, second = on_ranks(2, run)
    np.testing.assert_array_equal(first, second)


def test_schedulers_may_change_betas() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)

    def run(comm: Communicator) -> np.ndarray:
        model = model_of()
        optimizer, _ = made(compcoll.torch.OneBitAdam, model, comm, warmup=20)
        scheduler = schedule(optimizer)
        for step in range(10):
            set_gradients(model, step, 0)
            optimizer.step()
            scheduler.step()
        return values_of(model)

    model = model_of()
    oracle = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = schedule(oracle)
    for step in range(10):
        set_gradients(model, step, 0)
        oracle.step()
        scheduler.step()
    for values in on_ranks(2, run):
        np.testing.assert_allclose(values, values_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LOCAL)
def test_parameters_that_come_to_be_trained_are_refused(kind: Any) -> None:
    def run(comm: Communicator) -> None:
        model = model_of()
        model[0].bias.requires_grad_(False)
        inner = torch.optim.AdamW(model.parameters())
        kind(model, inner, every=2, group=comm)
        model[0].bias.requires_grad_(True)
        set_gradients(model, 0, comm.rank)
        with pytest.raises(InvalidArgument, match="was added or unfrozen"):
            inner.step()

    on_ranks(2, run)


def flat(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([each.double().flatten() for each in tensors.values()]).numpy()


@pytest.mark.parametrize("kind", LOCAL)
def test_what_is_sent_and_residuals_add_up(kind: Any) -> None:
    """By SGD at a rate of 1 the outer gradient is the sum of the gradients since the last outer step."""
    beta = 0.9 if kind.conserves == "decay" else 1.0
    options = {"beta": beta, "density": 0.01} if kind.conserves == "decay" else {"codec": "onebit"}

    def run(comm: Communicator) -> list[tuple[np.ndarray, ...]]:
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), 1.0)
        kept = kind(model, inner, every=2, group=comm, **options)
        given: list[np.ndarray] = []
        vector = kept.outer.param_groups[0]["params"][0]
        kept.outer.register_step_pre_hook(lambda *_: given.append(vector.grad.double().numpy().copy()))
        rounds, before, total = [], flat(kept.state_dict()["residuals"]), 0.0
        for step in range(10):
            set_gradients(model, step, comm.rank, 0.1)
            total = total + flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            inner.step()
            if step % 2:
                after = flat(kept.state_dict()["residuals"])
                rounds.append((given[-1], total, before, after))
                before, total = after, 0.0
        return rounds

    for rounds in zip(*on_ranks(3, run), strict=True):
        (mean, *_), *_ = rounds
        assert all(np.array_equal(given, mean) for given, *_ in rounds)
        if kind.conserves == "exact":
            lost = [sum(each[at] for each in rounds) for at in (2, 3)]
            np.testing.assert_allclose(mean + lost[1], np.mean([each[1] for each in rounds], 0) + lost[0], atol=1e-5)
            assert np.abs(lost[1]).max() > 0.01
        else:
            sent = np.array([beta * before + total - after for _, total, before, after in rounds])
            sent[np.abs(sent) < 1e-5] = 0
            np.testing.assert_allclose(mean, sent.sum(0) / np.maximum((sent != 0).sum(0), 1), atol=1e-5)
            assert 0 < np.count_nonzero(sent[0]) <= 41


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_earlier_releases_are_refused_by_version(kind: Any) -> None:
    """Those of 0.2 held flat tensors: the version is looked at before shapes."""

    def run(comm: Communicator) -> None:
        _, kept = made(kind, model_of(), comm)
        state = kept.state_dict()
        state["version"] -= 1
        state["residuals"] = {name: lost.reshape(-1) for name, lost in state["residuals"].items()}
        with pytest.raises(InvalidArgument, match=r"has version 1, .* reads version 2"):
            kept.load_state_dict(state)

    on_ranks(1, run)
