"""What compcoll logs during a check, which has no fixtures such as pytest's caplog."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int, name: str = "compcoll") -> Iterator[list[logging.LogRecord]]:
    """What the logger logs from a level on."""
    records: list[logging.LogRecord] = []
    log, handler = logging.getLogger(name), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    before = log.level
    log.setLevel(level)
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
