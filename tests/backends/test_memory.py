from __future__ import annotations

import uuid

import pytest

from ckpt.errors import ConfigError, ObjectNotFound
from ckpt.storage.testing import BackendConformance
from ckpt_backends.memory import forget_memory, open_memory
from tests.kit.parts import parts_of

part_bytes = parts_of("ckpt_backends.memory._PART_BYTES")


class TestMemory(BackendConformance):
    @pytest.fixture
    def open_root(self, part_bytes):
        store = uuid.uuid4().hex
        yield lambda name: open_memory(f"memory://{store}/{name}", {})
        forget_memory(store)


def test_two_names_are_two_stores():
    open_memory("memory://one", {}).put("key", [b"x"])
    with pytest.raises(ObjectNotFound):
        open_memory("memory://two", {}).head("key")
    forget_memory("one")
    assert list(open_memory("memory://one", {}).list("")) == []


def test_the_root_of_a_store_sees_its_prefixes():
    open_memory("memory://pre/a/b", {}).put("key", [b"x"])
    assert [info.key for info in open_memory("memory://pre", {}).list("")] == ["a/b/key"]
    assert open_memory("memory://pre/a/b/", {}).url == "memory://pre/a/b"
    forget_memory("pre")


def test_shared_is_what_the_option_says():
    assert not open_memory("memory://s", {}).capabilities.shared
    assert open_memory("memory://s", {"shared": True}).capabilities.shared
    with pytest.raises(ConfigError):
        open_memory("memory://s", {"sharde": True})
