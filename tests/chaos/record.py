"""What a job says of its saves, beside the folder that ckpt-chaos watches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from ckpt.events import SaveCommitted

BEGIN: Final = "begin"
SAVED, DIGEST = "saved", "digest"
SEEN: Final = "seen"
"""The file with a line before each run: which of ``STATES`` a folder of Hugging Face is in."""
HALF: Final = "half"
STATES: Final = ("nothing", "older", "new", HALF)


class Record:
    """The file of the steps whose save has ended, as the job was told, and that of the weights."""

    def __init__(self, out: str) -> None:
        self._folder = os.path.dirname(os.path.abspath(out))
        self._append(BEGIN)

    def resumed(self, step: int) -> None:
        print(f"resumed from step {step}", flush=True)

    def saved(self, step: int) -> None:
        self._append(str(step))

    def observe(self, event: object) -> None:
        """Take an event of ckpt."""
        if isinstance(event, SaveCommitted):
            self.saved(event.step)

    def ended(self, weights: Mapping[str, Any]) -> None:
        """Write the digest of the weights at the end of the training."""
        digest = hashlib.sha256()
        for name, tensor in sorted(weights.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        with open(os.path.join(self._folder, DIGEST), "w") as file:
            file.write(digest.hexdigest())

    def _append(self, line: str) -> None:
        with open(os.path.join(self._folder, SAVED), "a") as file:
            file.write(f"{line}\n")
