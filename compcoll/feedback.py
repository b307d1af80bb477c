"""Error feedback: what compression loses in one call is added to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from .errors import InvalidBuffer

_VERSION = 1
"""The version of what `ErrorFeedback.state_dict` gives: another one when its meaning changes."""


class Incoming(Protocol):
    """A call's values, not yet added to anything.

    Attributes
    ----------
    scale : float
        What they are multiplied with before they are added: a mean divides by the number of ranks.
    kernels : Selection
        Passes over arrays such as the feedback's.
    """

    @property
    def scale(self) -> float: ...

    @property
    def kernels(self) -> Any: ...

    def add_to(self, target: Any, factor: float = 1.0) -> None:
        """Add the values, times the scale and a factor, to an array of a residual's type."""

    def norm(self) -> float:
        """The Euclidean norm of the values that are finite, as the caller gave them."""


class ErrorFeedback:
    """Keeps what this rank's encodings lose, from call to call. The caller owns it: one a buffer that is summed again
    and again, such as a gradient.

    Attributes
    ----------
    conserves : str
        ``"exact"`` if results and what is kept add up to all that was put in; ``"decay"`` if what is kept changes by
        itself, too, as momentum does.
    arrays : tuple of str
        The names of the arrays kept, ``residual`` the first of them: all are as long as the buffer.
    residual : array or None
        The loss kept: float64 for float64 buffers, else float32; None before the first call. Losses that are not
        finite are dropped.
    calls : int
        How many calls it has seen.

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
        """Forget everything so far."""
        self.calls = 0
        for name in self.arrays:
            setattr(self, name, None)

    def prepare(self, n: int, dtype: str, zeros: Callable[[int, str], Any]) -> Any:
        """The residual for a buffer of ``n`` elements, made by ``zeros(n, dtype)`` at first.

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
                    "use one feedback a buffer, or reset() or resize() it"
                )
        return self.residual

    def resize(self, n: int) -> None:
        """Keep the first ``n`` elements; those beyond the present ones begin at 0."""
        if self.residual is None:
            return
        assert self._zeros is not None
        for name in self.arrays:
            old, new = getattr(self, name), self._zeros(n, self._dtype)
            kept = min(n, old.size)
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def state_dict(self) -> dict[str, Any]:
        """Everything kept, as copies: what `load_state_dict` takes."""
        arrays = {name: getattr(self, name) for name in self.arrays}
        copies = {name: None if array is None else array.copy() for name, array in arrays.items()}
        return {"version": _VERSION, "dtype": self._dtype, "calls": self.calls, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises
        ------
        InvalidBuffer
            If it is another kind's, of another version, cut, or holds values that are not finite.
        """
        wanted = {"version", "dtype", "calls", *self.arrays}
        if not isinstance(state, Mapping) or set(state) != wanted:
            given = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else repr(type(state))
            raise InvalidBuffer(f"the state has {given}: {', '.join(sorted(wanted))} are needed")
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
        """Add a call's values, and return the array from which a sparsifier chooses what to send."""
        incoming.add_to(self.residual)
        return self.residual

    def sent(self, kernels: Any, indices: Any, values: Any) -> None:
        """Take away what a sparsifier has sent."""
        kernels.subtract(indices, values, self.residual)

    def returned(self, kernels: Any, indices: Any, values: Any) -> None:
        """Take back what a sum had to leave out."""
        kernels.add(indices, values, self.residual)
