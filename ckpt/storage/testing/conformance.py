"""The tests that every backend must pass. To run them, subclass `BackendConformance` and define
the fixture ``open_root``.

``open_root(name)`` returns a new backend on the root of that name, inside of a store that is made
for the test. Two calls with one name return two backends that see the same objects. Two calls with
different names return backends that do not see each other's objects. The tests close all backends
that they open: the fixture ``roots`` is ``open_root`` with this addition. ``payload`` returns
random bytes, ``at_once`` runs a function in several threads with their numbers, and ``fetch``
returns all bytes of an object.

The largest objects of the tests have four parts. Override ``part_bytes_most`` if the parts of your
backend are larger than 8 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from ckpt.errors import CkptError, ManifestCorrupt, ObjectExists, ObjectNotFound, StorageError
from ckpt.storage.api import StorageBackend, Upload, read_object
from ckpt.storage.testing.suite import OpenRoot, at_once, fetch, page_aligned, payload, send, store
from ckpt.storage.testing.uploads import UploadConformance

__all__ = [
    "BackendConformance",
    "OpenRoot",
    "at_once",
    "fetch",
    "page_aligned",
    "payload",
    "send",
    "store",
]

_BAD_KEYS = (
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a//b",
    "a/./b",
    "a/",
    "a\\b",
    "a\0b",
    "a\nb",
    "C:x",
    "a*",
    "x" * 901,
    "a/" + "x" * 256,
)


class BackendConformance(UploadConformance):
    """All conformance tests. Inherit them with ``class TestMine(BackendConformance)``, and define
    the fixture ``open_root`` there.
    """

    # -- one small object --------------------------------------------------------------------------

    def test_what_was_put_is_read_back(self, backend: StorageBackend) -> None:
        for size in (0, 1, 7, 4095, 4096, 4097, 1 << 20):
            key, data = f"step-1.a/{size}", payload(size)
            info = backend.put(key, [data])
            assert (info.key, info.size) == (key, size)
            assert backend.head(key) == info
            assert fetch(backend, key) == data

    def test_an_object_over_the_limit_is_refused(self, backend: StorageBackend) -> None:
        backend.put("record", [payload(100)])
        assert read_object(backend, "record", limit=100) == payload(100)
        with pytest.raises(ManifestCorrupt, match="has 100 bytes, more than the 99 allowed here"):
            read_object(backend, "record", limit=99)
        with pytest.raises(ObjectNotFound):
            read_object(backend, "missing", limit=99)

    def test_put_joins_parts_of_every_buffer_kind(self, backend: StorageBackend) -> None:
        whole = bytearray(payload(1000))
        parts: Sequence[memoryview | bytes | bytearray] = [
            bytes(whole[:10]),
            whole[10:500],
            b"",
            memoryview(whole)[500:],
        ]
        assert backend.put("joined", parts).size == 1000
        assert fetch(backend, "joined") == whole

    def test_put_replaces_what_was_there(self, backend: StorageBackend) -> None:
        backend.put("key", [payload(100)])
        backend.put("key", [b"new"])
        assert fetch(backend, "key") == b"new"

    def test_a_key_may_hold_blanks_dots_and_letters_of_any_language(
        self, backend: StorageBackend
    ) -> None:
        for key in ("with blank/a b", "..a/b..c", "ключ/鍵-é", "a+b=c&d%20#e@f", ".hidden/x"):
            backend.put(key, [key.encode()])
            assert fetch(backend, key) == key.encode()
            assert [info.key for info in backend.list(key.partition("/")[0])] == [key]

    # -- put if absent -----------------------------------------------------------------------------

    def test_put_if_absent_creates(self, backend: StorageBackend) -> None:
        assert backend.put("folder/new", [b"x"], if_absent=True).size == 1
        assert fetch(backend, "folder/new") == b"x"

    def test_put_if_absent_leaves_what_is_there_untouched(self, backend: StorageBackend) -> None:
        backend.put("taken", [b"first"])
        with pytest.raises(ObjectExists) as error_info:
            backend.put("taken", [b"second"], if_absent=True)
        assert error_info.value.key == "taken"
        assert fetch(backend, "taken") == b"first"
        assert [info.key for info in backend.list("")] == ["taken"]

    def test_of_eight_racing_puts_exactly_one_wins(self, roots: OpenRoot) -> None:
        backends = [roots("root") for _ in range(8)]
        if not backends[0].capabilities.put_if_absent:
            pytest.skip("this store has no conditional put, and says so")

        def race(number: int) -> bool:
            try:
                backends[number].put("race/marker", [payload(2000, number)], if_absent=True)
            except ObjectExists:
                return False
            return True

        wins = at_once(race, 8)
        assert wins.count(True) == 1
        assert fetch(backends[0], "race/marker") == payload(2000, wins.index(True))
        assert [info.key for info in backends[0].list("")] == ["race/marker"]

    # -- reading -----------------------------------------------------------------------------------

    def test_any_range_can_be_read(self, backend: StorageBackend) -> None:
        data = payload(20000)
        backend.put("ranges", [data])
        for offset, nbytes in (
            (0, 1),
            (0, 20000),
            (1, 1),
            (4096, 4096),
            (4095, 2),
            (8192, 11808),
            (19999, 1),
            (20000, 0),
            (5, 0),
            (0, 4096),
        ):
            out = page_aligned(bytes(nbytes))
            backend.read_into("ranges", offset, out)
            assert out == data[offset : offset + nbytes], (offset, nbytes)

    def test_reading_past_the_end_is_an_error(self, backend: StorageBackend) -> None:
        backend.put("short", [payload(100)])
        for offset, nbytes in ((0, 101), (99, 2), (100, 1), (5000, 1), (0, 8192)):
            with pytest.raises(StorageError) as error_info:
                backend.read_into("short", offset, page_aligned(bytes(nbytes)))
            assert error_info.value.key == "short", (offset, nbytes)
            assert not isinstance(error_info.value, ObjectNotFound), (offset, nbytes)

    def test_a_read_writes_only_into_its_own_memory(self, backend: StorageBackend) -> None:
        backend.put("object", [payload(100)])
        memory = bytearray(b"\xaa" * 100)
        backend.read_into("object", 20, memoryview(memory)[10:30])
        assert memory == b"\xaa" * 10 + payload(100)[20:40] + b"\xaa" * 70

    def test_many_may_read_at_once(self, backend: StorageBackend) -> None:
        data = payload(1 << 20)
        backend.put("shared", [data])

        def read(number: int) -> bool:
            out = bytearray(100_000)
            backend.read_into("shared", number * 1000, memoryview(out))
            return bytes(out) == data[number * 1000 : number * 1000 + 100_000]

        assert all(at_once(read, 16))

    def test_reads_while_a_key_is_replaced_see_one_version_or_the_other(
        self, backend: StorageBackend
    ) -> None:
        versions = [bytes([number]) * 50_000 for number in range(4)]
        backend.put("flip", [versions[0]])

        def work(number: int) -> set[bytes]:
            if number < len(versions):
                backend.put("flip", [versions[number]])
                return set()
            out = bytearray(50_000)
            backend.read_into("flip", 0, memoryview(out))
            return {bytes(out)}

        results = set[bytes]().union(*at_once(work, 10))
        assert results <= set(versions)

    # -- missing objects ---------------------------------------------------------------------------

    def test_a_missing_object_is_said_to_be_missing(self, backend: StorageBackend) -> None:
        backend.put("there/is/this", [b"x"])
        for key in ("nothing", "there", "there/is", "there/is/this/not", "there/is/thi"):
            with pytest.raises(ObjectNotFound) as error_info:
                backend.head(key)
            assert error_info.value.key == key
            with pytest.raises(ObjectNotFound):
                backend.read_into(key, 0, memoryview(bytearray(1)))

    def test_an_unused_root_is_empty(self, backend: StorageBackend) -> None:
        assert list(backend.list("")) == []
        assert list(backend.folders("")) == []
        assert list(backend.list("step")) == []
        assert list(backend.folders("step/")) == []
        with pytest.raises(ObjectNotFound):
            backend.head("manifest.json")

    def test_delete_removes(self, backend: StorageBackend) -> None:
        backend.put("a/b", [b"x"])
        backend.put("a/c", [b"y"])
        backend.delete("a/b")
        with pytest.raises(ObjectNotFound):
            backend.head("a/b")
        assert [info.key for info in backend.list("")] == ["a/c"]
        backend.put("a/b", [b"again"])
        assert fetch(backend, "a/b") == b"again"

    def test_deleting_what_is_not_there_is_no_error(self, backend: StorageBackend) -> None:
        backend.delete("nothing")
        backend.put("a/b", [b"x"])
        backend.delete("a/missing")
        backend.delete("a/b")
        backend.delete("a/b")
        assert list(backend.list("")) == []

    def test_deleting_a_folder_or_a_key_below_an_object_removes_nothing(
        self, backend: StorageBackend
    ) -> None:
        backend.put("there/is/this", [b"x"])
        for key in ("there", "there/is", "there/is/this/not", "there/is/thi"):
            backend.delete(key)
        assert [info.key for info in backend.list("")] == ["there/is/this"]

    def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(
        self, backend: StorageBackend
    ) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                backend.put(f"busy/{number}", [payload(100, turn)])
                assert fetch(backend, f"busy/{number}") == payload(100, turn)
                backend.delete(f"busy/{number}")

        at_once(work, 8)
        assert list(backend.list("busy/")) == []

    # -- listings ----------------------------------------------------------------------------------

    @pytest.fixture
    def tree(self, backend: StorageBackend) -> StorageBackend:
        for number, key in enumerate(
            ["step-1.a/x", "step-1.a/sub/y", "step-10.a/x", "step-2.b/x", "step.json", "other"]
        ):
            backend.put(key, [b"." * number])
        return backend

    def test_list_finds_what_starts_with_the_prefix(self, tree: StorageBackend) -> None:
        matches: dict[str, list[str]] = {
            "": [
                "other",
                "step-1.a/sub/y",
                "step-1.a/x",
                "step-10.a/x",
                "step-2.b/x",
                "step.json",
            ],
            "step-1": ["step-1.a/sub/y", "step-1.a/x", "step-10.a/x"],
            "step-1.a/": ["step-1.a/sub/y", "step-1.a/x"],
            "step-1.a/s": ["step-1.a/sub/y"],
            "step-1.a/sub/": ["step-1.a/sub/y"],
            "other": ["other"],
            "oth": ["other"],
            "zzz": [],
            "other/x": [],
        }
        assert {
            prefix: sorted(info.key for info in tree.list(prefix)) for prefix in matches
        } == matches

    def test_list_tells_when_an_object_was_put_if_it_tells_anything(
        self, tree: StorageBackend
    ) -> None:
        moments = [info.modified for info in tree.list("")]
        assert moments.count(None) in (0, len(moments))
        assert all(abs(time.time() - moment) < 1800 for moment in moments if moment is not None), (
            moments
        )

    def test_list_tells_sizes(self, tree: StorageBackend) -> None:
        assert {info.key: info.size for info in tree.list("step-1")} == {
            "step-1.a/x": 0,
            "step-1.a/sub/y": 1,
            "step-10.a/x": 2,
        }

    def test_folders_names_the_next_level(self, tree: StorageBackend) -> None:
        names: dict[str, list[str]] = {
            "": ["step-1.a", "step-10.a", "step-2.b"],
            "step-1.a/": ["sub"],
            "step-2.b/": [],
            "none/": [],
        }
        assert {prefix: sorted(tree.folders(prefix)) for prefix in names} == names

    def test_two_roots_on_one_store_do_not_see_each_other(self, roots: OpenRoot) -> None:
        run_1, run_2, run_1_again = roots("run"), roots("run-2"), roots("run")
        run_1.put("key", [b"one"])
        run_2.put("key", [b"two!"])
        assert fetch(run_1_again, "key") == b"one"
        assert [(info.key, info.size) for info in run_1.list("")] == [("key", 3)]
        assert [(info.key, info.size) for info in run_2.list("")] == [("key", 4)]
        run_2.delete("key")
        assert fetch(run_1, "key") == b"one"

    # -- bad keys, errors and properties -----------------------------------------------------------

    def test_a_bad_key_is_refused_by_every_verb(self, backend: StorageBackend) -> None:
        verbs: list[Callable[[str], object]] = [
            lambda key: backend.put(key, [b"x"]),
            lambda key: backend.put(key, [b"x"], if_absent=True),
            lambda key: backend.upload(key, 1),
            lambda key: backend.read_into(key, 0, memoryview(bytearray(1))),
            backend.head,
            backend.delete,
        ]
        for key, verb in product(_BAD_KEYS, verbs):
            with pytest.raises(StorageError):
                verb(key)
        assert list(backend.list("")) == []

    def test_a_bad_prefix_is_refused(self, backend: StorageBackend) -> None:
        for prefix in ("/", "../", "a/../", "a\\", "a\0"):
            with pytest.raises(StorageError):
                list(backend.list(prefix))
            with pytest.raises(StorageError):
                list(backend.folders(prefix))

    def test_errors_are_ours_and_name_no_vendor(self, backend: StorageBackend) -> None:
        with pytest.raises(CkptError) as error_info:
            backend.head("missing")
        assert type(error_info.value).__module__ == "ckpt.errors"

    def test_the_url_is_for_people(self, backend: StorageBackend) -> None:
        assert backend.url
        assert "@" not in backend.url
        assert "?" not in backend.url
        assert "secret" not in backend.url.lower()

    def test_capabilities_make_sense(self, backend: StorageBackend) -> None:
        capabilities = backend.capabilities
        assert capabilities.part_bytes >= 1 << 20
        assert capabilities.part_bytes % capabilities.alignment == 0
        assert capabilities.max_concurrency >= 1
        assert backend.capabilities == capabilities

    def test_backend_and_upload_have_the_shape_of_the_contract(
        self, backend: StorageBackend
    ) -> None:
        assert isinstance(backend, StorageBackend)
        upload = backend.upload("shape", 1)
        assert isinstance(upload, Upload)
        assert upload.part_bytes >= backend.capabilities.part_bytes
        upload.abort()
