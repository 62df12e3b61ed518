"""How much processor time each test takes, with the processes that it starts.

All tests together are bound by the processors. A run of all tests says at its end what took most,
and a test that takes more than ``MOST_SECONDS`` fails unless it has the mark ``torture``.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

MOST_SECONDS = 60.0
"""Several times what the dearest test takes: no slow or busy machine needs that much."""
_SECONDS = "processor_seconds"
_DEAREST = 10


def used_seconds() -> float:
    """Return the processor time of this process, and of those that it and they have started.

    What another thread than the main one has started counts when it has ended. What has lost its
    parent does not count.
    """
    ticks, family = 0, [os.getpid()]
    for pid in family:
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user, system, and both of ended children
            family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """A plugin of pytest. The workers of xdist measure, and the process that started them sums."""

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds, self._used = most_seconds, 0.0
        self._seconds: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        self._used = used_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            before, self._used = self._used, used_seconds()
            seconds = max(0.0, self._used - before)
            report.user_properties.append((_SECONDS, round(seconds, 2)))
            if seconds > self._most_seconds and not item.get_closest_marker("torture"):
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {seconds:.0f} s of processor time, and a test may take "
                    f"{self._most_seconds:.0f} s. Do less, or mark it torture and keep a small one "
                    "of its kind (CONTRIBUTING.md)."
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._seconds[report.nodeid] = float(dict(report.user_properties).get(_SECONDS, 0))  # type: ignore[arg-type]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if config.args_source is not config.ArgsSource.TESTPATHS:
            return
        terminalreporter.section("processor time")
        terminalreporter.line(
            f"{used_seconds():.0f} s, {sum(self._seconds.values()):.0f} s of them in tests:"
        )
        for name in sorted(self._seconds, key=self._seconds.__getitem__)[: -_DEAREST - 1 : -1]:
            terminalreporter.line(f"{self._seconds[name]:6.1f} s {name}")
