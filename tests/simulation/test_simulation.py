"""The simulated transport: against closed formulas, against real messages, and against itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fakes.loopback import World, normals
from promises import FIXED, one_of_each

from compcoll import ZFP, Codec, CompcollError, MinMax
from compcoll.__main__ import main
from compcoll.algorithms import ALGORITHMS as RECORDS
from compcoll.errors import InvalidArgument
from compcoll.plan.cost import DEFAULTS, Link
from compcoll.simulation import run as simulation
from compcoll.simulation.network import Account, Network, Simulated
from compcoll.simulation.run import ALGORITHMS, Outcome, Scenario, handshake
from compcoll.tools.arguments import parse_speed
from compcoll.transports.base import Wire

ALPHA, BETA = 3e-6, 1 / 2e9
LINK = Link(ALPHA, BETA)
FREE = Link(0.0, 0.0)
NOTHING, AT_ONCE = (DEFAULTS.speeds[0].__class__(kind, 32, *[1e30] * 4) for kind in ("none", "minmax"))
INSTANT = type(DEFAULTS)(LINK, LINK, (NOTHING, AT_ONCE), message=0.0, call=0.0)
"""Kernels take no time."""


def run(
    ranks: int, nbytes: int, algorithm: str, codec: Codec | None = None, *, symmetric: bool = True, **network: Any
) -> Outcome:
    """What is simulated, without the handshake."""
    scenario = Scenario(ranks, Network(**{"inside": FREE, "between": LINK, **network}), nbytes, profile=INSTANT)
    with patch.object(simulation, "handshake", lambda ranks, network: Account((0.0,) * ranks, 0)):
        return simulation.allreduce(scenario, algorithm, codec, symmetric=symmetric)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 17, 64])
def test_ring_takes_what_the_formula_says(ranks: int) -> None:
    chunk = 4096
    outcome = run(ranks, ranks * chunk, "ring")
    assert outcome.seconds == pytest.approx(2 * (ranks - 1) * (ALPHA + chunk * BETA))
    assert outcome.messages == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_recursive_doubling_takes_what_the_formula_says(ranks: int) -> None:
    # One block, and hence one segment: with more of them, exchanges overlap.
    codec = MinMax(block=1 << 20)
    wire = 8 + (1 << 20)
    outcome = run(ranks, 4 << 20, "recursive_doubling", codec)
    assert outcome.seconds == pytest.approx(math.log2(ranks) * (ALPHA + wire * BETA))
    assert outcome.wire_nbytes == math.log2(ranks) * wire


def test_recursive_doubling_outside_powers_of_two() -> None:
    codec = MinMax(block=1 << 20)
    wire = 8 + (1 << 20)
    # 6 ranks: two of them hand in; their partners' first exchange; in the second the others' wires are there already,
    # and one's own leaves before the two that go back.
    outcome = run(6, 4 << 20, "recursive_doubling", codec)
    assert outcome.seconds == pytest.approx(3 * ALPHA + 5 * wire * BETA)


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_direct_takes_what_the_formula_says(ranks: int) -> None:
    chunk = 1 << 16
    outcome = run(ranks, ranks * chunk, "direct")
    assert outcome.seconds == pytest.approx(2 * (ALPHA + (ranks - 1) * chunk * BETA))
    assert outcome.messages == 2 * (ranks - 1)


def test_hierarchical_takes_what_the_formula_says() -> None:
    per_node, nodes, nbytes = 4, 2, 1 << 20
    inside = Link(1e-6, 1 / 1e10)
    codec = MinMax(block=1 << 20)
    outcome = run(per_node * nodes, nbytes, "hierarchical", codec, inside=inside, ranks_per_node=per_node)
    members = per_node - 1
    wire = 8 + nbytes // 4
    # One chunk, that of the last leader: it gets the other's, and sends the sum back.
    between = 2 * (ALPHA + wire * BETA)
    assert outcome.seconds == pytest.approx(2 * (inside.latency + members * nbytes * inside.per_byte) + between)


def test_kernels_take_their_time() -> None:
    speed = NOTHING.__class__("zfp", 8, 1e9, 2e9, 3e9, 4e9)
    ranks, chunk = 4, 1 << 16
    scenario = Scenario(
        ranks, Network(FREE, FREE), ranks * chunk, profile=type(DEFAULTS)(FREE, FREE, (speed, NOTHING), 0.0, 0.0)
    )
    outcome = simulation.allreduce(scenario, "ring", ZFP(rate=8))
    # Encoded once, recoded p - 1 times; decodes overlap with what is on its way but for p - 1 of them in a row.
    assert outcome.encode_seconds == pytest.approx(chunk / 1e9 + (ranks - 1) * chunk / 4e9)
    assert outcome.decode_seconds == pytest.approx((ranks - 1) * chunk / 2e9)
    assert outcome.seconds == pytest.approx(outcome.encode_seconds + outcome.decode_seconds)


def test_messages_cost_the_host_at_either_end() -> None:
    ranks, message = 4, 1e-5
    with_cost, without = (run(ranks, 16 * ranks, "ring", message=each) for each in (message, 0.0))
    assert with_cost.seconds - without.seconds == pytest.approx(2 * (ranks - 1) * message)


CASES = [
    pytest.param(ranks, per_node, algorithm, codec, marks=[pytest.mark.slow] if ranks in (8, 16, 32) else [])
    for ranks, per_node in ((2, 1), (5, 1), (8, 2), (12, 4), (16, 4), (17, 4), (32, 8))
    for algorithm in ALGORITHMS
    for codec in (None, ZFP(rate=8), MinMax())
]


@pytest.mark.parametrize(("ranks", "per_node", "algorithm", "codec"), CASES)
def test_one_node_stands_for_all(ranks: int, per_node: int, algorithm: str, codec: Codec | None) -> None:
    network = Network(Link(1e-6, 1 / 2e10), LINK, per_node, nics=min(per_node, 2), oversubscription=1.5)
    scenario = Scenario(ranks, network, ranks << 14, segment=1 << 12)
    one, all_of_them = (
        simulation.allreduce(scenario, algorithm, codec, symmetric=symmetric) for symmetric in (True, False)
    )
    assert all_of_them.symmetry == "none"
    for field in ("seconds", "encode_seconds", "decode_seconds", "messages"):
        assert getattr(one, field) == pytest.approx(getattr(all_of_them, field), rel=1e-9), field
    assert one[3:5] == all_of_them[3:5]


def test_which_node_stands_for_all() -> None:
    found = {(ranks, name): run(ranks, 1 << 20, name).symmetry for ranks in (15, 16) for name in ALGORITHMS}
    assert {name: found[16, name] for name in ALGORITHMS} == {name: RECORDS[name].symmetry for name in ALGORITHMS}
    assert (found[16, "ring"], found[16, "recursive_doubling"]) == ("rotation", "exclusive")
    assert found[16, "direct"] == found[16, "hierarchical"] == "rotation"
    # 2^20 / 15 is no whole number: chunks differ.
    assert {found[15, name] for name in ALGORITHMS} == {"none"}


def test_large_worlds_are_rounded_by_little() -> None:
    outcome = run(3000, 16 << 20, "ring")
    assert outcome.symmetry == "rotation"
    assert 16 << 20 < outcome.nbytes < 1.02 * (16 << 20)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "algorithm", "codec", "said"),
    [
        (4096, 16 << 20, "ring", MinMax(), "a multiple of 33554432 bytes"),
        (3000, 64 << 20, "direct", MinMax(), "a multiple of 24576000 bytes"),
        (3000, 1 << 30, "recursive_doubling", None, "powers of two"),
    ],
)
def test_what_takes_too_long_is_refused(
    ranks: int, nbytes: int, algorithm: str, codec: Codec | None, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"one by one.*{said}.*patient"):
        run(ranks, nbytes, algorithm, codec)


class Counted:
    """A transport that counts the messages of a program, of which each is sent once in a run."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_init(self, wire: Wire, dest: int, tag: int) -> Any:
        self.sent.append(wire.nbytes)
        return self._transport.send_init(wire, dest, tag)


@pytest.mark.parametrize("codec", [None, *one_of_each(FIXED), ZFP(rate=5.25)], ids=repr)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [(5, 2), (8, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (13, 5)))],
)
def test_the_same_messages_as_real_ranks(
    ranks: int, per_node: int, algorithm: str, codec: Codec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 10_000
    monkeypatch.setenv("COMPCOLL_SEGMENT", "4096")
    world = World(ranks, ranks_per_node=per_node)
    counted = [Counted(comm._transport) for comm in world.comms]
    for comm, transport in zip(world.comms, counted):
        comm._programs._transport = transport
    world.allreduce(normals(ranks, n), algorithm=algorithm, codec=codec)
    simulated = simulation.allreduce(
        Scenario(ranks, Network(LINK, LINK, per_node), 4 * n, segment=4096), algorithm, codec, symmetric=False
    )
    stats = [comm.stats for comm in world.comms]
    assert simulated.wire_nbytes == max(each.wire_nbytes for each in stats if each is not None)
    assert simulated.raw_sent_nbytes == max(each.raw_sent_nbytes for each in stats if each is not None)
    assert simulated.messages == np.mean([len(each.sent) for each in counted])
    for transport, each in zip(counted, stats):
        assert each is not None and sum(transport.sent) == each.wire_nbytes


def test_the_handshake_is_simulated_too() -> None:
    network = Network(FREE, LINK)
    assert max(handshake(16, network).seconds) == pytest.approx(4 * (ALPHA + 16 * BETA))
    for nbytes in (1 << 14, 1 << 20):
        whole = simulation.allreduce(Scenario(16, network, nbytes, profile=INSTANT, call=1e-3), "ring").seconds
        first = ALPHA + nbytes // 16 * BETA  # on its way meanwhile
        later = max(max(handshake(16, network).seconds) - first, 0.0)
        assert (later > 0) is (nbytes == 1 << 14)
        assert whole == pytest.approx(run(16, nbytes, "ring").seconds + later + 1e-3)


def test_all_bytes_that_are_sent_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, received = [], []
    send, deliver = Simulated.send, Simulated._deliver

    def counted_send(self: Any, source: Any, wire: Wire, dest: int, tag: int) -> Any:
        sent.append(wire.nbytes)
        return send(self, source, wire, dest, tag)

    def counted_deliver(message: Any, receiving: Any) -> None:
        received.append(receiving.wire.nbytes)
        deliver(message, receiving)

    monkeypatch.setattr(Simulated, "send", counted_send)
    monkeypatch.setattr(Simulated, "_deliver", staticmethod(counted_deliver))
    for algorithm in ALGORITHMS:
        sent.clear()
        received.clear()
        run(12, 50_000, algorithm, ZFP(rate=8), ranks_per_node=4, oversubscription=3.0)
        assert sorted(sent) == sorted(received)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_every_time(algorithm: str) -> None:
    scenario = Scenario(24, Network(LINK, LINK, 6, nics=2, oversubscription=2.0, message=1e-6), 1 << 20)
    assert len({simulation.allreduce(scenario, algorithm, ZFP(rate=8)) for _ in range(3)}) == 1


def test_ranks_of_a_node_share_its_nics_and_uplink() -> None:
    def seconds(**network: Any) -> float:
        return run(16, 16 << 20, "direct", ranks_per_node=8, **network).seconds

    # Eight ranks send eight chunks to the other node, twice.
    alone = 2 * 8 * (1 << 20) * BETA
    assert seconds(nics=1) == pytest.approx(8 * alone, rel=0.01)
    assert seconds(nics=8, oversubscription=8.0) == pytest.approx(8 * alone, rel=0.2)
    # Each begins with another rank of the other node: were it the same one, its NIC would be late by a fifth.
    assert alone < seconds(nics=8) < 1.15 * alone


def test_hosts_copy_inside_a_node() -> None:
    ranks, nbytes = 4, 1 << 20
    outcome = run(ranks, nbytes, "ring", inside=LINK, ranks_per_node=ranks, copied=True)
    assert outcome.seconds == pytest.approx(2 * (ranks - 1) * (ALPHA + nbytes / ranks * BETA))
    # Between nodes, NICs do.
    between = run(ranks, nbytes, "ring", inside=Link(0.0, 1.0), copied=True).seconds
    assert between == pytest.approx(outcome.seconds)


def test_a_ring_crosses_nodes_once() -> None:
    spread, together = (run(16, 16 << 20, "ring", ranks_per_node=each).seconds for each in (1, 8))
    assert together <= spread


def test_deadlock_is_told() -> None:
    world = Simulated(2, Network(LINK, LINK))

    def waits(transport: Any) -> Iterator[Any]:
        yield transport.irecv(Wire(memoryview(bytearray(4))), 1 - transport.rank, 0)

    with pytest.raises(CompcollError, match="deadlock: of 2 ranks 2 wait"):
        world.run([waits(transport) for transport in world.transports])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Network(LINK, LINK, ranks_per_node=0), "at least 1"),
        (lambda: Network(LINK, LINK, oversubscription=0.5), "oversubscription=0.5"),
        (lambda: Network(LINK, Link(-1.0, 0.0)), "latency=-1.0"),
        (lambda: Scenario(1, Network(LINK, LINK), 4), "at least 2"),
        (lambda: Scenario(4, Network(LINK, LINK), 3), "3 bytes"),
        (lambda: Scenario(4, Network(LINK, LINK, 8), 4), "8 ranks per node"),
        (lambda: Scenario(4, Network(LINK, LINK), 4, "int8"), "int8"),
        (lambda: simulation.allreduce(Scenario(4, Network(LINK, LINK), 4), "native"), "cannot be simulated"),
        (lambda: simulation.allreduce(Scenario(4, Network(LINK, LINK), 4), "rings"), "no algorithm 'rings'"),
        (lambda: Simulated(6, Network(LINK, LINK, 4), "rotation"), "nodes differ"),
        (lambda: Simulated(6, Network(LINK, LINK), "exclusive"), "powers of two"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make()


def test_speeds() -> None:
    assert parse_speed("1.5GB/s") == 1.5e9
    assert parse_speed("100gbit") == parse_speed("12.5 GB/s") == parse_speed("100 Gb/s") == 12.5e9
    for text in ("1.5", "3gb/s", "GB/s", "-1GB/s", "0GB/s", "1..5GB/s"):
        with pytest.raises(InvalidArgument, match="is not a speed"):
            parse_speed(text)


COMMAND = ["simulate", "--ranks", "16", "--link", "100gbit", "--latency", "2us", "--codec", "zfp", "--rate", "8"]


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--ranks-per-node", "4", "--inside", "25GB/s", "--oversubscription", "2"]
    assert main([*COMMAND, "-m", "64K:1M", *network]) == 0
    said = capsys.readouterr().out
    assert "16 ranks, 4 nodes of 4" in said and "uplinks 2:1" in said and "200 Gb/s" in said
    assert all(name in said for name in ALGORITHMS)
    assert said.count("<- fastest") == 5 and "fastest from size on" in said


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json", "--algorithm", "ring", "--recode", "1GB/s", "--message", "0"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ranks"] == 16 and record["message"] == 0
    assert [each["codec"] is None for each in record["results"]] == [True, False]
    assert record["results"][1]["wire_nbytes"] == 2 * 15 * (1 << 20) // 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--link", "10"], "'10' is not a speed"),
        (["--latency", "2"], "'2' is not a duration"),
        (["-m", "2M:1M"], "smallest size is larger"),
        (["-m", "ten"], "'ten' is not a size"),
        (["--algorithm", "ring,native"], "'native' cannot be simulated"),
        (["--rate", "1"], "rate=1"),
        (["--codec", "zpf"], "unknown codec 'zpf'"),
        (["--profile", "nowhere.json"], "cannot be read"),
        (["--plot", "picture.doc"], "suffix"),
    ],
)
def test_command_says_what_is_wrong(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--plot" in more:
        pytest.importorskip("matplotlib")
    assert main([*COMMAND, *more]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert main([*COMMAND, "-m", "64K", "--algorithm", "ring,direct", "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_command_starts_no_mpi() -> None:
    code = f"import sys; from compcoll.__main__ import main; main({COMMAND!r}); assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_thousands_of_ranks() -> None:
    outcome = run(4096, 16 << 20, "ring", ZFP(rate=8), ranks_per_node=8)
    assert outcome.messages == 2 * 4095
    assert outcome.wire_nbytes == 2 * 4095 * 1024
