"""Whether MPI takes memory of GPUs: what libraries say, and what settings do."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compcoll import errors
from compcoll.gpu import awareness as gpu_aware
from compcoll.transports import library


def library_with(kinds: str | None) -> Any:
    return lambda: library.Library("some", (4, 1), "MULTIPLE", kinds)


@pytest.mark.parametrize(
    ("setting", "kinds", "asked", "works", "aware", "how"),
    [
        ("1", None, False, False, True, "COMPCOLL_GPU_AWARE=1"),
        ("0", "system,mpi,cuda:device", True, True, False, "COMPCOLL_GPU_AWARE=0"),
        ("", "system,mpi,cuda:device", False, False, True, "mpi_memory_alloc_kinds"),
        ("", "system,mpi", True, False, True, "MPIX_Query_cuda_support"),
        ("", None, False, True, False, "MPIX_Query_cuda_support"),
        ("", None, None, True, True, "self-test"),
        ("", None, None, False, False, "self-test"),
    ],
)
def test_whether_mpi_is_gpu_aware(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    kinds: str | None,
    asked: bool | None,
    works: bool,
    aware: bool,
    how: str,
) -> None:
    """The surest answer counts."""
    monkeypatch.setenv("COMPCOLL_GPU_AWARE", setting)
    said = None if asked is None else gpu_aware.Awareness(asked, "MPIX_Query_cuda_support")
    monkeypatch.setattr(library, "library", library_with(kinds))
    monkeypatch.setattr(library, "ask_library", lambda: said)
    monkeypatch.setattr(gpu_aware, "_SELF_TEST", "" if works else "raise SystemExit(1)")
    library.gpu_awareness.cache_clear()
    try:
        found = library.gpu_awareness()
        assert found.aware == aware and how in found.how
    finally:
        library.gpu_awareness.cache_clear()


@pytest.mark.parametrize("name", ["libmpi.so.40", "libmpich.so.12", "libmpi_gnu_123.so.12", "libmpi_ibm.so.3"])
def test_libraries_are_asked_whatever_vendors_call_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """HPE's and IBM's, too: else a child process would try, which takes up to a minute."""
    path = tmp_path / name
    subprocess.run(
        [*shlex.split(os.environ.get("CXX", "g++")), "-shared", "-fPIC", "-x", "c", "-o", path, "-"],
        input=b"int MPIX_Query_cuda_support(void) { return 1; }",
        check=True,
    )
    monkeypatch.setattr(gpu_aware, "mapped_files", lambda: ["/lib/libc.so.6", str(path)])
    assert gpu_aware.ask_library() == (True, "MPIX_Query_cuda_support")
    monkeypatch.setattr(gpu_aware, "mapped_files", lambda: ["/lib/libc.so.6"])
    assert gpu_aware.ask_library() is None


def test_a_setting_that_is_neither_yes_nor_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_GPU_AWARE", "yes")
    library.gpu_awareness.cache_clear()
    with pytest.raises(errors.InvalidArgument, match="COMPCOLL_GPU_AWARE='yes'"):
        library.gpu_awareness()
