"""The list of every fault that is tried.

Tests count what they tried with the fixture ``tally``, and ``pytest --tally FILE`` writes the
counts to a file.

``python -m tests.faults.ledger`` puts them into the table of docs/reliability.md. A test compares
the page with the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "bench" / "results" / "reliability.json"
PAGE: Final = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- the table: python -m tests.faults.ledger -->", "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table: ``what`` happens, counted in ``unit``, and ``where`` it is tried.

    ``lost`` is what it costs, in the words of the table.
    """

    what: str
    unit: str
    lost: str
    where: str


NOTHING = "nothing"
FAULTS: Final[Mapping[str, Fault]] = {
    "killed-steps": Fault(
        "SIGKILL of a trainer with three tiers, before and after each call to each store",
        "deaths",
        "nothing; the save under way is finished or not listed",
        "tests/crash/test_kill_tiers.py",
    ),
    "killed-random": Fault(
        "SIGKILL of it at random moments",
        "deaths",
        "nothing; the save under way is finished or not listed",
        "tests/crash/test_kill_tiers.py",
    ),
    "agent-deaths": Fault(
        "SIGKILL of a trainer with an agent and three tiers, of the agent, or of both, at random "
        "moments, also while the agent finishes",
        "deaths",
        "nothing that was committed; the step in memory too, unless the agent was killed",
        "tests/agent/test_deaths.py",
    ),
    "node-deaths": Fault(
        "SIGKILL of the ranks and agents of one or both of two nodes with three tiers, at random "
        "moments; each sixth time a node is lost with its memory and its folder",
        "deaths",
        "nothing that was committed; with a node, what only the nodes had",
        "tests/agent/test_node_deaths.py",
    ),
    "nodes-removed": Fault(
        "loss of one of several nodes with its cable, ranks, agent and memory (namespaces of its "
        "own), while the others keep copies (`buddies=1`): at rest, or in the midst of saves",
        "nodes",
        "nothing that had its copies; in the midst of saves, at most the one step that had none "
        "yet",
        "tests/agent/test_removed_nodes.py",
    ),
    "ranks": Fault(
        "SIGKILL or SIGSTOP of one, two or all of four ranks under torchrun, or of its agent, at "
        "random moments of saves, restores and steps",
        "runs",
        "the steps since the last commit; nothing after SIGTERM",
        "tests/faults/test_ranks.py",
    ),
    "server-killed": Fault(
        "SIGKILL of the S3 server in mid-upload, and its return",
        "kills",
        NOTHING,
        "tests/faults/test_object_server.py",
    ),
    "network": Fault(
        "a proxy before S3 that delays, throttles, resets, answers 500, 503 and SlowDown, cuts "
        "bodies, loses replies",
        "requests harmed",
        NOTHING,
        "tests/faults/test_network.py",
    ),
    "network-stall": Fault(
        "a proxy that swallows requests and never answers",
        "requests harmed",
        "nothing, or that save, with our error in the stated time",
        "tests/faults/test_network.py",
    ),
    "no-space": Fault(
        "ENOSPC on a mount of its own, at the pages of a save in turn, on each tier on disk",
        "full disks",
        "that save, with `OutOfSpace`",
        "tests/faults/test_disk.py",
    ),
    "no-inodes": Fault(
        "no inode left, at every file of a save",
        "full disks",
        "that save, with `OutOfSpace`",
        "tests/faults/test_disk.py",
    ),
    "read-only": Fault(
        "a mount turned read-only between the calls of a save",
        "remounts",
        "that save, with `AccessDenied`",
        "tests/faults/test_disk.py",
    ),
    "io-error": Fault(
        "EIO, ENOSPC, EDQUOT, ESTALE, EROFS or EACCES from each system call of a save, a prune "
        "and a restore",
        "failed calls",
        "that save, with the `StorageError` of that error number",
        "tests/faults/test_syscalls.py",
    ),
    "nfs": Fault(
        "a real NFS server: out of space late, stopped and started under a soft and a hard mount, "
        "files deleted while open",
        "saves",
        "that save, with our error",
        "tests/faults/nfs.sh",
    ),
    "flipped": Fault(
        "a flipped bit in any file of any tier",
        "damaged files",
        "nothing while another tier or step is whole; else said, never restored",
        "tests/faults/test_damage.py",
    ),
    "cut": Fault(
        "any file of any tier cut at any length, emptied or removed",
        "damaged files",
        "nothing while another tier or step is whole; else said, never restored",
        "tests/faults/test_damage.py",
    ),
    "clock": Fault(
        "the clock jumps by hours and days, back and forth, between and within saves",
        "jumps",
        NOTHING,
        "tests/faults/test_clock.py",
    ),
    "two-jobs": Fault(
        "two jobs that save and prune in one root at once, neither able to see that the other lives",  # noqa: E501
        "saves",
        "saves of the one that lost the root, with `RootInUse`",
        "tests/faults/test_two_jobs.py",
    ),
    "power": Fault(
        "loss of power after each system call of saves and prunes: what was not fsynced is gone, "
        "or any part of it",
        "states of the disk",
        "nothing; the save under way is finished or not listed",
        "tests/faults/test_power_loss.py",
    ),
    "names": Fault(
        "a manifest whose names leave the root: .., absolute, links, Windows forms, NUL, very "
        "long, look-alikes",
        "manifests",
        "refused with `ManifestCorrupt`",
        "tests/faults/test_hostile.py",
    ),
    "sizes": Fault(
        "a manifest that claims 2^60 bytes, 50,000 tensors, deep nesting, a frame that unpacks to "
        "more",
        "manifests",
        "refused before memory is reserved",
        "tests/faults/test_hostile.py",
    ),
    "fuzz": Fault(
        "manifests, fragments, owners' notes and trees mutated at random, with right checksums",
        "records",
        "refused with our error",
        "tests/fuzz/test_readers.py",
    ),
    "fuzz-large": Fault(
        "manifests and fragments of large worlds, in columns, mutated at random",
        "records",
        "read or refused with our error, within bounds",
        "tests/fuzz/test_large_worlds.py",
    ),
    "import": Fault(
        "files of `torch.save`, DCP and safetensors with changed bytes, most of them with right "
        "checksums, given to `ckpt import`",
        "files",
        "refused with our error, or imported; nothing outside of the target",
        "tests/fuzz/test_import_mutations.py",
    ),
}


class Tally:
    """What a session has tried.

    Tests that pass call ``add``. A session that fails writes nothing.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def add(self, fault: str, tries: int, *, kind: str) -> None:
        assert fault in FAULTS, fault
        self.counts[fault, kind] = self.counts.get((fault, kind), 0) + tries

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        found = json.loads(path.read_text()) if path.exists() else {}
        for (fault, kind), tries in sorted(self.counts.items()):
            found.setdefault(fault, {})[kind] = {"tries": tries, **about}
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def table(results: Mapping[str, Any]) -> str:
    """Return the rows for what has been tried."""
    lines = [
        "| fault | tried by `make test` | by `make torture` | lost | where |",
        "|---|---:|---:|---|---|",
    ]
    for name, fault in FAULTS.items():
        if name in results:
            ci, torture, hand = (
                results[name].get(kind, {}).get("tries", 0) for kind in ("ci", "torture", "hand")
            )
            cells = [f"{count:,} {fault.unit}" if count else "-" for count in (ci, torture)]
            cells[1] = f"by hand: {hand} {fault.unit}" if hand else cells[1]
            lines.append(
                f"| {fault.what} | {cells[0]} | {cells[1]} | {fault.lost} | `{fault.where}` |"
            )
    return "\n".join(lines)


def page(text: str, results: Mapping[str, Any]) -> str:
    """Return ``text`` with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
