"""The conformance tests for large objects, which are written with an ``Upload``.

``payload`` returns random bytes, and ``page_aligned`` a copy of bytes in memory that begins at a
page. ``send`` writes the parts of an upload without finishing it, and ``store`` finishes it, too.
``fetch`` returns all bytes of an object. ``at_once`` runs a function in several threads with their
numbers.
"""

from __future__ import annotations

import random

import pytest

from ckpt.errors import ObjectNotFound, StorageError
from ckpt.storage.api import StorageBackend
from ckpt.storage.testing.suite import Suite, at_once, fetch, page_aligned, payload, send, store


class UploadConformance(Suite):
    """The tests that the uploads of every backend must pass. `BackendConformance` includes them."""

    def test_an_upload_of_less_than_a_part(self, backend: StorageBackend) -> None:
        for size in (0, 1, 4096, 5000):
            store(backend, f"small/{size}", payload(size))
            assert backend.head(f"small/{size}").size == size
            assert fetch(backend, f"small/{size}") == payload(size)

    def test_an_upload_of_several_parts(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        store(backend, "step/large", data)
        assert backend.head("step/large").size == len(data)
        assert fetch(backend, "step/large") == data

    def test_an_upload_of_exactly_two_parts(self, backend: StorageBackend) -> None:
        data = payload(2 * backend.capabilities.part_bytes)
        store(backend, "even", data)
        assert fetch(backend, "even") == data

    def test_an_upload_is_invisible_until_it_is_finished(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        view = memoryview(data)
        upload = backend.upload("step/late", len(data))
        send(upload, view)
        assert list(backend.list("")) == []
        with pytest.raises(ObjectNotFound):
            backend.head("step/late")
        upload.finish()
        assert [(info.key, info.size) for info in backend.list("")] == [("step/late", len(data))]

    def test_an_upload_replaces_only_at_its_end(self, backend: StorageBackend) -> None:
        backend.put("key", [b"old"])
        data = self.large(backend)
        upload = backend.upload("key", len(data))
        send(upload, memoryview(data))
        assert fetch(backend, "key") == b"old"
        upload.finish()
        assert fetch(backend, "key") == data

    def test_an_aborted_upload_leaves_nothing(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        upload = backend.upload("gone/large", len(data))
        upload.write(0, memoryview(data)[: upload.part_bytes])
        upload.abort()
        assert list(backend.list("")) == []
        assert list(backend.folders("")) == []

    def test_an_abort_leaves_the_old_object(self, backend: StorageBackend) -> None:
        backend.put("key", [b"old"])
        backend.upload("key", 100).abort()
        assert fetch(backend, "key") == b"old"

    def test_an_upload_with_a_missing_part_is_not_finished(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        upload = backend.upload("hole", len(data))
        upload.write(0, memoryview(data)[: upload.part_bytes])
        with pytest.raises(StorageError):
            upload.finish()
        upload.abort()
        assert list(backend.list("")) == []

    def test_an_upload_may_end_before_its_announced_size(self, backend: StorageBackend) -> None:
        part_bytes = backend.capabilities.part_bytes
        for size in (4097, part_bytes, 2 * part_bytes, 2 * part_bytes + 77):
            data = payload(size)
            upload = backend.upload(f"less/{size}", 5 * part_bytes)
            send(upload, page_aligned(data))
            assert upload.finish(size).size == size
            assert backend.head(f"less/{size}").size == size
            assert fetch(backend, f"less/{size}") == data

    def test_an_upload_must_end_where_its_parts_do(self, backend: StorageBackend) -> None:
        for end in (4096, 4098, 20000):
            upload = backend.upload("odd", 10000)
            upload.write(0, page_aligned(payload(4097)))
            with pytest.raises(StorageError):
                upload.finish(end)
            upload.abort()
            assert list(backend.list("")) == []

    def test_parts_may_come_in_any_order(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        view = memoryview(data)
        upload = backend.upload("shuffled", len(data))
        # The order of the parts needs no secure random numbers.
        send(upload, view, lambda offsets: random.Random(7).sample(offsets, len(offsets)))  # noqa: S311
        upload.finish()
        assert fetch(backend, "shuffled") == data

    def test_parts_may_come_at_once(self, backend: StorageBackend) -> None:
        if not backend.capabilities.parallel_parts:
            pytest.skip("this store takes one part at a time, and says so")
        data = self.large(backend)
        view = page_aligned(data)
        upload = backend.upload("parallel", len(data))
        offsets = list(range(0, len(data), upload.part_bytes))
        at_once(
            lambda number: upload.write(
                offsets[number], view[offsets[number] : offsets[number] + upload.part_bytes]
            ),
            len(offsets),
        )
        upload.finish()
        assert fetch(backend, "parallel") == data

    def test_a_part_may_be_written_twice(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        view = page_aligned(data)
        upload = backend.upload("again", len(data))
        upload.write(0, view[: upload.part_bytes])
        send(upload, view)
        last_offset = len(data) // upload.part_bytes * upload.part_bytes
        upload.write(last_offset, view[last_offset:])
        assert upload.finish().size == len(data)
        assert fetch(backend, "again") == data

    def test_memory_need_not_be_aligned(self, backend: StorageBackend) -> None:
        data = self.large(backend)
        for shift in (1, 512):
            upload = backend.upload(f"unaligned/{shift}", len(data))
            send(upload, page_aligned(data, shift))
            upload.finish()
            out = page_aligned(bytes(len(data)), shift)
            backend.read_into(f"unaligned/{shift}", 0, out)
            assert out == data

    def test_slices_of_a_bytearray_and_readonly_memory_are_taken(
        self, backend: StorageBackend
    ) -> None:
        memory = bytearray(self.large(backend))
        upload = backend.upload("slices", len(memory) - 10)
        send(upload, memoryview(memory)[10:].toreadonly())
        upload.finish()
        assert fetch(backend, "slices") == memory[10:]

    def test_four_uploads_at_once_do_not_mix(self, backend: StorageBackend) -> None:
        size = 2 * backend.capabilities.part_bytes + 5
        at_once(lambda number: store(backend, f"many/{number}", payload(size, number)), 4)
        for number in range(4):
            assert fetch(backend, f"many/{number}") == payload(size, number)
