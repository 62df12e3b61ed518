"""Random generators for the retries of client libraries.

By default these libraries draw the jitter of their retries from Python's global random generator,
in threads of their own. The training uses the same generator, so a retry would change the random
numbers of the training. The functions of this module give the libraries a separate generator.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

_SEPARATE_RANDOM = random.SystemRandom()


def separate_jitter_of_botocore() -> None:
    """Make all clients of botocore and aiobotocore in this process use a separate random generator.

    Further calls have no effect.
    """
    from aiobotocore.retries import standard
    from botocore.retries.standard import ExponentialBackoff

    module: Any = standard
    module.ExponentialBackoff = partial(ExponentialBackoff, random=_SEPARATE_RANDOM.random)


def separate_jitter_of_gcsfs() -> None:
    """Make all file systems of gcsfs in this process use a separate random generator.

    Further calls have no effect.
    """
    from gcsfs import retry

    module: Any = retry
    module.random = _SEPARATE_RANDOM
