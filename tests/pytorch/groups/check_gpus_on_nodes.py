"""`hierarchical` of tensors on GPUs by PyTorch's NCCL: values inside nodes, wires between them."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from check_collectives import standing
from check_gpus import downloaded, gpus, uploaded
from fakes.loopback import World, exact_sum, normals

import compcoll.torch


def check_hierarchical_goes_by_nccl() -> None:
    """Of several messages between two ranks each goes its own way; all ranks have the same bits."""
    rank, size = standing()
    inputs = normals(size, 4 * 2500)
    exact = exact_sum(inputs) / size
    for codec in (compcoll.ZFP(rate=8), compcoll.MinMax(block=64)):
        by_host = World(size, ranks_per_node=2).allreduce(inputs, codec=codec, algorithm="hierarchical", op="mean")[0]
        with gpus() as (cuda, group, made):
            tensor = uploaded(cuda, inputs[rank])
            compcoll.torch.all_reduce(tensor, "avg", group, codec=codec, algorithm="hierarchical")
            stats = compcoll.torch.stats(group)
            assert stats is not None and (stats.algorithm, stats.gpu_transport) == ("hierarchical", "NCCL")
            got = torch.from_numpy(downloaded(cuda, tensor).copy())
            assert [call[0] for call in made[0].calls].count("alltoall") >= 4
        every = [torch.empty_like(got) for _ in range(size)]
        dist.all_gather(every, got)
        assert all(torch.equal(each, got) for each in every)
        errors = [np.linalg.norm(result - exact) for result in (got.numpy(), by_host)]
        assert 0 < errors[0] <= 1.5 * errors[1]
