"""Compile CUDA programs to files of machine code. One rank of a node compiles a program, and all ranks load the file.

This module needs neither a GPU nor CuPy: `python -m compcoll cubins` compiles ahead of time, on any machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO

from .. import config
from ..errors import UnsupportedDevice
from ..pending import wait_until
from .programs import Program

ARCHITECTURES = ("80", "90", "100")
"""Compute capabilities of A100, H100 and B200. Code also runs on later minor versions of the same major version."""

OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""The options that CuPy adds to each compilation."""

_SECONDS_TO_COMPILE = 120.0  # a rank waits so long for another rank's compilation, then compiles itself
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")


class NVRTC:
    """The CUDA runtime compiler.

    Parameters
    ----------
    library : str
        Path or name of the shared library.

    Attributes
    ----------
    version : str
        The version, for example ``"13.0"``.
    """

    def __init__(self, library: str) -> None:
        if os.sep in library:
            # NVRTC of the 13.0 wheel does not search its own folder for its builtins library: load it beforehand.
            for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(library)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Compile a program; return its machine code for the options' architecture, and the compiler's log.

        Raises
        ------
        UnsupportedDevice
            If compilation fails.
        """
        made = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        if status := create(ctypes.byref(made), source.encode(), b"device.cu", 0, None, None):
            raise UnsupportedDevice(f"NVRTC {self.version} cannot create a program: status {status}")
        try:
            texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self._library.nvrtcCompileProgram(made, len(options), texts)
            log = self._told("ProgramLog", made).rstrip(b"\0").decode()
            if failed:
                raise UnsupportedDevice(f"NVRTC {self.version} failed with {' '.join(options)}: status {failed}: {log}")
            return self._told("CUBIN", made), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(made))

    def _told(self, what: str, made: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(made, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(made, text)
        return text.raw


@functools.cache
def nvrtc() -> NVRTC | None:
    """Return the newest NVRTC of NVIDIA's installed Python packages, else the system's; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ()) if spec] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    newest = sorted(found, key=_version, reverse=True)
    for library in (*map(str, newest), *_LIBRARIES):
        with contextlib.suppress(OSError, AttributeError):  # absent, or too old to have the version function
            return NVRTC(library)
    return None


def _version(library: Path) -> list[int]:
    return [int(part) for part in library.name.split(".") if part.isdigit()]


def folder() -> Path:
    """Return the folder for compiled programs: COMPCOLL_CUBINS if set, else a folder in the user's cache."""
    if given := config.cubins():
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("compcoll", appauthor=False) / "cubins"


def _stem(program: Program, arch: str) -> str:
    """Return the first part of a file name: a hash of the program's sources and options, and the architecture."""
    told = [option for option in program.options if not option.startswith("-I")]  # the digest option covers the headers
    return f"{blake2b(repr((program.source, told, OPTIONS)).encode(), digest_size=12).hexdigest()}-sm_{arch}"


def _path(program: Program, arch: str, compiler: NVRTC) -> Path:
    return folder() / f"{_stem(program, arch)}-nvrtc_{compiler.version}.cubin"


def kept(program: Program, arch: str) -> list[Path]:
    """Return a program's existing files whose machine code runs on a GPU.

    Files for higher compute capabilities come first. Of those for one capability, the file of this machine's compiler
    comes first.

    Parameters
    ----------
    program : Program
        The program.
    arch : str
        The GPU's compute capability, without a dot.
    """
    compiler, found = nvrtc(), []
    for built in sorted((known for known in {*ARCHITECTURES, arch} if _runs_on(known, arch)), key=int, reverse=True):
        paths = sorted(folder().glob(f"{_stem(program, built)}-nvrtc_*.cubin"), reverse=True)
        own = None if compiler is None else _path(program, built, compiler)
        found += sorted(paths, key=lambda path: path != own)
    return found


def _runs_on(built: str, arch: str) -> bool:
    """Return whether code built for one compute capability runs on a GPU of capability ``arch``."""
    return built[:-1] == arch[:-1] and int(built) <= int(arch)


def make(program: Program, arch: str) -> Path | None:
    """Compile a program once for all ranks that share the folder. Other ranks wait for the file.

    Returns
    -------
    Path or None
        The file; None if there is no compiler or no writable folder.

    Raises
    ------
    UnsupportedDevice
        If compilation fails.
    """
    compiler = nvrtc()
    if compiler is None:
        return None
    path = _path(program, arch, compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                code, _ = compiler.compile(program.source, [*program.options, f"-arch=sm_{arch}", *OPTIONS])
                _write(path, code)
    except OSError:
        return None
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            os.fchmod(number, 0o644)  # other users may share the folder
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file lock. After a time limit, go on without it: its holder may hang, and compiling twice is harmless."""
    with open(path, "w") as lock:
        wait_until(lambda: _locked(lock), _SECONDS_TO_COMPILE)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks: go on without
        pass
    return True
