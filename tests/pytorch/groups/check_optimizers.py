"""Compressed Adams and local steps over a group, with DistributedDataParallel and without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from check_collectives import standing
from check_training import backward, gathered, model_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.errors import HookTaken
from compcoll.torch import DiLoCo, GatheredState, OneBitAdam, SparseLoCo, ZeroOneAdam
from osu_like_bench.training.models import GPT

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def all_alike(values: torch.Tensor) -> bool:
    return all(torch.equal(part, values) for part in gathered(values))


def check_adams_of_ddp_and_of_modules_have_the_same_bits() -> None:
    makers: list[Any] = [
        lambda model: OneBitAdam(model, 1e-2, warmup=2),
        lambda model: OneBitAdam(model, 1e-2, warmup=2, codec="zfp", rate=8, transport="group"),
        lambda model: ZeroOneAdam(model, 1e-2, variance_updates=2, freeze=3, local_steps=4, local_limit=2),
    ]
    for make in makers:
        found = []
        for model in (DistributedDataParallel(model_of()), model_of(dist.get_rank())):
            optimizer = make(model)
            for step in range(7):
                if step % 2 and isinstance(model, DistributedDataParallel):
                    with model.no_sync():
                        backward(model, step)
                else:
                    backward(model, step)
                optimizer.step()
            assert optimizer.stats.steps == 7 and "direct" in str(optimizer.stats.calls)
            found.append(values_of(model))
            whole = GatheredState(optimizer).state_dict()
            held = [whole]
            dist.broadcast_object_list(held)
            GatheredState(optimizer).load_state_dict(held[0])
            assert torch.equal(values_of(model), found[-1])
            optimizer.free()
        assert torch.equal(*found)
        assert isinstance(optimizer, ZeroOneAdam) or all_alike(found[0])


def check_local_steps_of_ddp_and_of_modules_have_the_same_bits() -> None:
    options = {"every": 4, "delay": 1, "alpha": 0.25, "fragments": 2}
    for kind, more in ((DiLoCo, {"codec": "minmax", "bits": 4}), (SparseLoCo, {"density": 0.05})):
        found = []
        for model in (DistributedDataParallel(model_of()), model_of(dist.get_rank())):
            inner = torch.optim.AdamW(model.parameters(), 1e-2)
            with kind(model, inner, **options, **more) as diloco:
                for step in range(11):
                    backward(model, step)
                    inner.step()
                assert not all_alike(values_of(model))
                whole = GatheredState(diloco).state_dict()
                held = [whole]
                dist.broadcast_object_list(held)
                before = values_of(model)
                GatheredState(diloco).load_state_dict(held[0])
                assert torch.equal(values_of(model), before)
                diloco.synchronize()
                assert all_alike(values_of(model))
            found.append(values_of(model))
            inner.step()  # counted no more
        assert torch.equal(*found)


def check_survivors_and_a_rank_that_joins() -> None:
    rank, _ = standing()
    pair, everybody = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    model, other = model_of(), model_of(5)
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1), every=2, codec="minmax", bits=4)
    inner = diloco._inner
    for step in range(5):
        backward(model, step)
        inner.step()
    if rank < 2:  # rank 2 is gone
        diloco.group = pair
        backward(model, 5)
        inner.step()
        diloco.group = everybody
    else:
        model, inner = other, torch.optim.SGD(other.parameters(), 0.1)
        diloco = DiLoCo(model, inner, every=2, codec="minmax", bits=4, group=everybody)
    assert diloco.steps == 6 and all_alike(values_of(model))
    for step in range(6, 8):
        backward(model, step)
        inner.step()
    assert all_alike(values_of(model))
    dist.barrier()


def check_a_hook_that_is_there_is_left_alone() -> None:
    model = DistributedDataParallel(model_of())
    compression = compcoll.torch.compress(model, codec="zfp", rate=8)
    again = compcoll.torch.compress
    for make in (OneBitAdam, lambda net: DiLoCo(net, torch.optim.AdamW(net.parameters()), every=2), again):
        with pytest.raises(HookTaken, match=r"compcoll ZFP.*keep the object that compress.. returned"):
            make(model)
    compression.free()


def check_the_example_with_muon_trains() -> None:
    """The example of docs/training.md, on a model with blocks."""
    (example,) = re.findall(r"^## Muon\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    net = GPT(8, layers=1, width=32)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    names: dict[str, Any] = {**globals(), "model": net}
    exec(compile(example, str(PAGE), "exec"), names)
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    logits = names["model"](tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    names["muon"].step()
    names["adamw"].step()
    assert names["compression"].stats.calls.total() > 0
    assert not [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    assert all_alike(values_of(net))
    names["compression"].free()
