"""Which parameters of a model with adapters of PEFT a step leaves out."""

from __future__ import annotations

from typing import Final

from torch import nn

_SUBTRACTED_STARTS: Final = ("corda", "lora_ga", "loftq", "olora", "pissa")
"""The values of ``init_lora_weights`` of PEFT that change the frozen weights under an adapter when
it is put in place. Another process may change them in another way.
"""


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the frozen parameters of a PEFT model, in the state of a trainer, that
    are not saved. Those that an adapter has changed at its start are saved.

    The list is empty for other models.
    """
    if (configs := getattr(model, "peft_config", None)) is None:
        return []
    starts = [str(getattr(config, "init_lora_weights", "")) for config in configs.values()]
    is_changed = any(start.lower().startswith(_SUBTRACTED_STARTS) for start in starts)
    return [
        f"model/{name}"
        for name, value in model.named_parameters()
        if not (value.requires_grad or (is_changed and ".base_layer." in name))
    ]
