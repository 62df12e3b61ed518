"""A small checkpoint, and a store that is not waited for."""

from __future__ import annotations

import numpy as np

from ckpt.pipeline.retry import RetryPolicy
from tests.checkpoints import Arrays

SMALL: Arrays = {
    "w": np.arange(40, dtype=np.float32).reshape(8, 5),
    "b": np.arange(9, dtype=np.int64),
    "n": np.array(2.5),
}
IMPATIENT = RetryPolicy(attempts=3, first_seconds=0.001, most_seconds=0.002)
