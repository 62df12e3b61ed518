from __future__ import annotations

import pytest

from ckpt.config import SaveConfig
from ckpt.events import Observers
from ckpt.save.ledger import SaveLedger


def test_a_close_that_hangs_although_all_saves_have_ended_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    SaveLedger(Observers([]), SaveConfig()).give_up("ValueError: x", 0.3)
    assert caplog.messages == [
        "ckpt: ValueError: x: this process ends: close has not ended within 0.3 s, and no save was "
        "given up; older checkpoints are whole"
    ]
