from __future__ import annotations

import pytest

from ckpt.agent.watched_job import share_a_root


@pytest.mark.parametrize(
    ("one", "two", "shared"),
    [
        ("/mnt/dead", "/disk/b", False),
        ("/mnt/dead", "/mnt/dead/", True),
        ("file:///mnt/dead", "/mnt/dead", True),
        ("/mnt/dead", "/mnt/dead/b", False),
        ("shm://b", "shm://b", True),
        ("s3://bucket/run?region=a", "s3://bucket/run/", True),
        ("s3://bucket/run", "s3://bucket/run2", False),
    ],
)
def test_jobs_are_compared_without_the_file_systems_of_their_tiers(
    monkeypatch: pytest.MonkeyPatch, one: str, two: str, *, shared: bool
) -> None:
    """A mount that does not answer would block the only thread of the agent."""

    def block(*_: object, **__: object) -> None:
        raise AssertionError("the file system was asked")

    with monkeypatch.context() as patched:  # pytest itself asks the file system
        for name in ("stat", "lstat", "path.realpath"):
            patched.setattr(f"os.{name}", block)
        found = share_a_root(("/disk/a", one), (two,)), share_a_root((two,), ("/disk/a", one))
    assert found == (shared, shared)
