"""Decoders are total: whatever the bytes of a wire are, nothing outside its buffers is read or written."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples

import compcoll
from compcoll.errors import WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.kernels import _host

REPOSITORY = Path(__file__).resolve().parents[2]
INPUTS, LONG_INPUTS = 50_000, 500_000  # with each of 2 seeds, or 20


def run(command: list[str | Path], seconds: float, folder: Path) -> str:
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def built(program: str) -> Path:
    build = REPOSITORY / "build" / "fuzz"
    run(["cmake", "-S", REPOSITORY / "tests" / "kernels" / "fuzz", "-B", build, "-G", "Ninja"], 60, REPOSITORY)
    run(["cmake", "--build", build, "--target", program], 900, REPOSITORY)
    return build / program


@pytest.fixture(scope="module")
def fuzz() -> Path:
    """The fuzzer, with the decoders under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return built("fuzz")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 21))])
def test_every_decoder(fuzz: Path, tmp_path: Path, seed: int, long: bool, figure: Callable[[str], None]) -> None:
    """The input with a finding is in tmp_path/input, for fuzz --replay."""
    inputs = LONG_INPUTS if long else INPUTS
    said = run([fuzz, str(inputs), str(seed), tmp_path], 3000 if long else 600, tmp_path)
    assert said.startswith(f"{inputs} inputs without a finding"), said
    figure(f"fuzzing, seed {seed}: {said.strip()}")
    counts = dict(zip((words := said.rpartition("s: ")[2].split())[::2], map(int, words[1::2]), strict=True))
    assert list(counts) == [*_host.codecs(), "sparse32", "sparse64", "intsum", "votes"]
    assert min(counts.values()) > inputs // 20, said


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_kernels_in_several_threads(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Under ThreadSanitizer, with their team; in the long run only, since all kernels are compiled once more."""
    said = run([built("threads"), "20000"], 1000, tmp_path)
    assert "without a finding" in said
    figure(f"ThreadSanitizer: {said.strip()}")


@given(
    st.binary(max_size=600),
    st.integers(0, 100),
    st.sampled_from([np.float32, np.float64, np.float16]),
    st.sampled_from([{"tolerance": 1e-3}, {"precision": 12}, {"lossless": True}]),
)
@example(bytes(2), 0, np.float32, {"tolerance": 1e-3})  # a stream of no values
def test_zfp_streams_of_any_length(wire: bytes, n: int, dtype: type, mode: dict[str, float]) -> None:
    """What libzfp decodes through zfpy: values, or an error that has a name."""
    coder = compcoll.get_codec("zfp", **mode).coder(HostDevice(1), np.dtype(dtype).name)
    out = np.empty(n, dtype)
    with contextlib.suppress(WireCorrupted):
        coder.decode(n, None, (np.frombuffer(wire, np.uint8),), out.view(np.uint16) if dtype is np.float16 else out)


def bit_by_bit(data: bytes) -> int:
    """CRC-32C as RFC 3720 defines it: division of polynomials over GF(2)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


PUBLISHED = {  # RFC 3720, appendix B.4; the last is the check value of the catalogue of parametrised CRC algorithms
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


@pytest.mark.parametrize("portable", [False, True])
def test_checksums_as_published(portable: bool) -> None:
    for data, expected in PUBLISHED.items():
        assert _host.crc32c(np.frombuffer(data, np.uint8), portable) == expected == bit_by_bit(data)


@examples(30)
@given(st.integers(0, 7000), st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_checksums_of_any_length_and_alignment(n: int, offset: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, n + offset, dtype=np.uint8)[offset:]
    assert _host.crc32c(data) == _host.crc32c(data, True) == bit_by_bit(data.tobytes())
