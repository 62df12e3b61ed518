"""For authors of backends: the suite every backend must pass, and a store that fails on command.

::

    # conftest.py, so that failed asserts show their values
    pytest.register_assert_rewrite("ckpt.storage.testing.conformance",
    "ckpt.storage.testing.uploads")

    # test_mine.py
    from ckpt.storage.testing import BackendConformance

    class TestMine(BackendConformance):
        @pytest.fixture
        def open_root(self, tmp_path):
            return lambda name: open_mine(f"mine://{tmp_path}/{name}", {})
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.storage.testing.faulty import (
    Call,
    Crash,
    Delay,
    Fault,
    FaultyBackend,
    LoseReply,
    Raise,
    Rule,
    SimulatedCrash,
    Truncate,
    flip_byte,
)

if TYPE_CHECKING:
    from ckpt.storage.testing.conformance import BackendConformance

__all__ = [
    "BackendConformance",
    "Call",
    "Crash",
    "Delay",
    "Fault",
    "FaultyBackend",
    "LoseReply",
    "Raise",
    "Rule",
    "SimulatedCrash",
    "Truncate",
    "flip_byte",
]


def __getattr__(name: str) -> object:
    """Import the suite when it is asked for, since it needs pytest, and faults do not."""
    if name == "BackendConformance":
        from ckpt.storage.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(name)
