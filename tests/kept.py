"""What tests compile, kept in build/tests: once for all of their processes, until what it is made of changes."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from compcoll.gpu.cubins import NVRTC, OPTIONS
from compcoll.gpu.programs import KERNELS, Program

FOLDER = Path(__file__).resolve().parents[1] / "build" / "tests"


def kept(name: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes, whose name begins with `name`, and depends on all that it is made of."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}-{blake2b(repr(made_of).encode(), digest_size=12).hexdigest()}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            make(unfinished)
            unfinished.replace(path)
    return path


@functools.cache
def kernel_sources() -> bytes:
    """A digest of all sources of kernels, and of the compiler's version."""
    digest = blake2b(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for path in sorted(KERNELS.iterdir()):
        if path.is_file() and path.suffix in (".h", ".cu", ".cpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def machine_code(compiler: NVRTC, program: Program, arch: str) -> tuple[bytes, str]:
    """A program compiled as CuPy does it, which adds the architecture and options of its own; and what NVRTC said."""
    options = [*program.options, f"-arch=sm_{arch}", *OPTIONS, "--ptxas-options=-v"]  # a digest of sources among them

    def make(path: Path) -> None:
        cubin, log = compiler.compile(program.source, options)
        path.write_bytes(log.encode() + b"\0" + cubin)

    log, _, cubin = kept(f"sm_{arch}", (compiler.version, program.source, options), make).read_bytes().partition(b"\0")
    return cubin, log.decode()
