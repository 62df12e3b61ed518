"""Makes the description of a save for the tier writers, on the training thread."""

from __future__ import annotations

import time

from ckpt.adapters.walk.collect import Collected
from ckpt.adapters.walk.prepare import Prepared
from ckpt.config import Metadata
from ckpt.errors import ConfigError
from ckpt.model.keys import StepRef
from ckpt.model.metrics import METRICS
from ckpt.model.patterns import LEFT_OUT
from ckpt.model.values import dumps, to_json
from ckpt.save.rank_files import SaveJob
from ckpt.staging.snapshot import Snapshot


class Jobs:
    """Makes a `SaveJob` for each save of one manager.

    Args:
        metadata: The user's metadata, which every manifest gets.

    Raises:
        UnsupportedValue: The metadata is not made of plain values.
        ConfigError: The metadata has a name that ckpt uses itself.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = dict(metadata)
        self._packed = to_json("metadata", self._metadata)
        for name, setting in ((METRICS, "metrics"), (LEFT_OUT, "only")):
            if name in self._metadata:
                raise ConfigError(
                    f"metadata: {name!r} is where save_async({setting}=...) keeps what it is "
                    "given: take another name"
                )

    def job(
        self,
        ref: StepRef,
        trial: int,
        prepared: Prepared,
        snapshot: Snapshot,
        collected: Collected,
        notes: Metadata,
    ) -> SaveJob:
        """Return the description of one save. ``notes`` are added to the user's metadata."""
        if collected.left_out:
            notes = {**notes, LEFT_OUT: collected.left_out}
        return SaveJob(
            ref=ref,
            trial=trial,
            plan=prepared.plan,
            image=snapshot.window,
            tied=collected.tied,
            tree=dumps(collected.tree, "state"),
            per_rank=dumps(collected.per_rank, "state"),
            replicas=snapshot.replicas,
            metadata=to_json("metadata", {**self._metadata, **notes}) if notes else self._packed,
            created_at=time.time(),
            confirm=snapshot.confirm,
        )
