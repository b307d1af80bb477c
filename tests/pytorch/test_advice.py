"""Which methods are advised against, and how often."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch", "2.12")

import torch
from oracles.training import model_of

from compcoll import get_codec
from compcoll.errors import InvalidArgument
from compcoll.torch.gradients import compression as advice

pytestmark = pytest.mark.with_torch


def test_what_does_not_go_with_an_optimizer_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_warned", set())
    parameters = list(model_of().parameters())
    adam, sgd = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, 0.1, momentum=0.9)
    with pytest.warns(UserWarning, match=r"codec='topk'.*AdamW.*2\.82.*OneBitAdam"):
        advice.advise(get_codec("topk", density=0.01), adam)
    with pytest.warns(UserWarning, match=r"codec='onebit'.*AdamW.*2\.72.*OneBitAdam"):
        advice.advise(get_codec("onebit"), adam)
    with pytest.warns(UserWarning, match=r"codec='zfp'.*AdamW.*4 bits a value diverged"):
        advice.advise(get_codec("zfp", rate=4), adam)
    with pytest.warns(UserWarning, match=r"codec='minmax'.*AdamW.*2\.52"):
        advice.advise(get_codec("minmax", bits=2), adam)
    with pytest.warns(UserWarning, match=r"codec='variance'.*AdamW.*2\.50"):
        advice.advise(get_codec("variance"), adam)
    with pytest.warns(UserWarning, match=r"codec='onebit'.*SGD with a momentum of 0\.9"):
        advice.advise(get_codec("onebit"), sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.advise(get_codec("topk", density=0.01), adam)
        advice._warned.clear()
        advice.advise(get_codec("zfp", rate=8), adam)
        advice.advise(get_codec("zfp", tolerance=1e-6), adam)
        advice.advise(get_codec("minmax", bits=4), adam)
        advice.advise(get_codec("qsgd", bits=4), adam)
        advice.advise(get_codec("qsgd", bits=4), sgd)
        advice._warned.clear()
        advice.advise(get_codec("onebit"), torch.optim.SGD(parameters, 0.1, momentum=0.5))
        advice.advise(None, adam)
        for momentum in (0, 0.9):
            advice.advise(get_codec("int8"), torch.optim.SGD(parameters, 0.1, momentum=momentum))
    with pytest.raises(InvalidArgument, match="optimizer=3"):
        advice.advise(None, 3)  # type: ignore[arg-type]
