"""COMPCOLL_TRACE and its tool, with all ranks in one process; tests/mpi/check_trace.py has real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from oracles import chrome_trace

from compcoll import CompcollError
from compcoll.__main__ import main
from compcoll.errors import InvalidArgument
from compcoll.execute import trace as writing
from compcoll.tools import trace
from compcoll.tools.trace import Call, Step, conclusion, read

RANKS = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of three ranks: two calls by a program, one by a generator, one that travels with the handshake."""
    monkeypatch.setenv("COMPCOLL_TRACE", str(tmp_path / "trace"))
    world = World(RANKS)
    for n, how in ((5000, {"codec": "int8", "algorithm": "ring"}), (5000, {"codec": "topk", "density": 0.01}), (1, {})):
        for _ in range(2):
            world.allreduce(normals(RANKS, n), **how)
    return tmp_path / "trace"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def moved(path: Path, nanoseconds: int, host: str) -> None:
    """Let a file be from another host, whose clock is ahead."""
    rest = []
    for line in lines(path)[1:]:
        event = json.loads(line.rstrip(","))
        if "ts" in event:
            event["ts"] = (round(event["ts"] * 1000) + nanoseconds) / 1000
        if "host" in event["args"]:
            event["args"]["host"] = host
        rest.append(json.dumps(event))
    path.write_text("[\n" + ",\n".join(rest))


def test_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}.json" for rank in range(RANKS)]
    for rank in range(RANKS):
        calls = chrome_trace.calls(folder / f"rank-{rank}.json", rank)
        names = ["allreduce int8 ring 19.53 KiB"] * 2 + ["allreduce topk sparse_ring 19.53 KiB"] * 2
        assert [call.name for call in calls][:2] == names[:2] and len(calls) == 6
        for call in calls[:4]:
            sends = sum(step.args["bytes"] for step in call.of("wire") if step.name.startswith("send"))
            lengths = 24 if "topk" in call.name else 0  # of the other ranks' wires, which statistics do not count
            assert sends == call.args["wire_bytes"] + lengths > 0 and call.of("wait")
            assert call.of("encode") and call.of("decode")
        assert [step.kind for step in calls[4].steps if step.kind != "queue"] == ["handshake", "operation"]


def test_results_and_messages_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = [
        {"codec": "qsgd"},
        {"codec": "sign"},
        {"codec": "randomk", "density": 0.1},
        {"op": "max"},
        {},
    ]
    results = []
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("COMPCOLL_TRACE", folder)
        world = World(RANKS)
        results.append([world.allreduce(normals(RANKS, 3000), **how)[0].tobytes() for how in calls])
    assert results[0] == results[1]
    assert len(chrome_trace.calls(tmp_path / "rank-0.json")) == len(calls)


def test_a_killed_process_leaves_a_file(tmp_path: Path) -> None:
    program = (
        "import os, signal, numpy as np; from compcoll import Communicator; from compcoll.transports.loopback import "
        "Loopback; comm = Communicator(Loopback(1).transports[0]); x = np.ones(9, np.float32); comm.allreduce(x); "
        "comm.allreduce(x); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "COMPCOLL_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(chrome_trace.calls(tmp_path / "rank-0.json", 0)) == 2


def test_a_later_communicator_goes_on_in_the_file(folder: Path) -> None:
    """Its name is a new one, on all ranks the same."""
    World(RANKS).allreduce(normals(RANKS, 10))
    names = [[call.args["communicator"] for call in chrome_trace.calls(path)] for path in sorted(folder.iterdir())]
    assert names[0] == names[1] == names[2] and len(names[0]) == 7 and len(set(names[0])) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPCOLL_TRACE", str(tmp_path / "file"))
    with pytest.raises(
        InvalidArgument, match=r"COMPCOLL_TRACE='.*file' .* rank 0 .*rank-0.json.* unset COMPCOLL_TRACE"
    ):
        World(1)


def test_a_full_disk_ends_the_trace_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_TRACE", str(tmp_path))
    world = World(1)

    def full(self: object, lines: list[str]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing._File, "write", full)
    with pytest.warns(UserWarning, match="No space left"):
        world.allreduce(normals(1, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(world.allreduce(normals(1, 10))[0], normals(1, 10)[0])


def test_times_are_of_the_real_time_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("COMPCOLL_TRACE", str(tmp_path))
    world, before = World(1), time.time_ns()
    world.allreduce(normals(1, 10))
    (call,) = read(tmp_path)[0].calls()
    assert before - 10**6 < call.begun <= call.ended < time.time_ns() + 10**6


def test_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    alone = [chrome_trace.calls(folder / f"rank-{rank}.json") for rank in range(RANKS)]
    merged = chrome_trace.calls(folder / "trace.json")
    assert (folder / "trace.json").read_text().endswith("]\n")
    first = min(call.begun for calls in alone for call in calls)
    assert [call.begun for call in merged] == [call.begun - first for calls in alone for call in calls]
    assert [call.ended for call in merged] == [call.ended - first for calls in alone for call in calls]

    said = capsys.readouterr().out.splitlines()
    rows = [line for line in said if line[:1].isdecimal()]
    assert len(rows) == 3 * RANKS, "a row for each rank and kind of call"
    for row in rows:
        rank, *name, calls, ms = row.split()[:-7]
        shares = list(map(float, row.split()[-7:]))
        alike = [call for call in alone[int(rank)] if call.name == " ".join(name)]
        assert int(calls) == len(alike) == 2
        assert float(ms) == pytest.approx(sum(call.ended - call.begun for call in alike) / 1e6, abs=1e-3)
        assert sum(shares) == pytest.approx(100, abs=0.5)
        encoding = sum(step.ended - step.begun for call in alike for step in call.of("encode")) / 1e4 / float(ms)
        assert shares[1] == pytest.approx(encoding, abs=0.1)
    assert said[-1].split(" ", 1)[1]


def test_other_hosts_are_aligned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved(folder / "rank-1.json", 5_000_000_123, "elsewhere 1")
    moved(folder / "rank-2.json", 5_000_000_123, "elsewhere 1")
    ends = [
        [call.of("handshake")[0].ended for call in chrome_trace.calls(folder / f"rank-{rank}.json")]
        for rank in range(3)
    ]
    ahead = median([end - known for rank in (1, 2) for known, end in zip(ends[0], ends[rank], strict=True)])
    assert main(["trace", str(folder)]) == 0
    assert f"the clock of elsewhere is {ahead / 1e6:+.3f} ms from rank 0's: aligned" in capsys.readouterr().out
    merged = chrome_trace.calls(folder / "trace.json")
    after = [[call.of("handshake")[0].ended for call in merged if call.place[0] == rank] for rank in range(3)]
    for rank in (1, 2):
        shifts = {(b - after[0][0]) - (a - ends[0][0]) for a, b in zip(ends[rank], after[rank], strict=True)}
        assert shifts == {-round(ahead)}
    assert abs(median([end - known for rank in (1, 2) for known, end in zip(after[0], after[rank])])) <= 1


def test_a_host_without_common_collectives_stays_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "rank-2.json").read_text()
    (folder / "rank-2.json").write_text(text.replace("3 ranks", "1 ranks"))
    moved(folder / "rank-2.json", 0, "elsewhere 1")
    assert main(["trace", str(folder)]) == 0
    assert "elsewhere is not aligned" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_last_line_that_is_not_whole_is_left_out(folder: Path, cut: int) -> None:
    path = folder / "rank-1.json"
    whole = len(read(folder)[1].events)
    path.write_text(path.read_text()[:-cut])
    notes: list[str] = []
    assert len(read(folder, notes.append)[1].events) in (whole - 1, whole - 2, whole - 3) and notes == []


def test_broken_lines_are_left_out_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "rank-1.json"
    text = lines(path)
    text[5] = text[5][:30]
    path.write_text("\n".join([*text[:8], "\0\xff", *text[8:], "]"]))
    (folder / "rank-7.json").write_text("[")
    assert main(["trace", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "rank-1.json: 2 lines are no events" in said and "rank-7.json was left out" in said


def test_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err
    assert "nothing has no file rank-N.json" in said and "COMPCOLL_TRACE=" in said


def test_without_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_TRACE", str(tmp_path))
    World(2)
    with pytest.raises(CompcollError, match="no collective"):
        trace.run(type("Arguments", (), {"folder": tmp_path, "png": None})())  # type: ignore[arg-type]


def calls_of(*lengths: dict[str, int], begins: tuple[int, ...] = (0, 0)) -> list[Call]:
    """A call for each rank, with steps of some milliseconds."""
    calls = []
    for rank, (of_rank, begun) in enumerate(zip(lengths, begins)):
        at, steps = begun * 10**6, []
        for kind, length in of_rank.items():
            if kind != "rest":
                steps.append(Step(kind, at, at + length * 10**6))
            at += length * 10**6
        calls.append(Call(rank, "allreduce", ("world", 0), begun * 10**6, at, steps))
    return calls


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        (
            {"handshake": 1, "wait": 71, "encode": 20, "decode": 8},
            "the network is the limit: 71 % of the time is waiting",
        ),
        ({"handshake": 1, "wait": 30, "encode": 49, "decode": 20}, "encoding is the limit: 69 % of"),
        ({"handshake": 1, "wait": 30, "encode": 20, "decode": 49}, "decoding is the limit: 69 % of"),
        ({"handshake": 1, "operation": 99}, "nothing is compressed for most of the time: 99 %"),
        ({"handshake": 20, "rest": 80}, "compcoll's own work is the limit: 80 %"),
        ({"queue": 900, "handshake": 10, "wait": 90}, "the network is the limit: 90 %"),
    ],
)
def test_conclusion(lengths: dict[str, int], sentence: str) -> None:
    assert conclusion(calls_of(lengths, lengths)).startswith(sentence)


def test_conclusion_names_the_late_rank() -> None:
    late = calls_of({"handshake": 60, "wait": 40}, {"handshake": 1, "wait": 15}, begins=(0, 59))
    assert conclusion(late) == "rank 1 is late: the other ranks wait 59 % of their time for it in handshakes"
    in_turn = calls_of({"handshake": 60, "wait": 40}, {"handshake": 60, "wait": 40}, begins=(0, 1))
    assert conclusion(in_turn).startswith("ranks are late in turn: 60 %")


def test_drawn(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "last.png"
    assert main(["trace", str(folder), "--png", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    for wrong in (tmp_path / "last.nonsense", tmp_path / "nothing" / "last.png"):
        assert main(["trace", str(folder), "--png", str(wrong)]) == 1
        assert f"--png {wrong}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["trace", str(folder), "--png", str(image)]) == 1
    assert "--png needs matplotlib: pip install matplotlib" in capsys.readouterr().err
