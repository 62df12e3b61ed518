"""The description of one save, which the training thread makes for the tier writers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckpt.config import Metadata
from ckpt.errors import ConfigError
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk
from ckpt.model.metrics import METRICS
from ckpt.model.patterns import LEFT_OUT
from ckpt.model.values import dumps, to_json
from ckpt.model.views import View
from ckpt.pipeline.image_writer import Source
from ckpt.pipeline.stored_image import StoredImage
from ckpt.plan.save import SavePlan
from ckpt.staging.snapshot import Snapshot
from ckpt.state.walk.collect import WalkResult
from ckpt.state.walk.plan_cache import PreparedPlan
from ckpt.storage.tiers import OpenTier


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Describes one save for the tier writers.

    Attributes:
        ref: The step.
        trial: The number of earlier tries to save this step.
        plan: The save plan of the image.
        image: The bytes of the image. The state may still be copied into it while it is written.
            The bytes are valid until the save has ended.
        tied: Name of a tensor that shares memory with another tensor -> the other tensor's name.
        views: Name of a tensor that shares a buffer with other tensors -> its place in the buffer.
        tree: The plain values of the state, encoded.
        per_rank: The plain values that only this rank has, encoded.
        replicas: Waits until the whole state is in the image, and returns the digests of tensors
            that several ranks hold, by name. Raises the error of the copy if the copy has failed.
        metadata: The metadata of the manifest, encoded.
        created_at: When the save began, in seconds since 1970.
        confirm: Raises an error if the image does not hold the state as it was at the call. Called
            before each commit.
        hashed_chunks: The chunk table of the image; empty until the image has been written to a
            tier.
        restored_ref: The step that the job continued from at the call; None if it had restored
            none. This step decides which steps of earlier jobs forbid the save on a tier. A step
            that is restored while the save waits has no say.
        source: The tier whose files ``image`` reads; None if the image is in memory.
    """

    ref: StepRef
    trial: int
    plan: SavePlan
    image: Source
    tied: Mapping[str, str]
    views: Mapping[str, View]
    tree: bytes
    per_rank: bytes
    replicas: Callable[[], Mapping[str, str]]
    metadata: bytes
    created_at: float
    confirm: Callable[[], None]
    hashed_chunks: tuple[Chunk, ...] = ()
    restored_ref: StepRef | None = None
    source: OpenTier | None = None

    @property
    def is_single_pass(self) -> bool:
        """Whether the image cannot be read again, because a part of it has passed through memory
        in waves.
        """
        return not self.image.rereadable

    def from_files(self, image: StoredImage, source: OpenTier) -> SaveRequest:
        """Return this request for a farther tier, with an image that is read from the tier
        ``source`` and not from the slot.
        """
        return replace(
            self,
            image=image,
            replicas=dict(self.replicas()).copy,
            confirm=_confirm_nothing,
            source=source,
        )


def _confirm_nothing() -> None:
    """Do nothing: the image was confirmed before its commit on a nearer tier."""


class SaveRequests:
    """Makes a `SaveRequest` for each save of one manager.

    Args:
        metadata: The user's metadata, which every manifest gets.

    Raises:
        UnsupportedValue: The metadata is not made of plain values.
        ConfigError: The metadata has a name that ckpt uses itself, that begins with '$' or that is
            no string.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = dict(metadata)
        self._metadata_json = to_json("metadata", self._metadata)
        for name in self._metadata:
            # With another name, the names of the metadata would be hidden in its JSON.
            if not isinstance(name, str) or name.startswith("$"):
                raise ConfigError(
                    f"metadata: {name!r} is no name: use strings that do not begin with '$'"
                )
        for name, setting in ((METRICS, "metrics"), (LEFT_OUT, "only")):
            if name in self._metadata:
                raise ConfigError(
                    f"metadata: {name!r} is where save_async({setting}=...) keeps what it is "
                    "given: take another name"
                )

    def request(
        self,
        ref: StepRef,
        trial: int,
        preparation: PreparedPlan,
        snapshot: Snapshot,
        collection: WalkResult,
        notes: Metadata,
    ) -> SaveRequest:
        """Return the description of one save.

        Args:
            ref: The step.
            trial: The number of earlier tries to save this step.
            preparation: The save plan, as it was prepared for the state.
            snapshot: The copy of the state into the image.
            collection: The tensors and plain values that the walk over the state has collected.
            notes: Values for the manifest beside the user's metadata.
        """
        if collection.left_out:
            notes = {**notes, LEFT_OUT: collection.left_out}
        return SaveRequest(
            ref=ref,
            trial=trial,
            plan=preparation.plan,
            image=snapshot.window,
            tied=collection.ties,
            views=collection.views,
            tree=dumps(collection.tree, "state", collection.name_chars),
            per_rank=dumps(collection.per_rank, "state"),
            replicas=snapshot.replicas,
            metadata=to_json("metadata", {**self._metadata, **notes})
            if notes
            else self._metadata_json,
            created_at=time.time(),
            confirm=snapshot.confirm,
        )
