"""What each rank of test_jax.py does: the code of docs/jax.md, and launch/train_jax.py beside NumPy in one process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import train_jax
from mpi4py import MPI

import compcoll

TOP = Path(__file__).parents[2]
STEPS = 12
# Codec, algorithm, element type, and how far the change of the parameters may be from NumPy's, relative to its norm.
CASES = [
    (None, "auto", "float64", 1e-12),
    ("int8", "ring", "float64", 0.005),
    ("zfp:rate=16", "ring", "bfloat16", 0.3),  # parameters in bfloat16 lose small updates, also without a codec
]

Parameters = dict[str, np.ndarray]


def by_numpy(steps: int) -> Parameters:
    """The parameters after some steps on all examples, in float64, with gradients by hand."""
    x, y = train_jax.examples()
    p = train_jax.first_parameters()
    for _ in range(steps):
        hidden = np.tanh(x @ p["hidden"] + p["hidden_bias"])
        error = 2 / len(x) * (hidden @ p["out"] + p["out_bias"] - y)
        inner = error @ p["out"].T * (1 - hidden**2)
        gradients = {
            "hidden": x.T @ inner,
            "hidden_bias": inner.sum(0),
            "out": hidden.T @ error,
            "out_bias": error.sum(0),
        }
        p = {name: p[name] - train_jax.RATE * gradients[name] for name in p}
    return p


def flat(parameters: Any) -> np.ndarray:
    return np.concatenate([np.asarray(parameters[name], np.float64).ravel() for name in sorted(parameters)])


def check_training(comm: compcoll.Communicator) -> None:
    start, wanted = flat(train_jax.first_parameters()), flat(by_numpy(STEPS))
    for codec, algorithm, dtype, tolerance in CASES:
        x, y = (jnp.asarray(part[comm.rank :: comm.size], dtype) for part in train_jax.examples())
        parameters = jax.tree.map(lambda p: jnp.asarray(p, dtype), train_jax.first_parameters())  # noqa: B023
        training = train_jax.Training(codec, algorithm, feedback=codec is not None)
        for _ in range(STEPS):
            parameters, _ = training.step(parameters, x, y)
        found = flat(parameters)
        assert (comm.stats.codec is None) == (codec is None), comm.stats
        distance = np.linalg.norm(found - wanted) / np.linalg.norm(wanted - start)
        assert distance < tolerance, (codec, dtype, distance)
        assert len(set(MPI.COMM_WORLD.allgather(found.tobytes()))) == 1


def check_page(comm: compcoll.Communicator) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", (TOP / "docs/jax.md").read_text(), re.S | re.M):
        exec(block, names)
    total = names["total"]
    assert isinstance(total, jax.Array)
    assert np.allclose(total, comm.size * np.linspace(0, 1, 100_000), atol=0.02 * comm.size)

    random = np.random.default_rng(5)
    whole = random.standard_normal((comm.size, 50_000)).astype(np.float32)
    mean = whole.mean(0, dtype=np.float64)
    unit = names["normalized"](jnp.asarray(whole[comm.rank]))
    assert np.allclose(unit, whole[comm.rank] / np.linalg.norm(mean), rtol=0.02)

    x, y = random.standard_normal((comm.size, 8, 5)), random.standard_normal((comm.size, 8))
    parameters = {"weights": jnp.ones(5), "bias": jnp.zeros(())}
    new = names["step"](parameters, jnp.asarray(x[comm.rank]), jnp.asarray(y[comm.rank]))
    assert isinstance(new["weights"], jax.Array)
    every, target = x.reshape(-1, 5), y.reshape(-1)
    error = 2 / len(every) * (every @ np.ones(5) - target)
    assert np.allclose(new["weights"], 1 - 0.1 * every.T @ error, atol=0.02)
    assert np.allclose(new["bias"], -0.1 * error.sum(), atol=0.02)

    gradient = jax.jit(jax.grad(names["spread"]))(parameters, jnp.asarray(x[comm.rank]))["weights"]
    found = compcoll.allreduce(gradient, op="mean")
    centred = every - every.mean(0)
    wanted = 2 / len(every) * centred.T @ (centred @ np.ones(5))
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6), (found, wanted)


def check_arrays(comm: compcoll.Communicator) -> None:
    """bfloat16, unfinished work of JAX's, and calls by name."""
    x = (jnp.arange(4000.0) / 4000).astype(jnp.bfloat16)
    total = compcoll.allreduce(x, codec="zfp", rate=16, algorithm="ring")
    assert isinstance(total, jax.Array) and total.dtype == jnp.bfloat16
    assert np.asarray(total).dtype == ml_dtypes.bfloat16
    assert np.allclose(np.asarray(total, np.float64), comm.size * np.arange(4000) / 4000, atol=0.02 * comm.size)

    cube = jax.jit(lambda a: a @ a @ a / 500)
    later = cube(jnp.asarray(np.random.default_rng(3).standard_normal((500, 500)), jnp.float32))
    assert np.array_equal(compcoll.allreduce(later, op="max"), later)
    every = compcoll.allgather(jnp.full(3, comm.rank), algorithm="native")
    assert isinstance(every, jax.Array) and every.shape == (comm.size, 3)
    with pytest.raises(compcoll.errors.InvalidBuffer, match="read-only"):
        compcoll.allreduce(x, out=x)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    comm = compcoll.get_communicator()
    check_arrays(comm)
    check_training(comm)
    check_page(comm)
    sys.argv = [
        "train_jax.py",
        "--codec",
        "int8",
        "--algorithm",
        "ring",
        "--feedback",
        "--steps",
        "20",
        "--save",
        sys.argv[1],
    ]
    train_jax.main()
    if comm.rank == 0:
        print(json.dumps({"difference": float(np.linalg.norm(flat(dict(np.load(sys.argv[-1]))) - flat(by_numpy(20))))}))


main()
