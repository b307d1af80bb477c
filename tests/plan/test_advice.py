"""Advice for calls whose result loses too much, against the errors of real sums in float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

from compcoll import FP8, Codec, Int8, IntSum, MinMax, OneBit, Sign, get_codec
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.layout import World as Ranks
from compcoll.plan.advice import check_error, warning
from compcoll.plan.call import Call, Setting
from compcoll.plan.cost import DEFAULTS
from compcoll.plan.plan import LARGE_ERROR, Plan, make_plan

TOPK = get_codec("topk")


def plan_of(codec: Codec | None, ranks: int = 8, **more: Any) -> Plan:
    asked = {"algorithm": "ring", "collective": "allreduce", "op": "sum", "dtype": "float32", **more}
    call = Call(n=1 << 16, itemsize=np.dtype(asked["dtype"]).itemsize, codec=codec, **asked)
    return make_plan(call, Setting(Ranks(ranks), HostDevice(), DEFAULTS, library="MPI", shared=False))


def measured(ranks: int, codec: Codec, algorithm: str) -> float:
    """The relative error of a sum of normal values."""
    inputs = normals(ranks, 1 << 16)
    exact = exact_sum(inputs)
    lost = World(ranks).allreduce(inputs, codec=codec, algorithm=algorithm)[0] - exact
    return float(np.linalg.norm(lost) / np.linalg.norm(exact))


def test_another_algorithm_if_it_halves_the_error() -> None:
    codec, ranks = get_codec("zfp", rate=8), 16
    text = warning(plan_of(codec, ranks))
    said = re.search(r'on 16 ranks: .* error of ([\d.]+)\. Use algorithm="(\w+)" \(error ([\d.]+)\) or feedback=', text)
    assert said is not None, text
    lost, algorithm, less = float(said[1]), said[2], float(said[3])
    assert lost > LARGE_ERROR and less <= lost / 2
    assert measured(ranks, codec, "ring") == pytest.approx(lost, rel=0.3)
    assert measured(ranks, codec, algorithm) == pytest.approx(less, rel=0.3)


@pytest.mark.parametrize("codec", [MinMax(bits=2), MinMax(bits=1), get_codec("qsgd", bits=3)])
def test_another_codec_if_no_algorithm_is_much_better(codec: Codec) -> None:
    text = warning(plan_of(codec, 3))
    said = re.search(r"Use codec=(.*) \(error ([\d.]+)\)", text)
    assert said is not None, text
    other = MinMax(bits=6)
    assert repr(other) == said[1], "the fewest bits"
    lost = measured(3, other, "ring")
    assert lost <= LARGE_ERROR and lost == pytest.approx(float(said[2]), rel=0.3)
    assert measured(3, MinMax(bits=4), "ring") > LARGE_ERROR


def test_what_silences_it() -> None:
    plan = plan_of(MinMax(bits=2))
    limit = re.search(r"pass max_error=([\d.]+)", warning(plan))
    assert limit is not None and plan.error is not None and float(limit[1]) >= plan.error
    silent = plan_of(MinMax(bits=2), max_error=float(limit[1]))
    assert plan.loses_much and not silent.loses_much
    check_error(silent)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(OneBit()),
        plan_of(Sign(scale="mean")),
        plan_of(Sign()),
        plan_of(TOPK, algorithm="sparse_ring"),
        plan_of(get_codec("zfp", tolerance=0.5)),
        plan_of(Int8()),
        plan_of(None),
        plan_of(MinMax(bits=1), 1),
        plan_of(None, tolerance=0.9, algorithm="auto"),
    ],
    ids=str,
)
def test_no_warning(plan: Plan) -> None:
    """Of signs, errors that are unknown or small, and what the caller has decided."""
    assert not plan.loses_much


def test_only_sums_take_feedback() -> None:
    assert "feedback=" in warning(plan_of(MinMax(bits=2), collective="reduce_scatter"))
    assert "feedback=" not in warning(plan_of(MinMax(bits=2), collective="allgather", op=""))
    assert "feedback=" not in warning(plan_of(get_codec("terngrad"))), "its residual would grow"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(get_codec("zfp", rate=8), 16, max_error=0.1), r'is 0\.\d+: use algorithm="direct" \(error 0\.0'),
        (
            plan_of(FP8(), max_error=1e-3),
            r"max_error=0\.001: .* is 0\.\d+: use codec=IntSum\(bits=16, block=2048\) \(error",
        ),
        (plan_of(get_codec("zfp", tolerance=1e-9), max_error=0.1), r"is unknown: use codec=.*\(error 0\.0"),
        (plan_of(TOPK, algorithm="sparse_ring", max_error=0.1), r"is unknown: use codec="),
        (plan_of(MinMax(), max_error=1e-9), r"is 0\.\d+: use codec=None"),
        (plan_of(IntSum(8), 100, max_error=0.1), r"is \d.*: use codec="),
    ],
)
def test_calls_above_the_limit_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        check_error(plan)


def test_calls_within_the_limit_are_not() -> None:
    for plan in (
        plan_of(None, max_error=1e-30),
        plan_of(Int8(), max_error=0.1),
        plan_of(TOPK, algorithm="sparse_ring"),
    ):
        check_error(plan)
    with pytest.raises(InvalidArgument, match="unknown"):  # of few ranks, too, where nothing would be compressed
        check_error(plan_of(TOPK, 1, algorithm="sparse_ring", max_error=0.5))
