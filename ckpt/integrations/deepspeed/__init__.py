"""DeepSpeed: its own calls through the tiers of ckpt, or its engine on any number of ranks."""

from ckpt.integrations.deepspeed.engine import CkptEngine
from ckpt.integrations.deepspeed.zero import zero_state

__all__ = ["CkptEngine", "zero_state"]
