"""Train, and die of SIGKILL while the save of a step streams: trainer_kill.py FOLDER STEP WIDTH."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.integrations.trainers import TrainerCallback, trainer


class Kill(TrainerCallback):  # type: ignore[misc]
    """A callback that kills the process as soon as the save of a step has its folder."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == int(sys.argv[2]):
            root = Path(sys.argv[1], "ckpt")
            while not any(root.glob(f"step-*{state.global_step}.*")):
                pass
            os.kill(os.getpid(), signal.SIGKILL)


trainer(sys.argv[1], width=int(sys.argv[3]), callbacks=[Kill()]).train()
