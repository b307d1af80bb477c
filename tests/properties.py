"""How many examples the property tests try: fewer in `make test` than in `make test-all`."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings

settings.register_profile("full", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=20, deadline=None)  # pytest --hypothesis-profile quick
# For `make mutants`: a failing example is neither shrunk nor stored.
settings.register_profile(
    "once", max_examples=20, deadline=None, phases=(Phase.explicit, Phase.generate), database=None, derandomize=True
)
settings.load_profile("full")


def examples(number: int, **more: Any) -> settings:
    """Decorate a property that is tried on so many examples, or on a fifth of them with the profile `quick`."""
    return settings(max_examples=max(number * settings.default.max_examples // 100, 5), **more)
