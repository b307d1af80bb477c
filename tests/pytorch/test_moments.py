"""Second moments of samples' gradients, against PyTorch's back-propagation of one sample after the other."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", "2.12")

import torch
from torch import Tensor, nn

from compcoll.errors import InvalidArgument
from compcoll.torch.gradients.moments import of_micro_batches, of_samples
from osu_like_bench.training.models import GPT, convolutional

CASES = {
    "perceptron": lambda: (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(4, 5)),
    "convolutional": lambda: (convolutional(1, 3, width=8), torch.randn(4, 1, 8, 8)),
    "GPT": lambda: (GPT(6, layers=1, width=8, heads=2), torch.randint(256, (4, 6))),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64, four samples and their targets."""
    torch.manual_seed(3)
    model, inputs = CASES[request.param]()
    targets = inputs.roll(1, 1) if request.param == "GPT" else torch.randint(3, (4,))
    return model.double(), inputs if request.param == "GPT" else inputs.double(), targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def expected(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean gradients and ``Σ (∇f_z / B)²``, by one back-propagation a sample."""
    names = [name for name, _ in model.named_parameters()]
    each = [
        torch.autograd.grad(loss_of(model(inputs[z : z + 1]), targets[z : z + 1]), list(model.parameters()))
        for z in range(len(inputs))
    ]
    stacked = {name: torch.stack(gradients) for name, gradients in zip(names, zip(*each, strict=True), strict=True)}
    second = {name: (gradients / len(inputs)).square().sum(0) for name, gradients in stacked.items()}
    return {name: gradients.mean(0) for name, gradients in stacked.items()}, second


def test_samples(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    gradients, second = expected(*case)
    for found in (of_samples(case[0], loss_of, *case[1:]), of_micro_batches(case[0], loss_of, *case[1:], 4)):
        assert torch.allclose(found.loss.double(), loss_of(case[0](case[1]), case[2]))
        for name, wanted in gradients.items():
            torch.testing.assert_close(found.gradients[name], wanted)
            torch.testing.assert_close(found.second[name], second[name])
            assert (found.second[name] > 0).any()


def test_micro_batches_are_right_in_the_mean(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Over all 24 orders of four samples, in pairs: single ones are off, their mean is not."""
    model, inputs, targets = case
    gradients, second = expected(model, inputs, targets)
    found = [
        of_micro_batches(model, loss_of, inputs[list(order)], targets[list(order)], 2)
        for order in itertools.permutations(range(4))
    ]
    off = False
    for name, wanted in second.items():
        each = torch.stack([moments.second[name] for moments in found])
        torch.testing.assert_close(each.mean(0), wanted)
        off |= not torch.allclose(each[0], wanted)
        torch.testing.assert_close(found[0].gradients[name], gradients[name])
    assert off


class OfSome(nn.Module):
    """A layer that only samples above 0 go through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool((x > 0).all()) else x.clone().requires_grad_()


@pytest.mark.parametrize("order", [[1.0, -2.0, 3.0, -4.0], [-2.0, -4.0, 1.0, 3.0]])
def test_parts_that_do_not_use_a_parameter_have_a_gradient_of_zero(order: list[float]) -> None:
    inputs = torch.tensor(order, dtype=torch.float64).view(4, 1)
    found = of_micro_batches(OfSome(), lambda outputs, targets: outputs.mean(), inputs, inputs, 4)
    assert found.gradients["layer.weight"].item() == pytest.approx((1 + 3) / 4)
    assert found.second["layer.weight"].item() == pytest.approx((1 + 9) / 16)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_bad_counts(case: tuple[nn.Module, Tensor, Tensor], count: int) -> None:
    with pytest.raises(InvalidArgument, match="divide the 4 samples"):
        of_micro_batches(case[0], loss_of, *case[1:], count)
