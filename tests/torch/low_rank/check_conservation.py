"""What low-rank averaging gives and what it keeps add up to the gradients, also where ranks have none."""

from __future__ import annotations

from typing import Any

import numpy as np
from given import SHAPES, backward, draw, mean, model
from mpi.tensors import digest
from mpi4py import MPI

from compcoll.torch import ACPSGD, PowerSGD

METHODS = (ACPSGD, PowerSGD)
MODES: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (False, {}),
    (False, {"buffer_mb": 0}),
    (False, {"overlap": False}),
]
CODECS: list[dict[str, Any]] = [{}, {"codec": "minmax", "bits": 3, "block": 64, "algorithm": "ring"}]


def missing(step: int, size: int) -> dict[str, set[int]]:
    """The ranks that have no gradient of a parameter."""
    every = set(range(size))
    return [
        {},
        {"square": {size - 1}},
        {"first": {0}, "bias": {0}, "last": every - {0}},
        {"kernels": every},
        {},
        {"square": {size - 1}, "kernels": {0, size - 1}, "norm": every},
        {"square": {size - 1}},
    ][step]


def held(comm: MPI.Intracomm, compression: Any) -> dict[str, np.ndarray]:
    """The mean over the ranks of what they keep."""
    kept = compression.state_dict()["residuals"]
    return {name: mean(comm, values.double().numpy()).reshape(SHAPES[name]) for name, values in kept.items()}


def check_missing_gradients_lose_nothing(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for wrap, options in MODES:
            for codec in CODECS:
                net = model(wrap, **({"find_unused_parameters": True} if wrap else {}))
                compression = method(net, rank=3, min_compression_rate=1, **options, **codec)
                due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
                for step in range(7):
                    told = (method.__name__, wrap, options, codec, step)
                    without = missing(step, comm.size)
                    own = draw(comm, step)
                    before = compression.state_dict()["residuals"]
                    got = backward(
                        net, {name: values for name, values in own.items() if comm.rank not in without.get(name, ())}
                    )
                    for name in SHAPES:
                        lacking = without.get(name, set())
                        if len(lacking) == comm.size:
                            assert name not in got, told
                            if name in before:
                                after = compression.state_dict()["residuals"]
                                assert digest([before[name]]) == digest([after[name]]), told
                            continue
                        given = own[name].numpy() * (comm.rank not in lacking)
                        due[name] += given - got[name]
                    kept = held(comm, compression)
                    for name, short in due.items():
                        room = 1e-9 if name not in kept or not codec else 2e-5
                        assert np.abs(kept.get(name, 0) - mean(comm, short)).max() < room, (*told, name)
                assert all(np.abs(values).max() > 0.1 for values in kept.values()), "nothing was lost: proves nothing"
                compression.free()
