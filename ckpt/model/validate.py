"""Check that a manifest or fragment is one that this package could have written.

The checks run before a manifest or fragment is used. They require that names of files do not lead
out of their folder, that sizes are possible, and that layouts have as many elements as their
tensors. Other modules make the remaining checks. ``model.record_encoding`` checks the size and the
JSON, ``model.values`` the nesting of trees, and ``model.fragment_columns`` the columns of a
fragment. ``model.fill_manifest`` and ``plan.restore`` check that boxes do not overlap.

A *fragment* is the record of what one rank has written. A manifest refers to all of them, and may
*carry* copies. A *layout* says which rank has which box of a tensor. A *tied* name is one more name
of a tensor, and *views* are tensors that share memory with others. An *increment* is a data file
without the first chunks (``count`` of them), which the file of an older step, its *base*, has too.
Its ``lead`` is the size of what it holds before its own chunks. If the base is in another root,
``base_lead`` is the size of the first chunk of the base. The increment then has the *image header*,
which is the first chunk of its own image. An *adopted* base consists of files of another program,
and ``adoption`` says where they are. A *location* is the path of such a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from ckpt.codec.registry import is_known
from ckpt.errors import CodecMissing, ManifestCorrupt
from ckpt.model.box_layouts import fault_of
from ckpt.model.checksum import CHECKSUM_PATTERN
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import BaseRef, StepRef, data_name, fragment_name, parse_base
from ckpt.model.manifest import (
    FILE_SPACE,
    Encoding,
    File,
    Increment,
    Location,
    Manifest,
    Packed,
    Tensor,
)
from ckpt.model.values import parse
from ckpt.model.views import views_fault

MAX_CHUNK_BYTES = 64 << 20
MAX_DIMENSIONS = 64
_MAX_BYTES = 1 << 60
_MAX_PATH = 4096
_MIN_CHUNK_BYTES = 16  # The largest size of an element


def check_manifest(manifest: Manifest, *, key: str) -> Manifest:
    """Return ``manifest`` after checking it. ``key`` is its name in errors.

    Raises:
        ManifestCorrupt: The manifest is invalid. The error names the first fault.
        CodecMissing: The codec of a file is not installed here.
    """
    require(
        manifest.world_size >= 1 and manifest.step >= 0, key, "step or world size is out of range"
    )
    _check_chunk_bytes(manifest.chunk_bytes, key)
    _check_fragments(manifest, key)
    parse(manifest.metadata, key)
    encodings = {encoding.rank: encoding for encoding in manifest.encoded}
    files = manifest.file_map()
    _check_files(manifest.files, key, encodings=encodings)
    require(len(encodings) == len(manifest.encoded), key, "a file is encoded twice")
    for encoding in manifest.encoded:
        fits = (
            encoding.rank in files
            and len(encoding.lengths) == 1
            and 0 < encoding.size <= _MAX_BYTES
        )
        require(fits, key, f"the encoded size of rank {encoding.rank}")
        _check_codec(encoding, key)
    if manifest.locations:
        _check_locations(manifest.locations, files.keys() - encodings.keys(), key)
    if manifest.increments:
        ref = StepRef(manifest.step, manifest.attempt)
        check_increments(manifest.increments, ref, set(files), encodings, key)
    has_parts = (
        manifest.is_filled or manifest.per_rank or any(file.chunks for file in manifest.files)
    )
    require(not has_parts, key, "parts of fragments")
    _check_layouts(manifest, key)
    return manifest


def _check_fragments(manifest: Manifest, key: str) -> None:
    """Raise ``ManifestCorrupt`` unless the manifest names one fragment of each rank, and carries
    copies of all of them or of none.
    """
    for fragment in manifest.fragments:
        require(
            fragment.name == fragment_name(fragment.rank),
            key,
            f"fragment name {fragment.name[:80]!r}",
        )
        fits = 0 <= fragment.size <= _MAX_BYTES and _is_checksum(fragment.checksum)
        require(fits, key, f"fragment {fragment.name}")
    ranks = [fragment.rank for fragment in manifest.fragments]
    is_whole = len(ranks) == manifest.world_size and ranks == list(range(len(ranks)))
    require(is_whole, key, "not one fragment for each rank")
    copy_ranks = [part.rank for part in manifest.carried]
    require(copy_ranks in ([], ranks), key, "it carries the fragments of some ranks only")
    save = (manifest.step, manifest.attempt, manifest.world_size, manifest.chunk_bytes)
    for part in manifest.carried:
        part_save = (part.step, part.attempt, part.world_size, part.chunk_bytes)
        require(
            part_save == save, key, f"it carries the fragment of another save for rank {part.rank}"
        )


def _check_layouts(manifest: Manifest, key: str) -> None:
    """Raise ``ManifestCorrupt`` if a tensor, its layout, a tied name or a view is impossible."""
    require(len(manifest.layout_of) == len(manifest.tensors), key, "not one layout for each tensor")
    names: set[str] = set()
    faults: dict[tuple[int, tuple[int, ...]], str | None] = {}
    for tensor, index in zip(manifest.tensors, manifest.layout_of, strict=True):
        check_tensor(tensor, names, key)
        fits = not tensor.shards and 0 <= index < len(manifest.layouts)
        require(fits, key, f"tensor {tensor.name!r} has no layout")
        if (index, tensor.shape) not in faults:
            faults[index, tensor.shape] = fault_of(
                manifest.layouts[index], tensor.shape, manifest.world_size
            )
        if fault := faults[index, tensor.shape]:
            raise ManifestCorrupt(key, f"tensor {tensor.name!r}: {fault}")
    check_tied(manifest.tied, names, key)
    if manifest.views:
        kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        require(not (fault := views_fault(manifest.views, kinds)), key, fault)


def check_fragment_fields(record: Packed, key: str) -> None:
    """Check the step, the rank, the world size, the chunk size, the file and the codec that a
    fragment states.

    Raises:
        ManifestCorrupt: One of these values is invalid.
        CodecMissing: The codec is not installed here.
    """
    fits = 0 <= record.rank < record.world_size and record.step >= 0
    require(fits, key, "step, rank or world size is out of range")
    _check_chunk_bytes(record.chunk_bytes, key)
    files = (record.file,) if record.file else ()
    encodings = {encoding.rank: encoding for encoding in record.encoded}
    _check_files(files, key, encodings=encodings)
    require(all(file.rank == record.rank for file in files), key, "holds the file of another rank")
    require(set(encodings) <= {file.rank for file in files}, key, "an encoding of no file")
    for encoding in record.encoded:
        _check_codec(encoding, key)
    if record.locations:
        _check_locations(record.locations, {file.rank for file in files} - encodings.keys(), key)
    if record.increments:
        ref, ranks = StepRef(record.step, record.attempt), {file.rank for file in files}
        check_increments(record.increments, ref, ranks, encodings, key)


def _check_locations(locations: Sequence[Location], ranks: Set[int], key: str) -> None:
    """Raise ``ManifestCorrupt`` if two locations are of one rank, if one is of a rank that has no
    plain file, or if one is no path.

    Args:
        locations: The paths of the data files that belong to other programs.
        ranks: The ranks whose files are not encoded.
        key: The key of the manifest or fragment, for errors.
    """
    location_ranks = {location.rank for location in locations}
    require(
        len(location_ranks) == len(locations) and location_ranks <= ranks,
        key,
        "a location of no file",
    )
    for location in locations:
        require(_is_path(location.path), key, f"the location {location.path[:80]!r} is no path")


def check_increments(
    increments: Sequence[Increment],
    ref: StepRef,
    ranks: Collection[int],
    encodings: Mapping[int, Encoding],
    key: str,
) -> None:
    """Raise ``ManifestCorrupt`` if an increment names no other step, or has an impossible size.

    Args:
        increments: The increments of a manifest or fragment.
        ref: The step of the manifest or fragment.
        ranks: The ranks that have a data file.
        encodings: The encoded files, by rank.
        key: The key of the manifest or fragment, for errors.
    """
    require(
        len({increment.rank for increment in increments}) == len(increments),
        key,
        "a rank has two increments",
    )
    for increment in increments:
        base = parse_base(increment.base)
        detail = f"the increment of rank {increment.rank}"
        names_other = base is not None and base != BaseRef("", ref)
        require(names_other, key, f"{detail} names no other step")
        least_count = 1 + increment.has_image_header
        require(increment.rank in ranks and increment.count >= least_count, key, detail)
        sizes = (increment.lead, increment.size, increment.base_size, increment.base_lead)
        require(all(0 <= size <= _MAX_BYTES for size in sizes), key, f"{detail} has a wrong size")
        has_other_root = base is not None and bool(base.root)
        is_encoded = increment.rank in encodings
        has_lead = increment.lead > 0
        has_header = (
            has_lead == has_other_root
            if is_encoded
            else has_lead and _is_checksum(increment.checksum)
        )
        fits = has_header and has_other_root == increment.has_image_header
        require(fits, key, f"{detail}: its header")
        if (adoption := increment.adoption) is not None:
            require(not adoption.positions, key, f"{detail}: positions of chunks")
            paths_fit = adoption.files and all(_is_path(file.path) for file in adoption.files)
            require(bool(paths_fit), key, f"{detail}: its base has no files")
            fits = not increment.base_lead and increment.base_size == adoption.end
            sizes_fit = all(0 < file.size < FILE_SPACE for file in adoption.files)
            require(fits and sizes_fit, key, f"{detail}: the size of its base")


def _check_codec(encoding: Encoding, key: str) -> None:
    """Raise ``CodecMissing`` if the codec of ``encoding`` is not installed here."""
    if not is_known(encoding.codec):
        raise CodecMissing(key, encoding.codec[:40])


def require(condition: bool, key: str, detail: str) -> None:
    """Raise ``ManifestCorrupt`` for the manifest or fragment ``key`` with the text ``detail`` if
    ``condition`` is False.
    """
    if not condition:
        raise ManifestCorrupt(key, detail)


def _is_path(location: str) -> bool:
    return 0 < len(location) <= _MAX_PATH and "\0" not in location


def _is_checksum(text: str) -> bool:
    return CHECKSUM_PATTERN.fullmatch(text) is not None


def _check_chunk_bytes(chunk_bytes: int, key: str) -> None:
    require(
        _MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES, key, f"chunks of {chunk_bytes} bytes"
    )


def _check_files(files: Iterable[File], key: str, *, encodings: Mapping[int, Encoding]) -> None:
    """Raise ``ManifestCorrupt`` if a file does not have the name of its rank, or has an
    impossible size.
    """
    ranks: set[int] = set()
    for file in files:
        require(
            file.rank >= 0 and file.name == data_name(file.rank, is_encoded=file.rank in encodings),
            key,
            f"file name {file.name[:80]!r} is not that of its rank",
        )
        require(file.rank not in ranks, key, f"file {file.name} is named twice")
        ranks.add(file.rank)
        require(0 < file.size <= _MAX_BYTES, key, f"file {file.name} of {file.size} bytes")


def check_tensor(tensor: Tensor, names: set[str], key: str) -> None:
    """Check the name, the dtype, the shape and the order of a tensor.

    Args:
        names: The names of the tensors that were checked before. The function adds ``name``.
        key: The key of the manifest or fragment, for errors.

    Raises:
        ManifestCorrupt: The name occurs twice, or the dtype, the shape or the order is invalid.
    """
    name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
    require(name not in names, key, f"tensor {name!r} is named twice")
    names.add(name)
    require(dtype in DTYPES, key, f"tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    fits = len(shape) <= MAX_DIMENSIONS and all(0 <= n < 2**62 for n in shape)
    require(
        fits and math.prod(n for n in shape if n) * DTYPES[dtype].itemsize <= _MAX_BYTES,
        key,
        f"tensor {name!r} has an impossible shape",
    )
    if tensor.order:
        is_permutation = sorted(tensor.order) == list(range(len(shape)))
        require(is_permutation, key, f"tensor {name!r} has an impossible order of dimensions")


def check_tied(ties: Mapping[str, str], names: set[str], key: str) -> None:
    """Raise ``ManifestCorrupt`` if a tied name is tied to a name that is not in ``names``, or is
    itself in ``names``.

    Args:
        ties: Tied names, each with the name that its bytes are stored under.
        names: The names of the stored tensors.
        key: The key of the manifest or fragment, for errors.
    """
    for name, target in ties.items():
        require(
            target in names and name not in names,
            key,
            f"{name[:80]!r} is tied to {target[:80]!r}, which is not stored",
        )
