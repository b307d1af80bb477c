"""Ranks that fail: whether MPI lets the others go on, and the end of a job in which nobody catches an error.

The others would wait for that rank for ever, and it for them in MPI_Finalize. `python -m mpi4py` ends any program's job
then; here that is done for those that have made a communicator.
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

_SWITCH = "OMPI_MCA_mpi_ft_enable"  # of Open MPI's mpirun --with-ft ulfm


def survives_failures() -> bool:
    """Tell whether MPI lets the others go on when a rank has died: User-Level Failure Mitigation (MPI Forum, ULFM).

    Open MPI has it in every build since version 5, switched on when the job is started.
    """
    return os.environ.get(_SWITCH, "0") not in ("0", "false", "no")


files: list[str] = []
"""Temporary files of the job, which somebody removes at its end unless that comes early."""


def end_job(text: str) -> None:
    """Say why, and end all ranks."""
    for path in files:
        Path(path).unlink(missing_ok=True)
    _say(text)
    MPI.COMM_WORLD.Abort(1)


@lru_cache(maxsize=1)
def end_job_with_uncaught_errors() -> None:
    """Have an error that no code of the program's catches end the job, as soon as it has been shown.

    Where MPI lets the others go on, this rank alone dies, and they are told. An interpreter that someone types into
    shows such errors, too, and goes on: there they end nothing.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if MPI.Is_finalized() or MPI.COMM_WORLD.size == 1 or hasattr(sys, "ps1") or sys.flags.interactive:
            return
        if sys.stderr is not sys.__stderr__ and isinstance(sys.stderr, io.StringIO):
            # The hook of PyTorch's process groups calls this one so, and would print that afterwards.
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        if survives_failures():
            _say(f"{kind.__name__} was not caught: this rank ends, and the others are told")
            os.kill(os.getpid(), signal.SIGKILL)  # of an exit they would not be
        end_job(f"{kind.__name__} was not caught: all ranks end, since others would wait for this one")

    sys.excepthook = hook


def _say(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    print(f"compcoll, rank {MPI.COMM_WORLD.rank}: {text}", file=sys.__stderr__, flush=True)
