"""Client libraries draw the pauses between their tries from Python's global generator, from
threads of their own. That generator is the training's: a store that stumbles must not change
what a run computes.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

_DICE = random.SystemRandom()


def give_botocore_its_own_dice() -> None:
    """Do it for all clients of botocore in this process. Further calls have no effect."""
    from aiobotocore.retries import standard
    from botocore.retries.standard import ExponentialBackoff

    module: Any = standard
    module.ExponentialBackoff = partial(ExponentialBackoff, random=_DICE.random)


def give_gcsfs_its_own_dice() -> None:
    """Do it for all file systems of gcsfs in this process. Further calls have no effect."""
    from gcsfs import retry

    module: Any = retry
    module.random = _DICE
