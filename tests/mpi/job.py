"""One mpirun job of the tests: every rank's output apart, a hard time-out, and nothing left running afterwards.

Each rank runs under a line of shell that sends its output to files of its own and notes its exit status, so that no
MPI's way of mixing and tagging output matters. All processes of a job carry a token in their environment; only those
are ever signalled. A job that takes too long gets SIGABRT on its Pythons, whose faulthandler then says where each rank
was. What a job puts down in the temporary folder or in shared memory goes with it, even if it was killed: Open MPI
names its session folder after the process number, and a later mpirun that gets the same number fails over the old one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import launcher

TOKEN = "COMPCOLL_TEST_JOB"
SHARED_MEMORY = Path("/dev/shm")
# A rank that was killed takes its shell along: MPI must see that it died, and not a program that gave 137 back.
ONE_RANK = (
    'R="$0/${OMPI_COMM_WORLD_RANK-$PMI_RANK}"; "$@" >"$R.out" 2>"$R.err"; S=$?; echo $S >"$R.status"; '
    "[ $S -ne 137 ] || kill -KILL $$; exit $S"
)


class JobError(AssertionError):
    """A job that died, hung or failed; the message is the report of every rank."""


@dataclass(frozen=True)
class Rank:
    """What one rank wrote, and how it ended (None: it never did by itself)."""

    stdout: str
    stderr: str
    status: int | None


class Job:
    """`ranks` processes of `command` (a module name, or a script, with its arguments), started at once.

    `options` are further ones of mpirun.
    """

    def __init__(
        self,
        ranks: int,
        command: Sequence[str | Path],
        folder: Path,
        prefix: Path | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.ranks = ranks
        self.folder = folder
        self.killed_because: str | None = None
        self._token = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        python = str(prefix / "bin" / "python") if prefix else sys.executable
        program, *arguments = (str(word) for word in command)
        what = [program] if program.endswith(".py") else ["-m", program]
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._scratch = tempfile.mkdtemp(prefix="compcoll-job-", dir=shared)
        environ = {
            **os.environ,
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": self._scratch,
            "OMPI_MCA_btl_sm_backing_directory": self._scratch,
            TOKEN: self._token,
            **(env or {}),
        }
        self.command, environ = launcher.prepare(
            [*options, "-n", str(ranks), "/bin/sh", "-c", ONE_RANK, str(folder), python, *what, *arguments],
            prefix,
            environ,
        )
        with (folder / "mpirun.out").open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> None:
        """Wait for the end; a job that takes longer than `timeout` seconds, or is interrupted, is killed."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill(f"took longer than {timeout:g} s")
        finally:
            self.kill()

    def kill(self, because: str | None = None) -> None:
        """End every process of this job that is still there; with a reason, have each rank say where it was first."""
        if because is not None:
            self.killed_because = because
            for pid in self._members():
                if _executable(pid).startswith("python"):
                    _signal(pid, signal.SIGABRT)
            self._until(lambda: not any(_executable(pid).startswith("python") for pid in self._members()), 5.0)
        elif not self.running:
            self._until(lambda: not self._members(), 2.0)
        while members := self._members():
            for pid in members:
                _signal(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def rank(self, rank: int) -> Rank:
        status = self._read(f"{rank}.status").strip()
        return Rank(self._read(f"{rank}.out"), self._read(f"{rank}.err"), int(status) if status else None)

    def report(self) -> str:
        """Everything known about the job: how it ended, and what each rank wrote."""
        outputs = [self.rank(r) for r in range(self.ranks)]
        ended = self.killed_because or f"exit status {self.returncode}"
        lines = [f"{self.ranks} ranks: {ended}", f"  command: {' '.join(self.command)}"]
        lines += [f"  rank {r}: {_how(output.status)}" for r, output in enumerate(outputs)]
        if said := self._read("mpirun.out").strip():
            lines.append(f"--- mpirun\n{said}")
        for r, output in enumerate(outputs):
            for name, text in (("stdout", output.stdout), ("stderr", output.stderr)):
                if text.strip():
                    lines.append(f"--- rank {r} {name}\n{_shortened(text.rstrip())}")
        return "\n".join(lines)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            self._process.poll()
            time.sleep(0.01)

    def _members(self) -> list[int]:
        """Every live process that carries this job's token."""
        wanted = f"{TOKEN}={self._token}".encode()
        members = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        members.append(int(entry.name))
                except OSError:
                    continue
        return members


def _executable(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _how(status: int | None) -> str:
    if status is None:
        return "killed"
    if status > 128:
        try:
            return f"died of {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return "finished" if status == 0 else f"exit status {status}"


def _shortened(text: str, limit: int = 12000) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… ({len(text) - limit} characters) …\n{text[-limit // 2 :]}"
