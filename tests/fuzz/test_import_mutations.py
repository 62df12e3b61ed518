"""Files of other programs with changed bytes.

`ckpt import` accepts them or refuses them, soon, and writes nothing but its target.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt.catalog.step_listing import committed
from ckpt.cli.main import main
from ckpt.exchange.foreign.source_formats import read_source
from ckpt.storage.registry import open_backend
from tests.exchange.states import odd_state, trained
from tests.faults.conftest import Count, tally
from tests.fuzz.mutations import WILD, places

__all__ = ["tally"]

# a warning of torch is not an error outside of tests
pytestmark = pytest.mark.filterwarnings("default")

CODES = {0, 2, 3, 4, 5, 7, 8}
MOST_SECONDS = 5.0
"""Of processor time. An import of these files takes some hundredths of a second."""
MOST_BYTES, MOST_BYTES_PER_BYTE = 48 << 20, 256
NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
PIECES = (
    b"",
    b"\0" * 64,
    b"\xff" * 64,
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"(" * 50,
    b"h\x00",
    b"\x86" * 30,
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"R",
    b"b",
    b"../../victim",
    b'{"a":',
    b"[" * 2_000,
    b"\x1b]8;;x\x07",
    b"1e999",
    b"NaN",
    b"9" * 5_000,
    b"\x8b\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
)


# -- what is changed -------------------------------------------------------------------------------


def anywhere(data: bytes, draw: random.Random) -> bytes:
    """Make one to four changes: to bits, bytes or numbers, or to parts.

    A part is removed, doubled, moved or cut, or gets another meaning.
    """
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 2, 4, 8, 30, 300)))
        match draw.randrange(9):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at:end] = draw.randbytes(end - at)
            case 2:
                width = draw.choice((1, 2, 4, 8))
                number = draw.choice(NUMBERS) & ((1 << 8 * width) - 1)
                changed[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
            case 3:
                changed[at:at] = draw.choice(PIECES)
            case 4:
                piece = draw.choice(PIECES)
                changed[at : at + len(piece)] = piece
            case 5:
                del changed[at:end]
            case 6:
                changed[at:at] = changed[at:end] * draw.choice((1, 2, 20))
            case 7:
                part = changed[at:end]
                del changed[at:end]
                to = draw.randrange(len(changed) + 1)
                changed[to:to] = part
            case 8 if draw.randrange(4) == 0:
                del changed[at:]
    return bytes(changed)


def inside_the_archive(data: bytes, draw: random.Random) -> bytes:
    """Change one part of an archive of ``torch.save``, most often the pickle. Its checksums are
    right.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickles = [name for name in parts if name.endswith("data.pkl")]
    name = draw.choice(pickles * len(parts) + list(parts))
    match draw.randrange(8):
        case 0:
            del parts[name]
        case 1:
            parts[draw.choice(list(parts))] = parts[name]
        case _:
            parts[name] = anywhere(parts[name], draw)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return made.getvalue()


def header(data: bytes, draw: random.Random) -> bytes:
    """Change values in the header of a file of safetensors. Its length is right."""
    length = int.from_bytes(data[:8], "little")
    text = values(data[8 : 8 + length], draw)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def values(data: bytes, draw: random.Random) -> bytes:
    """Change values in a JSON text."""
    node = json.loads(data)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(node)[1:])
        parent = node
        for key in path[:-1]:
            parent = parent[key]
        match draw.randrange(4):
            case 0:
                del parent[path[-1]]
            case 1 if isinstance(parent, dict):
                parent[draw.choice(("../x", "a" * 5_000, "\x1b[2J", "", "é/~"))] = parent.pop(
                    path[-1]
                )
            case _:
                parent[path[-1]] = draw.choice(
                    (*WILD, *NUMBERS, [0, 2**62], [0, 2**100], [1] * 5_000)
                )
        if len(places(node)) < 2:
            break
    return json.dumps(node).encode()


# -- where it is done ------------------------------------------------------------------------------


def torch_file(folder: Path, **how: Any) -> str:
    net, optimizer = trained()
    torch.save(
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": 3,
            "pair": (1, [2, "x"]),
        },
        folder / "x.pt",
        **how,
    )
    return "x.pt"


def dcp_folder(folder: Path) -> str:
    net, _ = trained()
    plain = {
        name: value for name, value in odd_state().items() if name not in ("np", "array", "frozen")
    }
    dcp.save({"model": net.state_dict(), **plain}, checkpoint_id=folder, no_dist=True)
    return "."


def safetensors_file(folder: Path) -> str:
    values = odd_state()["tensors"]
    save_file(
        {name: value for name, value in values.items() if "c" not in name[:1]},
        folder / "x.safetensors",
        {"a": "b"},
    )
    return "x.safetensors"


def torchsnapshot_folder(folder: Path) -> str:
    torchsnapshot = pytest.importorskip("torchsnapshot")
    plain = {"step": 3, "pair": (1, [2, "x"]), "list": [0.5, {"x": b"y"}]}
    state = {"model": trained()[0], "other": torchsnapshot.StateDict(**plain)}
    torchsnapshot.Snapshot.take(str(folder), state)
    return "."


Change = Callable[[bytes, random.Random], bytes]
CASES: dict[str, tuple[Callable[[Path], str], str, Change]] = {
    "torch": (torch_file, "x.pt", anywhere),
    "torch, inside": (torch_file, "x.pt", inside_the_archive),
    "torch, old": (
        lambda to: torch_file(to, _use_new_zipfile_serialization=False),
        "x.pt",
        anywhere,
    ),
    "dcp, table": (dcp_folder, ".metadata", anywhere),
    "dcp, data": (dcp_folder, "*.distcp", anywhere),
    "safetensors": (safetensors_file, "x.safetensors", anywhere),
    "safetensors, header": (safetensors_file, "x.safetensors", header),
    "torchsnapshot, table": (torchsnapshot_folder, ".snapshot_metadata", values),
}


@dataclass
class Watch:
    """Records what Python opens for writing, makes, renames, removes or runs, while ``on``."""

    on: bool = False
    found: list[str] = field(default_factory=list)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = args
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                self.found.append(str(path))
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
            self.found.append(str(args[0]))
        elif event in ("os.rename", "os.link", "os.symlink"):
            self.found += [str(args[0]), str(args[1])]
        elif event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
            "socket.connect",
        ):
            self.found.append(f"{event} {args!r}")


WATCH = Watch()


@pytest.fixture(scope="module", autouse=True)
def watched() -> None:
    sys.addaudithook(WATCH.hear)  # no hook can be removed, so it is off between the imports


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("place", "place/source", "place/temporary"):
        os.mkdir(tmp_path / name)
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.delenv("CKPT_ROOT", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "place" / "temporary"))
    Path("victim").write_text("mine")
    return tmp_path / "place"


def peak_bytes(begin: bool = False) -> int:
    """Return the most memory of this process since the last time ``begin`` was given."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) << 10


@dataclass(frozen=True)
class Imported:
    """What one import did. ``faults`` has the sentences about what it must not do."""

    code: int
    faults: list[str]
    reported: str


def imported(
    source: str, size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Imported:
    """Run ``ckpt import`` on a source of ``size`` bytes, in the folder of ``place``."""
    monkeypatch.setattr("sys.argv", ["ckpt", "import", source, "runs", "--step", "1"])
    capsys.readouterr()
    WATCH.found.clear()
    names = sorted(os.listdir("source"))
    before, began = peak_bytes(begin=True), time.process_time()
    WATCH.on = True
    try:
        code = main()
    finally:
        WATCH.on = False
    seconds, nbytes = time.process_time() - began, peak_bytes() - before
    reported = capsys.readouterr()
    root = Path.cwd() / "runs"
    steps = [ref.step for ref in committed(open_backend("runs"))]
    outside = [  # Python compiles a module with its first import
        name for name in WATCH.found if "__pycache__" not in name and not inside(name, root)
    ]
    there = set(os.listdir()) | {f"source/{name}" for name in os.listdir("source")}
    known = {"runs", "source", "temporary", "victim", *(f"source/{name}" for name in names)}
    faults = {
        f"it took {seconds} s": seconds > MOST_SECONDS,
        f"it took {nbytes} bytes": nbytes > MOST_BYTES + MOST_BYTES_PER_BYTE * size,
        f"it ended with {code}": code not in CODES or "internal error" in reported.err,
        "it printed what a terminal obeys": not all(
            map(str.isprintable, (reported.err + reported.out).split("\n"))
        ),
        f"it touched {outside}": bool(outside),
        f"it left {there ^ known}": not there <= known or Path("victim").read_text() != "mine",
        f"its steps are {steps}": steps != ([1] if code == 0 else []),
    }
    return Imported(code, [fault for fault, found in faults.items() if found], reported.err)


def harm(what: str) -> None:
    match what:
        case "internal error":
            raise KeyError("x")
        case "bytes":
            bytearray(256 << 20)[:: 1 << 12] = b"x" * (1 << 16)
        case "touched":
            Path("runs/../victim").write_text("mine")
        case "left":
            os.close(os.open("source/more", os.O_CREAT))


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("internal error", "ended with"),
        ("bytes", "bytes"),
        ("touched", "touched"),
        ("left", "left"),
    ],
)
def test_what_an_import_must_not_do_is_seen(
    place: Path,
    what: str,
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = f"source/{torch_file(place / 'source')}"
    assert imported(source, os.path.getsize(source), capsys, monkeypatch).faults == []
    shutil.rmtree("runs")

    def harmful(*arguments: Any) -> Any:
        harm(what)
        return read_source(*arguments)

    monkeypatch.setattr("ckpt.exchange.foreign.source_reader.read_source", harmful)
    found = imported(source, os.path.getsize(source), capsys, monkeypatch)
    assert any(fault in each for each in found.faults), found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "examples",
    [16, pytest.param(2_000, marks=[pytest.mark.torture, pytest.mark.timeout(7_200)])],
    ids=["few", "many"],
)
def test_changed_bytes_are_imported_or_refused(
    place: Path,
    case: str,
    examples: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tally: Count,
) -> None:
    make, pattern, change = CASES[case]
    source = make(place / "source")
    [path] = (place / "source").glob(pattern)
    whole = path.read_bytes()
    taken = imported(f"source/{source}", len(whole), capsys, monkeypatch)
    assert (taken.code, taken.faults) == (0, []), taken
    temporary = os.listdir("temporary")  # torch makes a folder for its cache, once
    refused = 0
    for number in range(examples):
        shutil.rmtree("runs", ignore_errors=True)
        data = change(whole, random.Random(f"{case} {number}"))
        path.write_bytes(data)
        found = imported(f"source/{source}", len(data), capsys, monkeypatch)
        assert found.faults == [], (case, number, found)
        assert path.read_bytes() == data, (case, number, found)
        assert os.listdir("temporary") == temporary, (case, number, found)
        refused += found.code != 0
    assert refused > examples // 4
    tally("import", examples)


def inside(name: str, root: Path) -> bool:
    """Return whether a name is below the root.

    The memory that a save is copied into counts as below it, and so does a descriptor.
    """
    whole = os.path.normpath(os.path.join(root.parent, name))
    return (
        name.isdigit()
        or whole == str(root)
        or whole.startswith((f"{root}/", "/dev/shm/ckpt-", "/dev/null"))
    )
