"""A manifest by reference, and the fragments that it leaves to be read: which are needed, and what it is with them filled in.

Pure: who reads fragments is the catalog. A rank that restores what it saved needs one, its own; one that reshards those of the ranks whose boxes meet its own; whoever wants all of a
checkpoint needs all of them, and then has the manifest that a small world would have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from msgspec.structs import replace

from ckpt.errors import ManifestCorrupt
from ckpt.model.box import Box
from ckpt.model.manifest import Encoding, File, Fragment, Manifest, Shard, Tensor
from ckpt.model.runs import boxes_of, ranks_meeting
from ckpt.model.validate import check_manifest


def ranks_of(manifest: Manifest, wanted: Iterable[tuple[str, Iterable[Box]]]) -> set[int]:
    """Ranks whose files hold some of ``wanted``: names (tied ones too) and boxes. Names that are not there are nobody's."""
    layout_of = {
        tensor.name: index for tensor, index in zip(manifest.tensors, manifest.layout_of, strict=True)
    }
    layout_of |= {name: layout_of[target] for name, target in manifest.tied.items()}
    known: dict[tuple[int, Box], set[int]] = {}  # thousands of tensors, a few layouts
    found: set[int] = set()
    for name, boxes in wanted:
        if (index := layout_of.get(name)) is None:
            continue
        for box in boxes:
            if (index, box) not in known:
                known[index, box] = ranks_meeting(manifest.layouts[index], box)
                found |= known[index, box]
    return found


def fill(manifest: Manifest, fragments: Mapping[int, Fragment], *, key: str) -> Manifest:
    """``manifest`` with what the fragments of some ranks say; whole if they are all there, and then checked as a whole.

    Raises:
        ManifestCorrupt: They do not say what it was merged from, or do not fit together.
    """
    files, encoded, known = list[File](), list[Encoding](), manifest.file_map()
    for rank, part in fragments.items():
        if (replace(part.file, chunks=()) if part.file else None) != known.get(rank):
            raise ManifestCorrupt(key, f"the fragment of rank {rank} names another file")
    for file in manifest.files:
        own = fragments.get(file.rank)
        files.append(file if own is None or own.file is None else own.file)
    for encoding in manifest.encoded:
        mine = fragments.get(encoding.rank)
        if mine is None:
            encoded.append(encoding)
            continue
        if [replace(each, lengths=(each.size,)) for each in mine.encoded] != [encoding]:
            raise ManifestCorrupt(key, f"the fragment of rank {encoding.rank} is encoded otherwise")
        encoded += mine.encoded
    whole = len(fragments) == manifest.world_size
    filled = replace(
        manifest,
        files=tuple(files),
        encoded=tuple(encoded),
        tensors=_shards(manifest, fragments, key),
        per_rank={**manifest.per_rank, **{str(rank): part.per_rank for rank, part in fragments.items()}},
        by_reference=not whole,
        layouts=() if whole else manifest.layouts,
        layout_of=() if whole else manifest.layout_of,
    )
    return check_manifest(filled, key=key) if whole else filled


def _shards(manifest: Manifest, fragments: Mapping[int, Fragment], key: str) -> tuple[Tensor, ...]:
    """Of each tensor those shards of ``fragments`` that count: of equal copies one does."""
    told = {
        rank: {
            tensor.name: (tensor, {shard.box: shard for shard in tensor.shards}) for tensor in part.tensors
        }
        for rank, part in fragments.items()
    }
    known: dict[tuple[int, int], tuple[Box, ...]] = {}
    found: list[Tensor] = []
    for tensor, layout in zip(manifest.tensors, manifest.layout_of, strict=True):
        shards: list[tuple[Box, Shard]] = []
        for rank, tensors in told.items():
            mine, held = tensors.get(tensor.name, (tensor, {}))
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                raise ManifestCorrupt(key, f"the fragment of rank {rank} has another tensor {tensor.name!r}")
            if (layout, rank) not in known:  # lazily, and no more than could be right
                runs = manifest.layouts[layout]
                known[layout, rank] = tuple(islice(boxes_of(runs, rank), len(held) + 1))
            boxes = known[layout, rank]
            if len(boxes) > len(held) or not all(box in held for box in boxes):
                raise ManifestCorrupt(key, f"rank {rank} has other boxes of tensor {tensor.name!r}")
            shards += [(box, held[box]) for box in boxes]
        shards.sort(key=lambda pair: pair[0])
        found.append(replace(tensor, shards=tuple(shard for _, shard in shards)))
    return tuple(found)
