"""Monitoring of runs: observers that turn events into metrics and a journal, and views of runs.

`Metrics` and `Journal` are observers: ``CheckpointManager(..., observers=[Metrics(port=9401)])``.
"""

from __future__ import annotations

from ckpt.observe.journal import Journal
from ckpt.observe.metrics import Metrics

__all__ = ["Journal", "Metrics"]
