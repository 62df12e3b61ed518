"""What one rank puts on one tier: its image, encoded or as it is, and the fragment that tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from ckpt.codec.byte_planes import Encoder, widths_of
from ckpt.config import NO_CODEC, SaveConfig
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.manifest import FORMAT, Chunk, Encoding, File, Fragment, FragmentRef
from ckpt.model.packed import Frames, frames_of, pack_fragment
from ckpt.pipeline.encoded import write_encoded
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.pipeline.writer import OnBytes, Source, adopt_image, write_image
from ckpt.plan.restore import chunks_of
from ckpt.plan.save import SavePlan
from ckpt.storage.api import Adopting
from ckpt.storage.tiers import OpenTier


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """All that streaming needs to know.

    Attributes:
        trial: Counts the tries at one step.
        image: Lent until the job is done.
        replicas: Gives the digests of replicas, once all of the image has landed; raises if it never does.
        known: The chunk table, once the image has been written.
    """

    ref: StepRef
    trial: int
    plan: SavePlan
    image: Source
    tied: Mapping[str, str]
    tree: bytes
    per_rank: bytes
    replicas: Callable[[], Mapping[str, str]]
    metadata: bytes
    created_at: float
    known: tuple[Chunk, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the image comes from a nearer tier's files."""
        return isinstance(self.image, StoredImage)


class RankFiles:
    """Threads: one save at a time."""

    def __init__(
        self, tier: OpenTier, rank: int, world_size: int, config: SaveConfig, workers: Workers
    ) -> None:
        self._backend, self._rank, self._world_size = tier.backend, rank, world_size
        self._chunk_bytes, self._workers = config.chunk_bytes, workers
        # every node has the manifest, but only one node has the fragment
        self._in_manifest = config.copies == "per_node"
        self._frames: tuple[SavePlan, Frames] | None = None
        self._encoder = None if tier.tier.codec == NO_CODEC else Encoder(tier.tier.codec)
        self._streamed: Encoding | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Of the fragment, and of the data."""
        return fragment_name(self._rank), self._data_name

    @property
    def _data_name(self) -> str:
        return data_name(self._rank, encoded=self._encoder is not None)

    def stored(self, job: SaveJob, retry: RetryPolicy) -> StoredImage:
        """The image of a job that was written here, the last that was not stored already."""
        file = File(self._data_name, self._rank, job.plan.size, job.known)
        return StoredImage.of(self._backend, job.ref.key(file.name), chunks_of(file, self._streamed), retry)

    def write(
        self, job: SaveJob, on_bytes: OnBytes, retry: RetryPolicy
    ) -> tuple[tuple[Chunk, ...], Encoding | None]:
        """Make the image durable. One that is stored elsewhere is begun anew if the store fails for longer than a request is retried.

        Raises:
            ChecksumMismatch: What was read back from the nearer tier is not what was written there.
            StorageError: Nothing is visible then.
        """
        key, lengths = job.ref.key(self._data_name), list[int]()
        write, sent = self._way(job, lengths), list[int]()

        def count(nbytes: int) -> None:
            sent.append(nbytes)
            on_bytes(nbytes)

        def attempt() -> tuple[Chunk, ...]:
            on_bytes(-sum(sent))  # begun anew
            sent.clear()
            lengths.clear()
            return write(
                job.image,
                job.plan.chunks,
                key=key,
                workers=self._workers,
                retry=RetryPolicy(),
                on_bytes=count,
                known=job.known,
            )

        chunks = retry.call(attempt) if job.is_stored else attempt()
        encoder = self._encoder
        encoding = Encoding(self._rank, encoder.name, tuple(lengths)) if encoder else None
        if not job.is_stored:
            self._streamed = encoding
        return chunks, encoding

    def put_fragment(
        self, job: SaveJob, chunks: tuple[Chunk, ...], encoding: Encoding | None, retry: RetryPolicy
    ) -> FragmentRef:
        """Tell of the image, once it is durable."""
        name, _ = self.names
        data = pack(pack_fragment(self._fragment(job, chunks, encoding), self._frames_of(job.plan)))
        retry.call(lambda: self._backend.put(job.ref.key(name), [data]))
        return FragmentRef(name, self._rank, len(data), checksum(data))

    def _way(self, job: SaveJob, lengths: list[int]) -> Callable[..., tuple[Chunk, ...]]:
        """How images are written here; ``lengths`` takes those of encoded chunks."""
        if isinstance(self._backend, Adopting):
            return partial(adopt_image, backend=self._backend)
        if self._encoder is None:
            return partial(write_image, backend=self._backend)
        widths = widths_of(job.plan.chunks, job.plan.tensors)
        return partial(
            write_encoded, backend=self._backend, encoder=self._encoder, widths=widths, lengths=lengths
        )

    def _fragment(self, job: SaveJob, chunks: tuple[Chunk, ...], encoding: Encoding | None) -> Fragment:
        return Fragment(
            format=FORMAT,
            step=job.ref.step,
            attempt=job.ref.attempt,
            rank=self._rank,
            world_size=self._world_size,
            created_at=job.created_at,
            chunk_bytes=self._chunk_bytes,
            file=File(self._data_name, self._rank, job.plan.size, chunks),
            tensors=job.plan.tensors,
            tied=dict(job.tied),
            tree=msgspec.Raw(job.tree),
            per_rank=msgspec.Raw(job.per_rank),
            replicas=dict(job.replicas()),
            metadata=msgspec.Raw(job.metadata),
            encoded=(encoding,) if encoding else (),
            in_manifest=self._in_manifest,
        )

    def _frames_of(self, plan: SavePlan) -> Frames:
        """Those of the save before if the plan is the same: making them takes Python a while."""
        if self._frames is None or self._frames[0] is not plan:
            self._frames = plan, frames_of(plan.tensors, plan.chunks)
        return self._frames[1]
