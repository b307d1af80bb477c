"""What `Communicator.explain` and ``python -m compcoll explain`` tell is what runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World
from hypothesis import event, given
from hypothesis import strategies as st
from oracles import collectives as oracles
from properties import examples

from compcoll import Codec, CompcollError, get_codec, list_codecs
from compcoll.__main__ import main
from compcoll.algorithms.record import REDUCTIONS, ROOTED
from compcoll.codecs.base import UPDATING
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.layout import World as Ranks
from compcoll.plan import choose, profile
from compcoll.plan.call import Call, Setting
from compcoll.plan.cost import DEFAULTS, RAW, Profile, Timing
from compcoll.plan.plan import make_plan

DTYPES: list[Any] = [np.dtype(t) for t in "?bhilqBHILQfdFD"]
DTYPES += [np.dtype(name) for name in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)] * 8
OPS = ["sum", "mean", "max", "min", "prod", "land", "bor"]
NEED_A_STATE = ("variance", "hybrid")  # that has observed gradients: a call without it is refused
CODECS: list[Codec | None] = [None, None, get_codec("zfp", tolerance=1e-3)]
CODECS += [get_codec(name) for name in list_codecs() if name not in NEED_A_STATE]
WORLDS = [(p, k) for p in range(1, 9) for k in range(1, p + 1) if -(-p // k) <= 4]


def measured() -> Profile:
    """As if our own algorithms were fast on some ranks, in memory and not."""
    points = ((4, 2e-6), (1 << 20, 1e-4), (1 << 26, 1e-2))
    slower = tuple((n, 2 * seconds) for n, seconds in points)
    timings = []
    for size, per_node in WORLDS[::2]:
        world = Ranks(size, per_node)
        timings += [Timing(name, RAW, 32.0, world, slower) for name in ("native", "shared_memory", "dissemination")]
        timings += [Timing(name, kind, 32.0, world, points) for name in ("ring", "direct") for kind in (RAW, "zfp")]
    return Profile(DEFAULTS.inside, DEFAULTS.between, DEFAULTS.speeds, 4e-6, 1e-5, timings=tuple(timings))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = profile.Place("MPI 1.0", ("a",), "host portable")
    path = tmp_path_factory.mktemp("profiles") / "measured.json"
    return profile.save(profile.Stored(measured(), place, "2026-01-01T00:00:00+00:00"), path)


@pytest.fixture(params=["defaults", "measured"])
def known(request: pytest.FixtureRequest, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_PROFILE", "defaults" if request.param == "defaults" else str(stored))


calls = st.fixed_dictionaries(
    {
        "collective": st.sampled_from(["allreduce"] * 5 + sorted(choose.NAMES)),
        "ranks": st.sampled_from(WORLDS),
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(["sum"] * 4 + OPS),
        "codec": st.sampled_from(CODECS),
        "tolerance": st.sampled_from([None, None, None, 0.0, 1e-2, 0.2]),
        "algorithm": st.integers(0, 999),
        "checksum": st.booleans(),
        "bits": st.integers(2, 26),
    }
)


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """What a method of a communicator takes besides its array."""
    restricted = choose.RESTRICTED if call["collective"] == "allreduce" else ()
    names = [*["auto"] * 8, *choose.NAMES[call["collective"]], *restricted]
    given: dict[str, Any] = {"algorithm": names[call["algorithm"] % len(names)], "codec": call["codec"]}
    if call["tolerance"] is not None:
        given |= {"codec": "auto", "tolerance": call["tolerance"]}
    if call["collective"] in REDUCTIONS:
        given["op"] = call["op"]
    return given


@pytest.mark.usefixtures("known")
@given(calls)
@examples(400)
def test_what_is_explained_runs(call: dict[str, Any]) -> None:
    size, per_node = call["ranks"]
    world = World(size, ranks_per_node=per_node, checksum=call["checksum"], seed=None, timeout=20)
    nbytes = min(1 << call["bits"], 1 << 16)
    n = max(nbytes // call["dtype"].itemsize // size, 1) * size
    inputs = [np.ones(n, call["dtype"]) for _ in range(size)]
    options = arguments(call)
    try:
        plans = [
            comm.explain(x, collective=call["collective"], **options)
            for comm, x in zip(world.comms, inputs, strict=True)
        ]
    except CompcollError:
        return
    event(f"runs {plans[0].algorithm}")
    assert len({repr(plan) for plan in plans}) == 1
    world.run(
        lambda comm, x: getattr(comm, f"i{call['collective']}")(
            x,
            **options,
            **oracles.arguments(call["collective"], x.size, comm.size, comm.rank),
            **oracles.previous(plans[0].call.codec, call["collective"], inputs),
        ),
        inputs,
    )
    for comm, plan in zip(world.comms, plans, strict=True):
        assert comm.stats is not None
        codec = None if plan.codec is None else repr(plan.codec)
        assert (comm.stats.algorithm, comm.stats.codec) == (plan.algorithm, codec)


@pytest.mark.usefixtures("known")
@given(calls)
@examples(150)
def test_what_is_explained_would_run_at_any_size(call: dict[str, Any]) -> None:
    """Up to 64 MiB, and of one rank: what another communicator prepares for the same call."""
    size, per_node = call["ranks"]
    first, second = (
        World(size, ranks_per_node=per_node, checksum=call["checksum"], seed=None).comms[0] for _ in range(2)
    )
    n = max((1 << call["bits"]) // call["dtype"].itemsize // size, 1) * size
    x, options, collective = np.zeros(n, call["dtype"]), arguments(call), call["collective"]
    needed = {"reduce": (options.get("op"), 0), "alltoallv": oracles.counts_of(n, size, 0)}
    updates = collective in UPDATING and isinstance(options["codec"], Codec) and options["codec"].needs_reference
    out = np.empty(x.shape if collective == "bcast" else (size, n), x.dtype) if updates else None
    given = needed.get(collective, options.get("op", 0 if collective in ROOTED else None)), out, None
    asked = (options["codec"], options["algorithm"], {"tolerance": call["tolerance"]} if "tolerance" in options else {})
    try:
        plan = first.explain(x, collective=collective, **options)
    except CompcollError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        with pytest.raises(type(refused), match=f"^{re.escape(str(refused))}$"):
            second._collectives.check(collective, x, *given, asked)
        return
    prepared = second._collectives.check(collective, x, *given, asked)[0].plan
    assert (plan.algorithm, plan.codec, str(plan)) == (prepared.algorithm, prepared.codec, str(prepared))
    marked = [line for line in str(plan).splitlines() if "  <- " in line]
    assert [line.split()[0] for line in marked] == [plan.algorithm] * (plan.algorithm != choose.COPY)
    assert plan.algorithm in str(plan).partition("choice: ")[2]


def test_halves_go_through_shared_memory_inside_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --bytes 1M -p 2 --ranks-per-node 2 --dtype float16 --profile defaults"
    assert main(words.split()) == 0
    told = capsys.readouterr().out
    call = Call("allreduce", 1 << 19, "float16", 2, "sum", None, choose.AUTO)
    assert told == f"{make_plan(call, Setting(Ranks(2, 2), HostDevice(), DEFAULTS, library='MPI', shared=True))}\n"
    assert re.search(r"^shared_memory .*  <- auto$", told, re.MULTILINE)
    assert "native " in told and "(converts halves)" in told


def test_what_runs_where_mpi_must_not_block_is_told() -> None:
    call = Call("allreduce", 1 << 18, "float32", 4, "sum", None, choose.AUTO)
    plan = make_plan(call, Setting(Ranks(2, 1), HostDevice(), DEFAULTS, library="MPI", shared=False))
    assert plan.algorithm == "native" and plan.unblocked is not None and plan.unblocked.algorithm == "ring"
    assert re.search(r"choice: native: .*\nwhere some rank must not block in MPI.*: ring\n", str(plan))
    named = make_plan(call._replace(algorithm="native"), plan.setting)
    assert "must not block" not in str(named)
    assert named.unblocked is None and named.signature.call != plan.signature.call


def test_explaining_reads_and_sends_nothing() -> None:
    world = World(2)
    x = np.full(1000, np.nan, np.float32)
    plan = world.comms[0].explain(x, codec="zfp", rate=8, algorithm="ring")
    assert plan.algorithm == "ring" and plan.codec == get_codec("zfp", rate=8)
    assert "asked for" in str(plan) and repr(plan) == f"Plan({plan.signature.call})"
    assert world.comms[0].stats is None and np.isnan(x).all()
    for collective, root in (("bcast", 1), ("allgatherv", 0)):
        told = repr(world.comms[0].explain(x.reshape(10, 100), collective=collective, root=root))
        assert "root 1" in told if root else "rows of shape (100,)" in told
    with pytest.raises(InvalidArgument, match="collective='scan' is none of allreduce"):
        world.comms[0].explain(x, collective="scan")
    with pytest.raises(InvalidArgument, match="root=2 is not a rank"):
        world.comms[0].explain(x, collective="gather", root=2)
    with pytest.raises(InvalidArgument, match="rate=99"):
        world.comms[0].explain(x, codec="zfp", rate=99)
    # Nobody was told of these: the ranks still make the same calls.
    sums = world.allreduce([np.ones(9, np.float32)] * 2)
    assert all((total == 2).all() for total in sums)
