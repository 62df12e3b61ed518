from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import ManifestCorrupt
from ckpt.model.manifest import Chunk, File, Fragment, FragmentRef, Manifest, Shard, Tensor
from ckpt.model.packed import fragment_of, pack_fragment
from ckpt.model.validate import MAX_CHUNK_BYTES, check_fragment, check_manifest
from tests.model.records import records

MANIFEST, FRAGMENT = records()
WEIGHT = next(index for index, tensor in enumerate(MANIFEST.tensors) if tensor.name == "weight")
HUGE = 1 << 62

Break = Callable[[Manifest], Manifest]


def at(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def file(**changes: Any) -> Break:
    return lambda m: replace(m, files=at(m.files, 1, replace(m.files[1], **changes)))


def chunk(**changes: Any) -> Break:
    def broken(m: Manifest) -> Manifest:
        chunks = m.files[0].chunks
        return replace(
            m, files=at(m.files, 0, replace(m.files[0], chunks=at(chunks, 1, replace(chunks[1], **changes))))
        )

    return broken


def reference(**changes: Any) -> Break:
    return lambda m: replace(m, fragments=at(m.fragments, 1, replace(m.fragments[1], **changes)))


def tensor(**changes: Any) -> Break:
    return lambda m: replace(m, tensors=at(m.tensors, WEIGHT, replace(m.tensors[WEIGHT], **changes)))


def shard(**changes: Any) -> Break:
    def broken(m: Manifest) -> Manifest:
        shards = m.tensors[WEIGHT].shards
        return tensor(shards=at(shards, 1, replace(shards[1], **changes)))(m)

    return broken


def shards(change: Callable[[tuple[Shard, ...]], tuple[Shard, ...]]) -> Break:
    return lambda m: tensor(shards=change(m.tensors[WEIGHT].shards))(m)


def edit(**changes: Any) -> Break:
    return lambda m: replace(m, **changes)


SUM = "0" * 32
RULES: dict[str, tuple[Break, str]] = {
    "no ranks": (edit(world_size=0, fragments=()), "out of range"),
    "negative step": (edit(step=-1), "out of range"),
    "tiny chunks": (edit(chunk_bytes=15), "chunks of 15 bytes"),
    "no chunks": (edit(chunk_bytes=0), "chunks of 0 bytes"),
    "negative chunks": (edit(chunk_bytes=-64), "chunks of -64 bytes"),
    "giant chunks": (edit(chunk_bytes=MAX_CHUNK_BYTES + 1), "chunks of"),
    "a fragment outside the folder": (reference(name="../rank-00001.json"), "fragment name"),
    "a fragment under another rank's name": (reference(name="rank-00000.json"), "fragment name"),
    "a fragment of negative size": (reference(size=-1), "fragment rank-00001.json"),
    "a fragment of giant size": (reference(size=HUGE), "fragment rank-00001.json"),
    "a fragment without checksum": (reference(checksum=""), "fragment rank-00001.json"),
    "a checksum in capitals": (reference(checksum="A" * 32), "fragment rank-00001.json"),
    "a checksum with a line end": (reference(checksum="0" * 32 + "\n"), "fragment rank-00001.json"),
    "a rank without fragment": (lambda m: replace(m, fragments=m.fragments[:1]), "not one fragment"),
    "a rank with two fragments": (lambda m: replace(m, fragments=(*m.fragments, m.fragments[1])), "not one fragment"),
    "a rank beyond the world": (reference(rank=2, name="rank-00002.json"), "not one fragment"),
    "a negative rank": (reference(rank=-1, name="rank--0001.json"), "not one fragment"),
    "a world too large to count": (edit(world_size=HUGE), "not one fragment"),
    "a file outside the folder": (file(name="../../etc/passwd"), "not that of its rank"),
    "an absolute file": (file(name="/rank-00001.safetensors"), "not that of its rank"),
    "a file under another rank's name": (file(name="rank-00000.safetensors"), "not that of its rank"),
    "a file of a negative rank": (file(rank=-1, name="rank--0001.safetensors"), "not that of its rank"),
    "a file named twice": (lambda m: replace(m, files=(*m.files, m.files[1])), "named twice"),
    "a file too small for its chunks": (file(size=1), "do not add up"),
    "an empty file": (file(size=0, chunks=()), "of 0 bytes"),
    "a giant file": (file(size=HUGE, chunks=(Chunk(HUGE, SUM),)), "bytes"),
    "a chunk more than its file": (lambda m: file(chunks=(*m.files[1].chunks, Chunk(1, SUM)))(m), "do not add up"),
    "a chunk less than its file": (lambda m: file(chunks=m.files[1].chunks[:-1])(m), "do not add up"),
    "a chunk without bytes": (chunk(nbytes=0), "a chunk of rank-00000"),
    "a chunk of negative size": (chunk(nbytes=-8), "a chunk of rank-00000"),
    "a chunk of another size": (chunk(nbytes=16), "do not add up"),
    "a chunk without checksum": (chunk(checksum="zz"), "a chunk of rank-00000"),
    "a tensor named twice": (lambda m: replace(m, tensors=(*m.tensors, m.tensors[0])), "named twice"),
    "a dtype nobody knows": (tensor(dtype="float42"), "unknown dtype"),
    "a dtype of other size": (tensor(dtype="float64"), "shard"),
    "a negative dimension": (tensor(shape=(-10, 4)), "impossible shape"),
    "a giant dimension": (tensor(shape=(HUGE, 4)), "impossible shape"),
    "a giant tensor": (tensor(shape=(1 << 40, 1 << 40)), "impossible shape"),
    "giant beside zero": (tensor(shape=(0, 1 << 40, 1 << 40)), "impossible shape"),
    "too many dimensions": (tensor(shape=(1,) * 65), "impossible shape"),
    "a box outside": (shard(offsets=(8, 0)), "not inside"),
    "a box at a negative place": (shard(offsets=(-1, 0)), "not inside"),
    "a box of negative size": (shard(shape=(-5, 4)), "not inside"),
    "a box of other rank": (shard(offsets=(5,), shape=(5,)), "not inside"),
    "a box with too few offsets": (shard(offsets=(5,)), "not inside"),
    "boxes that overlap": (shard(offsets=(4, 0)), "overlap"),
    "a box twice": (shards(lambda s: (*s, s[0])), "overlap"),
    "a hole": (shards(lambda s: s[:1]), "20 of 40 elements are in no box"),
    "no boxes": (shards(lambda s: ()), "40 of 40 elements are in no box"),
    "a box larger than its file": (tensor(shape=(10, 1 << 40), shards=(Shard(0, 4096, (0, 0), (10, 1 << 40)),)), "more bytes than"),
    "a shard of a rank without file": (shard(rank=7), "rank 7 has no file"),
    "a shard beside the chunks": (shard(offset=4097), "is not aligned with the chunks"),
    "a shard before the file": (shard(offset=-64), "is not aligned with the chunks"),
    "a shard after the file": (shard(offset=HUGE), "is not aligned with the chunks"),
    "a shard on another's chunks": (lambda m: replace(m, tensors=(*m.tensors, replace(m.tensors[WEIGHT], name="x"))), "overlaps another there"),
    "a tensor of more bytes than elements": (tensor(dtype="complex128", shape=(1 << 60,), shards=()), "impossible shape"),
    "a tie to nothing": (edit(tied={"head": "nobody"}), "which is not stored"),
    "a tie to a tie": (edit(tied={"head": "weight", "deep": "head"}), "which is not stored"),
    "a tie to itself": (edit(tied={"loop": "loop"}), "which is not stored"),
    "a tie over a tensor": (edit(tied={"bias": "weight"}), "which is not stored"),
}  # fmt: skip


def test_what_we_write_is_accepted():
    assert check_manifest(MANIFEST, key="k") is MANIFEST
    assert check_fragment(FRAGMENT, key="k") is FRAGMENT


@pytest.mark.parametrize("rule", RULES)
def test_a_manifest_that_breaks_one_rule_is_refused(rule):
    broken, told = RULES[rule]
    with pytest.raises(ManifestCorrupt) as caught:
        check_manifest(broken(MANIFEST), key="step/manifest.json")
    assert told in caught.value.detail
    assert caught.value.key == "step/manifest.json"


FRAGMENT_RULES: dict[str, tuple[Callable[[Fragment], Fragment], str]] = {
    "a negative rank": (lambda f: replace(f, rank=-1), "out of range"),
    "a rank beyond the world": (lambda f: replace(f, rank=2), "out of range"),
    "a negative step": (lambda f: replace(f, step=-1), "out of range"),
    "no ranks": (lambda f: replace(f, world_size=0), "out of range"),
    "tiny chunks": (lambda f: replace(f, chunk_bytes=8), "chunks of 8"),
    "another rank's file": (lambda f: replace(f, file=MANIFEST.files[0]), "file of another rank"),
    "another rank's name": (lambda f: replace(f, file=replace(f.file, name="rank-00000.safetensors")), "not that of its rank"),
    "no file": (lambda f: replace(f, file=None), "has no file"),
    "a shard of another rank": (
        lambda f: replace(f, tensors=tuple(replace(t, shards=tuple(replace(s, rank=0) for s in t.shards)) for t in f.tensors)),
        "rank 0 has no file",
    ),
    "a tie to nothing": (lambda f: replace(f, tied={"a": "b"}), "not stored"),
}  # fmt: skip


@pytest.mark.parametrize("rule", FRAGMENT_RULES)
def test_a_fragment_that_breaks_one_rule_is_refused(rule):
    broken, told = FRAGMENT_RULES[rule]
    with pytest.raises(ManifestCorrupt) as caught:
        check_fragment(broken(FRAGMENT), key="k")
    assert told in caught.value.detail


def test_shards_that_claim_the_same_chunks_again_and_again_take_no_longer_than_the_file_has_chunks() -> None:
    chunks = (Chunk(4096, SUM), *(Chunk(16, SUM) for _ in range(2000)))
    shard = Shard(1, 4096, (0,), (32_000,))
    tensors = tuple(Tensor(f"x{i}", "uint8", (32_000,), (shard,)) for i in range(2000))
    file = File("rank-00001.safetensors", 1, 4096 + 32_000, chunks)
    hostile = replace(FRAGMENT, chunk_bytes=16, file=file, tensors=tensors, tied={})
    began = time.process_time()
    with pytest.raises(ManifestCorrupt, match="overlaps another there"):
        check_fragment(hostile, key="k")
    with pytest.raises(ManifestCorrupt, match="a shard is not aligned with the chunks"):
        fragment_of(pack_fragment(hostile), key="k")
    assert time.process_time() - began < 0.5
    check_fragment(replace(hostile, tensors=tensors[:1]), key="k")


def test_a_fragment_may_hold_a_part_of_its_tensors():
    tensors = tuple(replace(tensor, shards=()) for tensor in FRAGMENT.tensors)
    check_fragment(replace(FRAGMENT, tensors=tensors), key="k")


def test_a_tensor_of_sixty_four_dimensions_is_possible():
    part = Shard(0, 4096, (0,) * 64, (1,) * 64)
    one = File("rank-00000.safetensors", 0, 4100, (Chunk(4096, SUM), Chunk(4, SUM)))
    manifest = replace(
        MANIFEST, world_size=1, fragments=MANIFEST.fragments[:1], files=(one,), tied={},
        tensors=(Tensor("x", "float32", (1,) * 64, (part,)),),
    )  # fmt: skip
    assert check_manifest(manifest, key="k") is manifest


numbers = st.sampled_from([-HUGE, -1, 0, 1, 2, 5, 16, 4096, 1 << 31, 1 << 53, HUGE, 1 << 70])
tuples = st.lists(numbers, max_size=3).map(tuple)
wild_chunks = st.builds(Chunk, nbytes=numbers, checksum=st.just(SUM))
wild_shards = st.builds(Shard, rank=numbers, offset=numbers, offsets=tuples, shape=tuples)


@settings(max_examples=500, deadline=None)
@given(
    st.builds(
        replace,
        st.just(MANIFEST),
        world_size=st.just(2) | numbers,
        step=st.just(3) | numbers,
        chunk_bytes=st.just(64) | numbers,
        files=st.just(MANIFEST.files)
        | st.lists(st.builds(File, st.just("rank-00000.safetensors"), numbers, numbers, st.lists(wild_chunks, max_size=3).map(tuple))).map(tuple),
        fragments=st.just(MANIFEST.fragments)
        | st.lists(st.builds(FragmentRef, st.just("rank-00000.json"), numbers, numbers, st.just(SUM))).map(tuple),
        tensors=st.lists(
            st.builds(
                Tensor,
                st.text(max_size=2),
                st.sampled_from(["float32", "uint8", "complex128"]),
                tuples,
                st.lists(wild_shards, max_size=3).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    )
)  # fmt: skip
def test_wild_numbers_are_refused_with_our_error(manifest):
    try:
        check_manifest(manifest, key="k")
    except ManifestCorrupt:
        return
    assert all(tensor.shards or not tensor.nbytes for tensor in manifest.tensors)
