"""Files and manifests that were made to do harm.

No file leaves the root, no memory is reserved because a number says so, and no other user may read.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.cli.main import main
from ckpt.errors import AccessDenied, CkptError, ManifestCorrupt, NoCheckpoint
from ckpt.model.checksum import checksum
from ckpt.storage.api import check_key
from ckpt.storage.registry import open_backend
from tests.faults.conftest import Count
from tests.kit.damage import sealed
from tests.kit.stores import whole
from tests.kit.worlds import run_code

NAMES = (
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "//etc/passwd",
    "C:\\x",
    "C:/x",
    "\\\\host\\share",
    "rank-00000.safetensors:stream",
    "NUL",
    "con.json",
    "rank-00000.safetensors\0",
    "\0",
    "",
    ".",
    "a" * 5000,
    "rank-00000.safetensors/",
    "./rank-00000.safetensors",
    "x/rank-00000.safetensors",
    "rank-\u0660\u0660\u0660\u0660\u0660.safetensors",
    "rank\u201000000.safetensors",
    "rank-00000\u2024safetensors",
    "\u202erank-00000.safetensors",
    "rank-00000.safetensors ",
    "rank-00000.safetensors.",
    "RANK-00000.SAFETENSORS",
    "rank-00001.safetensors",
    "manifest.json",
    "writer.json",
    "%2e%2e/x",
    "..%2fx",
    "~/x",
    "$HOME",
    "rank-00000.safetensors\n",
    "\ud7ff",
    "e\u0301",
)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of 24 bytes."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"x": torch.arange(3)}, 1)
    [folder] = (tmp_path / "run").glob("step-*")
    return folder


def body_of(step: Path) -> Any:
    return json.loads((step / "manifest.json").read_bytes())["body"]


def refused(step: Path, body: Any) -> None:
    """Check that a restore rejects this manifest and touches nothing."""
    (step / "manifest.json").write_bytes(sealed(body))
    before = torch.full((3,), -1)
    with (
        CheckpointManager(step.parent) as manager,
        pytest.raises(NoCheckpoint, match=r"is not a valid manifest|checkpoint file"),
    ):
        manager.restore({"x": before})
    assert before.tolist() == [-1] * 3


def test_a_name_that_is_not_the_ranks_own_is_refused(step: Path, tally: Count) -> None:
    whole_body = body_of(step)
    for name in NAMES:
        for table in ("files", "fragments"):
            body = json.loads(json.dumps(whole_body))
            body[table][0][0] = name
            refused(step, body)
    tally("names", 2 * len(NAMES))


def test_a_name_of_a_tensor_is_no_path(tmp_path: Path, tally: Count) -> None:
    """Any text may name a tensor, and never names a file."""
    names = [name for name in NAMES if name and not name.startswith("$")]
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({name: torch.tensor(index) for index, name in enumerate(names)}, 1)
        target = {name: torch.tensor(-1) for name in names}
        manager.restore(target)
    assert [int(value) for value in target.values()] == list(range(len(names)))
    assert sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_file()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    tally("names", len(names))


@pytest.mark.parametrize(
    "key",
    [
        *NAMES[:10],
        NAMES[11],
        NAMES[12],
        NAMES[13],
        NAMES[14],
        NAMES[15],
        NAMES[16],
        "a/../b",
        "a//b",
        "nul\x01",
    ],
)
def test_a_key_that_leaves_the_root_reaches_no_store(tmp_path: Path, key: str) -> None:
    backend = open_backend(str(tmp_path / "run"))
    if key in ("NUL", "con.json"):
        check_key(key)  # a plain name here; on a Windows share the share has to refuse it
        return
    for call in (
        lambda: backend.put(key, [b"x"]),
        lambda: backend.head(key),
        lambda: backend.delete(key),
        lambda: backend.upload(key, 9),
    ):
        with pytest.raises(CkptError):
            call()
    assert not list(tmp_path.rglob("*"))


def test_links_lead_nowhere(step: Path, tmp_path: Path, tally: Count) -> None:
    image = step / "rank-00000.safetensors"
    outside = tmp_path / "outside"
    outside.mkdir()
    image.rename(outside / "image")
    image.symlink_to(outside / "image")
    with CheckpointManager(step.parent) as manager, pytest.raises(CkptError):
        manager.restore({"x": torch.zeros(3, dtype=torch.int64)})
    step.rename(tmp_path / "moved")
    step.symlink_to(outside, target_is_directory=True)
    backend = open_backend(str(step.parent))
    for call in (
        lambda: backend.put(f"{step.name}/x", [b"x"]),
        lambda: backend.delete(f"{step.name}/image"),
        lambda: backend.head(f"{step.name}/image"),
    ):
        with pytest.raises(AccessDenied):
            call()
    assert whole(step.parent) == []
    assert [path.name for path in outside.iterdir()] == ["image"]
    tally("names", 2)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "rank-00000.json"])
def test_a_link_out_of_the_root_is_damage_to_its_step_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        for number in (1, 2, 3):
            manager.save({"x": torch.full((3,), number)}, number)
    [newest] = root.glob("step-*3.*")
    (newest / name).rename(tmp_path / "elsewhere")
    (newest / name).symlink_to(tmp_path / "elsewhere")

    def ckpt(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt", *args, "--root", str(root)])
        return main(), capsys.readouterr().out

    code, reported = ckpt("ls")
    assert code == 0
    if name == "manifest.json":
        assert "a link leads out of the root" in reported
    assert ckpt("verify", "3")[0] == 4
    assert ckpt("verify", "2")[0] == 0
    state = {"x": torch.zeros(3, dtype=torch.int64)}
    with CheckpointManager(root) as manager:
        report = manager.restore(state)
        assert report is not None
        assert report.step == int(state["x"][0]) == 2
        assert [step for step, _ in report.skipped] == [3]
        manager.save(state, 4)
    assert ckpt("prune", "--keep-last", "1")[0] == 0
    left = [ref.step for ref in committed(open_backend(str(root)))]
    assert left == [4, 3]  # a damaged step is kept for a day
    assert (tmp_path / "elsewhere").exists()


def test_a_note_of_the_owner_that_is_a_link_out_of_the_root_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "run/writer.json").symlink_to(tmp_path / "elsewhere")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"x": torch.ones(3)}, 1)
    assert whole(tmp_path / "run") == [1]
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """This also holds with a umask that would let all users in."""
    old = os.umask(0)
    try:
        with CheckpointManager([Tier("memory"), tmp_path / "near", tmp_path / "far"]) as manager:
            manager.save({"x": torch.ones(9)}, 1)
            shared = [
                Path("/dev/shm", name)
                for name in os.listdir("/dev/shm")
                if name.startswith(f"ckpt-slot-{os.getpid()}-")
            ]
            assert shared
            mine = [
                path
                for path in Path("/dev/shm").glob(f"ckpt-memory-{os.getuid()}-*")
                if any(
                    other.samefile(slot) for other in path.rglob("*.safetensors") for slot in shared
                )
            ]
            assert mine
            for path in [
                *shared,
                *tmp_path.rglob("*"),
                *mine,
                *(inner for folder in mine for inner in folder.rglob("*")),
            ]:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
    finally:
        os.umask(old)


GREEDY = """
import resource, sys, torch
from ckpt import CheckpointManager
from ckpt.errors import CkptError
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
with CheckpointManager(sys.argv[1]) as manager:
    before = peak()
    for step in manager.steps():
        try: manager.restore({"x": torch.zeros(3, dtype=torch.int64)}, step); print("RESTORED", step)
        except CkptError as error: print(step, type(error).__name__, str(error)[:150])
    print("GREW", peak() - before)
"""  # noqa: E501


def test_numbers_in_a_manifest_reserve_nothing(step: Path, tmp_path: Path, tally: Count) -> None:
    whole_body = body_of(step)

    def changed(change: Any) -> Any:
        body = json.loads(json.dumps(whole_body))
        change(body)
        return body

    def claim(body: Any, size: int) -> None:
        body["files"][0][2] = size
        body["files"][0][3] = [[4096, "0" * 32], [size - 4096, "0" * 32]]

    tensor = whole_body["tensors"][0]
    bodies = [
        changed(lambda body: claim(body, 2**60)),
        changed(lambda body: claim(body, 2**62)),
        changed(lambda body: body.update(chunk_bytes=2**60)),
        changed(lambda body: body.update(world_size=2**40)),
        changed(lambda body: body["fragments"][0].__setitem__(2, 2**60)),
        changed(
            lambda body: body.update(
                tensors=[[tensor[0], tensor[1], [2**60], [[0, 4096, [0], [2**60]]]]]
            )
        ),
        changed(
            lambda body: body.update(
                tensors=[[tensor[0], tensor[1], [2**20] * 3, [[0, 4096, [0] * 3, [2**20] * 3]]]]
            )
        ),
        changed(
            lambda body: body.update(
                tensors=[[f"t{number}", "int64", [0], []] for number in range(50_000)]
            )
        ),
        changed(lambda body: body.update(tensors=[[tensor[0], tensor[1], [1] * 5000, []]])),
    ]
    for number, body in enumerate(bodies, start=2):
        folder = step.parent / f"step-{number:09d}.{whole_body['attempt']}"
        folder.mkdir()
        for name in ("rank-00000.safetensors", "rank-00000.json"):
            (folder / name).write_bytes((step / name).read_bytes())
        (folder / "manifest.json").write_bytes(sealed({**body, "step": number}))
    for number, packed in enumerate(
        (b'{"checksum":"' + b"[" * 10**6, sealed({"a": 1}).replace(b"1", b"[" * 10**5)), start=50
    ):
        folder = step.parent / f"step-{number:09d}.{whole_body['attempt']}"
        folder.mkdir()
        (folder / "manifest.json").write_bytes(packed)
    said = run_code(GREEDY, step.parent)
    restored = [line for line in said.splitlines() if line.startswith("RESTORED")]
    assert restored == ["RESTORED 1"], said
    assert int(said.rpartition("GREW ")[2]) < 200, said
    tally("sizes", len(bodies) + 2)


def test_a_frame_that_claims_more_than_any_manifest_is_refused(step: Path, tally: Count) -> None:
    import zstandard

    for frame in (
        zstandard.ZstdCompressor().compress(b"")[:4]
        + b"\xe0"
        + (1 << 50).to_bytes(8, "little"),  # the header of a frame of 2^50 bytes
        zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 10**6),
    ):
        (step / "manifest.json").write_bytes(
            b"ckpt-zstd " + checksum(frame).encode() + b"\n" + frame
        )
        backend = open_backend(str(step.parent))
        with pytest.raises(ManifestCorrupt):
            read_manifest(backend, committed(backend)[0])
    tally("sizes", 2)
