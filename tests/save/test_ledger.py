from __future__ import annotations

import pytest

from ckpt.config import SaveConfig
from ckpt.errors import AccessDenied, TierBehind
from ckpt.events import Observers
from ckpt.model.keys import StepRef
from ckpt.pending import SaveRecord
from ckpt.save.ledger import SaveLedger


def test_a_close_that_hangs_although_all_saves_have_ended_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    SaveLedger(Observers([]), SaveConfig()).give_up("ValueError: x", 0.3)
    assert caplog.messages == [
        "ckpt: ValueError: x: this process ends: close has not ended within 0.3 s, and no save was "
        "given up; older checkpoints are whole"
    ]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_tier_that_is_behind_hides_no_error_of_another_tier(failing: str) -> None:
    ledger = SaveLedger(Observers([]), SaveConfig())
    record = SaveRecord(1, 0, None, began=0, tiers={"a": "a", "b": "b"})
    ledger.begin(record, StepRef(1, "a" * 12), owner=None)
    refused = AccessDenied("k")
    first, second = (TierBehind(1), refused) if failing == "b" else (refused, TierBehind(1))
    assert record.end_on("a", first) is True
    error = record.end_on("b", second)
    assert error is refused
    ledger.end(record, refused)
    assert record.unreported_error is refused


def test_the_last_save_that_hangs_holds_the_next_call_no_longer_than_a_commit_may_take() -> None:
    ledger = SaveLedger(Observers([]), SaveConfig(commit_timeout_seconds=0.05))
    record = SaveRecord(1, 0, None, began=0, tiers={"a": "a"})
    ledger.begin(record, StepRef(1, "a" * 12), owner=None)
    assert ledger.save_of(1) is record
    assert not record.done()
