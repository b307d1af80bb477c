#!/usr/bin/env python3
"""Train a small network with JAX on all ranks; the mean of the gradients is compressed inside of `jax.jit`.

    mpirun -n 2 python launch/train_jax.py --codec int8

Each rank has its part of the examples. All ranks hold the same parameters, bit for bit. Rank 0
prints the loss over all examples; with --save, it writes the parameters to a file. docs/jax.md explains the program.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree

import compcoll

# Before JAX computes anything: with asynchronous dispatch, a callback on a rank with one core waits for itself.
jax.config.update("jax_cpu_enable_async_dispatch", False)

EXAMPLES, FEATURES, HIDDEN = 384, 64, 256
RATE = 0.05


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Return all ranks' inputs and targets, in float64."""
    random = np.random.default_rng(1)
    x = random.standard_normal((EXAMPLES, FEATURES))
    return x, np.sin(x @ random.standard_normal((FEATURES, 1)) / 4)


def first_parameters() -> dict[str, np.ndarray]:
    """Return the parameters before the first step, in float64."""
    random = np.random.default_rng(2)
    return {
        "hidden": random.standard_normal((FEATURES, HIDDEN)) / np.sqrt(FEATURES),
        "hidden_bias": np.zeros(HIDDEN),
        "out": random.standard_normal((HIDDEN, 1)) / np.sqrt(HIDDEN),
        "out_bias": np.zeros(1),
    }


def loss(parameters: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error."""
    hidden = jnp.tanh(x @ parameters["hidden"] + parameters["hidden_bias"])
    return jnp.mean((hidden @ parameters["out"] + parameters["out_bias"] - y) ** 2)


class Training:
    """A step of gradient descent, compiled as a whole: the allreduce is a callback inside."""

    def __init__(self, codec: str | None, algorithm: str = "auto", feedback: bool = False) -> None:
        self.options = {"codec": codec, "algorithm": algorithm}
        self.feedback = compcoll.ErrorFeedback() if feedback else None
        self.step = jax.jit(self._step)

    def _on_host(self, x: jax.Array) -> np.ndarray:
        return compcoll.allreduce(np.asarray(x), op="mean", feedback=self.feedback, **self.options)

    def _mean(self, x: jax.Array) -> jax.Array:
        return io_callback(self._on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def _step(self, parameters: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, x, y)
        flat, unflatten = ravel_pytree(gradients)  # one collective for all gradients
        mean = unflatten(self._mean(flat))
        return jax.tree.map(lambda p, g: p - RATE * g, parameters, mean), value


def main() -> None:
    """Train, and print the loss."""
    text, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("train_jax.py", description=text, epilog=rest, formatter_class=raw)
    add = parser.add_argument
    add("--codec", help="of the gradients, with its options, such as zfp:rate=16 (default: none)")
    add("--algorithm", default="auto", help="of the allreduce; auto compresses only where it pays (default: auto)")
    add("--feedback", action="store_true", help="add what compression loses to the next step's gradients")
    add("--dtype", choices=("bfloat16", "float32", "float64"), default="float32", help="default: %(default)s")
    add("--steps", type=int, default=50, help="default: %(default)s")
    add("--save", metavar="FILE", help="where to write the parameters, as .npz in float64")
    given = parser.parse_args()

    jax.config.update("jax_enable_x64", given.dtype == "float64")
    comm = compcoll.get_communicator()
    x, y = (jnp.asarray(part[comm.rank :: comm.size], given.dtype) for part in examples())
    parameters = jax.tree.map(lambda p: jnp.asarray(p, given.dtype), first_parameters())
    training = Training(given.codec, given.algorithm, given.feedback)
    for step in range(given.steps):
        parameters, value = training.step(parameters, x, y)
        if step % 10 == 0 or step == given.steps - 1:
            value = compcoll.allreduce(value, op="mean")  # outside of jit: a jax.Array goes in and comes out
            if comm.rank == 0:
                print(f"step {step:3}  loss {float(value):.4f}")
    if given.save and comm.rank == 0:
        np.savez(given.save, **jax.tree.map(lambda p: np.asarray(p, np.float64), parameters))


if __name__ == "__main__":
    main()
