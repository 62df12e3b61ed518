"""Save weights as transformers itself saves a model. It is imported only if it is needed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers  # pyright: ignore[reportMissingImports]

from ckpt.errors import ConfigError


def save(weights: Mapping[str, torch.Tensor], files: str, place: str, most_bytes: int) -> None:
    """Make a model of ``weights``, and save it to the folder ``place``.

    The folder ``files`` has the model's ``config.json``.

    No code of the folder is run: only classes of transformers are made.

    Raises:
        ConfigError: transformers does not know the model, or the weights do not fit it.
    """
    config = transformers.AutoConfig.from_pretrained(
        files, local_files_only=True, trust_remote_code=False
    )
    architectures = config.architectures or []
    model_class = getattr(transformers, architectures[0], None) if architectures else None
    if model_class is None:
        raise ConfigError(
            f"{files}/config.json names the architecture {architectures[0]!r}, which transformers "
            f"{transformers.__version__} does not have"
            if architectures
            else f"{files}/config.json names no architecture, the class of the model: add it, such "
            'as "architectures": ["GPT2LMHeadModel"]; model.save_pretrained(FOLDER) writes it too, '
            "and model.config.save_pretrained does not"
        )
    with torch.device("meta"):
        model = model_class(config)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit {architectures[0]}: {error}") from None
    model.tie_weights()
    model.config.dtype = next(model.parameters()).dtype
    model.save_pretrained(place, max_shard_size=most_bytes)
