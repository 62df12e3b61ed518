"""What operators see. `Metrics` is an observer:
``CheckpointManager(..., observers=[Metrics(port=9401)])``.
"""

from __future__ import annotations

from ckpt.observe.metrics import Metrics

__all__ = ["Metrics"]
