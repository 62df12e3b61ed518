"""Find the fragments that a reader needs, and put their contents into the manifest.

A stored manifest lacks the chunks, the shards and the ``PerRank`` values, which are in the
fragments of the ranks. A rank that restores its own part needs its own fragment only. A rank that
reshards needs the fragments of all ranks whose boxes overlap its own boxes. A reader of the whole
checkpoint needs all fragments. The catalog (``ckpt.catalog``) reads fragments from the store.

A *fragment* is the record of what one rank has written. A *shard* is a box, which is a rectangular
region of a tensor, in the file of a rank. A *layout* says which rank has which box, as a few *runs*
that each describe many boxes. Tensors that are cut alike share a layout. A manifest *carries*
fragments if it contains copies of them. An *increment* is a data file without the chunks that the
file of an older step has too, and a *location* is the path of a data file of another program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from ckpt.errors import ManifestCorrupt
from ckpt.model.box import Box, BoxIndex, tiling_fault
from ckpt.model.box_layouts import boxes_of, extent, ranks_meeting
from ckpt.model.fragment_columns import fragment_of
from ckpt.model.manifest import Encoding, File, Fragment, Increment, Manifest, Shard, Tensor


def ranks_of(manifest: Manifest, regions: Iterable[tuple[str, Iterable[Box]]]) -> set[int]:
    """Return the ranks whose files hold an element of ``regions``.

    Args:
        regions: Names of tensors, which may be tied names, with boxes of each. A name that is not
            in the manifest is ignored.
    """
    layout_of = {
        tensor.name: index
        for tensor, index in zip(manifest.tensors, manifest.layout_of, strict=True)
    }
    layout_of |= {name: layout_of[target] for name, target in manifest.tied.items()}
    # Each pair of a layout and a box is looked up once, since thousands of tensors share a few.
    ranks_by_box: dict[tuple[int, Box], set[int]] = {}
    extents: dict[int, BoxIndex] = {}
    ranks: set[int] = set()
    for name, boxes in regions:
        if (index := layout_of.get(name)) is None:
            continue
        for box in boxes:
            if (index, box) not in ranks_by_box:
                runs = manifest.layouts[index]
                if index not in extents:
                    extents[index] = BoxIndex([extent(run) for run in runs])
                runs_near_box = [runs[position] for position in extents[index].search(box)]
                ranks_by_box[index, box] = ranks_meeting(runs_near_box, box)
                ranks |= ranks_by_box[index, box]
    return ranks


def carried_fragment(manifest: Manifest, rank: int, *, key: str) -> Fragment | None:
    """Return the fragment of ``rank`` from the copy in the manifest. Return None if the manifest
    carries no copies of fragments.

    Raises:
        ManifestCorrupt: The copy is invalid.
        CodecMissing: The codec of the rank's data file is not installed here.
    """
    return fragment_of(manifest.carried[rank], key=key) if manifest.carried else None


def carried_fragments(manifest: Manifest, *, key: str) -> dict[int, Fragment]:
    """Return a dict that maps each rank to its fragment, from the copies in the manifest. The dict
    is empty if the manifest carries no copies of fragments.

    Raises:
        ManifestCorrupt: A copy is invalid.
        CodecMissing: The codec of a data file is not installed here.
    """
    return {part.rank: fragment_of(part, key=key) for part in manifest.carried}


def fill_manifest(manifest: Manifest, fragments: Mapping[int, Fragment], *, key: str) -> Manifest:
    """Return ``manifest`` with the chunks, shards and ``PerRank`` values that ``fragments`` hold.

    If ``fragments`` has all ranks, check that the boxes of each tensor cover the tensor exactly
    once.

    Args:
        fragments: The fragments to use, by rank.
        key: The name of the manifest in errors.

    Raises:
        ManifestCorrupt: The manifest was not merged from these fragments, or the boxes of a tensor
            overlap or leave a hole.
    """
    # ``manifest`` has files without chunks, and encodings with one length, the size of the file.
    files, encodings, files_by_rank = list[File](), list[Encoding](), manifest.file_map()
    locations = {location.rank: (location,) for location in manifest.locations}
    for rank, part in fragments.items():
        if (replace(part.file, chunks=()) if part.file else None) != files_by_rank.get(rank):
            raise ManifestCorrupt(key, f"the fragment of rank {rank} names another file")
        if part.locations != locations.get(rank, ()):
            raise ManifestCorrupt(key, f"the fragment of rank {rank} names another location")
    for file in manifest.files:
        fragment = fragments.get(file.rank)
        files.append(file if fragment is None or fragment.file is None else fragment.file)
    increments = list[Increment]()
    for increment in manifest.increments:
        fragment = fragments.get(increment.rank)
        own_increments = (increment,) if fragment is None else fragment.increments
        if [own_increment.without_positions() for own_increment in own_increments] != [increment]:
            raise ManifestCorrupt(key, f"the fragment of rank {increment.rank} has another base")
        increments += own_increments
    for encoding in manifest.encoded:
        fragment = fragments.get(encoding.rank)
        if fragment is None:
            encodings.append(encoding)
            continue
        if [
            replace(own_encoding, lengths=(own_encoding.size,)) for own_encoding in fragment.encoded
        ] != [encoding]:
            raise ManifestCorrupt(key, f"the fragment of rank {encoding.rank} is encoded otherwise")
        encodings += fragment.encoded
    is_whole = len(fragments) == manifest.world_size
    return replace(
        manifest,
        files=tuple(files),
        encoded=tuple(encodings),
        increments=tuple(increments),
        tensors=_Filler(manifest, fragments, key).tensors(is_whole),
        per_rank={
            **manifest.per_rank,
            **{str(rank): part.per_rank for rank, part in fragments.items()},
        },
        is_filled=is_whole,
    )


class _Filler:
    """Find the shards of each tensor in fragments.

    If several ranks have stored the same box, take the shard of the rank that the layout in the
    manifest names.
    """

    def __init__(self, manifest: Manifest, fragments: Mapping[int, Fragment], key: str) -> None:
        self._manifest, self._key = manifest, key
        self._tensors_of = {
            rank: {tensor.name: tensor for tensor in part.tensors}
            for rank, part in fragments.items()
        }
        self._boxes: dict[tuple[int, int], tuple[Box, ...]] = {}
        self._complete_layouts: set[tuple[int, tuple[int, ...]]] = set()

    def tensors(self, whole: bool) -> tuple[Tensor, ...]:
        """Return the tensors of the manifest with the shards that the fragments hold.

        Args:
            whole: Whether the fragments of all ranks are present, so that the boxes of each tensor
                must cover it exactly once.
        """
        tensors: list[Tensor] = []
        for tensor, layout in zip(self._manifest.tensors, self._manifest.layout_of, strict=True):
            shards = [
                shard
                for rank in self._tensors_of
                for shard in self._shards_of(tensor, layout, rank)
            ]
            if len(shards) > 1:
                shards.sort(key=lambda shard: shard.box)
            if whole and (layout, tensor.shape) not in self._complete_layouts:
                if fault := tiling_fault(tensor.shape, [shard.box for shard in shards]):
                    raise ManifestCorrupt(self._key, f"tensor {tensor.name!r}: {fault}")
                self._complete_layouts.add((layout, tensor.shape))
            tensors.append(replace(tensor, shards=tuple(shards)))
        return tuple(tensors)

    def _shards_of(self, tensor: Tensor, layout: int, rank: int) -> Sequence[Shard]:
        """Return the shards of a tensor that the manifest names on ``rank``.

        Raises:
            ManifestCorrupt: The fragment of the rank has another tensor or other boxes.
        """
        own_tensor = self._tensors_of[rank].get(tensor.name)
        if own_tensor is not None and (own_tensor.dtype, own_tensor.shape) != (
            tensor.dtype,
            tensor.shape,
        ):
            raise ManifestCorrupt(
                self._key, f"the fragment of rank {rank} has another tensor {tensor.name!r}"
            )
        shards = own_tensor.shards if own_tensor else ()
        if (layout, rank) not in self._boxes:
            # A forged layout may have very many boxes for this rank. To find a difference, it is
            # enough to take one more box than the rank has shards.
            boxes = boxes_of(self._manifest.layouts[layout], rank)
            self._boxes[layout, rank] = tuple(islice(boxes, len(shards) + 1))
        expected_boxes = self._boxes[layout, rank]
        if len(expected_boxes) == len(shards) and all(
            box.offsets == shard.offsets and box.shape == shard.shape
            for box, shard in zip(expected_boxes, shards, strict=True)
        ):
            return shards
        by_box = {shard.box: shard for shard in shards}
        if len(expected_boxes) > len(by_box) or not all(box in by_box for box in expected_boxes):
            raise ManifestCorrupt(
                self._key, f"rank {rank} has other boxes of tensor {tensor.name!r}"
            )
        return [by_box[box] for box in expected_boxes]
