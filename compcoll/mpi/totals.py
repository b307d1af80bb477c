"""Totals of a program's collectives, and the table that shows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout import amount


@dataclass
class Total:
    """Totals of one kind of call on this rank.

    Attributes
    ----------
    calls, compressed : int
        Calls, and those that were compressed.
    nbytes, saved : int
        Bytes of the messages, and the bytes that compression kept from being sent.
    error : float or None
        The largest estimated relative error; None if one was unknown.
    seconds, native_seconds : float
        Time in the calls, and what MPI's own would have taken: for compressed calls that time multiplied by the speedup
        that the cost model predicts, else the same.
    """

    calls: int = 0
    compressed: int = 0
    nbytes: int = 0
    saved: int = 0
    error: float | None = 0.0
    seconds: float = 0.0
    native_seconds: float = 0.0


@dataclass
class Totals:
    """Totals of a program's collectives on this rank, by the name of mpi4py's method."""

    dry_run: bool = False
    by_method: dict[str, Total] = field(default_factory=dict)

    def left(self, method: str, nbytes: int, seconds: float) -> None:
        """Count a call that MPI ran itself."""
        self._add(method, nbytes, seconds, seconds)

    def compressed(
        self, method: str, nbytes: int, saved: int, error: float | None, seconds: float, native_seconds: float
    ) -> None:
        """Count a compressed call, or in a dry run one that would have been."""
        total = self._add(method, nbytes, seconds, native_seconds)
        total.compressed += 1
        total.saved += saved
        total.error = None if error is None or total.error is None else max(total.error, error)

    def _add(self, method: str, nbytes: int, seconds: float, native_seconds: float) -> Total:
        total = self.by_method.setdefault(method, Total())
        total.calls += 1
        total.nbytes += nbytes
        total.seconds += seconds
        total.native_seconds += native_seconds
        return total

    def table(self, heading: str) -> str:
        """Return the table, one line for each method, the largest first, and the sum.

        Parameters
        ----------
        heading : str
            The first line.
        """
        rows = sorted(self.by_method.items(), key=lambda row: (-row[1].nbytes, row[0]))
        total = Total()
        for _, each in rows:
            for name in ("calls", "compressed", "nbytes", "saved", "seconds", "native_seconds"):
                setattr(total, name, getattr(total, name) + getattr(each, name))
        errors = [each.error for _, each in rows]
        total.error = None if None in errors else max((error for error in errors if error), default=0.0)
        saved = "would save" if self.dry_run else "saved"
        columns = ("calls", "compressed", "bytes", saved, "error up to", "seconds", "MPI's own")
        lines = [heading, f"{'':<22}" + "".join(f"{name:>13}" for name in columns)]
        lines += [_row(name, each) for name, each in [*rows, ("all", total)]]
        return "\n".join(
            [
                *lines,
                "error: estimate of ‖result - exact‖ / ‖exact‖ for Gaussian values, the largest of a call",
                "MPI's own: for compressed calls by the speedup that the cost model predicts",
            ]
        )


def _row(name: str, total: Total) -> str:
    error = "unknown" if total.error is None else f"{total.error:.1e}" if total.error else "0"
    cells = (str(total.calls), str(total.compressed), amount(total.nbytes), amount(total.saved), error)
    times = (f"{total.seconds:.3f}", f"{total.native_seconds:.3f}")
    return f"{name:<22}" + "".join(f"{cell:>13}" for cell in (*cells, *times))
