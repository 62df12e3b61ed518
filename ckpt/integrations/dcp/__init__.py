"""``torch.distributed.checkpoint`` (DCP) with ckpt as its storage."""

from ckpt.integrations.dcp.storage import CkptReader, CkptWriter

__all__ = ["CkptReader", "CkptWriter"]
