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
    """For all its clients of this process. Done again, it does nothing new."""
    from aiobotocore.retries import standard
    from botocore.retries.standard import ExponentialBackoff

    module: Any = standard
    module.ExponentialBackoff = partial(ExponentialBackoff, random=_DICE.random)


def give_gcsfs_its_own_dice() -> None:
    """For all its file systems of this process. Done again, it does nothing new."""
    from gcsfs import retry

    module: Any = retry
    module.random = _DICE
