"""How many examples a property is tried with: a fifth of them in CI, and all in torture."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_ALL = 100
"""The examples of a property without a number of its own."""
_LEAST = 4

# A busy machine does not make a test fail.
settings.register_profile("torture", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("torture"), max_examples=_ALL // 5)


def choose(*, takes_all: bool) -> None:
    settings.load_profile("torture" if takes_all else "tests")


def examples(number: int) -> int:
    """Return how many of ``number`` examples the profile of this run takes."""
    return max(_LEAST, number * settings().max_examples // _ALL)
