"""Why `auto` takes what it takes, and the limits of what it is asked: of calls that nobody has to make."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from compcoll import ZFP, Codec, Int8, IntSum, MinMax, Sign, get_codec
from compcoll.codecs.sparse.sparsifier import MOST_ELEMENTS, MOST_PACKED
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.layout import World
from compcoll.plan import choose
from compcoll.plan.call import Call, Setting
from compcoll.plan.choose import Option
from compcoll.plan.cost import DEFAULTS
from compcoll.plan.explanation import _reason, _row, duration
from compcoll.plan.plan import make_plan


def setting(library: str = "MPI") -> Setting:
    return Setting(World(4), HostDevice(), DEFAULTS, library=library, shared=False)


@pytest.mark.parametrize(("codec", "refused"), [(Sign(), "adds, and does not vote"), (IntSum(), "")])
def test_a_sum_never_takes_the_place_of_a_vote(codec: Codec, refused: str) -> None:
    call = Call("allreduce", 1 << 20, "float32", 4, "sum", codec, choose.AUTO)
    (native,) = (
        option for option in choose.options(call, setting()) if option.algorithm == "native" and not option.codec
    )
    assert native.refused == refused
    (native,) = (o for o in choose.options(call, setting(library="")) if o.algorithm == "native" and not o.codec)
    assert native.refused == "no MPI for it"
    sealed = choose.options(call._replace(checksum=True), setting())
    assert sealed[0].refused == "carries no checksums"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 1.5), "native: ring with minmax bits=8 would take 1.50 × as long"),
        ((1.0, 0.97), "native: ring with minmax bits=8 would gain less than 5%"),
        ((1.0, 1.0), "native: ring with minmax bits=8 would gain less than 5%"),
        ((3.0, 1.5), "ring with minmax bits=8: 2.00 × faster than MPI's own"),
    ],
)
def test_what_is_said_of_the_choice(seconds: tuple[float, float], said: str) -> None:
    codec = MinMax()
    found = [Option("native", None, seconds[0], 0.0), Option("ring", codec, seconds[1], 1e-2)]
    chosen = choose.best(found)
    call = Call("allreduce", 1 << 20, "float32", 4, "sum", codec, choose.AUTO)
    assert _reason(found, chosen, call, setting(), chosen.algorithm, chosen.codec) == said


def test_what_is_said_where_nothing_else_is_to_be_had() -> None:
    call = Call("allreduce", 1 << 20, "float32", 4, "sum", None, choose.AUTO)

    def said(found: list[Option], asked: Call = call, **more: Any) -> str:
        return _reason(found, found[0], asked, setting(**more), "native", None)

    native, ring = Option("native", None, 1.0, 0.0), Option("ring", ZFP(rate=8), 0.1, 1.0, "error too large")
    assert said([native]).startswith("native: nothing is to be compressed; tune on these ranks")
    assert said([native, ring], call._replace(tolerance=0.01)) == "native: no codec keeps the error within 0.01"
    assert said([native, ring], call._replace(algorithm="native")) == "native: that algorithm was asked for"


def summary(codec: Codec | None, algorithm: str, **more: Any) -> str:
    call = Call("allreduce", 1 << 22, "float32", 4, "sum", codec, algorithm)._replace(**more)
    return make_plan(call, setting()).summary


def test_one_line_on_a_call() -> None:
    head = "allreduce of 16 MiB float32 on 4 ranks: "
    gain = r"\d+\.\d × as fast as MPI's own by the model"
    asked = "int8 by ring asked for; ring with int8: that algorithm was asked for"
    assert re.fullmatch(f"{head}{asked}, error 1.1e-02, 3.9 × fewer bytes, {gain}", summary(Int8(), "ring"))
    said = summary(Int8(), choose.AUTO)
    assert re.fullmatch(
        rf"{head}int8 asked for; .*: \d\.\d\d × faster than MPI's own, error .*, 3.9 × fewer bytes", said
    )
    said = summary(None, choose.AUTO, tolerance=1e-9)
    assert re.fullmatch(f"{head}codec for tolerance 1e-09 asked for; native: no codec keeps .*, uncompressed", said)
    said = summary(get_codec("zfp", tolerance=1e-3), "ring")
    assert re.fullmatch(f"{head}zfp .* by ring asked for; .*, error unknown, {gain}", said), "no ratio is known"
    assert summary(IntSum(), "native").endswith("error 1.4e-04, 2.0 × fewer bytes"), "MPI's own, too"
    call = Call("allgatherv", 0, "float32", 4, "", None, choose.AUTO, rows=(3, 2))
    assert make_plan(call, setting()).summary.startswith("allgatherv of rows of (3, 2) float32 on 4 ranks: no codec ")
    alone = make_plan(call, setting()._replace(world=World(1)))
    assert alone.summary.endswith("on 1 ranks: no codec asked for; copy: there is one rank")


@pytest.mark.parametrize(("error", "shown"), [(None, "?"), (0.0, "0"), (0.0123, "1.2e-02")])
def test_rows_show_what_is_known_of_errors(error: float | None, shown: str) -> None:
    call = Call("allreduce", 1 << 20, "float32", 4, "sum", None, choose.AUTO)
    words = _row(Option("ring", MinMax(), 2e-3, error, "error too large"), call, setting(), 1e-3, False).split()
    assert words == [
        "ring",
        "minmax",
        "bits=8",
        "2.000",
        "ms",
        "0.50×",
        "4",
        shown,
        "(error",
        "too",
        "large)",
    ]
    words = _row(Option("native", None, 1e-6, error), call, setting(), 1e-6, True).split()
    assert words == ["native", "-", "1.00", "µs", "1.00×", "0", shown, "<-", "auto"]


def test_seconds_have_the_largest_unit_of_which_there_is_one() -> None:
    told = [duration(seconds) for seconds in (90.0, 1.0, 0.25, 1e-3, 9.9e-4, 2e-8)]
    assert told == ["90.000 s", "1.000 s", "250.000 ms", "1.000 ms", "990.00 µs", "0.02 µs"]


def test_numbers_of_thousands_of_digits_are_refused_like_others() -> None:
    with pytest.raises(InvalidArgument, match=r"\(an integer of thousands of digits\)"):
        ZFP(rate=10**5000)


def test_limits_of_sparse_wires() -> None:
    """Indices of 32 bits, or of 28 beside a value of 4."""
    assert np.iinfo(np.uint32).max == MOST_ELEMENTS and MOST_PACKED == 1 << 28
