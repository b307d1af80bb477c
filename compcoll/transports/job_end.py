"""Failed ranks: whether MPI lets the other ranks continue, and how an uncaught error ends the job.

Otherwise the other ranks would wait for the failed rank for ever, and the failed rank for the others in MPI_Finalize.
`python -m mpi4py` ends the job of any program in this case; this module does so once a communicator was created.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from .library import MPI

_SWITCH = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpirun --with-ft ulfm


def survives_failures() -> bool:
    """Return whether other ranks can continue after a rank has died: User-Level Failure Mitigation (MPI Forum, ULFM).

    Every build of Open MPI since version 5 has it; it is switched on when the job starts.
    """
    return os.environ.get(_SWITCH, "0") not in ("0", "false", "no")


files: list[str] = []
"""Temporary files of the job, which `end_job` removes since their normal removal does not run then."""


def end_job(text: str) -> None:
    """Print the reason and abort all ranks."""
    for path in files:
        Path(path).unlink(missing_ok=True)
    _say(text)
    MPI.COMM_WORLD.Abort(1)


@lru_cache(maxsize=1)
def end_job_with_uncaught_errors() -> None:
    """Install an exception hook: an uncaught error ends the job after Python has printed it.

    If MPI lets other ranks continue, only this rank dies, and MPI informs the others. An interactive interpreter
    continues after errors, so there they do not end the job.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if MPI.Is_finalized() or MPI.COMM_WORLD.size == 1 or hasattr(sys, "ps1") or sys.flags.interactive:
            return
        if sys.stderr is not sys.__stderr__ and isinstance(sys.stderr, io.StringIO):
            # The hook of PyTorch's process groups captures stderr, and would print it only after this hook returns.
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        if survives_failures():
            _say(f"{kind.__name__} was not caught: this rank ends, and MPI informs the others")
            os.kill(os.getpid(), signal.SIGKILL)  # MPI would not inform the others of a normal exit
        end_job(f"{kind.__name__} was not caught: all ranks end, since others would wait for this one")

    sys.excepthook = hook


def _say(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the stream is None or closed
            stream.flush()
    print(f"compcoll, rank {MPI.COMM_WORLD.rank}: {text}", file=sys.__stderr__, flush=True)
