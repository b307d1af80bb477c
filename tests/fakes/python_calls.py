"""Counts the Python functions of compcoll that a call goes through."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import compcoll

_OURS = (str(Path(compcoll.__file__).parent), "<string>")  # dataclasses and named tuples write the latter
_PARTS = ("comp>", "genexpr>")


def functions_entered(action: Callable[[], Any]) -> list[CodeType]:
    """The functions that were entered on this thread.

    A generator that goes on is counted once, and a comprehension, which newer Pythons make no function of, is not.
    """
    entered: dict[FrameType, CodeType] = {}  # whose frames live as long as this, so that each is another

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS) and not frame.f_code.co_name.endswith(_PARTS):
            entered.setdefault(frame, frame.f_code)

    gc.collect()
    gc.disable()  # it would end others' objects meanwhile
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return list(entered.values())
