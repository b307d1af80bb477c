"""What ranks tell each other: the same comes out as went in, and foreign bytes run nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compcoll.errors import WireCorrupted
from compcoll.host.cores import Cores, Quota
from compcoll.layout import World
from compcoll.plan import profile
from compcoll.plan.cost import DEFAULTS, Timing
from compcoll.transports.serialization import packed, unpacked

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_was_told_is_heard(value: object) -> None:
    assert unpacked(packed(value)) == value


@given(st.binary())
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        heard = unpacked(data)
    except WireCorrupted:
        return
    assert unpacked(packed(heard)) == heard or heard != heard


def test_nothing_that_was_sent_is_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    with pytest.raises(WireCorrupted):
        unpacked(pickle.dumps(Trap()))
    assert not (tmp_path / "run").exists()


def test_depth_is_refused() -> None:
    with pytest.raises(WireCorrupted):
        unpacked(b"[" * 1_000_000)


@given(
    st.text(),
    st.frozensets(st.integers(0, 1 << 20)),
    st.lists(st.builds(Quota, st.text(), st.floats(0.01, 1000.0)), max_size=3).map(tuple),
)
def test_cores_are_heard(kernel: str, allowed: frozenset[int], quotas: tuple[Quota, ...]) -> None:
    own = Cores(kernel, allowed, quotas)
    assert Cores.of(*unpacked(packed(own.parts))) == own


class Ranks:
    """Two ranks of one node; what rank 0 tells comes as it does through a transport."""

    size, nodes = 2, (0, 0)

    @staticmethod
    def whereabouts() -> tuple[str, tuple[str, ...]]:
        return "some MPI", ("here",)

    @staticmethod
    def broadcast(work: Callable[[], Any]) -> Any:
        return unpacked(packed(work()))


@pytest.mark.parametrize("measured", [False, True])
def test_profiles_are_heard(measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = DEFAULTS
    if measured:
        timing = Timing("ring", "zfp", 8.0, World(2, 2, 0), ((4096, 1e-5), (8192, 0.1 + 0.2)))
        known = DEFAULTS.__class__(**{**vars(DEFAULTS), "timings": (timing,), "source": "somewhere"})
    monkeypatch.setattr(profile, "LibraryConnection", Ranks)
    monkeypatch.setattr(profile, "find", lambda place: SimpleNamespace(profile=known))
    monkeypatch.setenv("COMPCOLL_PROFILE", "")
    assert profile.profile_for(Ranks(), "host") == known  # type: ignore[arg-type]
