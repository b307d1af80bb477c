"""Which GradScaler scales a loss, found without being told."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch", "2.12")

import torch
from torch import nn

from compcoll.errors import InvalidArgument
from compcoll.torch.loss_scale import LossScale

pytestmark = pytest.mark.with_torch


def scaler_of(scale: float) -> torch.amp.GradScaler:
    """One in use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    return scaler


class Training:
    """A parameter, its optimizer, and the scale that is looked for."""

    def __init__(self) -> None:
        gc.collect()  # scalers of other tests
        self.parameter = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.scale = LossScale([self.parameter])

    def step(self, scaler: torch.amp.GradScaler | None) -> float:
        """One of the optimizer; gives by what the scale had it multiplied what is kept."""
        loss = self.parameter.sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        ratio = self.scale.begin()
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()
        return ratio


def test_the_only_scaler_is_known_from_the_first_step_on() -> None:
    training, scaler = Training(), scaler_of(4.0)
    training.scale.restart(loaded=True)
    assert training.step(scaler) == training.scale.unit == 4.0
    scaler.update(8.0)
    assert training.scale.possible and training.step(scaler) == 2.0


@pytest.mark.parametrize("own", [None, 4.0])
def test_anothers_is_found_out_at_the_first_step(own: float | None) -> None:
    training, other = Training(), scaler_of(256.0)
    scaler = None if own is None else scaler_of(own)
    training.step(scaler)
    assert training.scale.unit == (own or 1.0) and training.scale.possible == (own is not None)
    other.update(512.0)
    assert training.step(scaler) == 1.0


def test_what_was_loaded_for_another_scale_is_refused() -> None:
    training, other = Training(), scaler_of(256.0)
    training.scale.restart(loaded=True)
    before = training.parameter.detach().clone()
    with pytest.raises(InvalidArgument, match=r"scale of 256 .* were scaled by 1"):
        training.step(None)
    assert torch.equal(training.parameter, before)
    training.scale.restart(loaded=True)
    assert training.step(None) == 1.0
    own = scaler_of(4.0)
    both = Training()
    both.scale.restart(loaded=True)
    with pytest.raises(InvalidArgument, match=r"scaler\.update\(new_scale"):
        both.step(own)
    own.update(other.get_scale())
    assert both.step(own) == 256.0
