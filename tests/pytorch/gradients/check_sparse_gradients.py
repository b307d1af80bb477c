"""Gradients that are sparse tensors, of embeddings, under `compress`: exact means of all ranks' rows."""

from __future__ import annotations

import numpy as np
import torch
from check_compress import total, wrapped
from mpi.tensors import assert_same_bits
from mpi4py import MPI
from torch import nn

import compcoll.torch


class Words(nn.Module):
    """Two embeddings, of which one may be without any row in a step, and a layer that is compressed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(40, 24, mode="sum", sparse=True, dtype=dtype)
        self.head = nn.Linear(24, 60, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.bags(tokens % 40, torch.arange(len(tokens)))
        return self.head(hidden)


def tokens_of(comm: MPI.Intracomm, step: int) -> torch.Tensor:
    """Repeated ones, ones that other ranks have, too, and another number on each rank, for one of them none."""
    random = np.random.default_rng((step, comm.rank))
    count = 0 if comm.rank == 1 and step == 1 else 5 + 3 * comm.rank
    return torch.from_numpy(random.integers(0, 50, count))


def check_means_of_rows(comm: MPI.Intracomm) -> None:
    for dtype, room in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.float16, 1e-3)):
        for exclude in (["biases"], ["biases", "embeddings"]):
            torch.manual_seed(1)
            model = wrapped(Words(dtype))
            compression = compcoll.torch.compress(model, "zfp", rate=16, algorithm="ring", exclude=exclude)
            assert compression.exact["words.weight"] and compression.exact["bags.weight"]
            assert not compression.exact["head.weight"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                tokens = tokens_of(comm, step)
                optimizer.zero_grad()
                with model.no_sync():
                    model(tokens).float().square().sum().backward()
                embeddings = {"words": model.module.words.weight, "bags": model.module.bags.weight}
                wanted = {
                    name: total(comm, weight.grad.to_dense().double().numpy()) / comm.size
                    for name, weight in embeddings.items()
                }
                optimizer.zero_grad()
                model(tokens).float().square().sum().backward()
                for name, weight in embeddings.items():
                    assert weight.grad.is_sparse and weight.grad.dtype == dtype
                    got = weight.grad.to_dense().double().numpy()
                    assert np.abs(got - wanted[name]).max() <= room * max(np.abs(wanted[name]).max(), 1), (dtype, name)
                optimizer.step()
                assert_same_bits(comm, model.parameters())
            assert any("allgather" in call or "native" in call for call in compression.stats.calls)
            compression.free()
