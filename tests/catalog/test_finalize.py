"""A job dies when only the manifest is missing, and the next restore finishes its commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from ckpt import CheckpointManager
from ckpt.errors import NoCheckpoint
from ckpt.events import CommitFinished, Event
from ckpt.model.keys import OWNER
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.registry import open_backend


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((5000,), float(step)), "step": step}


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """Return a root with steps 1 and 2, and the manifest of step 2, which is not on the root.

    The manager is not collected before the test ends, since its job would count as ended.
    """
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save(state(1), 1)
        manager.save(state(2), 2)
        owner = read_owner(open_backend(str(root), {}))
    assert owner is not None
    manifest = next(root.glob("step-*2.*/manifest.json"))
    data = manifest.read_bytes()
    manifest.unlink()
    write(root, replace(owner, pid=2**22 + 1, started=1))
    yield root, data
    del manager


def write(root: Path, owner: Owner) -> None:
    (root / OWNER).write_bytes(msgspec.json.encode(owner))


def owner_of(root: Path) -> Owner:
    return msgspec.json.decode((root / OWNER).read_bytes(), type=Owner)


def restored(
    root: Path, step: int | None = None
) -> tuple[int, tuple[tuple[int, str], ...], list[Event]]:
    events: list[Event] = []
    with CheckpointManager(root, observers=[events.append]) as manager:
        target = state(0)
        report = manager.restore(target, step)
    assert report is not None
    assert bool((target["x"] == report.step).all())
    return (
        report.step,
        report.finished,
        [event for event in events if isinstance(event, CommitFinished)],
    )


def test_the_same_bytes_and_a_word_about_it(
    left: tuple[Path, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    root, manifest = left
    step, finished, events = restored(root)
    assert (step, [number for number, _ in finished]) == (2, [2])
    assert events == [CommitFinished(step=2, tier=finished[0][1])]
    assert next(root.glob("step-*2.*/manifest.json")).read_bytes() == manifest
    assert "has finished its commit" in caplog.text
    assert not list(root.glob("*/claim"))
    assert restored(root)[:2] == (2, ())


def test_an_older_step_that_is_asked_for_finishes_nothing(left: tuple[Path, bytes]) -> None:
    assert restored(left[0], 1) == (1, (), [])
    assert not list(left[0].glob("step-*2.*/manifest.json"))
    assert restored(left[0], 2)[0] == 2


@pytest.mark.parametrize("gone", ["rank-00000.json", "rank-00000.safetensors"])
def test_what_is_not_whole_is_left_as_it_is(left: tuple[Path, bytes], gone: str) -> None:
    next(left[0].glob(f"step-*2.*/{gone}")).unlink()
    before = sorted(left[0].rglob("*"))
    assert restored(left[0]) == (1, (), [])
    assert sorted(left[0].rglob("*")) == before


def test_a_live_job_commits_by_itself(left: tuple[Path, bytes]) -> None:
    write(left[0], Owner.of_this_process(owner_of(left[0]).attempt))
    assert restored(left[0]) == (1, (), [])


def test_of_a_job_that_cannot_be_seen_the_command_is_told(
    left: tuple[Path, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    write(left[0], replace(owner_of(left[0]), machine="another"))
    with caplog.at_level(logging.WARNING):
        assert restored(left[0]) == (1, (), [])
    assert (
        f"ckpt finalize file://{left[0]} --step 2 --job-is-dead" in caplog.text
        or "--step 2 --job-is-dead" in caplog.text
    )


def test_the_restarts_that_torchrun_counts_tell_nothing_of_a_job_on_another_machine(
    left: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launch agents of one run gave their workers 2 and 0 in one start of the group."""
    for name, value in (("RUN_ID", "r"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    write(left[0], replace(Owner.of_this_process(owner_of(left[0]).attempt), machine="another"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restored(left[0])[0] == 1


def test_a_part_that_was_damaged_is_found_when_it_is_read(left: tuple[Path, bytes]) -> None:
    data = next(left[0].glob("step-*2.*/*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert restored(left[0])[0] == 1


def test_abandoned_steps_do_not_keep_a_step_of_the_branch_from_being_finished(
    tmp_path: Path,
) -> None:
    root, trained = tmp_path / "run", state(0)
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            trained["x"].fill_(step)
            manager.save(trained, step)
        manager.restore(trained, 1)
        trained["x"].fill_(2)
        manager.save(trained, 2)
        owner = read_owner(open_backend(str(root), {}))
        assert owner is not None
    [manifest] = root.glob("step-*2.*tb/manifest.json")
    manifest.unlink()
    write(root, replace(owner, pid=2**22 + 1, started=1))
    assert restored(root)[:2] == (2, ((2, str(root)),))
    # The leader went on after the abandoned step 3, which may have been refused.
    next(root.glob("step-*3.*/manifest.json")).unlink()
    with pytest.raises(NoCheckpoint):
        restored(root, 3)
