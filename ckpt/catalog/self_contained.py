"""Turn an adopted step into one that needs no file of another program, for a copy of it.

A data file of an adopted step is a file of another program. The copy gets a data file as a save
writes it in its place: the header, and then the bytes of the tensors without gaps. Its chunks are
those of the tensors in the foreign file, with the same checksums. So each byte is verified as it is
read, and a second copy has the same records as the first one.

A *fragment* is the record of what one rank has written. Its field ``locations`` has the path of the
foreign file. A *staged* offset counts in the file as a save writes it. A tensor consists of boxes
(rectangular regions), each stored as whole chunks. A *leaf* is a tensor with the boxes that a rank
has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from ckpt.catalog.tiered_reader import SourceManifest, TieredReader
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import pack_fragment, read_fragment
from ckpt.model.keys import data_name
from ckpt.model.manifest import Chunk, File, Fragment, FragmentRef, Manifest, StoredFile
from ckpt.model.record_encoding import pack
from ckpt.pipeline.chunk_reader import Sink
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import merge
from ckpt.plan.restore import ChunkRead
from ckpt.plan.save import SavePlan, plan_save


@dataclass(frozen=True, slots=True)
class _NewFile:
    """A data file in the place of a foreign file.

    Attributes:
        header: The header, which is the first chunk.
        indices: For each other chunk, its index in the foreign file.
    """

    header: bytes
    indices: Sequence[int]


class SelfContainedStep:
    """The step of ``origin`` as a save would have written it.

    It gives what a copy asks a `TieredReader` for.

    ``_source_files`` are the foreign data files by rank, and ``_new_files`` are the files that
    replace them. ``_records`` are the bytes of the new fragments. A *part* is the fragment of one
    rank.

    Args:
        origin: Reads the adopted step.
        source: The manifest of the adopted step, with all fragments filled in.

    Attributes:
        ref: The step.
        source: The manifest of the new step, with all fragments filled in.
    """

    def __init__(self, origin: TieredReader, source: SourceManifest) -> None:
        self._origin, self.ref = origin, origin.ref
        self._source_files: Mapping[int, StoredFile] = source.manifest.stored_files()
        self._new_files: dict[int, _NewFile] = {}
        parts = self._read_fragments(source.manifest)
        fragments = {
            rank: self._without_location(part) if part.locations else part
            for rank, part in parts.items()
        }
        packed_fragments = {rank: pack_fragment(part) for rank, part in fragments.items()}
        self._records = {rank: pack(part) for rank, part in packed_fragments.items()}
        manifest = merge(
            (
                packed_fragments[fragment_ref.rank],
                _fragment_ref(
                    fragment_ref.name, fragment_ref.rank, self._records[fragment_ref.rank]
                ),
            )
            for fragment_ref in source.manifest.fragments
        )
        self.source = SourceManifest(
            source.position,
            fill_manifest(manifest, fragments, key=self.ref.manifest),
            pack(manifest),
        )

    def fragment(
        self,
        manifest: Manifest,  # noqa: ARG002 - that of this step
        fragment_ref: FragmentRef,
        file: File | None,  # noqa: ARG002
    ) -> bytes:
        """Return the bytes of a fragment."""
        return self._records[fragment_ref.rank]

    def fetch(self, reads: Sequence[ChunkRead], sink: Sink) -> int:
        """Do what `TieredReader.fetch` does, for the chunks of one file of the new step."""
        rank = reads[0].rank
        if (new_file := self._new_files.get(rank)) is None:
            return self._origin.fetch(reads, sink)
        source = self._source_files[rank]
        source_reads: list[ChunkRead] = []
        for read in reads:
            if read.index == 0:  # The header
                sink.place(read, memoryview(new_file.header))
            else:
                index = new_file.indices[read.index - 1]
                source_reads.append(replace(read, index=index, offset=source.offsets[index]))
        source_reads.sort(key=lambda read: read.offset)
        return self._origin.fetch(source_reads, sink) if source_reads else 0

    def _read_fragments(self, manifest: Manifest) -> dict[int, Fragment]:
        files = manifest.file_map()
        return {
            fragment_ref.rank: read_fragment(
                self._origin.fragment(manifest, fragment_ref, files.get(fragment_ref.rank)),
                key=self.ref.key(fragment_ref.name),
            )
            for fragment_ref in manifest.fragments
        }

    def _without_location(self, part: Fragment) -> Fragment:
        """Return the fragment for the new data file of a rank."""
        source = self._source_files[part.rank]
        plan = _plan_of(part)  # Its ``items`` are the boxes, in the order of the new file
        staged_offsets = {
            (tensor.name, shard.box): shard.offset
            for tensor in part.tensors
            for shard in tensor.shards
        }
        chunks = [Chunk(len(plan.header), checksum(plan.header))]
        indices: list[int] = []
        for item in plan.items:
            # A box without bytes has no chunk: no chunk may begin at its offset.
            index = source.staged_index.get(
                staged_offsets[part.tensors[item.leaf].name, item.box], 0
            )
            nbytes = 0
            while nbytes < item.nbytes:
                chunks.append(source.chunks[index])
                indices.append(index)
                nbytes, index = nbytes + source.chunks[index].nbytes, index + 1
        self._new_files[part.rank] = _NewFile(plan.header, indices)
        file = File(data_name(part.rank), part.rank, plan.size, tuple(chunks))
        return with_fields(part, file=file, tensors=plan.tensors, locations=())


def _plan_of(part: Fragment) -> SavePlan:
    """Return the layout of the new data file. Its chunks are not used: those of the foreign file
    may be cut by the rule of an earlier version.
    """
    leaves = [
        Leaf(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tuple(shard.box for shard in tensor.shards),
            order=tensor.order,
        )
        for tensor in part.tensors
    ]
    return plan_save(leaves, rank=part.rank, chunk_bytes=part.chunk_bytes)


def _fragment_ref(name: str, rank: int, record: bytes) -> FragmentRef:
    return FragmentRef(name, rank, len(record), checksum(record))
