"""How many requests the steps that a tier holds cost a job that saves there."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import s3fs
import torch

from ckpt import CheckpointManager, Tier
from ckpt.model.keys import StepRef
from ckpt.page.store_requests import Requests, requests_of_removal, requests_of_save
from ckpt_backends.folder.posix import PosixBackend
from ckpt_backends.s3.bulk_client import S3BulkClient
from tests.servers import KEY, SECRET, Server

Calls = list[tuple[str, str]]
Place = Callable[[int], Tier]


def _hold(folder: Path, steps: int) -> None:
    """Put ``steps`` steps of an earlier job into ``folder``, with files of no content."""
    for step in range(steps):
        ref = StepRef(step, "abcdefghijkl")
        (folder / ref.folder).mkdir(parents=True)
        for name in ("manifest.json", "rank-00000.json", "rank-00000.safetensors"):
            (folder / ref.folder / name).write_bytes(b"{}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record the threads and names of the requests to S3 and of the calls to folders."""
    recorded: Calls = []
    whole = s3fs.S3FileSystem.call_s3

    def call(self, method: str, *args, **kwargs):
        recorded.append((threading.current_thread().name, method))
        return whole(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", call)
    folder_verbs = ("put", "head", "list", "folders", "read_into", "delete")
    bulk_verbs = ("fetch", "receive", "send_part")
    for cls, verbs in ((PosixBackend, folder_verbs), (S3BulkClient, bulk_verbs)):
        for verb in verbs:
            method = getattr(cls, verb)

            def recording(self, key: str, *args, _verb=verb, _method=method, **kwargs):
                recorded.append((threading.current_thread().name, _verb))
                return _method(self, key, *args, **kwargs)

            monkeypatch.setattr(cls, verb, recording)
    return recorded


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A function that returns a tier with a number of steps."""

    def tier(steps: int) -> Tier:
        if request.param == "folder":
            _hold(tmp_path / str(steps), steps)
            return Tier(str(tmp_path / str(steps)))
        server: Server = request.getfixturevalue("rclone_s3")
        assert server.data is not None
        bucket = f"requests-{steps}"
        _hold(server.data / "bucket" / bucket, steps)
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)  # rclone forgets its listings of folders
        options = {"endpoint_url": server.url, "key": KEY, "secret": SECRET}
        return Tier(f"s3://bucket/{bucket}", options=options)

    return tier


def _requests(tier: Tier, calls: Calls, step: int) -> tuple[int, int, int]:
    """Return the numbers of requests of a first and a second save, and of the pruning thread."""
    calls.clear()
    with CheckpointManager(tier) as manager:
        manager.save({"x": torch.ones(3)}, step=step)
        first = sum("prune" not in thread for thread, _ in calls)
        manager.save({"x": torch.ones(3)}, step=step + 1)
        both = sum("prune" not in thread for thread, _ in calls)
    return first, both - first, sum("prune" in thread for thread, _ in calls)


@pytest.mark.parametrize(
    "steps", [1_000, pytest.param(5_000, marks=pytest.mark.torture)], ids=["1000", "5000"]
)
def test_steps_that_are_there_cost_a_page_of_a_listing_for_each_thousand(
    place: Place, calls: Calls, steps: int
) -> None:
    """One request for each of them came before the first commit, and again after each commit."""
    tiers = [place(10), place(steps)]
    few, many = (_requests(tier, calls, steps) for tier in tiers)
    pages = steps // 1000
    # docs/scale.md names them. A folder has no read of a whole object.
    assert few[:2] == ((11, 10) if tiers[0].url.startswith("/") else (10, 8))
    assert many[0] <= few[0] + pages
    assert many[1] == few[1]
    # The pruning thread looks for remains once in a job, in a folder step by step.
    keys = 3 * steps
    assert many[2] <= few[2] + (steps + 10 if tiers[1].url.startswith("/") else 1 + keys // 1000)


def test_a_capacity_that_is_not_reached_costs_no_read_of_a_manifest(
    place: Place, calls: Calls
) -> None:
    """Each manifest was read before the first commit. Only the sizes of the files are needed."""
    tiers = [replace(place(steps), capacity="1TB") for steps in (20, 400)]
    few, many = (_requests(tier, calls, 400) for tier in tiers)
    is_folder = tiers[0].url.startswith("/")
    assert many[0] <= few[0] + (400 - 20 if is_folder else 3 * 400 // 1000 + 1)
    assert many[1] == few[1]


_KINDS = {
    "put_object": "puts",
    "create_multipart_upload": "puts",
    "send_part": "puts",
    "complete_multipart_upload": "puts",
    "fetch": "gets",
    "receive": "gets",
    "head_object": "heads",
    "list_objects_v2": "lists",
    "list_multipart_uploads": "lists",
    "delete_object": "deletes",
}


@pytest.mark.server
@pytest.mark.parametrize("nbytes", [4, pytest.param(20 << 20, marks=pytest.mark.torture)])
def test_the_page_of_serve_knows_what_a_save_to_s3_asks(
    rclone_s3: Server, calls: Calls, nbytes: int
) -> None:
    """A tier that keeps two steps removes one with each save."""
    options = {"endpoint_url": rclone_s3.url, "key": KEY, "secret": SECRET}
    tier = Tier(f"s3://bucket/serve-{nbytes}", options=options, keep_last=2)
    counts: list[Requests] = []
    with CheckpointManager(tier) as manager:
        for step in range(6):
            calls.clear()
            manager.save({"x": torch.full((nbytes // 4,), float(step))}, step=step)
            for writer in manager._saver._writers:
                assert writer._pruner is not None
                writer._pruner._workers.submit(int).result()
            counts.append(Requests(**Counter(_KINDS[method] for _, method in calls)))
    assert counts[1] == requests_of_save(1, nbytes, 2)
    assert counts[5] == requests_of_save(1, nbytes, 2) + requests_of_removal(1)
