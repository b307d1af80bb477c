"""The CUDA programs without a GPU: compiled for real architectures, and searched for races on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import cuda_shim
from kept import machine_code

from compcoll import ZFP, errors
from compcoll.gpu import launches as launches
from compcoll.gpu import programs as cuda_programs
from compcoll.gpu.coder import DeviceCoder
from compcoll.gpu.cubins import nvrtc
from compcoll.gpu.programs import COMPUTED, KERNELS, program
from compcoll.host.encode_options import EncodeOptions
from compcoll.kernels import _host

PROGRAMS = (*_host.codecs(), *cuda_shim.SPECIAL)
TESTS = Path(__file__).resolve().parents[1]
SHIM = (sys.executable, "-m", "fakes.cuda_shim")
BARRIERS = [
    (path.name, number)
    for path in sorted(KERNELS.glob("device*.h"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if re.search(r"__sync(threads|warp)\(\)", line) and "orders no memory" not in line
]
"""Not those that only shuffles stand in for, which here are barriers, and on a GPU are none."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvrtc_compiles_every_kernel(architecture: str) -> None:
    compiler = nvrtc()
    if compiler is None and "CI" not in os.environ:
        pytest.skip("nvidia-cuda-nvrtc is not installed: make install")
    assert compiler is not None

    def compiled(which: tuple[str, str]) -> tuple[bytes, str]:
        return machine_code(compiler, program(*which), architecture)

    programs = [(codec, computed) for codec in PROGRAMS for computed in COMPUTED]
    with ThreadPoolExecutor(2) as pool:
        for which, (cubin, log) in zip(programs, pool.map(compiled, programs), strict=True):
            functions = cuda_shim.functions_of(program(*which))
            assert cubin[:4] == b"\x7fELF"
            assert sorted(re.findall(r"Compiling entry function '(\w+)'", log)) == sorted(functions)
            spills = [int(nbytes) for nbytes in re.findall(r"(\d+) bytes spill stores", log)]
            assert len(spills) == len(functions)
            assert max(spills) <= (0 if which[1] == "float32" else 64), log


def test_programs_name_all_functions_once() -> None:
    programs = [program(codec, computed) for codec in PROGRAMS for computed in COMPUTED]
    parts = [name for each in programs for name in cuda_shim.functions_of(each)]
    assert len(set(parts)) == len(parts)
    recorded = cuda_shim.Recorded()
    for codec, dtype in [(ZFP(), "float32"), (ZFP(), "float64")]:
        for maxbits in (16, 32, 33, 64, 65, 128):
            for scale in (1.0, 0.5):
                coder = DeviceCoder(recorded, (codec.name, maxbits, 0), dtype)
                coder.encode(100, 8, [], 16, EncodeOptions(scale=scale))
    used = {launch.function for launch in recorded.launches}
    assert used < set(parts) and len(used) == 12


def test_digest_covers_included_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = program("zfp", "float32").options  # kept: not asked for while the sources are others
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    monkeypatch.setattr(cuda_programs, "KERNELS", copy)
    before = cuda_programs._source.__wrapped__()
    with (copy / "zfp.h").open("a") as header:
        header.write("// changed\n")
    after = cuda_programs._source.__wrapped__()
    assert before[0] == after[0] and before[1] != after[1]
    assert f"-DCOMPCOLL_DIGEST=0x{before[1]}" in options


def test_launches_refuse_what_cannot_be() -> None:
    recorded = cuda_shim.Recorded()
    zfp = DeviceCoder(recorded, ("zfp", 32, 0), "float32")
    zfp.encode(0, 8, [], 16)
    zfp.decode(0, 8, [], 16)
    assert not recorded.launches
    with pytest.raises(errors.InvalidArgument, match="nothing to sum"):
        zfp.encode(4, None, [], 16)
    with pytest.raises(ValueError, match="bits per block must be in"):
        DeviceCoder(recorded, ("zfp", 8, 0), "float32")
    with pytest.raises(ValueError, match="block must be a multiple of 8"):
        DeviceCoder(recorded, ("minmax", 8, 12), "float32")


def test_parameters_have_no_fields() -> None:
    """CuPy has NumPy describe a kernel's argument at every launch, which takes ten times as long with fields."""
    recorded = cuda_shim.Recorded()
    DeviceCoder(recorded, ("zfp", 32, 0), "float32").encode(4, 8, [], 16)
    given = recorded.launches[0].argument
    assert given.size == 1 and given.dtype.names is None and given.nbytes == 120 + 8 * launches.MOST_WIRES


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return cuda_shim.build("-fsanitize=thread", "-g1", "-DCOMPCOLL_TYPES=1")


@pytest.fixture(scope="module")
def sanitized_tiles() -> Path:
    return cuda_shim.build_tiles("-fsanitize=thread", "-g1")


def under_thread_sanitizer(library: Path, dropped_line: int, *tiles: str) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, timeout=20)
    sanitizer = Path(found.stdout.strip())
    assert sanitizer.is_absolute(), "g++ has no ThreadSanitizer"
    environment = {**os.environ, "LD_PRELOAD": str(sanitizer), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [*SHIM, str(library), str(dropped_line), *tiles]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, env=environment, timeout=100)


@pytest.mark.slow
def test_no_races(sanitized: Path, sanitized_tiles: Path) -> None:
    for ran in (under_thread_sanitizer(sanitized, 0), under_thread_sanitizer(sanitized_tiles, 0, "tiles")):
        assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_misaligned_memory_is_found() -> None:
    """The proof that the kernels' other tests find what a GPU would refuse."""
    library = cuda_shim.build("-DCOMPCOLL_SPARSE", "-DCOMPCOLL_TYPES=1")
    ended = subprocess.run([*SHIM, str(library), "-1"], cwd=TESTS, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGILL


@pytest.mark.slow
@pytest.mark.parametrize(("header", "line"), BARRIERS)
def test_every_barrier_is_needed(header: str, line: int, sanitized: Path, sanitized_tiles: Path) -> None:
    """The proof that races are found: without a barrier there is one."""
    tiles = {"device_rounds.h", "device_records.h"}
    assert len(BARRIERS) == 12 == len({(name in tiles, number) for name, number in BARRIERS})  # dropped by their lines
    ran = under_thread_sanitizer(*(sanitized_tiles, line, "tiles") if header in tiles else (sanitized, line))
    assert ran.returncode == 66 and "ThreadSanitizer: data race" in ran.stderr, ran.stderr
    assert header in ran.stderr
