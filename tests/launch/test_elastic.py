"""launch/training/elastic.py without MPI: how elastic ranks begin."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", "2.12")

from fakes.threads import on_ranks
from oracles.training import model_of, values_of

from compcoll import Communicator

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


@pytest.mark.with_torch
def test_all_ranks_begin_with_rank_0s_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LAUNCH))
    elastic, train_ddp = (importlib.import_module(name) for name in ("training.elastic", "train_ddp"))

    def connect(comm: Communicator) -> np.ndarray:
        training = elastic.ElasticTraining.__new__(elastic.ElasticTraining)
        training.communicator, training.module = comm, model_of(seed=comm.rank)
        training.arguments, training.codec, training.by_samples = train_ddp.parser().parse_args([]), None, False
        return values_of(training.connect())

    for values in on_ranks(3, connect):
        np.testing.assert_array_equal(values, values_of(model_of(seed=0)))
