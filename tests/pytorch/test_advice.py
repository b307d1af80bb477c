"""Which methods are advised against, by which figures, and how often."""

from __future__ import annotations

import math
import re
import shlex
import warnings
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", "2.12")

import torch
import torch.distributed as dist
import train_ddp
from oracles.training import model_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import get_codec
from compcoll.codecs import Codec
from compcoll.errors import InvalidArgument
from compcoll.tools.arguments import chosen_codec
from compcoll.torch.gradients import compression as advice
from osu_like_bench.pages import study

pytestmark = pytest.mark.with_torch

MATRICES = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{kind.__name__: kind for kind in (*advice._ADAMS, torch.optim.Muon, torch.optim.RMSprop)},
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SGD, Nesterov": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.1),
}


def warning_of(codec: Codec, optimizer: torch.optim.Optimizer) -> str:
    """The warning, or an empty text."""
    advice._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advice.advise(codec, optimizer)
    return "".join(str(each.message) for each in caught)


def test_what_does_not_go_with_an_optimizer_is_told_once() -> None:
    advice._warned.clear()
    adam = torch.optim.AdamW(model_of().parameters())
    with pytest.warns(UserWarning, match=r"codec='topk'.*AdamW.*2\.82.*OneBitAdam"):
        advice.advise(get_codec("topk", density=0.01), adam)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.advise(get_codec("topk", density=0.01), adam)
        advice.advise(None, adam)
        advice.advise(get_codec("zfp", tolerance=1e-6), adam)
    advice._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        advice.advise({"a": get_codec("onebit"), "b": None, "c": get_codec("int8"), "*": get_codec("topk")}, adam)
    assert [str(each.message).partition(" on ")[0] for each in found] == ["codec='onebit'", "codec='topk'"]
    prepared = torch.optim.SGD(model_of().parameters(), 0.1)
    prepared.optimizer = adam  # type: ignore[attr-defined]  # as accelerate.Accelerator().prepare(optimizer) has it
    assert "does not suit AdamW" in warning_of(get_codec("topk"), prepared)
    with pytest.raises(InvalidArgument, match="optimizer=3"):
        advice.advise(None, 3)  # type: ignore[arg-type]


def studied() -> Iterator[tuple[str, Codec, torch.optim.Optimizer, bool, str]]:
    """Each codec that a study of losses tried with feedback: its optimizer, whether it was too bad, and its loss."""
    pages = {page.name: page for page in study.PAGES}
    for each in (study.TEXT, study.MUON):
        found = study.methods(pages[each.name].record())
        for method in found:
            command = method.case.command.replace("{launch}", "0")
            options = train_ddp.parser().parse_args(shlex.split(command.split("train_ddp.py")[1]))
            codec = chosen_codec(options)
            if codec is None or options.low_rank or options.diloco or options.no_feedback or not method.case.results:
                continue
            optimizer: torch.optim.Optimizer
            if options.sgd is not None:
                momentum = 0.9 if options.momentum is None else options.momentum
                optimizer = torch.optim.SGD(MATRICES.parameters(), options.sgd, momentum=momentum)
            elif options.optimizer == "muon":
                optimizer = torch.optim.Muon(MATRICES.parameters())
            elif options.optimizer is None:
                optimizer = torch.optim.AdamW(MATRICES.parameters())
            else:
                continue  # a codec of the momentum
            plain = next(other for other in found if other.name == method.baseline).mean("loss")
            loss = method.mean("loss")
            figures = f"ended at {loss:.2f} nats, and uncompressed gradients at {plain:.2f}"
            worse = study.verdict(each, method, found) == "**no**"
            yield method.name, codec, optimizer, worse, "diverged" if math.isnan(loss) else figures


def test_advice_is_the_studies() -> None:
    """`compress` warns of what ended more than 2 % above uncompressed gradients, with figures of that optimizer."""
    cases = list(studied())
    figures: dict[tuple[type, str], list[str]] = {}
    for _, codec, optimizer, worse, text in cases:
        if worse:
            figures.setdefault((type(optimizer), codec.name), []).append(text)
    assert {kind for kind, _ in figures} == {torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon}
    for name, codec, optimizer, worse, _ in cases:
        text = warning_of(codec, optimizer)
        assert bool(text) == worse, (name, text)
        if worse:
            assert any(each in text for each in figures[type(optimizer), codec.name]), (name, text)
            assert type(optimizer).__name__ in text
    tables = [(torch.optim.AdamW, advice._UNDER_ADAM), (torch.optim.SGD, advice._UNDER_MOMENTUM)]
    for kind, table in [*tables, (torch.optim.Muon, advice._UNDER_MUON)]:
        assert table.keys() == {codec for known, codec in figures if known is kind}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("alone")
def test_advice_can_be_followed(kind: str) -> None:
    """With an optimizer, the methods that its warning names raise no error and no warning."""
    for codec in dict.fromkeys(codec for _, codec, _, worse, _ in studied() if worse):
        optimizer = OPTIMIZERS[kind](MATRICES.parameters())
        advised = warning_of(codec, optimizer).partition(" Use ")[2]
        assert ("DGC" in advised) == (advised != "" and kind == "SGD")
        if "DGC" in advised:
            compcoll.torch.DGC(DistributedDataParallel(MATRICES), optimizer).free()
        if "OneBitAdam" in advised:
            assert isinstance(optimizer, advice._ADAMS)
        for other in re.findall(r"codec='(\w+)'", advised):
            assert not warning_of(get_codec(other), optimizer)
