"""What a process does in a world of simulated ranks, for the clock: put fragments, commit them,
restore, hear words.

Each function is the work of one process, and returns its processor time and memory.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from bench.worlds import Job, World
from ckpt.coordination.commit_state_machine import Durable
from ckpt.coordination.exchanges import encode_json
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest, ranks_of
from ckpt.model.fragment_columns import pack_fragment, read_fragment
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import FragmentRef, Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.validate import check_manifest
from ckpt.plan.merge import MergeCache, merge
from ckpt.plan.restore import plan_restore


def write(world: World, folder: str, ranks: range) -> dict[str, Any]:
    """Puts the fragments of some ranks, for two saves on the same layout.

    In a process of its own.
    """
    job = Job(world)
    refs: list[list[FragmentRef]] = [[], []]
    packing: list[float] = []
    for rank in ranks:
        leaves = world.leaves(rank)
        packed: Packed | None = None
        for step in (1, 2):
            packed = (
                job.again(packed, rank, step, leaves) if packed else job.packed(rank, step, leaves)
            )
            data = pack(packed)
            if rank == ranks[len(ranks) // 2]:  # the real thing, for the clock
                fragment = job.fragment(rank, step, leaves)
                start = time.process_time()
                pack(pack_fragment(fragment))
                packing.append(time.process_time() - start)
            with open(f"{folder}/{step}-{rank}", "wb") as file:
                file.write(data)
            refs[step - 1].append(FragmentRef(fragment_name(rank), rank, len(data), checksum(data)))
    return {"refs": refs, "pack": packing, "plan": job.plans.seconds}


def _read(folder: str, step: int, ref: FragmentRef) -> Packed:
    """As the committer reads a fragment."""
    with open(f"{folder}/{step}-{ref.rank}", "rb") as file:
        data = file.read()
    assert checksum(data) == ref.checksum
    return unpack(data, Packed, key=ref.name)


def commit(folder: str, refs: list[list[FragmentRef]]) -> dict[str, float]:
    """The leader's work of two saves.

    In a process of its own, since it measures its memory.
    """
    found: dict[str, float] = {"base": _peak()}
    known = MergeCache()
    gc.disable()  # as collection is on the save path: fragments have no cycles
    for step, name in ((1, "merge_first"), (2, "merge_known")):
        start, cpu = time.perf_counter(), time.process_time()
        manifest = merge(((_read(folder, step, ref), ref) for ref in refs[step - 1]), known)
        data = pack(manifest)
        found[name] = time.perf_counter() - start
        found[f"{name}_cpu"] = time.process_time() - cpu
    with open(f"{folder}/manifest", "wb") as file:
        file.write(data)
    return {**found, "manifest": float(len(data)), "memory": _peak()}


def restore(folder: str, world: World, rank: int) -> dict[str, float]:
    """A rank of ``world`` restores save 2: from the bytes of the manifest to its plan.

    In a process of its own.
    """
    with open(f"{folder}/manifest", "rb") as file:
        data = file.read()
    wanted = world.leaves(rank)
    base = _peak()
    gc.disable()  # as Restorer does
    start, cpu = time.perf_counter(), time.process_time()
    manifest = check_manifest(unpack(data, Manifest, key="manifest"), key="manifest")
    opened = time.perf_counter() - start
    ranks = ranks_of(manifest, [(leaf.name, leaf.boxes) for leaf in wanted])
    files = {ref.rank: ref for ref in manifest.fragments}
    parts = {}
    for each in sorted(ranks):
        with open(f"{folder}/2-{each}", "rb") as file:
            part = file.read()
        assert checksum(part) == files[each].checksum
        parts[each] = read_fragment(part, key="fragment")
    manifest = fill_manifest(manifest, parts, key="manifest")
    plan = plan_restore(manifest, wanted)
    seconds = time.perf_counter() - start
    assert plan.wanted_bytes == sum(leaf.nbytes for leaf in wanted)
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "open": opened,
        "fragments": len(ranks),
        "reads": len(plan.reads),
        "files": len({r.rank for r in plan.reads}),
        "over": plan.read_bytes / max(1, plan.wanted_bytes),
        "memory": _peak() - base,
    }


def _peak() -> float:
    """Return the peak of this process. The peak of ``getrusage`` begins with that of its parent."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024.0


def words(ranks: int) -> dict[str, float]:
    """The leader hears the words of all ranks, through a TCPStore of this process; and looks
    once when only half of them have come.
    """
    import torch.distributed as dist

    from ckpt.coordination.torch_store import TorchStoreCoordinator

    make: Any = dist  # torch's stub does not export it
    store = make.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    count = [0]

    class Counting(TorchStoreCoordinator):
        def __init__(self) -> None:
            self.rank, self.world_size, self.attempt = 0, ranks, "abcxyzdefuvw"
            self._store = store

        def _read_value(self, key: str) -> bytes | None:
            count[0] += 1
            return super()._read_value(key)

        def _have_values(self, keys: list[str]) -> bool:
            count[0] += 1
            return super()._have_values(keys)

        def _wait(self, keys: list[str], seconds: float) -> bool:
            count[0] += 1
            return super()._wait(keys, seconds)

    leader, word = (
        Counting(),
        encode_json(Durable(FragmentRef(fragment_name(ranks), ranks, 40000, "0" * 32))),
    )
    subject = "save/0/0/step-000001200.abcxyzdefuvw"
    for rank in range(ranks // 2):
        store.set(f"{subject}/{rank}", word.decode())
    begin = time.perf_counter()
    leader.collect(subject, set(range(ranks // 2, ranks)), timeout=0.001)
    look = time.perf_counter() - begin
    for rank in range(ranks // 2, ranks):
        store.set(f"{subject}/{rank}", word.decode())
    count[0] = 0
    begin, cpu = time.perf_counter(), time.process_time()
    assert len(leader.collect(subject, set(range(ranks)), timeout=60)) == ranks
    return {
        "hear": time.perf_counter() - begin,
        "hear_cpu": time.process_time() - cpu,
        "look": look,
        "requests": float(count[0]),
        "word": float(len(word)),
    }
