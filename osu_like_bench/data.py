"""Generate or load the values to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.dtypes import DTYPES, computed_on

from . import UsageError

Array = npt.NDArray[Any]


def _normal(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    values: Array = rng.standard_normal(n, dtype) * dtype(1e-3)
    return values


def _smooth(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    periods = np.array([1000.0, 4321.0, 20011.0])
    values = np.zeros(n, dtype)
    index = np.arange(n, dtype=np.float64)
    for period, phase in zip(periods, rng.random(len(periods)), strict=True):
        values += np.sin(index * (2 * np.pi / period) + 2 * np.pi * phase).astype(dtype)
    return values


def _spectrum(rng: np.random.Generator, n: int, dtype: Any, amplitude: Callable[[Array], Array]) -> Array:
    """Return a field of random phases; ``amplitude`` takes wave numbers, of which there are n / 2."""
    numbers = np.arange(n // 2 + 1, dtype=np.float64)
    phases = np.exp(2j * np.pi * rng.random(numbers.size))
    phases[0] = 0
    values = np.fft.irfft(amplitude(np.maximum(numbers, 1)) * phases, n) if n > 1 else np.zeros(n)
    scaled: Array = (values / max(np.abs(values).max(initial=0.0), 1e-300)).astype(dtype)
    return scaled


def _heat(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    return _spectrum(rng, n, dtype, lambda k: np.exp(-((k / 4000) ** 2)))


def _turbulent(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    return _spectrum(rng, n, dtype, lambda k: k ** (-5 / 6))


def _sparse(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    values = np.zeros(n, dtype)
    chosen = rng.integers(0, n, -(-n // 100))
    values[chosen] = _normal(rng, len(chosen), dtype)
    return values


def _laplace(rng: np.random.Generator, n: int, dtype: Any) -> Array:
    sizes = rng.standard_exponential(n, dtype)
    values: Array = sizes * np.where(rng.random(n, np.float32) < 0.5, dtype(-1e-3), dtype(1e-3))
    return values


KINDS: Mapping[str, Callable[[np.random.Generator, int, Any], Array]] = {
    "normal": _normal,
    "laplace": _laplace,
    "smooth": _smooth,
    "heat": _heat,
    "turbulent": _turbulent,
    "sparse": _sparse,
    "uniform": lambda rng, n, dtype: 2 * rng.random(n, dtype) - 1,
}
"""Functions that generate values, by kind.

normal: standard deviation 1e-3; laplace: scale 1e-3, like gradients; smooth: a sum of three sines; heat: a temperature
that has diffused until waves of 1/4000 of the length have fallen to 1/e; turbulent: velocities whose energy falls as
the wave number to the power -5/3 (Kolmogorov 1941); sparse: one value of 100 is not zero; uniform: from -1 to 1.
"""

_FILE = ".npy"


def kind_of(text: str) -> str:
    """Check that an argument is one of `KINDS` or the name of a NumPy file, and return it.

    Raises
    ------
    UsageError
        If it is neither.
    """
    if text not in KINDS and not text.endswith(_FILE):
        raise UsageError(f"{text!r}: {', '.join(KINDS)} or a file *{_FILE} is needed")
    return text


def _from_file(path: str, n: int, number: int) -> Array:
    try:
        values = np.load(path, allow_pickle=False).reshape(-1)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {path}: {error}") from error
    if values.dtype.kind != "f" or values.size < n:
        raise UsageError(f"--data {path}: {values.size} numbers of {values.dtype}, but {n} floats are needed")
    first = number * n % (values.size - n + 1)
    found: Array = values[first : first + n]
    return found


def make(kind: str, n: int, dtype: str, seed: Sequence[int]) -> Array:
    """Generate ``n`` values, or read them from a file.

    Parameters
    ----------
    kind : str
        One of `KINDS`, or the name of a NumPy file. The last seed selects the part of the file; 0 is the beginning.
    n : int
        Number of values.
    dtype : str
        One of compcoll's element types.
    seed : sequence of int
        Equal seeds give equal values.
    """
    computed = computed_on(dtype).numpy.type
    values = KINDS[kind](np.random.default_rng(seed), n, computed) if kind in KINDS else _from_file(kind, n, seed[-1])
    return values.astype(DTYPES[dtype].numpy, copy=False)
