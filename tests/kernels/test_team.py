"""Threads that share a kernel's work: the same bits, nobody waits for one that does not run, and forks go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from promises import FIXED, one_of_each

import compcoll
from compcoll.codecs.base import Codec
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.kernels import _host

CODECS: dict[str, Codec] = {
    "zfp": compcoll.get_codec("zfp", rate=8),
    "minmax": compcoll.get_codec("minmax", bits=5),
    "qsgd": compcoll.get_codec("qsgd", bits=4),
    "cast": compcoll.get_codec("cast", dtype="float16"),
    "nvfp4": compcoll.get_codec("mx", format="nvfp4"),
}
for _codec in one_of_each(FIXED):
    if _codec.name in _host.codecs():
        CODECS.setdefault(_codec.name, _codec)
Array = npt.NDArray[Any]

ENCODE = """
import os
import numpy as np
import compcoll
from compcoll.host.device import HostDevice

def encode(n, threads):
    coder = compcoll.get_codec("zfp", rate=8).coder(HostDevice(threads), "float32")
    x, wire = np.ones(n, np.float32), np.empty(coder.wire_nbytes(n), np.uint8)
    coder.encode(n, x, [], wire)

def helpers():
    tasks = (open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
    return sum(name == "compcoll-helper\\n" for name in tasks)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wires(codec: Codec, x: Array, threads: int) -> tuple[bytes, bytes, bytes]:
    """What is encoded with feedback, what that lost, and the sum of its decoding and the values."""
    coder = codec.coder(HostDevice(threads), x.dtype.name)
    wire, residual = np.zeros(coder.wire_nbytes(x.size), np.uint8), np.full_like(x, 1e-4)
    coder.encode(x.size, x, [], wire, EncodeOptions(residual=residual, rng_counter=7))
    out = np.empty_like(x)
    coder.decode(x.size, x, [wire, wire], out, scale=0.5)
    return wire.tobytes(), residual.tobytes(), out.tobytes()


def test_every_kernel_has_a_codec_here() -> None:
    assert set(CODECS) == set(_host.codecs())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_bits_as_one_thread(name: str, dtype: str) -> None:
    for n in (40_001, 262_144, 1_500_007):
        x = np.random.default_rng(n).standard_normal(n).astype(dtype)
        alone = wires(CODECS[name], x, 1)
        for threads in (2, 3, 8):
            assert wires(CODECS[name], x, threads) == alone, (n, threads)


def test_low_rank_factors_same_bits_as_one_thread() -> None:
    rows, columns, rank = 701, 1111, 4
    passes = _host.LowRank32(len(_host.instruction_sets()) - 1, rows, columns, rank, columns, False)
    random = np.random.default_rng(0)
    gradient, kept = random.standard_normal((2, rows, columns)).astype(np.float32)
    left, right = (random.standard_normal((n, rank)).astype(np.float32) for n in (rows, columns))
    found: dict[int, bytes] = {}
    for threads in (1, 2, 5):
        for side, given, factor in ((1, right, np.empty_like(left)), (2, left, np.empty_like(right))):
            total, addresses = np.empty_like(kept), [array.ctypes.data for array in (gradient, kept, left, right)]
            passes.project(
                *(
                    addresses[0],
                    DTYPES["float32"].precision,
                    addresses[1],
                    (addresses[2], addresses[3]),
                    total.ctypes.data,
                    side,
                ),
                *(given.ctypes.data, factor.ctypes.data, threads),
            )
            assert found.setdefault(side, factor.tobytes()) == factor.tobytes(), (side, threads)


def test_callers_at_once_share_the_helpers() -> None:
    x = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    alone, wrong = {name: wires(codec, x, 1) for name, codec in CODECS.items()}, []

    def check(name: str) -> None:
        for _ in range(20):
            if wires(CODECS[name], x, 3) != alone[name]:
                wrong.append(name)

    threads = [
        threading.Thread(target=check, args=(name,)) for name in CODECS for _ in range(6)
    ]  # more than it has jobs
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_helpers_start_when_wanted_and_once() -> None:
    assert run(ENCODE + "encode(1000, 2); encode(1 << 22, 1); print(helpers())") == "0"
    assert run(ENCODE + "encode(1 << 22, 3); encode(1 << 22, 2); encode(1 << 22, 3); print(helpers())") == "2"


def test_a_forked_child_starts_its_own() -> None:
    forked = """
encode(1 << 22, 3)
child = os.fork()
if child == 0:
    assert helpers() == 0
    encode(1 << 22, 2)
    os._exit(helpers())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), helpers())
"""
    assert run(ENCODE + forked) == "1 2"


def test_a_fork_while_other_threads_encode() -> None:
    forked = """
import threading
encode(1 << 18, 1)
over = threading.Event()
def go_on():
    while not over.is_set():
        encode(1 << 20, 3)
threads = [threading.Thread(target=go_on) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        for _ in range(20):  # more than there are jobs
            encode(1 << 18, 3)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads:
    thread.join()
print(codes == [0] * 20)
"""
    assert run(ENCODE + forked) == "True"


def test_the_process_ends_with_helpers() -> None:
    for _ in range(5):
        assert run(ENCODE + "encode(1 << 20, 4); print('ended')") == "ended"


def test_no_openmp() -> None:
    libraries = subprocess.run(["ldd", _host.__file__], capture_output=True, text=True, check=True).stdout
    assert "libc" in libraries
    assert "omp" not in libraries


def test_threads_that_get_no_time_cost_little() -> None:
    """Bound to one core, beside a process that keeps it busy: eight threads take about as long as one."""
    bound = """
import subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
def seconds(threads):
    started = time.perf_counter()
    for _ in range(8):
        encode(1 << 22, threads)
    return time.perf_counter() - started
try:
    seconds(1), seconds(8)
    pairs = [(seconds(1), seconds(8)) for _ in range(5)]
finally:
    busy.kill()
    busy.wait()
print(sorted(many / one for one, many in pairs)[2])
"""
    assert float(run(ENCODE + bound)) < 2.5
