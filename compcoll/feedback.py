"""Error feedback: the residual of one call, which compression lost, is added to the values of the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .errors import InvalidBuffer

_VERSION = 1
"""The version of the format of `ErrorFeedback.state_dict`; it changes with the meaning of the entries."""


class Incoming:
    """The values that the caller passed to a collective, before they are added to a residual.

    Parameters
    ----------
    coder : SparseCoder
        Adds the values to an array.
    x : array
        The values.
    scale : float
        Factor of the values when they are added: 1/p for a mean over p ranks.

    Attributes
    ----------
    kernels : Selection
        Kernels for arrays such as the residual.
    """

    def __init__(self, coder: Any, x: Any, scale: float) -> None:
        self._coder, self._x, self.scale = coder, x, scale
        self.kernels = coder.kernels

    def add_to(self, target: Any, factor: float = 1.0) -> None:
        """Add the values, times ``scale`` and ``factor``, to an array of the residual's type."""
        self._coder.accumulate(self._x, target, self.scale * factor)

    def norm(self) -> float:
        """Return the Euclidean norm of the finite values, without ``scale``."""
        values = self.kernels.zeros(self._x.size)
        self._coder.accumulate(self._x, values, 1.0)
        return math.sqrt(self.kernels.moments(values)[2])


class ErrorFeedback:
    """The state of error feedback for one buffer: keeps what this rank's encodings lose and adds it to the next call.

    Use one object for each buffer that is reduced repeatedly, such as a gradient.

    Attributes
    ----------
    conserves : str
        ``"exact"`` if results and residuals add up to the sum of all inputs; ``"decay"`` if the state also changes by
        itself, as momentum does.
    arrays : tuple of str
        The names of the arrays kept; ``residual`` is the first. All have as many elements as the buffer.
    residual : array or None
        The residual: float64 for float64 buffers, else float32; None before the first call. Encoding errors that are
        not finite are dropped.
    calls : int
        The number of calls so far.

    References
    ----------
    F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech 2014.

    Examples
    --------
    >>> feedback = compcoll.ErrorFeedback()
    >>> for step in range(3):
    ...     total = compcoll.allreduce(np.ones(64, np.float32), codec="minmax", bits=2, feedback=feedback)
    >>> feedback.residual.shape
    (64,)
    """

    conserves: ClassVar[str] = "exact"
    arrays: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(self) -> None:
        self.residual: Any = None
        self.calls = 0
        self._dtype = ""
        self._zeros: Callable[[int, str], Any] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def reset(self) -> None:
        """Drop all arrays and set ``calls`` to 0."""
        self.calls = 0
        for name in self.arrays:
            setattr(self, name, None)

    def prepare(self, n: int, dtype: str, zeros: Callable[[int, str], Any]) -> Any:
        """Return the residual for a buffer of ``n`` elements. The first call makes it with ``zeros(n, dtype)``.

        Raises
        ------
        InvalidBuffer
            If an earlier call had another number of elements or another element type.
        """
        self._zeros = zeros
        if self.residual is None:
            self._dtype = dtype
            for name in self.arrays:
                if getattr(self, name) is None:
                    setattr(self, name, zeros(n, dtype))
        for name in self.arrays:
            size = getattr(self, name).size
            if size != n or self._dtype != dtype:
                raise InvalidBuffer(
                    f"feedback holds the {name} of {size} {self._dtype} elements, but this buffer has {n} of {dtype}: "
                    "use one ErrorFeedback for each buffer, or reset() or resize() this one"
                )
        return self.residual

    def resize(self, n: int) -> None:
        """Change the number of elements to ``n``: keep the first ones and set new ones to 0."""
        if self.residual is None:
            return
        assert self._zeros is not None
        for name in self.arrays:
            old, new = getattr(self, name), self._zeros(n, self._dtype)
            kept = min(n, old.size)
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the whole state, for `load_state_dict`."""
        arrays = {name: getattr(self, name) for name in self.arrays}
        copies = {name: None if array is None else array.copy() for name, array in arrays.items()}
        return {"version": _VERSION, "dtype": self._dtype, "calls": self.calls, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state_dict`.

        Raises
        ------
        InvalidBuffer
            If the state belongs to another class or version, its arrays differ in shape, or it holds NaN or Inf.
        """
        wanted = {"version", "dtype", "calls", *self.arrays}
        if not isinstance(state, Mapping) or set(state) != wanted:
            given = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else repr(type(state))
            raise InvalidBuffer(f"the state has the entries {given}: {', '.join(sorted(wanted))} are needed")
        if state["version"] != _VERSION:
            raise InvalidBuffer(f"the state is of version {state['version']!r}: this release reads {_VERSION}")
        sizes = {None if state[name] is None else state[name].shape for name in self.arrays}
        if len(sizes) != 1:
            raise InvalidBuffer(f"the state's arrays differ in shape: {', '.join(map(str, sizes))}")
        for name in self.arrays:
            array = state[name]
            if array is not None and not bool(((array - array) == 0).all()):
                raise InvalidBuffer(f"the state's {name} holds NaN or Inf")
        self._dtype, self.calls = state["dtype"], state["calls"]
        for name in self.arrays:
            setattr(self, name, None if state[name] is None else state[name].copy())

    def accumulate(self, incoming: Incoming) -> Any:
        """Add a call's values and return the array from which a sparsifier selects elements."""
        incoming.add_to(self.residual)
        return self.residual

    def sent(self, kernels: Any, indices: Any, values: Any) -> None:
        """Subtract from the residual the elements that a sparsifier has sent."""
        kernels.subtract(indices, values, self.residual)

    def returned(self, kernels: Any, indices: Any, values: Any) -> None:
        """Add to the residual the elements that a sparse sum left out."""
        kernels.add(indices, values, self.residual)
