from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import CodecMissing, FormatUnsupported, ManifestCorrupt
from ckpt.model.box_layouts import Level, Run, Runs
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import fragment_of, pack_fragment
from ckpt.model.manifest import (
    Chunk,
    Encoding,
    File,
    Fragment,
    FragmentRef,
    Location,
    Manifest,
    Shard,
    Tensor,
)
from ckpt.model.validate import MAX_CHUNK_BYTES, check_manifest
from ckpt.model.views import View
from tests.kit.examples import examples
from tests.model.records import records

MANIFEST, FRAGMENT = records()
WEIGHT = next(index for index, tensor in enumerate(MANIFEST.tensors) if tensor.name == "weight")
HUGE = 1 << 62

Break = Callable[[Manifest], Manifest]


def at(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def file(**changes: Any) -> Break:
    return lambda m: replace(m, files=at(m.files, 1, replace(m.files[1], **changes)))


def reference(**changes: Any) -> Break:
    return lambda m: replace(m, fragments=at(m.fragments, 1, replace(m.fragments[1], **changes)))


def encoding(**changes: Any) -> Break:
    """Encode rank 1's file, with the change."""
    encoded = replace(Encoding(1, "zstd", (100,)), **changes)
    return lambda m: replace(file(name="rank-00001.encoded")(m), encoded=(encoded,))


def tensor(**changes: Any) -> Break:
    return lambda m: replace(
        m, tensors=at(m.tensors, WEIGHT, replace(m.tensors[WEIGHT], **changes))
    )


def layouts(change: Callable[[Runs], Runs]) -> Break:
    """Change the runs of the layout that the tensor has."""

    def broken(m: Manifest) -> Manifest:
        index = m.layout_of[WEIGHT]
        return replace(m, layouts=at(m.layouts, index, change(m.layouts[index])))

    return broken


def run(**changes: Any) -> Break:
    return layouts(lambda runs: at(runs, 0, replace(runs[0], **changes)))


def level(**changes: Any) -> Break:
    return layouts(
        lambda runs: at(runs, 0, replace(runs[0], levels=(replace(runs[0].levels[0], **changes),)))
    )


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
    "a rank without fragment": (
        lambda m: replace(m, fragments=m.fragments[:1]),
        "not one fragment",
    ),
    "a rank with two fragments": (
        lambda m: replace(m, fragments=(*m.fragments, m.fragments[1])),
        "not one fragment",
    ),
    "fragments in another order": (
        lambda m: replace(m, fragments=m.fragments[::-1]),
        "not one fragment",
    ),
    "a rank beyond the world": (reference(rank=2, name="rank-00002.json"), "not one fragment"),
    "a negative rank": (reference(rank=-1, name="rank--0001.json"), "not one fragment"),
    "a world too large to count": (edit(world_size=HUGE), "not one fragment"),
    "a fragment of some ranks": (edit(carried=(FRAGMENT,)), "of some ranks only"),
    "a fragment of another save": (
        edit(carried=tuple(replace(FRAGMENT, rank=rank, step=4) for rank in range(2))),
        "another save",
    ),
    "a file outside the folder": (file(name="../../etc/passwd"), "not that of its rank"),
    "an absolute file": (file(name="/rank-00001.safetensors"), "not that of its rank"),
    "a file under another rank's name": (
        file(name="rank-00000.safetensors"),
        "not that of its rank",
    ),
    "a file of a negative rank": (
        file(rank=-1, name="rank--0001.safetensors"),
        "not that of its rank",
    ),
    "a file named twice": (lambda m: replace(m, files=(*m.files, m.files[1])), "named twice"),
    "an empty file": (file(size=0), "of 0 bytes"),
    "a giant file": (file(size=HUGE), "bytes"),
    "a file with chunks": (file(chunks=(Chunk(16, SUM),)), "parts of fragments"),
    "values of a rank": (edit(per_rank={"0": msgspec.Raw(b"{}")}), "parts of fragments"),
    "all fragments filled in": (edit(is_filled=True), "parts of fragments"),
    "an encoding of no file": (edit(encoded=(Encoding(7, "zstd", (9,)),)), "the encoded size"),
    "an encoding of no bytes": (encoding(lengths=(0,)), "the encoded size"),
    "an encoding with the chunks": (encoding(lengths=(5, 5)), "the encoded size"),
    "an encoding of another rank": (encoding(rank=0), "not that of its rank"),
    "a file that is encoded twice": (
        lambda m: replace(encoding()(m), encoded=2 * encoding()(m).encoded),
        "encoded twice",
    ),
    "a location of no file": (edit(locations=(Location(7, "/a"),)), "a location of no file"),
    "two locations of a file": (
        edit(locations=(Location(1, "/a"), Location(1, "/b"))),
        "a location of no file",
    ),
    "a location of an encoded file": (
        lambda m: replace(encoding()(m), locations=(Location(1, "/a"),)),
        "a location of no file",
    ),
    "an empty location": (edit(locations=(Location(1, ""),)), "is no path"),
    "a location with a null": (edit(locations=(Location(1, "/a\0b"),)), "is no path"),
    "a giant location": (edit(locations=(Location(1, "/a" * 4000),)), "is no path"),
    "a tensor named twice": (
        lambda m: replace(
            m, tensors=(*m.tensors, m.tensors[0]), layout_of=(*m.layout_of, m.layout_of[0])
        ),
        "named twice",
    ),
    "a tensor without layout": (
        lambda m: replace(m, layout_of=m.layout_of[:-1]),
        "not one layout for each",
    ),
    "a layout that is not there": (
        lambda m: replace(m, layout_of=at(m.layout_of, WEIGHT, 99)),
        "has no layout",
    ),
    "a layout before the first": (
        lambda m: replace(m, layout_of=at(m.layout_of, WEIGHT, -1)),
        "has no layout",
    ),
    "a tensor with shards": (tensor(shards=(Shard(0, 4096, (0, 0), (5, 4)),)), "has no layout"),
    "a dtype nobody knows": (tensor(dtype="float42"), "unknown dtype"),
    "a negative dimension": (tensor(shape=(-10, 4)), "impossible shape"),
    "a giant dimension": (tensor(shape=(HUGE, 4)), "impossible shape"),
    "a giant tensor": (tensor(shape=(1 << 40, 1 << 40)), "impossible shape"),
    "giant beside zero": (tensor(shape=(0, 1 << 40, 1 << 40)), "impossible shape"),
    "too many dimensions": (tensor(shape=(1,) * 65), "impossible shape"),
    "an order of other dimensions": (tensor(order=(0, 2)), "impossible order"),
    "an order of fewer dimensions": (tensor(order=(0,)), "impossible order"),
    "an order with a dimension twice": (tensor(order=(1, 1)), "impossible order"),
    "an order of giant dimensions": (tensor(order=(0, HUGE)), "impossible order"),
    "a view of nothing": (edit(views={"no": View("no", 0, ())}), "is a view, and is not stored"),
    "a view of fewer dimensions": (edit(views={"weight": View("b", 0, (4,))}), "impossible place"),
    "a view of negative strides": (edit(views={"weight": View("b", 0, (-4, 1))}), "impossible"),
    "a view of giant strides": (edit(views={"weight": View("b", 0, (HUGE, 1))}), "impossible"),
    "a view before its buffer": (edit(views={"weight": View("b", -4, (4, 1))}), "impossible"),
    "a view at half an element": (edit(views={"weight": View("b", 2, (4, 1))}), "impossible"),
    "a view without elements": (edit(views={"empty": View("b", 0, (3, 1))}), "without elements"),
    "a buffer of gaps": (edit(views={"weight": View("b", 1 << 20, (4, 1))}), "larger than"),
    "a view of wide rows": (edit(views={"weight": View("b", 0, (1 << 20, 1))}), "larger than"),
    "a tensor of more bytes than elements": (
        tensor(dtype="complex128", shape=(1 << 60,)),
        "impossible shape",
    ),
    "a tensor of another shape": (tensor(shape=(11, 4)), "40 of 44 elements"),
    "a box outside": (run(offsets=(8, 0)), "not inside"),
    "a box at a negative place": (run(offsets=(-1, 0)), "not inside"),
    "a box of negative size": (run(shape=(-5, 4)), "counts backwards"),
    "a box of other rank": (run(offsets=(5,), shape=(5,)), "other dimensions"),
    "a box with too few offsets": (run(offsets=(5,)), "other dimensions"),
    "a box of a rank beyond the world": (run(rank=1), "beyond the ranks"),
    "a box of a negative rank": (run(rank=-1), "beyond the ranks"),
    "a box twice": (level(offset_steps=(0, 0)), "more than once"),
    "a run of no boxes": (level(count=0), "counts backwards"),
    "boxes without end": (level(count=HUGE, offset_steps=(0, 1)), ""),
    "a hole": (level(count=1), "20 of 40 elements"),
    "no boxes": (layouts(lambda runs: ()), "0 of 40 elements"),
    "a tie to nothing": (edit(tied={"head": "nobody"}), "which is not stored"),
    "a tie to a tie": (edit(tied={"head": "weight", "deep": "head"}), "which is not stored"),
    "a tie to itself": (edit(tied={"loop": "loop"}), "which is not stored"),
    "a tie over a tensor": (edit(tied={"bias": "weight"}), "which is not stored"),
}


def test_what_we_write_is_accepted():
    assert check_manifest(MANIFEST, key="k") is MANIFEST
    assert check_manifest(encoding()(MANIFEST), key="k").codecs == ("zstd",)
    carried = tuple(replace(FRAGMENT, rank=rank) for rank in range(2))
    check_manifest(replace(MANIFEST, carried=carried), key="k")
    checked(WHOLE)


@pytest.mark.parametrize("rule", RULES)
def test_a_manifest_that_breaks_one_rule_is_refused(rule):
    broken, reported = RULES[rule]
    with pytest.raises(ManifestCorrupt) as caught:
        check_manifest(broken(MANIFEST), key="step/manifest.json")
    assert reported in caught.value.detail
    assert caught.value.key == "step/manifest.json"


WHOLE = fragment_of(FRAGMENT, key="k")
"""The fragment as objects, which are easier to break. It is packed and read again."""
Spoil = Callable[[Fragment], Fragment]


def checked(fragment: Fragment) -> Fragment:
    """Return what is read of it, or the refusal."""
    return fragment_of(pack_fragment(fragment), key="k")


def own_file(**changes: Any) -> Spoil:
    return lambda f: replace(f, file=replace(f.file, **changes))  # type: ignore[type-var]


def own_chunks(changed: Callable[[tuple[Chunk, ...]], tuple[Chunk, ...]]) -> Spoil:
    def broken(f: Fragment) -> Fragment:
        assert f.file is not None
        return own_file(chunks=changed(f.file.chunks))(f)

    return broken


def own_chunk(**changes: Any) -> Spoil:
    return own_chunks(lambda chunks: at(chunks, 1, replace(chunks[1], **changes)))


def own_tensor(**changes: Any) -> Spoil:
    return lambda f: replace(
        f, tensors=at(f.tensors, WEIGHT_OF, replace(f.tensors[WEIGHT_OF], **changes))
    )


def own_shard(**changes: Any) -> Spoil:
    def broken(f: Fragment) -> Fragment:
        shards = f.tensors[WEIGHT_OF].shards
        return own_tensor(shards=at(shards, 0, replace(shards[0], **changes)))(f)

    return broken


def own_lengths(lengths: Callable[[list[int]], list[int]]) -> Spoil:
    def broken(f: Fragment) -> Fragment:
        assert f.file is not None
        encoded = Encoding(1, "zstd", tuple(lengths([chunk.nbytes for chunk in f.file.chunks])))
        return replace(own_file(name="rank-00001.encoded")(f), encoded=(encoded,))

    return broken


WEIGHT_OF = next(index for index, tensor in enumerate(WHOLE.tensors) if tensor.name == "weight")
FRAGMENT_RULES: dict[str, tuple[Spoil, str]] = {
    "a negative rank": (lambda f: replace(f, rank=-1), "out of range"),
    "a rank beyond the world": (lambda f: replace(f, rank=2), "out of range"),
    "a negative step": (lambda f: replace(f, step=-1), "out of range"),
    "no ranks": (lambda f: replace(f, world_size=0), "out of range"),
    "tiny chunks": (lambda f: replace(f, chunk_bytes=8), "chunk"),
    "another rank's file": (lambda f: replace(f, file=MANIFEST.files[0]), ""),
    "another rank's name": (own_file(name="rank-00000.safetensors"), "not that of its rank"),
    "no file": (lambda f: replace(f, file=None), "chunks"),
    "a tie to nothing": (lambda f: replace(f, tied={"a": "b"}), "is tied to"),
    "a tie over a tensor": (lambda f: replace(f, tied={"bias": "weight"}), "is tied to"),
    "a file too small for its chunks": (own_file(size=1), "do not add up"),
    "a chunk more than its file": (
        own_chunks(lambda chunks: (*chunks, Chunk(1, SUM))),
        "do not add up",
    ),
    "a chunk less than its file": (
        own_chunks(lambda chunks: chunks[:-1]),
        "chunks of its file",
    ),
    "a chunk without bytes": (own_chunk(nbytes=0), "a chunk of no bytes"),
    "a chunk of negative size": (own_chunk(nbytes=-8), "a chunk of no bytes"),
    "a chunk of another size": (own_chunk(nbytes=24), "chunks of its file"),
    "a chunk without checksum": (own_chunk(checksum=""), "not one checksum for each chunk"),
    "a tensor named twice": (
        lambda f: replace(f, tensors=(*f.tensors, f.tensors[0])),
        "named twice",
    ),
    "a dtype nobody knows": (own_tensor(dtype="float42"), "unknown dtype"),
    "a dtype of other size": (own_tensor(dtype="float64"), "shard"),
    "an impossible order": (own_tensor(order=(1, 1)), "impossible order"),
    "an impossible shape": (own_tensor(shape=(1 << 40, 1 << 40)), "impossible shape"),
    "a box outside": (own_shard(offsets=(8, 0)), "not inside"),
    "a box at a negative place": (own_shard(offsets=(-1, 0)), "not inside"),
    "a box of negative size": (own_shard(shape=(-5, 4)), "less than nothing"),
    "a box larger than its file": (
        lambda f: own_shard(shape=(10, 1 << 40), offsets=(0, 0))(
            own_tensor(shape=(10, 1 << 40))(f)
        ),
        "chunks of its file",
    ),
    "a shard beside the chunks": (own_shard(offset=4097), "is not aligned with the chunks"),
    "a shard before the file": (own_shard(offset=-64), "is not aligned with the chunks"),
    "a shard after the file": (own_shard(offset=HUGE), "is not aligned with the chunks"),
    "a shard on another's chunks": (
        lambda f: replace(f, tensors=(*f.tensors, replace(f.tensors[WEIGHT_OF], name="x"))),
        "overlap",
    ),
    "an encoded length too few": (
        own_lengths(lambda lengths: lengths[1:]),
        "not one length for each chunk",
    ),
    "an encoded chunk of no bytes": (own_lengths(lambda lengths: [0, *lengths[1:]]), "too long"),
    "an encoded chunk that is longer": (
        own_lengths(lambda lengths: [lengths[0] + 1, *lengths[1:]]),
        "too long",
    ),
}


@pytest.mark.parametrize("rule", FRAGMENT_RULES)
def test_a_fragment_that_breaks_one_rule_is_refused(rule):
    broken, reported = FRAGMENT_RULES[rule]
    with pytest.raises(ManifestCorrupt) as caught:
        checked(broken(WHOLE))
    assert reported in caught.value.detail


def test_an_encoded_chunk_that_would_unpack_to_more_than_a_chunk_may_have_is_refused() -> None:
    """The header has the right length, and a reader reserves memory for what it unpacks to."""
    long = MAX_CHUNK_BYTES + 4096
    file = File("rank-00001.encoded", 1, long, (Chunk(long, SUM),))
    fragment = replace(
        WHOLE, file=file, tensors=(), tied={}, encoded=(Encoding(1, "zstd", (long,)),)
    )
    checked(fragment)
    with pytest.raises(ManifestCorrupt, match="too long"):
        checked(replace(fragment, encoded=(Encoding(1, "zstd", (100,)),)))


def test_fragments_that_are_not_those_of_the_manifest_are_refused() -> None:
    other = replace(WHOLE, rank=0, file=None)
    with pytest.raises(ManifestCorrupt, match="another file"):
        fill_manifest(MANIFEST, {0: other}, key="k")
    with pytest.raises(ManifestCorrupt, match="has other boxes"):
        fill_manifest(MANIFEST, {1: own_shard(offsets=(4, 0))(WHOLE)}, key="k")
    with pytest.raises(ManifestCorrupt, match="has another tensor"):
        fill_manifest(MANIFEST, {1: own_tensor(dtype="int32")(WHOLE)}, key="k")


def test_a_location_that_manifest_and_fragment_do_not_share_is_refused() -> None:
    located = replace(WHOLE, locations=(Location(1, "/a"),))
    for manifest, fragment in (
        (MANIFEST, located),
        (replace(MANIFEST, locations=(Location(1, "/a"),)), WHOLE),
        (replace(MANIFEST, locations=(Location(1, "/b"),)), located),
    ):
        with pytest.raises(ManifestCorrupt, match="names another location"):
            fill_manifest(manifest, {1: fragment}, key="m")


def test_shards_that_claim_the_same_chunks_again_and_again_take_no_longer_than_the_file_has_chunks() -> (  # noqa: E501
    None
):
    chunks = (Chunk(4096, SUM), *(Chunk(16, SUM) for _ in range(2000)))
    shard = Shard(1, 4096, (0,), (32_000,))
    tensors = tuple(Tensor(f"x{i}", "uint8", (32_000,), (shard,)) for i in range(2000))
    file = File("rank-00001.safetensors", 1, 4096 + 32_000, chunks)
    hostile = replace(WHOLE, chunk_bytes=16, file=file, tensors=tensors, tied={})
    packed = pack_fragment(hostile)
    began = time.process_time()
    with pytest.raises(ManifestCorrupt, match="a shard is not aligned with the chunks"):
        fragment_of(packed, key="k")
    assert time.process_time() - began < 0.5
    checked(replace(hostile, tensors=tensors[:1]))


def test_a_fragment_may_hold_a_part_of_its_tensors():
    checked(replace(WHOLE, tensors=tuple(replace(tensor, shards=()) for tensor in WHOLE.tensors)))


def test_a_tensor_of_sixty_four_dimensions_is_possible():
    shape = (1,) * 64
    part = Shard(1, 4096, (0,) * 64, shape)
    file = File("rank-00001.safetensors", 1, 4100, (Chunk(4096, SUM), Chunk(4, SUM)))
    one = Tensor("x", "float32", shape, (part,))
    assert checked(replace(WHOLE, file=file, tied={}, tensors=(one,))).tensors == (one,)
    manifest = replace(
        MANIFEST,
        tied={},
        tensors=(replace(one, shards=()),),
        layout_of=(0,),
        layouts=((Run(1, (0,) * 64, shape, ()),),),
    )
    assert check_manifest(manifest, key="k") is manifest


numbers = st.sampled_from([-HUGE, -1, 0, 1, 2, 5, 16, 4096, 1 << 31, 1 << 53, HUGE, 1 << 70])
tuples = st.lists(numbers, max_size=3).map(tuple)
wild_levels = st.builds(Level, numbers, numbers, tuples)
wild_runs = st.builds(Run, numbers, tuples, tuples, st.lists(wild_levels, max_size=3).map(tuple))


@settings(max_examples=examples(500))
@given(
    st.builds(
        replace,
        st.just(MANIFEST),
        world_size=st.just(2) | numbers,
        step=st.just(3) | numbers,
        chunk_bytes=st.just(64) | numbers,
        files=st.just(MANIFEST.files)
        | st.lists(st.builds(File, st.just("rank-00000.safetensors"), numbers, numbers, st.just(())), max_size=3).map(tuple),  # noqa: E501
        fragments=st.just(MANIFEST.fragments)
        | st.lists(st.builds(FragmentRef, st.just("rank-00000.json"), numbers, numbers, st.just(SUM)), max_size=3).map(tuple),  # noqa: E501
        layouts=st.lists(st.lists(wild_runs, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),  # noqa: E501
        layout_of=st.just((0, 0, 0, 0)) | tuples,
        tensors=st.lists(
            st.builds(Tensor, st.text(max_size=2), st.sampled_from(["float32", "uint8", "complex128"]), tuples, st.just(())),  # noqa: E501
            max_size=4,
        ).map(tuple),
    )
)  # fmt: skip
def test_wild_numbers_are_refused_with_our_error(manifest):
    try:
        check_manifest(manifest, key="k")
    except ManifestCorrupt:
        return
    for tensor, index in zip(manifest.tensors, manifest.layout_of, strict=True):
        assert manifest.layouts[index] or not tensor.nbytes


def test_a_manifest_with_a_codec_that_is_not_installed_is_not_damaged() -> None:
    record = encoding(codec="gzip")(MANIFEST)
    with pytest.raises(CodecMissing, match="'gzip', which is not installed here: install") as error:
        check_manifest(record, key="k")
    assert isinstance(error.value, FormatUnsupported)
