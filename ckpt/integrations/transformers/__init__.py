"""Saves by ckpt in the ``Trainer`` of transformers and in the trainers of TRL derived from it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.integrations.transformers.trainer import CkptTrainerMixin, make_ckpt_trainer

__all__ = ["CkptTrainerMixin", "make_ckpt_trainer"]


def __getattr__(name: str) -> Any:
    # On first use, since ``trainer_folder`` does not need transformers.
    if name in __all__:
        return getattr(import_module("ckpt.integrations.transformers.trainer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
