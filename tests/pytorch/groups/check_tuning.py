"""What a user has measured of a group's links is stored, and found again."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import compcoll.torch
from compcoll.torch.groups.membership import member_of


def check_tune_stores_a_profile_that_is_found() -> None:
    named = os.environ.pop("COMPCOLL_PROFILE")
    try:
        said = compcoll.torch.tune(seconds=0.0)
        assert "gloo of PyTorch" in said and "stored in" in said
        group = dist.new_group()
        x = torch.ones(100)
        compcoll.torch.all_reduce(x, group=group, codec="zfp", rate=8)
        assert f"profile: {said.rpartition(' ')[2]}" in str(
            member_of(group, torch.device("cpu")).communicator.explain(x.numpy())
        )
    finally:
        os.environ["COMPCOLL_PROFILE"] = named
