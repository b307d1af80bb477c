"""Plans: what a call is found to be, from every side, and the line that other ranks are told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from promises import FIXED

from compcoll import ZFP, Codec, IntSum, MinMax, Sign
from compcoll.codecs.base import bits_of
from compcoll.codecs.checksum import CheckedCoder
from compcoll.codecs.sparse.sparsifier import SparseCoder
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostCoder, HostDevice
from compcoll.layout import World
from compcoll.plan import choose
from compcoll.plan.call import Call, Setting
from compcoll.plan.choose import Option
from compcoll.plan.cost import DEFAULTS, RAW, Timing
from compcoll.plan.plan import make_plan
from compcoll.sparse import TopK

DEVICE = HostDevice(1)
KIB, MIB = 1 << 10, 1 << 20
ZFP8 = "ZFP(rate=8.0)"


def where(size: int = 4, per_node: int = 1, **more: Any) -> Setting:
    return Setting(World(size, per_node), DEVICE, DEFAULTS, library="MPI", shared=size == per_node)._replace(**more)


def call(nbytes: int = 16 * MIB, codec: Codec | None = None, algorithm: str = "auto", **more: Any) -> Call:
    dtype = more.pop("dtype", "float32")
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 4
    return Call("allreduce", nbytes // itemsize, dtype, itemsize, "sum", codec, algorithm)._replace(**more)


LINES: list[tuple[Call, Setting, str]] = [
    (call(algorithm="ring"), where(), "allreduce(sum of 4194304 float32, no codec, ring in segments of 65536)"),
    (call(), where(), "allreduce(sum of 4194304 float32, no codec, native or ring in segments of 65536)"),
    (call(64 * KIB), where(), "allreduce(sum of 16384 float32, no codec, native or direct in segments of 65536)"),
    (call(algorithm="native"), where(), "allreduce(sum of 4194304 float32, no codec, native)"),
    (
        call(collective="reduce_scatter", op="mean"),
        where(),
        "reduce_scatter(mean of 4194304 float32, no codec, native or ring in segments of 65536)",
    ),
    (call(dtype="int32", op="max"), where(), "allreduce(max of 4194304 int32, no codec, native)"),
    (call(4 * KIB), where(2, 2), "allreduce(sum of 1024 float32, no codec, shared_memory)"),
    (call(MIB), where(2, 2), "allreduce(sum of 262144 float32, no codec, shared_memory)"),
    (call(codec=ZFP(rate=8)), where(), f"allreduce(sum of 4194304 float32, {ZFP8}, ring in segments of 131072)"),
    (
        call(codec=ZFP(rate=8), algorithm="ring"),
        where(blocks=True),
        f"allreduce(sum of 4194304 float32, {ZFP8}, ring in segments of 524288)",
    ),
    (
        call(tolerance=0.02),
        where(),
        "allreduce(sum of 4194304 float32, codec for tolerance 0.02, ring in segments of 131072 with "
        "MinMax(bits=8, block=2048))",
    ),
    (
        call(op="mean", algorithm="direct", checksum=True),
        where(),
        "allreduce(mean of 4194304 float32, no codec, direct in segments of 65536, with checksums)",
    ),
    (
        call(MIB, IntSum()),
        where(4, 4),
        "allreduce(sum of 262144 float32, IntSum(bits=16, block=2048), shared_memory without codec)",
    ),
    (
        Call("bcast", 600, "float64", 8, "", None, "binomial", root=2),
        where(),
        "bcast(600 float64, no codec, binomial in segments of 32768, root 2)",
    ),
    (
        Call("allgatherv", 0, "float32", 4, "", None, "ring", rows=(3, 5)),
        where(4, 4),
        "allgatherv(float32, no codec, ring in segments of 262144, rows of shape (3, 5))",
    ),
    (call(dtype="int32", op="max"), where(4, 4), "allreduce(max of 4194304 int32, no codec, native)"),
]


@pytest.mark.parametrize(("asked", "setting", "line"), LINES, ids=lambda value: value if type(value) is str else "")
def test_the_line_that_other_ranks_are_told(asked: Call, setting: Setting, line: str) -> None:
    plan = make_plan(asked, setting)
    assert plan.signature.call == line
    assert plan.scale == (0.25 if asked.op == "mean" else 1.0)
    other = plan.unblocked
    assert (other is not None) == (" or " in line)
    if other is not None:
        own = line.partition(" or ")[2].split()[0].rstrip(")")
        assert (other.algorithm, other.signature) == (own, plan.signature) and other.codec is None


def test_what_runs_instead_of_mpis_own_does_not_travel_with_the_handshake() -> None:
    """Ranks that may block in MPI have sent nothing with theirs: though tune has found it to be nearly as fast."""
    points = tuple((1 << k, 1e-5) for k in range(2, 25))
    slower = tuple((nbytes, 1.2 * seconds) for nbytes, seconds in points)
    timings = tuple(
        Timing(name, RAW, 32.0, World(2, 1), times) for name, times in (("native", points), ("dissemination", slower))
    )
    setting = where(2, profile=replace(DEFAULTS, timings=timings))
    for nbytes in (KIB, 4 * KIB, 16 * KIB, 64 * KIB):
        plan = make_plan(call(nbytes), setting)
        assert plan.algorithm == "native"
        assert plan.unblocked is None or plan.unblocked.algorithm not in ("native", "dissemination")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [None, *FIXED, MinMax(4), ZFP(rate=4)], ids=repr)
def test_segments_are_a_mebibyte_or_make_messages_of_128_to_256_kib(codec: Codec | None, dtype: str) -> None:
    """Inside a node, and between nodes; of no more than 2 MiB of values, and no less than half a MiB of compressed."""
    size, coder = DTYPES[dtype].itemsize, None if codec is None else codec.coder(DEVICE, dtype)
    ratio = 1.0 if coder is None else 8 * size / bits_of(coder)
    asked = call(64 * MIB, codec, "ring", dtype=dtype)
    assert make_plan(asked, where(4, 4)).lengths.segment == MIB // size
    plan = make_plan(asked, where())
    values = plan.lengths.segment * size
    wire = values / ratio
    assert 128 * KIB * 0.99 < wire <= 256 * KIB or values >= 2 * MIB - size
    assert wire > 255 * KIB or 512 * KIB * 0.99 <= values <= 2 * MIB
    assert plan.lengths.block == (1 if codec is None else codec.block)
    # Of what has no fixed size, half is supposed to be sent; of what adds numbers, too.
    for unknown, algorithm in ((ZFP(tolerance=1e-3), "ring"), (IntSum(8), "ring"), (TopK(0.1), "sparse_ring")):
        assert make_plan(call(64 * MIB, unknown, algorithm, dtype=dtype), where()).lengths.segment == 512 * KIB // size


@pytest.mark.parametrize("sealed", [False, True])
def test_coders_of_plans(sealed: bool) -> None:
    """Those that move values: with a checksum where it is asked for; of integers and votes, values as they are."""
    kind = CheckedCoder if sealed else HostCoder

    def plan(codec: Codec | None, algorithm: str, setting: Setting) -> Any:
        return make_plan(call(codec=codec, algorithm=algorithm, checksum=sealed), setting)

    ring, nodes = plan(MinMax(4), "ring", where()), plan(MinMax(4), "hierarchical", where(4, 2))
    assert all(type(each) is kind for each in (*ring.coders, *nodes.coders))
    assert (
        nodes.coders.raw.wire_nbytes(1000) - 4000 == ring.coders.coder.wire_nbytes(1000) - 508 == (4 if sealed else 0)
    )
    assert (
        type(plan(IntSum(), "ring", where()).coders.coder) is kind and plan(IntSum(), "ring", where()).quantizer.is_sum
    )
    sparse = plan(TopK(0.1), "sparse_ring", where()).coders.coder
    assert type(sparse) is SparseCoder and sparse._seal_nbytes == (4 if sealed else 0)
    if not sealed:
        for algorithm in ("dissemination", "native"):
            assert make_plan(call(2 * KIB, algorithm=algorithm), where()).coders is None


@pytest.mark.parametrize("shared", [False, True])
def test_one_rank_copies_unless_that_is_not_what_a_codec_does(shared: bool) -> None:
    alone = where(1, 1, shared=shared)
    for codec in (None, MinMax(4), IntSum()):
        plan = make_plan(call(codec=codec), alone)
        assert (plan.algorithm, plan.codec, plan.codec_text, plan.quantizer) == (choose.COPY, None, None, None)
        assert plan.unblocked is None
    for codec in (Sign(), TopK(0.1)):  # a vote of one is a sign, and a sparsifier sends a part
        plan = make_plan(call(codec=codec), alone)
        assert plan.algorithm != choose.COPY and plan.codec == codec and plan.codec_text == repr(codec)


def test_named_algorithms_take_the_codec_that_keeps_the_error_small() -> None:
    plan = make_plan(call(tolerance=0.02, algorithm="direct"), where())
    assert plan.algorithm == "direct" and plan.codec is not None
    told = refusals(call(tolerance=1e-12, algorithm="direct"), where())
    assert (
        told["direct", True] == "error too large" and told["direct", False] == "" and told["ring", True] == "not direct"
    )
    # What no codec takes is left to MPI, tolerance or not.
    plan = make_plan(call(tolerance=0.02, algorithm="native", dtype="int32"), where())
    assert (plan.algorithm, plan.codec) == ("native", None)


def refusals(asked: Call, setting: Setting, **more: Any) -> dict[tuple[str, bool], str]:
    found: list[Option] = choose.options(asked, setting, **more)
    return {(option.algorithm, option.codec is not None): option.refused for option in found}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_left_to_mpi_below_32_kib(dtype: str) -> None:
    for nbytes, refused in ((32 * KIB - 2, ""), (32 * KIB, "converts halves"), (32 * KIB + 2, "converts halves")):
        told = refusals(call(nbytes, dtype=dtype), where())
        assert told["native", False] == refused
        assert told["ring", False] == ("rounds at every hop" if refused else "not measured here")
        assert told["direct", False] == ("" if refused else "not measured here")
        assert refusals(call(nbytes, dtype=dtype, algorithm="native"), where())["native", False] == ""
    assert refusals(call(nbytes), where())["native", False] == ""
    moved = Call("allgather", 64 * KIB, dtype, 2, "", None, "auto")
    assert refusals(moved, where())["native", False] == "" and refusals(moved, where(library=""))["ring", False] == ""


@pytest.mark.parametrize(("nbytes", "refused"), [(128 * KIB - 4, "slow to agree on scales"), (128 * KIB, "")])
def test_integers_are_added_from_128_kib_on(nbytes: int, refused: str) -> None:
    told = refusals(call(nbytes, IntSum(8)), where())
    assert told["ring", True] == told["direct", True] == refused
    # Where values may not go as they are, numbers do.
    assert refusals(call(nbytes, IntSum(8)), where(library=""))["ring", True] == ""
    assert refusals(call(nbytes, IntSum(8)), where(library=""))["ring", False] == "uncompressed"
    assert refusals(call(nbytes, MinMax()), where(library=""))["ring", True] == ""


def test_small_arrays_travel_with_the_handshake_up_to_its_length() -> None:
    """Of 128 KiB between two ranks at a time, of what 16 KiB leave for several arrays otherwise; of up to 16 ranks."""
    for size, longest in ((2, 128 * KIB), (16, 128 * KIB), (3, 16 * KIB - 16), (5, (16 * KIB - 16) // 2)):
        for nbytes, fits in ((longest // 4 * 4, True), (longest // 4 * 4 + 4, False)):
            assert choose.small(call(nbytes), where(size)) == fits
    for asked, setting in (
        (call(64), where(17)),
        (call(64), where(1)),
        (call(64, checksum=True), where()),
        (call(64), where(gpus=True)),
        (Call("allgather", 4, "float32", 4, "", None, "auto"), where()),
    ):
        assert not choose.small(asked, setting)


def test_what_may_go_through_shared_memory() -> None:
    """Allreduces of what our own algorithms take, without checksums, where ranks share some, or there is one rank."""
    assert choose.may_share(call(), where(2, 2)) and choose.may_share(call(), where(1, shared=False))
    assert not choose.may_share(call(), where(2, 2, shared=False))
    for name in ("allgather", "bcast", "alltoall", "reduce_scatter"):
        assert not choose.may_share(call(collective=name), where(2, 2))
    assert not choose.may_share(call(checksum=True), where(2, 2))
    assert not choose.may_share(call(dtype="int32"), where(2, 2)) and not choose.may_share(call(op="max"), where(2, 2))


def test_streams_carry_what_is_known_before() -> None:
    """Phases of hierarchical are, where nodes have as many ranks each."""
    assert choose.streamed([0, 0, 1, 1]) == ("native", "direct", "hierarchical") == choose.streamed([3, 4, 5])
    for nodes in ([0, 0, 1], [0], [0, 0, 0]):
        assert choose.streamed(nodes) == ("native", "direct")
    ours = {"gpus": True, "streamed": ("native", "direct", "hierarchical")}
    told = refusals(call(codec=MinMax()), where(4, 2, **ours))
    assert told["ring", True] == "not by NCCL" and told["hierarchical", True] == "no model of it by NCCL"
    assert told["direct", True] == told["native", False] == ""
    assert refusals(call(codec=MinMax(), algorithm="hierarchical"), where(4, 2, **ours))["hierarchical", True] == ""
    assert refusals(call(codec=MinMax()), where(4, 2))["hierarchical", True] == ""


def test_segments_of_arrays_on_gpus() -> None:
    """8 MiB, and the whole buffer where what leaves by a stream leaves whole."""
    asked = call(codec=MinMax(), algorithm="direct")
    assert make_plan(asked, where(gpus=True)).lengths.segment == 2 * MIB
    streamed = where(gpus=True, streamed=("native", "direct"))
    assert make_plan(asked, streamed).lengths.segment == 16 * MIB
    assert make_plan(asked._replace(n=0), streamed).lengths.segment == 1


def test_what_was_measured_may_be_chosen() -> None:
    """Our own algorithms, uncompressed, only where they were; shared memory in any node."""
    points = ((4, 1e-6), (1 << 26, 1e-2))
    measured = replace(DEFAULTS, timings=(Timing("ring", RAW, 32.0, World(4), points),))
    assert refusals(call(), where(profile=measured))["ring", False] == ""
    assert refusals(call(), where())["ring", False] == "not measured here"
    quick = replace(DEFAULTS, timings=(Timing("ring", "zfp", 8.0, World(4), points),))
    assert refusals(call(), where(profile=quick))["ring", False] == "not measured here"
    beside = where(4, 4)
    for nbytes in (16 * KIB, MIB, 64 * MIB):
        assert refusals(call(nbytes), beside)["shared_memory", False] == ""
    assert ("shared_memory", False) not in refusals(call(checksum=True), beside)
    kept = choose.options(call(MIB, MinMax()), beside, allowed=True)
    assert kept and all(not option.refused for option in kept)


def test_gloos_own_is_not_slowed_by_a_time_out() -> None:
    """MPI's own must not block if there is a time-out, and is then slow between nodes. gloo's own has threads."""
    of_mpi, of_gloo = (make_plan(call(), where(blocks=blocks)) for blocks in (False, True))
    assert of_mpi.algorithm == of_gloo.algorithm == "native"
    assert of_mpi.unblocked is not None and of_gloo.unblocked is None


def test_votes_are_gathered_or_counted() -> None:
    """A bit of each other rank comes in; fields of votes are 4 bits, of up to 7 ranks, and move twice."""
    asked, setting = call(codec=Sign()), where(4)
    quantizer = choose.quantizer_of(asked.codec, asked, setting)
    assert choose.gathers("ring", quantizer) and not choose.gathers("recursive_doubling", quantizer)
    assert choose.format_on_wire("ring", Sign(), asked, setting).bits == 2
    assert choose.format_on_wire("recursive_doubling", Sign(), asked, setting).bits == 4
    assert choose.format_on_wire("ring", IntSum(16), call(codec=IntSum(16)), setting).bits == 16
    assert choose.quantizer_of(asked.codec, asked._replace(collective="allgather"), setting) is None
