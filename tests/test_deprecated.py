"""Former names: they work and warn, and the present names do not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World

from compcoll import ZFP, Communicator, config, get_codec
from compcoll.deprecated import renamed_arguments, renamed_attribute
from compcoll.errors import InvalidArgument
from compcoll.transports.loopback import Loopback


@renamed_arguments(smallest="min_numel")
def compressing(x: int, *, min_numel: int = 3) -> tuple[int, int]:
    return x, min_numel


class Kept:
    account = renamed_attribute("account", "stats")

    def __init__(self) -> None:
        self.stats: Any = 1


def test_arguments() -> None:
    with pytest.warns(DeprecationWarning, match=r"smallest= is deprecated .* use min_numel=") as warned:
        assert compressing(1, smallest=2) == (1, 2)  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compressing(1, min_numel=2) == (1, 2) and compressing(1) == (1, 3)


def test_attributes() -> None:
    kept = Kept()
    with pytest.warns(DeprecationWarning, match=r"\.account is deprecated .* use \.stats") as warned:
        kept.account += 1
    assert kept.stats == 2 and [each.filename for each in warned] == [__file__] * 2


def test_names_of_communicators() -> None:
    world = World(2)
    results = world.allreduce([np.ones(4, np.float32)] * 2, op="avg")
    np.testing.assert_array_equal(results, 1)
    (comm, _) = world.comms
    assert comm.stats is not None
    with pytest.warns(DeprecationWarning, match="sequence_number"):
        assert comm.begun == comm.sequence_number == 1
    with pytest.warns(DeprecationWarning, match="gpu_transport"):
        assert comm.stats.carrier == comm.stats.gpu_transport == ""
    with pytest.warns(DeprecationWarning, match='progress="nap" .* use progress="sleep"') as warned:
        Communicator(Loopback(1).transports[0], progress="nap").free()
    assert warned[0].filename == __file__


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_RATE", "12")
    with pytest.raises(InvalidArgument, match="COMPCOLL_CODEC is not: set COMPCOLL_CODEC=zfp:rate=12"):
        config.codec()
    monkeypatch.setenv("COMPCOLL_CODEC", "zfp")
    with pytest.warns(DeprecationWarning, match="COMPCOLL_RATE is deprecated .* use COMPCOLL_CODEC=zfp:rate=12$"):
        assert get_codec(config.codec() or "") == ZFP(rate=12)
    monkeypatch.delenv("COMPCOLL_RATE")
    monkeypatch.setenv("COMPCOLL_CODEC", "zfp:rate=12")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.codec() == "zfp:rate=12"


def test_names_of_torch() -> None:
    torch = pytest.importorskip("compcoll.torch", exc_type=ImportError)
    with pytest.warns(DeprecationWarning, match="GatheredState"):
        assert torch.WholeState is torch.GatheredState
    assert "WholeState" not in torch.__all__
    for cls in (torch.GradientCompression, torch.ShardCompression, torch.PowerSGD, torch.OneBitAdam, torch.DiLoCo):
        assert isinstance(cls.account, property)
