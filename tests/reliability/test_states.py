"""States that are saved: another version's, another kind's and cut ones are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals

from compcoll import ErrorFeedback
from compcoll.errors import InvalidBuffer


def feedback_with_a_past() -> ErrorFeedback:
    feedbacks = [ErrorFeedback(), ErrorFeedback()]
    world, inputs = World(2), normals(2, 300)
    world.loopback.run(
        [
            comm.iallreduce(x, codec="minmax", algorithm="ring", feedback=feedback)
            for comm, x, feedback in zip(world.comms, inputs, feedbacks, strict=True)
        ]
    )
    return feedbacks[0]


def test_a_state_goes_on() -> None:
    kept = feedback_with_a_past()
    other = ErrorFeedback()
    other.load_state_dict(kept.state_dict())
    assert other.residual.tobytes() == kept.residual.tobytes() and np.abs(kept.residual).max() > 0
    assert other.residual is not kept.residual


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: {**state, "version": 2}, "version 2: this release reads 1"),
        (
            lambda state: {name: value for name, value in state.items() if name != "residual"},
            "residual, version are needed",
        ),
        (lambda state: {**state, "momentum": None}, "are needed"),
        (lambda state: list(state.items()), "list"),
        (lambda state: {**state, "residual": state["residual"] * np.nan}, "NaN or Inf"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change: object, text: str) -> None:
    kept = feedback_with_a_past()
    before = kept.residual.tobytes()
    with pytest.raises(InvalidBuffer, match=text):
        kept.load_state_dict(change(kept.state_dict()))  # type: ignore[operator]
    assert kept.residual.tobytes() == before


def test_without_the_gil_the_import_says_so() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import compcoll; compcoll.encode"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "ImportError: compcoll's kernels need the GIL" in done.stderr


class Killed(BaseException):
    """What a `kill -9` does: nothing is tidied up."""


def whole(number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What two ranks save after so many steps: weights, and what a low-rank method and its feedback keep."""
    import torch

    from compcoll.torch.states import state_of

    common = {"step": number, "settings": {"seed": 1}, "model": {"weight": torch.full((300,), float(number))}}
    own = [
        state_of(rank, 2, {"weight": np.full(300, number + rank / 2, np.float32)})
        | {"steps": number, "step": number, "factors": {"weight": (torch.ones(30, 2), torch.ones(10, 2))}}
        for rank in range(2)
    ]
    return common, own


def save(folder: Path, number: int) -> None:
    """As two ranks do, one at a time: each goes as far as the next barrier."""
    from training import checkpoint

    common, own = whole(number)
    barriers = iter(range(3))

    def barrier() -> None:
        if next(barriers) == 1:
            checkpoint._write(own[1], folder / f"step-{number:09d}.unfinished" / "rank-1.pt")

    checkpoint.save(folder, number, common, own[0], (0, 2), barrier)


def loaded_step(folder: Path) -> int:
    """The step of the checkpoint that is there, all of whose parts belong to it."""
    from training import checkpoint

    found = checkpoint.load(folder)
    assert found is not None
    common, own = found
    expected_common, expected_own = whole(common["step"])
    assert common["model"]["weight"].equal(expected_common["model"]["weight"])
    for state, expected in zip(own, expected_own, strict=True):
        assert state["residuals"]["weight"].equal(expected["residuals"]["weight"])
        assert state["factors"]["weight"][0].equal(expected["factors"]["weight"][0])
    return int(common["step"])


def test_a_checkpoint_is_there_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each call that changes the disk, one after the other: the one before is there, or the new one."""
    pytest.importorskip("torch", "2.12")
    save(tmp_path, 1)
    changes = [(os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open")]
    moment, found = 0, []
    while True:
        calls = iter(range(moment))

        def killed_in_time(real: Any, calls: Iterator[int] = calls) -> Any:
            def change(*arguments: Any, **options: Any) -> Any:
                if next(calls, None) is None:
                    raise Killed
                return real(*arguments, **options)

            return change

        with monkeypatch.context() as patched:
            for owner, name in changes:
                patched.setattr(owner, name, killed_in_time(getattr(owner, name)))
            try:
                save(tmp_path, 2)
                break
            except Killed:
                pass
        found.append(loaded_step(tmp_path))
        moment += 1
    assert moment >= 10 and found == sorted(found) and found[0] == 1 and loaded_step(tmp_path) == 2, found
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.12")
    from training import checkpoint

    from osu_like_bench import UsageError

    common, own = whole(1)
    for rank in (0, 1):
        with pytest.raises(UsageError, match=r"ranks \[1\] do not see .*on a file system that all nodes share"):
            checkpoint.save(tmp_path / f"of {rank}", 1, common, own[rank], (rank, 2), lambda: None)


def test_cut_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", "2.12")
    from training import checkpoint

    from osu_like_bench import UsageError

    save(tmp_path, 1)
    folder = tmp_path / "step-000000001"
    for name in ("common.pt", "rank-0.pt", "rank-1.pt"):
        content = (folder / name).read_bytes()
        for length in (*range(0, len(content), 97), len(content) - 1):
            (folder / name).write_bytes(content[:length])
            with pytest.raises(UsageError, match=name):
                checkpoint.load(tmp_path)
        (folder / name).unlink()
        with pytest.raises(UsageError, match=name):
            checkpoint.load(tmp_path)
        for foreign in (b"PK", b"nonsense" * 100, np.arange(9).tobytes()):
            (folder / name).write_bytes(foreign)
            with pytest.raises(UsageError, match=name):
                checkpoint.load(tmp_path)
        torch.save([1, 2], folder / name)
        with pytest.raises(UsageError, match=f"{name} is no part of a checkpoint: it holds a list"):
            checkpoint.load(tmp_path)
        (folder / name).write_bytes(content)
    assert loaded_step(tmp_path) == 1
    common = torch.load(folder / "common.pt")
    for wrong, said in (({**common, "version": 7}, "version 7"), ({"model": common["model"]}, "no checkpoint")):
        torch.save(wrong, folder / "common.pt")
        with pytest.raises(UsageError, match=said):
            checkpoint.load(tmp_path)


def test_states_of_compressions_that_are_foreign_are_refused() -> None:
    torch = pytest.importorskip("torch", "2.12")
    from compcoll.errors import InvalidArgument
    from compcoll.torch.states import residuals_of

    _, own = whole(3)
    low = ("steps", "step", "factors")
    assert (residuals_of(own[1], 1, 2, {"weight": (300,)}, low)["weight"] == 3.5).all()
    spoiled = {"weight": torch.tensor([np.nan] * 300)}
    for wrong, said in (
        ({**own[0], "version": 1}, "version 1, but this release reads version 2: do not load it"),
        ({name: value for name, value in own[0].items() if name != "factors"}, "no state of such a compression"),
        ({**own[0], "residuals": spoiled}, "'weight' holds NaN or Inf"),
        ({**own[0], "residuals": {"weight": torch.ones(299)}}, r"\[299\] elements of 'weight'"),
        ({**own[0], "residuals": {"bias": torch.ones(300)}}, "'bias', which is no parameter of that shape"),
        (own[1], "rank 1 of 2, but here is rank 0 of 2"),
        (own[:1], "give the state of each rank once"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            residuals_of(wrong, 0, 2, {"weight": (300,)}, low)
    with pytest.raises(InvalidArgument, match="no state of such a compression"):
        residuals_of(own[0], 0, 2, {"weight": (300,)})  # a low-rank method's, given to another
