"""A few bytes in a store take little memory and time, with any content.

Both grow no faster than the bytes.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import find
from ckpt.cli.main import main
from ckpt.errors import ManifestCorrupt, UnsupportedValue
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Manifest
from ckpt.model.record_encoding import MAX_EXPANSION, pack, unpack
from ckpt.model.values import decode, dumps, parse
from ckpt.storage.registry import open_backend
from tests.fuzz.records import BODIES
from tests.kit.damage import sealed
from tests.kit.marks import torture

Tree = Callable[[int], Any]


def compressed(body: bytes) -> bytes:
    frame = zstandard.ZstdCompressor(level=19).compress(sealed(body))
    return b"ckpt-zstd " + checksum(frame).encode() + b"\n" + frame


def body_with(**fields: Any) -> bytes:
    return msgspec.json.encode({**BODIES[Manifest], **fields})


@pytest.mark.parametrize(
    "filling", [[], "key", {"key=": "x"}, 0], ids=["lists", "keys", "dicts", "zeros"]
)
def test_a_few_bytes_never_unpack_to_many(filling: Any) -> None:
    """A manifest of some kB once kept ``ls`` busy for a minute, and took gigabytes."""
    data = compressed(body_with(tree={"x": [filling] * 2_000_000}))
    assert len(data) < 40_000
    tracemalloc.start()
    try:
        with pytest.raises(ManifestCorrupt, match="claim to unpack to"):
            unpack(data, Manifest, key="k")
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data) + 100_000
    finally:
        tracemalloc.stop()


def test_a_record_that_would_become_too_small_is_stored_as_it_is() -> None:
    """So a reader accepts everything that a save writes."""
    tree = msgspec.json.encode({"x": [0] * 2_000_000})
    record = msgspec.structs.replace(
        unpack(sealed(body_with()), Manifest, key="k"), tree=msgspec.Raw(tree)
    )
    packed = pack(record)
    assert len(packed) > len(tree)
    assert unpack(packed, Manifest, key="k") == record
    less = pack(
        msgspec.structs.replace(record, tree=msgspec.Raw(msgspec.json.encode(list(range(400_000)))))
    )
    assert less.startswith(b"ckpt-zstd ")
    assert MAX_EXPANSION == 256


def nested(kind: str, depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = {"dict": {"a": node}, "list": [node]}.get(
            kind, {"$": kind, "v": node if kind == "object" else [node]}
        )
    return {"x": node}


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "object", "frozenset"])
def test_a_tree_that_is_nested_too_deeply_is_neither_written_nor_read(kind: str) -> None:
    node = nested(kind, 400)
    with pytest.raises(ManifestCorrupt, match="nested too deeply"):
        parse(msgspec.Raw(msgspec.json.encode(node)))
    with pytest.raises(UnsupportedValue, match="nested too deeply"):
        dumps(node, "state")
    parse(msgspec.Raw(dumps(nested(kind, 100), "state")))


def test_a_long_name_above_many_values_is_neither_written_nor_read() -> None:
    """Each of them would have the name in its own."""
    node: Any = {"k" * 100_000: [{}] * 100_000}
    with pytest.raises(ManifestCorrupt, match="times as many characters"):
        parse(msgspec.Raw(msgspec.json.encode(node)))
    with pytest.raises(UnsupportedValue, match="times as many characters"):
        dumps(node, "state")
    parse(msgspec.Raw(dumps({"k" * 100_000: [{}]}, "state")))
    pair = {"$": "dict", "v": [[{"$": "tuple", "v": ["k" * 100_000]}, [{}] * 100_000]]}
    with pytest.raises(ManifestCorrupt, match="times as many characters"):
        parse(msgspec.Raw(msgspec.json.encode(pair)))


@pytest.mark.parametrize("tag", ["set", "dict", *torture("frozenset", "Counter")])
def test_members_that_all_have_one_hash_are_refused(tag: str) -> None:
    """10,000 of them once took a second, and 100,000 minutes."""
    prime = 2**61 - 1
    members = [{"$": "int", "v": hex(1 + i * prime)} for i in range(20_000)]
    node = {"$": tag, "v": members if "set" in tag else [[each, 1] for each in members]}
    with pytest.raises(ManifestCorrupt, match="one hash"):
        decode(node, lambda _tag, _node: None)
    few = {**node, "v": node["v"][:10]}
    assert len(decode(few, lambda _tag, _node: None)) == 10


def test_a_value_that_python_does_not_print_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckpt import CheckpointManager

    state: dict[str, Any] = {"large": 2**20_000, "in": [2**20_000], "key": {2**20_000: 1}}
    for step, more in ((1, 0), (2, 1)):
        with CheckpointManager(tmp_path) as manager:
            manager.restore(dict.fromkeys(state)) if step > 1 else None
            manager.save({**state, "large": state["large"] + more}, step)
    capsys.readouterr()
    assert run(["show", "2", "--root", str(tmp_path)]) == 0
    assert "0x1000000" in capsys.readouterr().out
    assert run(["diff", str(tmp_path), "--step", "1", "--step", "2"]) == 1
    assert "1 difference" in capsys.readouterr().out


def run(words: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ckpt", *words])
        return main()


# -- growth ----------------------------------------------------------------------------------------


def groups(n: int) -> Any:
    return {
        "o": {
            "$": "optimizer",
            "groups": [{"params": [f"p{i}"], "values": {"lr": 1}} for i in range(n)],
            "state": {},
        }
    }


def module(n: int) -> Any:
    return {"m": {"$": "module", "values": {f"w{i}": i for i in range(n)}}}


TREES: dict[str, Tree] = {
    "lists": lambda n: {"x": [[] for _ in range(n)]},
    "dicts": lambda n: {"x": [{"a": {}} for _ in range(n)]},
    "keys": lambda n: {"x": "key" * n},
    "names": lambda n: {"token" * 20: {f"{i}=": i for i in range(n)}},
    "deep": lambda n: {"x": [nested("tuple", 90) for _ in range(n // 100)]},
    "sets": lambda n: {"x": {"$": "set", "v": list(range(n))}},
    "objects": lambda n: {"x": {"$": "object", "v": [{"$": "object", "v": i} for i in range(n)]}},
    "groups": groups,
    "module": module,
}  # fmt: skip
VERBS = ("ls", "show", "show --json", "verify", "diff")


def cost(
    root: Path, words: str, tree: Any, capsys: pytest.CaptureFixture[str]
) -> tuple[float, int, int]:
    """Return the seconds and bytes of memory of a command on a checkpoint with this tree.

    The last value is the size of its manifest.
    """
    [path] = root.glob("step-*/manifest.json")
    body = json.loads(path.read_bytes())["body"]
    path.write_bytes(sealed({**body, "tree": tree, "metadata": tree}))
    verb, *flags = words.split()
    place = [str(root), str(root)] if verb == "diff" else ["--root", str(root)]
    tracemalloc.start()
    began = time.process_time()
    try:
        assert run([verb, *place, *flags]) in (0, 1, 4)
        return time.process_time() - began, tracemalloc.get_traced_memory()[1], path.stat().st_size
    finally:
        tracemalloc.stop()
        capsys.readouterr()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    import torch

    from ckpt import CheckpointManager

    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"x": torch.arange(3)}, 1)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "lists" else pytest.param(kind, marks=pytest.mark.torture) for kind in TREES],
)
def test_time_and_memory_of_a_verb_grow_as_the_manifest_does(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For sixteen times the bytes the cost grows at most about sixteen times. A byte costs at most
    some hundred bytes.
    """
    for words in VERBS:
        cost(root, words, {}, capsys)
        little, _, _ = cost(root, words, TREES[kind](100), capsys)
        much, memory, nbytes = cost(root, words, TREES[kind](1_600), capsys)
        assert much < 50 * max(little, 0.02), (words, little, much)
        assert memory < 2_000 * nbytes + 4_000_000, (words, memory, nbytes)


@pytest.mark.torture
def test_many_attempts_at_one_step_are_put_in_order(tmp_path: Path) -> None:
    for number in range(20_000):
        (tmp_path / f"step-{number:09d}.abcdef").mkdir()
        (tmp_path / f"step-{number:09d}.abcdef" / "manifest.json").write_bytes(b"{}")
    backend = open_backend(str(tmp_path))
    began = time.process_time()
    assert len(find(backend, None)) == 20_000
    assert time.process_time() - began < 60


def test_a_listing_survives_one_hostile_manifest(root: Path) -> None:
    [path] = root.glob("step-*/manifest.json")
    other = root / "step-000000002.abcdef"
    other.mkdir()
    body = json.loads(path.read_bytes())["body"]
    deep: Any = nested("list", 400)
    text = msgspec.json.encode({**body, "step": 2, "attempt": "abcdef", "metadata": deep})
    (other / "manifest.json").write_bytes(sealed(text))
    found = Inventory(open_backend(str(root)), for_display=True).look()
    assert [(held.ref.step, held.state) for held in found] == [(2, "damaged"), (1, "committed")]
