"""Manifests, and fragments in columns, with changes anywhere are read or refused, within bounds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from msgspec.structs import replace

from ckpt.errors import CkptError, ManifestCorrupt
from ckpt.model.box import Box
from ckpt.model.fill_manifest import fill_manifest, ranks_of
from ckpt.model.fragment_columns import fragment_of, pack_fragment, read_fragment
from ckpt.model.manifest import Encoding, Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.validate import check_manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import merge
from ckpt.plan.restore import plan_restore
from tests.faults.conftest import Count, tally
from tests.fuzz.mutations import mutated
from tests.fuzz.records import SCALE, fuzz, record_ref, reported
from tests.kit.damage import sealed
from tests.plan.worlds import fragment_of as written

__all__ = ["tally"]

ARRAYS: dict[str, np.ndarray] = {
    "x": np.arange(80, dtype=np.float32).reshape(20, 4),
    "y": np.arange(6, dtype=np.int64),
}
PLAIN = [
    written(
        rank,
        2,
        [
            Leaf("x", "float32", (20, 4), (Box((10 * rank, 0), (10, 4)),)),
            Leaf("y", "int64", (6,), (Box((0,), (6,)),)),
        ],
        ARRAYS,
    )[1]
    for rank in range(2)
]
PACKED = [pack_fragment(part) for part in PLAIN]
OUTLINE = merge((part, record_ref(part)) for part in PACKED)
FORM = msgspec.json.decode(zstandard.decompress(PACKED[0].form))


def use(record: Manifest) -> None:
    """Use it as a restore does."""
    check_manifest(record, key="k")
    wanted = [Leaf(t.name, t.dtype, t.shape, (Box.whole(t.shape),)) for t in record.tensors]
    ranks = ranks_of(record, [(leaf.name, leaf.boxes) for leaf in wanted])
    parts = {part.rank: fragment_of(part, key="k") for part in PACKED if part.rank in ranks}
    plan = plan_restore(fill_manifest(record, parts, key="k"), wanted)
    assert sum(target.part.numel for read in plan.reads for target in read.targets) >= sum(
        leaf.boxes[0].numel for leaf in wanted
    )


@SCALE
def test_a_manifest_by_reference_changed_anywhere_is_read_or_refused(
    examples: int, tally: Count
) -> None:
    use(OUTLINE)

    def check(body: Any) -> None:
        try:
            use(unpack(sealed(body), Manifest, key="k"))
        except CkptError as refused:
            reported(refused)

    tally("fuzz-large", fuzz(examples, mutated(json.loads(msgspec.json.encode(OUTLINE))), check))


@SCALE
def test_a_fragment_in_columns_changed_anywhere_is_read_or_refused(
    examples: int, tally: Count
) -> None:
    body = json.loads(msgspec.json.encode(replace(PACKED[0], world_size=1)))

    def check(changed: Any) -> None:
        read_or_refused(sealed(changed))

    tally("fuzz-large", fuzz(examples, mutated(body), check))


def read_or_refused(data: bytes) -> None:
    """Read it by itself, and with what a merge needs of it."""
    for way in (
        lambda: read_fragment(data, key="k"),
        lambda: merge([(unpack(data, Packed, key="k"), record_ref(PACKED[0]))]),
    ):
        try:
            way()
        except CkptError as refused:
            reported(refused)


@SCALE
def test_columns_changed_anywhere_are_read_or_refused(examples: int, tally: Count) -> None:
    """The numbers are consistent for JSON and zstd, and have any values."""
    tensors, dims, shards, chunks = FORM
    columns = {
        "tensors": tensors,
        "dims": dims,
        "shards": _numbers(shards),
        "chunks": _numbers(chunks),
        "offsets": np.frombuffer(zstandard.decompress(PACKED[0].offsets), "<i8").tolist(),
    }

    def check(changed: Any) -> None:
        try:
            form = [
                changed["tensors"],
                changed["dims"],
                *(np.array(changed[k], "<i8").tobytes() for k in ("shards", "chunks")),
            ]
            offsets = np.array(changed["offsets"], "<i8").tobytes()
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        packed = replace(
            PACKED[0],
            world_size=1,
            form=zstandard.compress(msgspec.json.encode(form)),
            offsets=zstandard.compress(offsets),
        )
        read_or_refused(pack(packed))

    tally("fuzz-large", fuzz(examples, mutated(columns), check))


def _numbers(text: str) -> list[int]:
    return np.frombuffer(msgspec.json.decode(json.dumps(text), type=bytes), "<i8").tolist()


@pytest.mark.parametrize("field", ["form", "offsets", "replicas"])
def test_a_frame_that_claims_more_than_a_fragment_has_reserves_nothing(field: str) -> None:
    """A frame's header says 1 TiB."""
    bomb = bytes.fromhex("28b52ffde0") + (1 << 40).to_bytes(8, "little") + bytes(8)
    packed = replace(PACKED[0], world_size=1, **{field: bomb})
    with pytest.raises(ManifestCorrupt, match="claim to unpack to 1099511627776 bytes"):
        read_fragment(pack(packed), key="k")


@pytest.mark.parametrize(
    "change",
    [
        {"checksums": PACKED[0].checksums[:-1]},
        {"lengths": b"12345678"},
        {"encoded": (Encoding(0, "zstd", (1,)),)},
        {"tied": {"z": "nothing"}},
        {"tied": {"x": "y"}},
        {"file": None},
        {"rank": 1},
    ],
)
def test_columns_that_do_not_fit_their_fragment_are_refused(change: dict[str, Any]) -> None:
    packed: Packed = replace(PACKED[0], **change)
    with pytest.raises(ManifestCorrupt):
        read_fragment(pack(packed), key="k")
    with pytest.raises(ManifestCorrupt):
        merge([(packed, record_ref(PACKED[0]))])


def of_form(tensors: list[Any], shards: list[list[int]]) -> Packed:
    """Return ``PACKED[0]`` with other tensors of up to one dimension in its file."""
    form = [
        tensors,
        1,
        np.array(shards, "<i8").tobytes(),
        msgspec.json.decode(json.dumps(FORM[3]), type=bytes),
    ]
    return replace(
        PACKED[0],
        world_size=1,
        form=zstandard.compress(msgspec.json.encode(form)),
        offsets=zstandard.compress(bytes(8 * len(shards))),
        replicas=b"",
    )


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([["x", "float32", [4], []], ["y", "float32", [4], []]], "overlap"),
        ([["x", "float32", [4], []], ["y", "complex128", [1 << 60], []]], "impossible shape"),
    ],
)
def test_shards_that_cannot_be_are_refused_where_fragments_are_merged(
    tensors: list[Any], expected: str
) -> None:
    """Two shards are on the same bytes of the file, or have so many bytes that their sum overflows
    to 0.
    """
    chunk = _numbers(FORM[3])[1]
    tensors[0][2] = [chunk // 4]
    if expected == "overlap":
        tensors[1][2] = [chunk // 4]
    shards = [[index, _numbers(FORM[3])[0], each[2][0]] for index, each in enumerate(tensors)]
    packed = of_form(tensors, shards)
    merge([(of_form(tensors[:1], shards[:1]), record_ref(PACKED[0]))])
    with pytest.raises(ManifestCorrupt, match=expected):
        merge([(packed, record_ref(PACKED[0]))])


def test_a_box_that_is_empty_in_a_dimension_which_its_tensor_lacks_is_refused() -> None:
    """It would have no place in the file, while the tensor has an element."""
    tensors = [["x", "float32", [], []], ["y", "float32", [1], []]]
    first, second = _numbers(FORM[3])[0], _numbers(FORM[3])[0] + 4
    with pytest.raises(ManifestCorrupt, match="less than nothing"):
        merge([(of_form(tensors[:1], [[0, second, 0]]), record_ref(PACKED[0]))])
    with pytest.raises(ManifestCorrupt, match="is not aligned with the chunks"):
        merge([(of_form(tensors, [[0, first, 1], [1, second, 1]]), record_ref(PACKED[0]))])


def test_a_manifest_whose_boxes_overlap_is_refused_before_anything_is_read() -> None:
    (run,) = OUTLINE.layouts[OUTLINE.layout_of[0]]
    level = run.levels[0]
    near = tuple(step // 2 for step in level.offset_steps)
    assert any(near)
    twice = replace(run, levels=(replace(level, offset_steps=near),))  # the same volume, and a hole
    record = replace(
        OUTLINE, layouts=tuple((twice,) if each == (run,) else each for each in OUTLINE.layouts)
    )
    check_manifest(record, key="k")
    with pytest.raises(ManifestCorrupt):
        use(record)


def test_a_frame_unpacks_to_no_more_than_its_length_allows() -> None:
    """The cases are 300 MB of names that compress to 30 kB, and offsets of more shards than the
    form has.
    """
    form = [[["x", "float32", [1], []]] * 100_000 * 4, 1, b"", b""]
    many = zstandard.compress(msgspec.json.encode(form))
    for field, frame in (("form", many), ("offsets", zstandard.compress(bytes(8 << 20)))):
        packed = replace(PACKED[0], world_size=1, **{field: frame})
        with pytest.raises(ManifestCorrupt, match="claim to unpack to"):
            read_fragment(pack(packed), key="k")
