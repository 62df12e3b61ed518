"""Tools for authors of backends: the tests that every backend must pass, and a backend that fails
at the calls that a test chooses.

These two files run the tests on the backend that ``open_mine`` opens::

    # conftest.py: makes pytest show the values in failed asserts
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
    """Import ``BackendConformance`` on first use, since only this name needs pytest."""
    if name == "BackendConformance":
        from ckpt.storage.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(name)
