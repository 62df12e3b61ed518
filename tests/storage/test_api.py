from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from ckpt.storage.api import ScatterReads, aligned_memory
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) - 1, 2 << 20, (16 << 20) + 8192])
def test_aligned_memory_begins_at_a_huge_page_and_has_the_size_asked_for(nbytes: int) -> None:
    memory = aligned_memory(nbytes)
    assert memory.nbytes == nbytes
    assert np.frombuffer(memory, np.uint8).ctypes.data % (2 << 20) == 0
    memory[:] = b"\xa5" * nbytes
    assert memory.tobytes() == b"\xa5" * nbytes


def test_aligned_memory_goes_with_its_last_view() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    gc.collect()
    before = resident()
    for _ in range(20):
        memory = aligned_memory(8 << 20)
        memory[:] = bytes(8 << 20)
        view = memory[100:]
        del memory
        assert view[0] == 0
        del view
    assert resident() - before < 32 << 20


def test_a_folder_can_read_into_many_places_and_what_wraps_it_need_not(tmp_path: Path) -> None:
    """Faults are injected into ``read_into``, so the wrapper reads each place by itself."""
    folder = open_backend(str(tmp_path))
    assert isinstance(folder, ScatterReads)
    assert not isinstance(FaultyBackend(folder), ScatterReads)
    folder.put("x", [b"0123456789"])
    outs = [memoryview(bytearray(n)) for n in (3, 0, 4)]
    folder.read_parts("x", 2, outs)
    assert [bytes(out) for out in outs] == [b"234", b"", b"5678"]
