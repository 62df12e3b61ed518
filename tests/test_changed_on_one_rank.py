"""A rank whose tensor has changed during the copy has no image for any tier.

The others go on to the next tier, and learn of it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ckpt import CheckpointManager, Tier
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import CkptError, PeerFailed, TensorChanged
from ckpt.save.active_save import ActiveSave
from ckpt.save.saver import Saver
from ckpt.save.tier_writer import TierWriter
from tests.coordination.world import World


def test_the_others_do_not_wait_for_it_on_the_next_tier(tmp_path: Path, monkeypatch) -> None:
    stream = Saver._stream

    def changed(self: Saver, writers: Sequence[TierWriter], save: ActiveSave) -> None:
        def raises() -> None:
            raise TensorChanged("x", save.request.ref.step)

        bad = save.request.ref.step == 1 and self._writers[0]._coordinator.rank == 1
        job = replace(save.request, confirm=raises) if bad else save.request
        stream(self, writers, replace(save, request=job))

    monkeypatch.setattr(Saver, "_stream", changed)
    tiers: list[str | Tier] = [
        Tier(str(tmp_path / "first"), required=False),
        Tier(str(tmp_path / "disk")),
        str(tmp_path / "far"),
    ]

    def work(coordinator: Coordinator) -> object:
        state = {f"x{coordinator.rank}": torch.ones(1000)}
        with CheckpointManager(
            tiers, coordinator=coordinator, commit_timeout_seconds=60
        ) as manager:
            error = manager.save_async(state, 1).exception()
            manager.save(state, 2)
            return error, manager.steps()

    found = World(2, patience=60).run(work)
    assert all(not isinstance(each, CkptError) for each in found.values()), found
    assert isinstance(found[1][0], TensorChanged)
    assert isinstance(found[0][0], PeerFailed)
    assert found[0][0].failures.keys() == {1}
    assert [steps for _, steps in found.values()] == [[2], [2]]
