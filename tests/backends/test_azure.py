from __future__ import annotations

import uuid

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import AccessDenied, ConfigError, ObjectExists, StorageError, TransientStorageError
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import at_once, fetch, payload
from ckpt_backends import azure
from tests.kit.parts import parts_of
from tests.servers import ACCOUNT_KEY, azure_options, azurite

__all__ = ["azurite"]
pytestmark = pytest.mark.server
part_bytes = parts_of("ckpt_backends.azure.PART_BYTES")


class TestAzure(BackendConformance):
    @pytest.fixture
    def open_root(self, azurite, part_bytes):
        place = uuid.uuid4().hex
        return lambda name: open_backend(f"abfs://bucket/{place}/{name}", azure_options(azurite))


@pytest.fixture
def tier(azurite, part_bytes):
    return Tier(f"abfs://bucket/{uuid.uuid4().hex}", options=azure_options(azurite))


@pytest.fixture
def backend(tier):
    backend = open_backend(tier.url, tier.options)
    yield backend
    backend.close()


def test_a_job_saves_and_restores(tier):
    with CheckpointManager(tier) as manager:
        for step in range(3):
            manager.save({"w": torch.full((100_000,), float(step))}, step=step)
    state = {"w": torch.zeros(100_000)}
    with CheckpointManager(tier) as manager:
        assert manager.steps() == [0, 1, 2]
        manager.restore(state)
    assert state["w"].eq(2).all()


def test_of_eight_large_conditional_puts_exactly_one_wins(tier, part_bytes):
    backends = [open_backend(tier.url, tier.options) for _ in range(8)]

    def race(number):
        try:
            backends[number].put("marker", [payload(part_bytes + 1, number)], if_absent=True)
        except ObjectExists:
            return False
        return True

    won = at_once(race, 8)
    assert won.count(True) == 1
    assert fetch(backends[0], "marker") == payload(part_bytes + 1, won.index(True))
    for backend in backends:
        backend.close()


def test_a_conditional_put_whose_reply_is_lost_has_succeeded(backend, monkeypatch):
    call = azure.AzureBackend.call

    def lose(self, key, method, *arguments, **named):
        answer = call(self, key, method, *arguments, **named)
        if method == "upload_blob":
            raise TransientStorageError(key, "the reply is lost")
        return answer

    monkeypatch.setattr(azure.AzureBackend, "call", lose)
    backend.put("mine", [b"x"], if_absent=True)
    call(backend, "other", "upload_blob", b"y")
    with pytest.raises(ObjectExists):
        backend.put("other", [b"x"], if_absent=True)


def test_an_upload_whose_blocks_are_lost_is_no_object_of_the_same_size(backend, part_bytes):
    size = 5 * part_bytes // 2
    lost, kept = backend.upload("file", size), backend.upload("file", size)
    for upload, number in ((lost, 1), (kept, 2)):
        data = memoryview(payload(size, number))
        for start in range(0, size, upload.part_bytes):
            upload.write(start, data[start : start + upload.part_bytes])
    kept.finish()  # Azure then drops all other blocks of the object
    with pytest.raises(StorageError):
        lost.finish()
    assert fetch(backend, "file") == payload(size, 2)


def test_an_upload_whose_reply_is_lost_has_succeeded(backend, monkeypatch, part_bytes):
    call = azure.AzureBackend.call

    def lose(self, key, method, *arguments, **named):
        answer = call(self, key, method, *arguments, **named)
        if method == "commit_block_list":
            raise TransientStorageError(key, "the reply is lost")
        return answer

    monkeypatch.setattr(azure.AzureBackend, "call", lose)
    size = 5 * part_bytes // 2
    upload = backend.upload("file", size)
    for start in range(0, size, upload.part_bytes):
        upload.write(start, memoryview(payload(size))[start : start + upload.part_bytes])
    assert upload.finish().size == size
    assert fetch(backend, "file") == payload(size)


def test_an_object_has_the_date_that_its_listing_has(backend):
    backend.put("step/file", [b"x"])
    (listed,) = backend.list("step/")
    assert listed.modified is not None
    assert backend.head("step/file").modified == pytest.approx(listed.modified, abs=1)


def test_a_missing_container_is_named(azurite):
    backend = open_backend("abfs://nosuch/x", azure_options(azurite))
    for ask in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.head("key"),
        lambda: list(backend.list("")),
        lambda: list(backend.folders("")),
    ):
        with pytest.raises(StorageError, match="no container 'nosuch'"):
            ask()


def test_a_wrong_key_is_access_denied_and_not_told(azurite):
    options = azure_options(azurite)
    wrong = ACCOUNT_KEY[::-1].replace("=", "") + "="
    options["connection_string"] = str(options["connection_string"]).replace(ACCOUNT_KEY, wrong)
    with pytest.raises(AccessDenied) as caught:
        open_backend("abfs://bucket/x", options).head("key")
    assert wrong not in str(caught.value)


def test_a_url_of_azure_itself_is_taken(azurite):
    url = "abfss://bucket@ckpttest.dfs.core.windows.net/runs/x"
    backend = open_backend(url, azure_options(azurite))
    backend.put("key", [b"one"])
    same = open_backend("abfs://bucket/runs/x", azure_options(azurite))
    assert fetch(same, "key") == b"one"
    same.delete("key")


def test_two_containers_of_one_account_are_two_tiers():
    pytest.importorskip("adlfs")
    urls = [f"abfss://{name}@ckpttest.dfs.core.windows.net/runs" for name in ("one", "two")]
    options = {"account_name": "ckpttest", "account_key": ACCOUNT_KEY}
    assert [open_backend(url, options).url for url in urls] == urls
    with CheckpointManager([Tier(url, options=options) for url in urls]):
        pass


def test_a_user_and_a_password_in_a_url_are_not_shown():
    pytest.importorskip("adlfs")
    options = {"account_name": "ckpttest", "account_key": ACCOUNT_KEY}
    assert open_backend("abfs://me:secret@bucket/runs", options).url == "abfs://bucket/runs"


def test_a_url_without_container_is_refused():
    pytest.importorskip("adlfs")
    with pytest.raises(ConfigError, match="no container"):
        open_backend("abfs://", {"account_name": "x", "anon": True})


def test_a_page_of_a_listing_is_asked_for_when_the_one_before_it_was_taken(backend, monkeypatch):
    pages = []
    ask = azure.AzureBackend._run

    def recorded(self, key, work):
        pages.append(key)
        return ask(self, key, work)

    for number in range(5):
        backend.put(f"step-{number}/file", [b"x"])
    monkeypatch.setattr(azure, "_PAGE_KEYS", 2)
    monkeypatch.setattr(azure.AzureBackend, "_run", recorded)
    listed = backend.list("step-")
    assert [next(listed).key, next(listed).key] == ["step-0/file", "step-1/file"]
    assert len(pages) == 1
    assert [info.key for info in listed] == [f"step-{number}/file" for number in (2, 3, 4)]
    assert len(pages) == 3
    assert list(backend.folders("")) == [f"step-{number}" for number in range(5)]
    assert len(pages) == 6
