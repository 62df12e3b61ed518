from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt.errors import HostMemoryExhausted
from ckpt.staging import memory_budget
from ckpt.staging.memory_budget import Budget, Reservation, Room, Siblings, decide, measure

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Set 64 GiB of free memory, independently of this machine."""
    monkeypatch.setattr(memory_budget, "_meminfo_available", lambda: 64 << 30)


@pytest.mark.parametrize(
    ("memory", "shared", "slots", "is_shared"),
    [
        (1000, 1000, 2, True),
        (200, 200, 2, True),
        (199, 199, 1, True),
        (1000, 150, 1, True),
        (1000, 99, 2, False),
        (100, 0, 1, False),
    ],
)
def test_as_many_slots_as_fit_and_shared_if_one_does(memory, shared, slots, is_shared):
    budget = decide(
        100 * MIB, most_slots=2, room=Room(memory=memory * MIB, shared_bytes=shared * MIB, ranks=1)
    )
    assert (budget.slots, budget.is_shared, budget.nbytes) == (
        slots,
        is_shared,
        100 * MIB,
    )
    assert f"{slots} slot(s) of 100 MiB" in budget.sentence
    assert ("lost with the process" in budget.sentence) != is_shared
    assert ("2 were wanted" in budget.sentence) == (slots < 2)


def test_a_small_image_has_a_size():
    room = Room(memory=MIB, shared_bytes=MIB, ranks=1)
    assert "2 slot(s) of 98 KiB each" in decide(100_000, most_slots=2, room=room).sentence


@pytest.mark.parametrize("used", [0, 100])
def test_what_deltas_keep_is_counted_and_told(tmp_path, monkeypatch, used):
    """Memory that is yet to be taken is free on the machine until then."""
    monkeypatch.setattr(memory_budget, "free_memory", lambda: (1000 - used) * MIB)
    kept = Reservation(100 * MIB, used * MIB)
    assert kept.reduce(measure(str(tmp_path), ranks=1)).memory == 900 * MIB
    room = kept.reduce(measure(str(tmp_path), ranks=1, limit=500 * MIB))
    assert (room.memory, room.limit) == (400 * MIB, 400 * MIB)
    sentence = decide(200 * MIB, most_slots=2, room=room).sentence
    assert "100 MiB more keep the last step for deltas" in sentence
    room = kept.reduce(measure(str(tmp_path), ranks=1, limit=150 * MIB))
    with pytest.raises(HostMemoryExhausted, match="100 MiB more keep the last step for deltas"):
        decide(1000 * MIB, most_slots=2, room=room)


def test_when_not_even_one_fits_the_numbers_are_told():
    with pytest.raises(
        HostMemoryExhausted, match=r"100 MiB: 30 MiB may be used by each of the 8 rank"
    ) as caught:
        decide(100 * MIB, most_slots=2, room=Room(memory=30 * MIB, shared_bytes=500 * MIB, ranks=8))
    assert caught.value.needed == 100 * MIB


def test_the_ranks_of_a_node_share_what_is_there(tmp_path):
    one, eight = measure(str(tmp_path), ranks=1), measure(str(tmp_path), ranks=8)
    assert one.memory > 0
    assert eight.memory == pytest.approx(one.memory / 8, rel=0.2)
    assert 0 < eight.shared_bytes <= eight.memory


def test_the_last_rank_to_ask_gets_as_much_as_the_first(cgroup, tmp_path):
    """Three of four ranks have taken their part already."""
    cgroup(("/job", 1000, 0, 0))
    first = measure(str(tmp_path), ranks=4).memory
    cgroup(("/job", 1000, 3 * first // MIB, 0))
    siblings = Siblings(node_memory=4 * first, shm_bytes=0)
    assert measure(str(tmp_path), ranks=4, siblings=siblings).memory == first
    # what it would get if they were foreign processes
    assert measure(str(tmp_path), ranks=4).memory < first / 2


def test_a_rank_gets_no_more_than_there_is_whatever_the_others_hold(cgroup, tmp_path):
    cgroup(("/job", 1000, 900, 0))
    siblings = Siblings(node_memory=1000 * MIB, shm_bytes=900 * MIB)
    got = measure(str(tmp_path), ranks=2, siblings=siblings)
    assert got.memory / MIB / memory_budget._USABLE_SHARE == pytest.approx(100, abs=1)
    assert got.shared_bytes <= got.memory


def test_a_shared_memory_that_is_not_there_has_no_room(tmp_path):
    assert measure(str(tmp_path / "missing"), ranks=1).shared_bytes == 0


# -- memory cgroups: a tree of files as the kernel shows it -------------------------------------

V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "stat": "total_inactive_file {}\ntotal_active_file 0\n",
}
V2 = {
    "limit": "memory.max",
    "used": "memory.current",
    "stat": "anon 7\ninactive_file {}\nactive_file 0\nslab 9\n",
}
UNLIMITED = {"v1": str(0x7FFFFFFFFFFFF000), "v2": "max"}


@pytest.fixture(params=["v1", "v2"])
def cgroup(request, tmp_path, monkeypatch):
    """Put cgroups below a mount of their own. This process is in the last one, or in
    ``reported``.
    """
    names = {"v1": V1, "v2": V2}[request.param]
    kind = {"v1": "_V1", "v2": "_V2"}[request.param]
    monkeypatch.setattr(
        memory_budget, kind, replace(getattr(memory_budget, kind), mount=str(tmp_path))
    )
    other = {"_V1": "_V2", "_V2": "_V1"}[kind]
    monkeypatch.setattr(
        memory_budget,
        other,
        replace(getattr(memory_budget, other), mount=str(tmp_path / "not mounted")),
    )

    def make(*groups: tuple[str, int | None, int, int], reported: str | None = None) -> None:
        for path, limit, used, cache in groups:
            folder = tmp_path / path.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names["limit"]).write_text(
                UNLIMITED[request.param] if limit is None else str(limit * MIB)
            )
            (folder / names["used"]).write_text(str(used * MIB))
            (folder / "memory.stat").write_text(names["stat"].format(cache * MIB))
        path = reported or groups[-1][0]
        own = tmp_path / "own"
        own.write_text(f"9:cpu,cpuacct:/elsewhere\n4:memory:{path}\n0::{path}\n")
        monkeypatch.setattr(memory_budget, "_OWN_CGROUPS", str(own))

    return make


def room(tmp_path, ranks: int = 1) -> float:
    """Return the MiB that are left, before anything is kept back for others."""
    return measure(str(tmp_path), ranks=ranks).memory / MIB / memory_budget._USABLE_SHARE


def test_a_limit_of_the_process_own_cgroup_is_seen(cgroup, tmp_path):
    cgroup(("/", None, 900, 0), ("/slurm", None, 500, 0), ("/slurm/job_7", 300, 100, 0))
    assert room(tmp_path) == pytest.approx(200, abs=1)
    assert room(tmp_path, ranks=4) == pytest.approx(50, abs=1)


def test_the_tightest_of_all_levels_counts(cgroup, tmp_path):
    cgroup(("/", 5000, 900, 0), ("/slurm", 400, 350, 0), ("/slurm/job_7", 300, 100, 0))
    assert room(tmp_path) == pytest.approx(50, abs=1)


def test_page_cache_is_given_back_and_counts_as_room(cgroup, tmp_path):
    """After a day of reading data, every container is full of page cache."""
    cgroup(("/", None, 0, 0), ("/job", 300, 299, 250))
    assert room(tmp_path) == pytest.approx(251, abs=1)


def test_in_a_container_that_is_told_the_path_of_its_host_the_root_it_sees_counts(cgroup, tmp_path):
    cgroup(("/", 300, 100, 0), reported="/docker/0123abc")
    assert room(tmp_path) == pytest.approx(200, abs=1)


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(cgroup, tmp_path):
    cgroup(("/job", 300, 310, 0))
    assert room(tmp_path) == 0
    with pytest.raises(HostMemoryExhausted, match="memory cgroup"):
        decide(MIB, most_slots=2, room=measure(str(tmp_path), ranks=1))


def test_without_a_limit_the_machine_counts(cgroup, tmp_path):
    cgroup(("/", None, 900, 0), ("/job", None, 500, 0))
    assert room(tmp_path) > 900


def test_memory_that_is_throttled_beyond_counts_as_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_budget, "_V2", replace(memory_budget._V2, mount=str(tmp_path)))
    monkeypatch.setattr(memory_budget, "_OWN_CGROUPS", str(tmp_path / "own"))
    for name, text in {
        "own": "0::/\n",
        "memory.max": "max",
        "memory.high": str(200 * MIB),
        "memory.current": "0",
    }.items():
        (tmp_path / name).write_text(text)
    assert room(tmp_path) == pytest.approx(200, abs=1)


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/../..\n", "4:memory:\n"])
def test_cgroups_that_cannot_be_read_are_no_limit(own, tmp_path, monkeypatch):
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory_budget, "_OWN_CGROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(memory_budget, "_V1", replace(memory_budget._V1, mount=str(tmp_path)))
    monkeypatch.setattr(memory_budget, "_V2", replace(memory_budget._V2, mount=str(tmp_path)))
    assert room(tmp_path) > 100


def test_a_large_image_passes_through_a_ring_and_the_rest_of_the_memory_is_for_the_spill():
    room = Room(memory=8000 * MIB, shared_bytes=4000 * MIB, ranks=1)
    found = decide(2000 * MIB, most_slots=2, room=room, elastic=True)
    assert (found.slots, found.slot_bytes, found.is_shared) == (2, 192 * MIB, False)
    assert found.spill_bytes == (4000 - 2 * 192) * MIB
    assert "192 MiB of anonymous memory in waves" in found.sentence


@pytest.mark.parametrize(("nbytes", "memory"), [(95 * MIB, 8000 * MIB), (2000 * MIB, 250 * MIB)])
def test_a_small_image_is_whole_and_little_memory_is_one_ring(nbytes, memory):
    found = decide(
        nbytes, most_slots=2, room=Room(memory=memory, shared_bytes=memory, ranks=1), elastic=True
    )
    assert (found.slots, found.spill_bytes) == ((2, 0) if nbytes < memory else (1, 0))
    assert found.slot_bytes == (nbytes if nbytes < memory else 160 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "frame"),
    [(96, 8), (256, 8), (511, 8), (512, 16), (1023, 16), (1024, 32), (1 << 20, 32)],
)
def test_a_ring_has_at_most_a_fifth_of_an_image_that_is_not_very_small(nbytes, frame):
    room = Room(memory=4 << 40, shared_bytes=0, ranks=1)
    found = decide(nbytes * MIB, most_slots=2, room=room, elastic=True, part_bytes=16 * MIB)
    assert (found.frame_bytes, found.slot_bytes) == (frame * MIB, 6 * frame * MIB)
    assert found.slot_bytes <= found.nbytes / 5 or nbytes < 256


@pytest.mark.parametrize("nbytes", [49, 64, 95, 96, 256, 512, 1024])
def test_the_spill_has_room_for_a_whole_image_of_tensors_that_are_copied_at_the_call(nbytes):
    """Otherwise the call would last until the store has taken the rest of the image."""
    room = Room(memory=4 << 40, shared_bytes=0, ranks=1)
    found = decide(nbytes * MIB, most_slots=2, room=room, elastic=True, part_bytes=16 * MIB)
    assert found.slot_bytes == found.nbytes or found.spill_bytes >= found.nbytes


def test_a_ring_grows_with_the_parts_of_a_very_large_image():
    """S3 takes at most 10,000 parts."""
    room = Room(memory=4 << 40, shared_bytes=0, ranks=1)
    found = decide(2 << 40, most_slots=2, room=room, elastic=True)
    part = -(-(2 << 40) // 10_000)
    assert 192 * MIB < found.slot_bytes >= part + 64 * MIB


@pytest.mark.parametrize(
    ("nbytes", "part", "least"),
    [
        (2000, 16, "171 MiB: 128 MiB that the image passes through in waves, and 43 MiB for"),
        (2000, 200, "384 MiB: 288 MiB that the image passes through in waves, and 96 MiB for"),
        (300, 16, "43 MiB: 32 MiB that the image passes through in waves, and 11 MiB for"),
        (40, 16, "40 MiB, for the whole image"),
    ],
)
def test_too_little_memory_is_an_error_with_the_least_and_what_it_is_for(nbytes, part, least):
    def budget_of(memory: int) -> Budget:
        room = Room(memory=memory * MIB, shared_bytes=0, ranks=2)
        return decide(nbytes * MIB, most_slots=2, room=room, elastic=True, part_bytes=part * MIB)

    enough = int(least.split()[0])
    assert budget_of(enough).slots == 1
    with pytest.raises(HostMemoryExhausted, match=f"the least is {least}"):
        budget_of(enough - 1)
