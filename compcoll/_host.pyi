from collections.abc import Sequence
from typing import Any

def instruction_sets() -> list[str]: ...

class Coder:
    def __init__(
        self, codec: int, first: int, second: int, variant: int, seed: int, storage: int, instruction_set: int
    ) -> None: ...
    def wire_nbytes(self, n: int) -> int: ...
    def encode(
        self,
        n: int,
        add: Any,
        add_scale: float,
        wires: Sequence[Any],
        residual: Any,
        feed: bool,
        residual_scale: float,
        draw: int,
        position: int,
        wire: Any,
        decoded: Any,
        threads: int,
    ) -> None: ...
    def decode(self, n: int, add: Any, add_scale: float, wires: Sequence[Any], out: Any, threads: int) -> None: ...
