"""Fixtures for all tests; the servers are in tests/servers.py, stores in tests/kit/stores.py."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
from pathlib import Path

import pytest

# Threads of OpenMP wait for each other in loops. Several processes of tests share the processors,
# and such a loop then takes more time than a small tensor needs: with two threads, the tests of
# Lightning take twice the processor time. torch reads the variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("ckpt.storage.testing.conformance", "ckpt.storage.testing.uploads")

from tests.faults.ledger import Tally  # noqa: E402
from tests.kit import small_pieces  # noqa: E402
from tests.kit.marks import is_torture  # noqa: E402
from tests.kit.parts import PART_BYTES  # noqa: E402
from tests.kit.processor_time import MOST_SECONDS, ProcessorTime  # noqa: E402
from tests.kit.stores import gated  # noqa: E402
from tests.servers import fake_gcs, moto_server, rclone_s3  # noqa: E402

__all__ = ["fake_gcs", "gated", "moto_server", "rclone_s3"]


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``torture`` unless it was requested, and put files with long tests first.

    All properties belong to ``torture`` too, with more examples (``tests.kit.examples``), and so
    does what uploads small parts otherwise (``tests.kit.parts``).

    The workers of xdist get the files in this order, so that no worker waits at the end for a long
    file of another. Both groups are in the order of their paths, whatever file a worker imports
    first.
    """
    if is_torture(config):
        for item in items:
            is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
            if is_property or PART_BYTES in getattr(item, "fixturenames", ()):
                item.add_marker("torture")
    else:
        kept = [item for item in items if not item.get_closest_marker("torture")]
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("torture")]
        )
        items[:] = kept
    long = {
        item.path
        for item in items
        if item.get_closest_marker("distributed") or item.get_closest_marker("slow")
    }
    items.sort(key=lambda item: (item.path not in long, item.path))


def pytest_collection_finish() -> None:
    """Keep what the tests have imported and pytest has collected until the end.

    A garbage collection need not look through these 700,000 objects each time.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tally",
        type=Path,
        help="write how often each fault was tried into this file, if all tests pass",
    )
    parser.addoption(
        "--most-seconds",
        type=float,
        default=MOST_SECONDS,
        help="fail a test that takes more processor time, unless it is marked torture",
    )
    parser.addoption(
        "--small-pieces",
        action="store_true",
        help="let images of a few kilobytes pass through memory in waves",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.tally = Tally()  # type: ignore[attr-defined]
    config.pluginmanager.register(ProcessorTime(config.option.most_seconds))
    if importlib.util.find_spec("hypothesis"):  # `make device` has no hypothesis
        from tests.kit.examples import choose

        choose(takes_all=is_torture(config))
    if config.option.small_pieces:
        small_pieces.shrink()
    if (worker := getattr(config, "workerinput", None)) is not None:
        import_from_another_file_on(config, int(worker["workerid"][2:]) / worker["workercount"])


def import_from_another_file_on(config: pytest.Config, share: float) -> None:
    """Let a worker of xdist import all files of tests, but first those after this share of them.

    pytest compiles each file that is not compiled yet, which takes 9 s for all of them. The
    workers would otherwise do it side by side, each for the same file at the same time.
    """
    if config.args_source is config.ArgsSource.TESTPATHS:
        files = sorted(str(path) for path in Path(__file__).parent.rglob("test_*.py"))
        first = int(len(files) * share)
        config.args = files[first:] + files[:first]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.option.tally
    if path is not None and exitstatus == 0:
        about = {"python": platform.python_version(), "kernel": platform.release()}
        session.config.tally.write(path, about)  # type: ignore[attr-defined]
