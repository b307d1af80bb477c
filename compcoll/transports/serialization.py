"""The small things that ranks tell each other besides wires, as JSON: to read it runs nothing, whoever sent it."""

from __future__ import annotations

import json
from typing import Any

from ..errors import WireCorrupted


def packed(value: object) -> bytes:
    """Pack what JSON has: numbers, texts, None, sequences and dicts of those; tuples come out as lists."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpacked(data: bytes | bytearray) -> Any:
    """Unpack what a rank has packed.

    Raises
    ------
    WireCorrupted
        If it is something else.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireCorrupted(f"{len(data)} bytes that a rank told are no message of compcoll's: {error}") from error
