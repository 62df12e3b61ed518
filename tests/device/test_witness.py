"""Changes on an accelerator that move no version counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import TensorChanged
from ckpt.staging.copies import Copy
from ckpt.staging.device import side_stream
from ckpt.staging.snapshot import Batch, Snapshot
from tests.device.accelerator import SECONDS, keep_busy, trained

pytestmark = pytest.mark.device

SOURCES: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "a number": lambda place: torch.ones((), device=place),
    "small": lambda place: torch.ones(7, 9, device=place),
    "one line": lambda place: torch.ones(1001, device=place),
    "several lines": lambda place: torch.ones(1024, 512, device=place),
    "transposed": lambda place: torch.ones(300, 700, device=place).t(),
}


@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("kind", SOURCES)
def test_what_stays_is_confirmed_and_what_changes_is_named(
    kind: str, check: str, place: torch.device
) -> None:
    sources = {name: make(place) for name, make in SOURCES.items()}

    def snapshot() -> Snapshot:
        late = tuple(
            Copy(name, source, torch.zeros(source.shape), source, source.nbytes)
            for name, source in sources.items()
        )
        return Snapshot(7, [Batch(eager=(), late_copies=late, checks=())], check=check)  # type: ignore[arg-type]

    def confirm(taken: Snapshot) -> None:
        taken.copy_eager()
        taken.copy_late()
        taken.confirm()

    confirm(snapshot())
    before = snapshot()
    sources[kind].data.add_(1)
    torch.accelerator.synchronize(place)  # the copy reads what is there when it runs
    with pytest.raises(TensorChanged, match=f"'{kind}'"):
        confirm(before)


def test_a_write_by_data_while_copies_wait_is_found(root: str, place: torch.device) -> None:
    """On a busy machine the copies may run before the write. A longer try shows it then."""
    state = trained(place)
    side = side_stream(place)
    assert side is not None
    with CheckpointManager(root) as manager:
        for number, seconds in enumerate(SECONDS):
            keep_busy(seconds, side)
            pending = manager.save_async(state, number)
            for parameter in state["model"].parameters():
                parameter.data.fill_(7 + number)
            if isinstance(error := pending.exception(60), TensorChanged):
                assert error.name.startswith("model/")
                return
    pytest.fail("no try was found out")
