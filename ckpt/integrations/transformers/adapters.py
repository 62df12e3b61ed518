"""Which parameters of a model with adapters of PEFT a step leaves out."""

from __future__ import annotations

from typing import Final

from torch import nn

_CHANGING_INITIALIZATIONS: Final = ("corda", "lora_ga", "loftq", "olora", "pissa")
"""The values of ``init_lora_weights`` of PEFT that change the frozen weights under an adapter when
it is put in place. Another process may change them in another way.
"""


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the frozen parameters of a PEFT model, in the state of a trainer, that
    are not saved. The weights of a base layer that an adapter has changed when it was put in place
    are saved.

    The list is empty for other models.
    """
    if (configs := getattr(model, "peft_config", None)) is None:
        return []
    initializations = [str(getattr(config, "init_lora_weights", "")) for config in configs.values()]
    changes_base = any(
        name.lower().startswith(_CHANGING_INITIALIZATIONS) for name in initializations
    )
    return [
        f"model/{name}"
        for name, value in model.named_parameters()
        if not (value.requires_grad or (changes_base and ".base_layer." in name))
    ]
