"""Bad input: a named error that says what was given and what is allowed, on every rank, and nothing is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

import compcoll
from compcoll import ZFP, Cast, ErrorFeedback, MinMax
from compcoll.codecs import ALL
from compcoll.errors import (
    CollectiveMismatch,
    CommunicatorBroken,
    CompcollError,
    InvalidArgument,
    InvalidBuffer,
    PeerTimeout,
    UnknownAlgorithm,
    UnknownCodec,
    UnsupportedDType,
    WireCorrupted,
)

X = np.arange(1000, dtype=np.float32)
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False

REFUSED: list[tuple[dict[str, Any], type[CompcollError], str]] = [
    ({"codec": "zpf"}, UnknownCodec, r"codec 'zpf' \(did you mean 'zfp'\?\): there are cast, .*fp8, .*intsum, .*zfp"),
    ({"codec": "gzip9"}, UnknownCodec, r"unknown codec 'gzip9': there are cast"),
    ({"codec": "zfp", "rte": 8}, InvalidArgument, r"no option 'rte' \(did you mean 'rate'\?\): it takes lossless"),
    ({"codec": "zfp", "rate": 2}, InvalidArgument, r"zfp: rate=2 must be above 2 and at most 64"),
    ({"codec": "zfp", "rate": 33}, InvalidArgument, r"rate=33 is out of range for float32: above 2, at most 32"),
    ({"codec": "zfp", "rate": 2.1}, InvalidArgument, r"out of range for float32"),
    (
        {"codec": "zfp", "rate": 2.5, "x": X.astype(np.float64)},
        InvalidArgument,
        r"out of range for float64: at least 3",
    ),
    ({"codec": "zfp", "rate": 8, "tolerance": 0.1}, InvalidArgument, r"rate and tolerance exclude each other"),
    ({"codec": "zfp", "rate": float("nan")}, InvalidArgument, r"rate=nan must be"),
    ({"codec": "zfp", "rate": "8"}, InvalidArgument, r"rate='8' must be a number"),
    ({"codec": "zfp", "tolerance": -1}, InvalidArgument, r"tolerance=-1"),
    ({"codec": "minmax", "bits": 9}, InvalidArgument, r"bits=9 must be an integer from 1 to 8"),
    ({"codec": "minmax", "block": 12}, InvalidArgument, r"block=12 must be a multiple of 8"),
    ({"codec": "qsgd", "bits": 0}, InvalidArgument, r"qsgd: bits=0 must be an integer from 1 to 8"),
    ({"codec": "qsgd", "norm": "l1"}, InvalidArgument, r'norm=\'l1\' is neither "l2" nor "max"'),
    ({"codec": "qsgd", "rounding": "up"}, InvalidArgument, r"rounding='up' is neither"),
    ({"codec": "terngrad", "seed": -1}, InvalidArgument, r"terngrad: seed=-1 must be an integer from 0"),
    ({"codec": "onebit", "block": 1 << 17}, InvalidArgument, r"onebit: block=131072 must be .* 8 to 65536"),
    ({"codec": "fp8", "format": "e3m4"}, InvalidArgument, r"fp8: format='e3m4' is neither"),
    ({"codec": "cast", "dtype": "float8"}, InvalidArgument, r"dtype='float8' is none of \"float16\""),
    ({"codec": "cast", "dtype": "float64"}, InvalidArgument, r"a float64 wire is wider than the float32 values"),
    ({"codec": "minmax:bits=9"}, InvalidArgument, r"minmax: bits=9 must be an integer from 1 to 8"),
    ({"codec": "minmax:bits=4", "bits": 4}, InvalidArgument, r"codec='minmax:bits=4' and bits=4: bits is given twice"),
    ({"codec": MinMax(), "bits": 4}, InvalidArgument, r"options bits go with a codec's name"),
    ({"rate": 8}, InvalidArgument, r"options rate go with a codec: name it, such as codec=\"zfp\""),
    ({"codecs": "zfp"}, InvalidArgument, r"'codecs' is neither an argument nor .* \(did you mean 'codec'\?\)"),
    ({"codec": "auto"}, InvalidArgument, r"codec=\"auto\" needs tolerance=, .*such as tolerance=1e-2$"),
    ({"codec": "auto", "tolerance": 1, "rate": 8}, InvalidArgument, r"and takes no other option: not rate"),
    ({"codec": 8}, InvalidArgument, r"codec=8 is neither a codec nor the name of one"),
    ({"algorithm": "rng"}, UnknownAlgorithm, r"no algorithm 'rng' \(did you mean 'ring'\?\): there are auto, ring,"),
    ({"algorithm": "sharedmemory"}, UnknownAlgorithm, r"\(did you mean 'shared_memory'\?\): .*, shared_memory$"),
    ({"codec": "zfp", "algorithm": "native"}, UnknownAlgorithm, r"uncompressed, but codec=ZFP.* was given"),
    ({"op": "median"}, InvalidArgument, r"op='median' is none of sum, mean, max"),
    ({"op": "max", "codec": "zfp"}, InvalidArgument, r"op='max' cannot be compressed"),
    ({"op": "max", "algorithm": "ring"}, UnsupportedDType, r"reduces them by sum or mean, not max"),
    (
        {"x": X.astype(np.int32), "codec": "zfp"},
        UnsupportedDType,
        r"compresses float16, .*, not int32: convert x, or use codec=None",
    ),
    ({"x": X.astype(np.int32), "op": "mean"}, UnsupportedDType, r"mean of int32"),
    ({"x": X.astype(object)}, UnsupportedDType, r"object"),
    ({"x": X.astype(np.longdouble), "codec": "zfp"}, UnsupportedDType, r"longdouble|float128"),
    ({"x": [1.0, 2.0]}, InvalidBuffer, r"x is a list: a numpy.ndarray is needed"),
    ({"x": X[::2]}, InvalidBuffer, r"not C-contiguous: pass numpy.ascontiguousarray"),
    ({"x": X.astype(">f4")}, InvalidBuffer, r"byte order"),
    ({"out": READ_ONLY}, InvalidBuffer, r"out is read-only"),
    ({"out": np.zeros(999, np.float32)}, InvalidBuffer, r"out is float32\[999\], but the result is float32\[1000\]"),
    ({"out": np.zeros(1000, np.float64)}, InvalidBuffer, r"out is float64\[1000\]"),
    ({"out": np.zeros(2000, np.float32)[::2]}, InvalidBuffer, r"out .*not C-contiguous"),
    ({"codec": ZFP}, InvalidArgument, r"codec=ZFP is a class: give ZFP"),
    ({"codec": "minmax", "bits": 8.0}, InvalidArgument, r"bits=8.0 must be an integer"),
    ({"codec": "zfp", "rate": np.array([8, 8])}, InvalidArgument, r"must be a number"),
    (
        {"x": X.astype(bool), "op": "max"},
        UnsupportedDType,
        r"max of bool: elements of type int, uint, float are needed",
    ),
    ({"op": "band"}, UnsupportedDType, r"band of float32"),
    ({"x": np.ma.masked_array(X)}, InvalidBuffer, r"MaskedArray"),
    ({"timeout": -1}, InvalidArgument, r"timeout=-1: a number of seconds"),
    ({"max_error": 0}, InvalidArgument, r"max_error=0: a relative error is needed, a finite number above 0"),
    ({"max_error": float("inf")}, InvalidArgument, r"max_error=inf: a relative error"),
    ({"max_error": "1e-2", "codec": "zfp"}, InvalidArgument, r"max_error='1e-2': a relative error"),
    (
        {"max_error": 1e-3, "codec": "zfp", "rate": 8},
        InvalidArgument,
        r"^max_error=0\.001: .* on 3 ranks is 0\.0\d+: use c",
    ),
    ({"feedback": 3, "codec": "zfp"}, InvalidArgument, r"feedback=3: a compcoll.ErrorFeedback is needed"),
]


@pytest.mark.parametrize(
    ("options", "error", "text"), REFUSED, ids=lambda v: str(v)[:60] if isinstance(v, dict) else ""
)
def test_refused_on_every_rank_and_usable_afterwards(
    options: dict[str, Any], error: type[CompcollError], text: str
) -> None:
    world = World(3)
    arguments = {"algorithm": "direct"} | options
    x = arguments.pop("x", X)
    before = x.tobytes() if isinstance(x, np.ndarray) else None
    for raised in world.errors([lambda comm: comm.iallreduce(x, **arguments)] * 3):
        assert type(raised) is error
        assert raised.args and re.search(text, str(raised)), str(raised)
    assert before is None or x.tobytes() == before
    assert_usable(world)


def assert_usable(world: World) -> None:
    inputs = normals(len(world.comms), 100)
    for result in world.allreduce(inputs, algorithm="ring"):
        np.testing.assert_allclose(result, exact_sum(inputs), rtol=1e-5, atol=1e-6)


def test_overlapping_out() -> None:
    world = World(2)
    memory = np.zeros(1100, np.float32)
    starts = [lambda comm: comm.iallreduce(memory[:1000], out=memory[100:], algorithm="direct")] * 2
    assert all("overlaps x without being x" in str(e) for e in world.errors(starts))
    assert_usable(world)


MISMATCHES: list[tuple[str, list[dict[str, Any]]]] = [
    ("size", [{"x": X}, {"x": X[:999]}]),
    ("dtype", [{"x": X}, {"x": X.astype(np.float64)}]),
    ("codec", [{"codec": "zfp"}, {"codec": "minmax"}]),
    ("codec or none", [{"codec": "zfp"}, {}]),
    ("rate", [{"codec": "zfp", "rate": 8}, {"codec": "zfp", "rate": 10}]),
    ("algorithm", [{"algorithm": "ring"}, {"algorithm": "direct"}]),
    ("op", [{"op": "sum"}, {"op": "mean"}]),
    ("max_error", [{"codec": "zfp", "max_error": 0.5}, {"codec": "zfp"}]),
]


@pytest.mark.parametrize(("what", "calls"), MISMATCHES, ids=[m[0] for m in MISMATCHES])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("odd_one", [0, -1])
def test_ranks_that_disagree(what: str, calls: list[dict[str, Any]], size: int, odd_one: int) -> None:
    world = World(size)
    chosen = [calls[0]] * size
    chosen[odd_one] = calls[1]
    starts = [
        lambda comm, call=({"x": X, "algorithm": "direct"} | call): comm.iallreduce(call["x"], **without_x(call))
        for call in chosen
    ]
    before = X.tobytes()
    errors = world.errors(starts)
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    for rank, error in enumerate(errors):
        lines = str(error).splitlines()
        assert len(lines) == 3 and "(this one)" in str(error)
        own = [line for line in lines if "(this one)" in line]
        assert f"{rank}" in own[0]
    assert X.tobytes() == before
    assert_usable(world)


def without_x(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "x"}


def test_one_rank_that_refuses_tells_the_others() -> None:
    world = World(4)
    starts = [lambda comm: comm.iallreduce(X, codec="minmax", algorithm="ring")] * 4
    starts[2] = lambda comm: comm.iallreduce(X[::2], codec="minmax", algorithm="ring")
    errors = world.errors(starts)
    assert isinstance(errors[2], InvalidBuffer)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], CollectiveMismatch)
        assert "rank 2: allreduce refused: InvalidBuffer: x of shape (500,)" in str(errors[rank])
    assert_usable(world)


def test_different_collectives_and_roots() -> None:
    world = World(3)
    starts = [lambda comm: comm.iallreduce(X, algorithm="ring")] * 2 + [
        lambda comm: comm.iallgather(X, algorithm="ring")
    ]
    assert all("allgather(1000 float32" in str(error) for error in world.errors(starts))
    starts = [lambda comm: comm.ibcast(X, 1, algorithm="binomial")] * 2 + [
        lambda comm: comm.ibcast(X, 2, algorithm="binomial")
    ]
    assert all("root 2" in str(error) for error in world.errors(starts))
    bad_root = world.errors([lambda comm: comm.ibcast(X, 3, algorithm="binomial")] * 3)
    assert all("root=3 is not a rank of this communicator: 0 to 2" in str(error) for error in bad_root)
    assert_usable(world)


def test_feedback_of_another_buffer() -> None:
    world = World(2)
    feedbacks = [ErrorFeedback(), ErrorFeedback()]
    for x, expected in ((X, None), (X[:500], InvalidBuffer), (X.astype(np.float64), InvalidBuffer)):
        starts = [
            lambda comm, x=x, f=f: comm.iallreduce(x, codec="minmax", algorithm="ring", feedback=f) for f in feedbacks
        ]
        errors = world.errors(starts)
        assert all(error is None if expected is None else isinstance(error, expected) for error in errors)
    feedbacks[0].reset()
    assert feedbacks[0].residual is None


def test_a_rank_that_never_comes() -> None:
    world = World(2, timeout=0.2)
    request = world.comms[0].iallreduce(X, codec="zfp", algorithm="ring")
    with pytest.raises(PeerTimeout, match=r"nothing came for 0\.2 s: allreduce by ring") as caught:
        request.wait()
    assert caught.value.missing == (1,) and "rank 1 did not answer" in str(caught.value)
    with pytest.raises(PeerTimeout):
        request.wait()
    with pytest.raises(CommunicatorBroken, match="nothing came"):
        world.comms[0].iallreduce(X, algorithm="ring")


def test_who_is_missing_and_what_the_others_wait_for() -> None:
    """All that wait give up with the first of them, though their own time-outs are longer."""
    world = World(4)
    timeouts = {0: 0.3, 1: None, 3: 60.0}

    def start(comm: compcoll.Communicator) -> compcoll.Request:
        return comm.iallreduce(X, codec="minmax", algorithm="ring", timeout=timeouts[comm.rank])

    def attempt(rank: int) -> tuple[CompcollError | None, float]:
        begin = time.monotonic()
        try:
            pending = world.comms[rank].iallgather(X, algorithm="ring") if rank == 1 else None
            request = start(world.comms[rank]) if pending is None else pending
            request.wait()
        except CompcollError as error:
            return error, time.monotonic() - begin
        return None, 0.0

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip((0, 1, 3), pool.map(attempt, (0, 1, 3)), strict=True))
    for rank, (error, seconds) in found.items():
        assert isinstance(error, PeerTimeout) and error.missing == (2,), error
        assert seconds < 10  # not 60: the first to give up tells the others
        assert "rank 2 did not answer" in str(error)
        assert ("allgather by ring" in str(error)) and ("allreduce by ring" in str(error)), error
        assert rank != 0 or "nothing came for 0.3 s" in str(error)


def test_why_another_rank_gave_up() -> None:
    world = World(2, timeout=20)

    def broken(comm: compcoll.Communicator) -> compcoll.Request:
        comm._break(WireCorrupted("bad bytes"))
        return comm.iallreduce(X, algorithm="ring")

    found = world.errors([lambda comm: comm.iallreduce(X, algorithm="ring"), broken])
    assert isinstance(found[0], CommunicatorBroken) and "rank 1 gave up: WireCorrupted: bad bytes" in str(found[0])


def test_encode_and_decode_refuse() -> None:
    with pytest.raises(UnsupportedDType, match="int32 elements cannot be encoded"):
        compcoll.encode(np.ones(4, np.int32))
    with pytest.raises(InvalidArgument, match="codec=None"):
        compcoll.encode(X, codec=None)  # type: ignore[arg-type]
    wire = compcoll.encode(X, codec="zfp", rate=8)
    with pytest.raises(InvalidBuffer, match=r"wire has 999 bytes of uint8, but ZFP\(rate=8.*writes 1000 bytes"):
        compcoll.decode(wire[:-1], 1000, np.float32, codec="zfp", rate=8)
    with pytest.raises(InvalidBuffer, match="1000 bytes"):
        compcoll.decode(wire, 1004, np.float32, codec="zfp", rate=8)
    with pytest.raises(WireCorrupted, match="holds neither encoded nor raw values"):
        compcoll.decode(np.full(10, 7, np.uint8), 1000, np.float32, codec="zfp", tolerance=0.1)


def test_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_TIMEOUT", "soon")
    with pytest.raises(InvalidArgument, match="COMPCOLL_TIMEOUT='soon'"):
        World(1)
    monkeypatch.setenv("COMPCOLL_TIMEOUT", "5")
    monkeypatch.setenv("COMPCOLL_INSTRUCTION_SET", "mmx")
    with pytest.raises(InvalidArgument, match=r"COMPCOLL_INSTRUCTION_SET='mmx' .*portable"):
        World(1)


def test_progress_must_be_known() -> None:
    with pytest.raises(InvalidArgument, match="none of"):
        World(1, progress="magic")


def test_codecs_are_values() -> None:
    assert ZFP(rate=8) == compcoll.get_codec("zfp", rate=8) == ZFP() and hash(ZFP()) == hash(ZFP(rate=8))
    assert repr(Cast("bfloat16")) == "Cast(dtype='bfloat16')"
    with pytest.raises(AttributeError):
        ZFP().rate = 9  # type: ignore[misc]
    sparse = {"hybrid", "randomk", "strom", "topk", "variance"}
    assert compcoll.list_codecs() == sorted({cls.name for cls in ALL} | sparse) and "zfp" in compcoll.list_codecs()
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"


def test_without_pytorch_its_extra_is_named() -> None:
    asked = "import sys; sys.modules['torch'] = None; import compcoll.torch"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: compcoll.torch needs PyTorch: pip install torch"
