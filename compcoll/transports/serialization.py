"""JSON for all messages between ranks that are not wires. Unlike pickle, reading it never runs code."""

from __future__ import annotations

import json
from typing import Any

from ..errors import WireCorrupted


def packed(value: object) -> bytes:
    """Serialize numbers, strings, None, and sequences and dicts of those. Tuples become lists."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpacked(data: bytes | bytearray) -> Any:
    """Deserialize the bytes that `packed` returned on some rank.

    Raises
    ------
    WireCorrupted
        If the bytes are not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireCorrupted(f"{len(data)} bytes from a rank are not a message of compcoll: {error}") from error
