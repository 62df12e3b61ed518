"""Lightning: ``CkptCheckpoint`` in the place of ``ModelCheckpoint``."""

from ckpt.integrations.lightning.callback import CkptCheckpoint

__all__ = ["CkptCheckpoint"]
