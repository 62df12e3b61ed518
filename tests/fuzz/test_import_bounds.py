"""Files of other programs that were made to do harm.

An import refuses them soon, and takes little memory for it.
"""

from __future__ import annotations

import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt.errors import CkptError, IntegrityError, UnsupportedValue
from ckpt.exchange.foreign.joined_tensors import Copier
from ckpt.exchange.foreign.source_formats import Kind, detect, read_source
from ckpt.exchange.inert.inert_pickle import Inert, read_inert
from ckpt.exchange.inert.input_limits import check_nesting
from tests.kit.worlds import run_code

pytestmark = pytest.mark.timeout(120)
STATE = {"w": torch.arange(6.0), "n": [torch.ones(2), {"a": (1, 2)}]}


def read(source: Path, kind: Kind | None = None) -> dict[str, object]:
    return read_source(str(source), kind or detect(str(source)), Copier(None)).state


def refused(source: Path, kind: Kind | None = None) -> str:
    """Return the message of the refusal.

    It must take at most 2 s of processor time and 64 MiB of memory.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(CkptError) as caught:
        read(source, kind)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 10
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000
    return str(caught.value)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("odd", [fifo, device])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.pt", "torch"),
        (".metadata", "dcp"),
        ("x.safetensors", "safetensors"),
        ("model.safetensors.index.json", "safetensors"),
        ("pytorch_model.bin.index.json", "torch"),
    ],
)
def test_what_is_no_ordinary_file_is_not_waited_for(
    tmp_path: Path, odd: Callable[[Path], None], name: str, kind: Kind
) -> None:
    source = folder(tmp_path / "source")
    torch.save(STATE, source / "a.bin")
    odd(source / name)
    assert "is not an ordinary file" in refused(source, kind)


def test_a_part_that_is_no_ordinary_file_is_not_waited_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=source, no_dist=True)
    [part] = source.glob("*.distcp")
    part.rename(tmp_path / "part")
    fifo(part)
    assert "is not an ordinary file" in refused(source)
    part.unlink()
    part.symlink_to(tmp_path / "part")
    assert read(source).keys() == {"w"}  # a link to a file counts as a file


TOWER = b"\x80\x02(K\x01t" + b"q\x00h\x00h\x00\x86" * 60
"""A tuple of two tuples of two tuples...: 2**60 items in 300 bytes."""


def archive(path: Path, data: bytes, how: int = zipfile.ZIP_STORED, more: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
        for index in range(more):
            file.writestr(f"archive/data/{index}", bytes(64))
    return path


@pytest.mark.parametrize("ending", [b"K\x01s.", b"K\x01\x86.", b"."], ids=["key", "pair", "value"])
def test_tuples_of_the_same_tuples_are_refused(tmp_path: Path, ending: bytes) -> None:
    """As a key of a dict they are hashed, which takes 2**60 steps."""
    data = (b"\x80\x02}" + TOWER[2:] if ending == b"K\x01s." else TOWER) + ending
    assert "take forever" in refused(archive(tmp_path / "x.pt", data))
    (tmp_path / "old.pt").write_bytes(data)
    assert refused(tmp_path / "old.pt")
    table = folder(tmp_path / "dcp") / ".metadata"
    table.write_bytes(data)
    assert "not one that torch writes" in refused(table.parent) or ending == b"."


def test_marks_take_time_in_proportion() -> None:
    """180 kB of them once kept an import busy for minutes."""
    data = b"\x80\x02" + b"(" * 90_000 + b"t" * 90_000 + b"."
    with pytest.raises(UnsupportedValue):
        read_inert(b"\x80\x02" + b"(" * 90_000 + b"tt" * 45_000 + b"}.", "x")
    assert read_inert(b"\x80\x02" + (b"(t" + b"0") * 90_000 + b"N.", "x") is None
    assert read_inert(b"\x80\x02((0" + b"0N.", "x") is None
    assert isinstance(read_inert(data, "x"), tuple)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cbuiltins\nlist\n" + b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"R.",
        b"\x80\x02cx\ny\nq\x00" + b"h\x00K\x01b0" * 1_000 + b"h\x00.",
        b"\x80\x02}(K\x01K\x02\x86K\x01u.",
    ],
    ids=["arguments that are a text", "built again and again", "a tuple as a key"],
)
def test_a_table_that_would_grow_faster_than_its_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedValue, match="not one that"):
        read_inert(data, "x")


def test_a_table_of_dcp_is_read_as_before(tmp_path: Path) -> None:
    dcp.save({"a": {"b": [torch.ones(3), 5]}}, checkpoint_id=tmp_path / "d", no_dist=True)
    table = read_inert((tmp_path / "d" / ".metadata").read_bytes(), "x")
    assert isinstance(table, Inert)
    found = read(tmp_path / "d")
    assert found["a"]["b"][1] == 5  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "shape", [(1,) * 100_000, (1 << 30,), (1 << 62, 1)], ids=["dims", "4 GiB", "2**64"]
)
def test_a_tensor_that_is_not_there_is_not_made(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = tmp_path / "d"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=source, no_dist=True)
    table = pickle.loads((source / ".metadata").read_bytes())
    object.__setattr__(
        table.state_dict_metadata["w"], "size", torch.Size(shape[:1]) if len(shape) == 1 else shape
    )
    (source / ".metadata").write_bytes(pickle.dumps(table))
    assert "is not a table of torch.distributed.checkpoint" in refused(source)


def test_two_entries_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "d"
    dcp.save({"v": torch.ones(3), "w": torch.ones(3)}, checkpoint_id=source, no_dist=True)
    table = pickle.loads((source / ".metadata").read_bytes())
    one, two = table.storage_data.values()
    two.offset = one.offset
    (source / ".metadata").write_bytes(pickle.dumps(table))
    assert "overlap" in refused(source)


def test_what_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    """204 kB once took 605 MB."""
    path = archive(
        tmp_path / "x.pt", b"\x80\x02]" + b"]a" * 50_000_000 + b".", zipfile.ZIP_DEFLATED
    )
    assert path.stat().st_size < 250_000
    assert "compressed" in refused(path)


def test_parts_of_a_file_that_overlap_are_refused(tmp_path: Path) -> None:
    """Each entry of a zip's directory may name the same bytes."""
    path = archive(tmp_path / "x.pt", pickle.dumps({}, 2), more=2_000)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    where = {}
    while data[at : at + 4] == b"PK\x01\x02":
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        where[bytes(data[at + 46 : at + 46 + name])] = at
        struct.pack_into("<II", data, at + 20, 100_000, 100_000)  # sizes
        at += 46 + name + extra + comment
    path.write_bytes(data)
    assert len(where) > 2_000
    assert "overlap" in refused(path)


def test_a_state_of_the_same_lists_again_and_again_is_refused(tmp_path: Path) -> None:
    tower: list[object] = [1]
    for _ in range(60):
        tower = [tower, tower]
    torch.save({"x": tower}, tmp_path / "x.pt")
    assert "again and again" in refused(tmp_path / "x.pt")
    loop: list[object] = []
    loop.append(loop)
    torch.save({"x": loop}, tmp_path / "loop.pt")
    assert "in itself" in refused(tmp_path / "loop.pt")
    shared = {"lr": 0.1, "betas": (0.9, 0.99)}
    check_nesting({"groups": [shared] * 50_000, "w": torch.ones(2)}, "x")


def test_whole_files_are_read_as_before(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "new.pt")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        found = read(tmp_path / name)
        assert torch.equal(found["w"], STATE["w"])  # type: ignore[arg-type]
        assert found["n"][1] == {"a": (1, 2)}  # type: ignore[index]


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for cut in (3, 10, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "x.pt").write_bytes(data[:cut])
        with pytest.raises((IntegrityError, UnsupportedValue, CkptError)):
            read(tmp_path / "x.pt")


def test_an_import_from_the_command_line_ends(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    fifo(source / ".metadata")
    words = ["ckpt", "import", str(source), str(tmp_path / "runs"), "--step", "1"]
    code = f"import sys; from ckpt.cli.main import main; sys.argv = {words}; sys.exit(main())"
    assert "is not an ordinary file" in run_code(code, status=2, timeout=100)
