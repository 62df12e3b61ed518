"""SGLang: an engine takes the weights of later steps while it serves.

    engine = sglang.Engine("gpt2/")
    weights = SglangWeights(engine)
    with ckpt.follow("runs/gpt") as versions:
        for version in versions:
            weights.update(version)

A *version* is the weights of one step. It is read, verified and compared with the model before the
engine gets the first tensor, since an engine ends with its program if it cannot load a tensor.
Importing this module imports SGLang.

The engine gets the tensors in *buckets*, several tensors in one piece of shared memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
from sglang.srt.weight_sync.tensor_bucket import (  # pyright: ignore[reportMissingImports]
    FlattenedTensorBucket,
)

from ckpt.errors import ConfigError, RestoreError
from ckpt.errors.base import few
from ckpt.exchange.foreign.safetensors_folder import choose_files
from ckpt.exchange.inert.inert_torch import Span
from ckpt.exchange.inert.safetensors_reader import read_file
from ckpt.exchange.weights.follow import Version
from ckpt.integrations.shared.once_warnings import warn_of_untested

TESTED_RANGE: Final = ("0.5", "0.5")
BUCKET_BYTES: Final = 128 << 20
_FORMAT: Final = "flattened_bucket"
_log = logging.getLogger("ckpt")

Shapes = Mapping[str, tuple[int, ...]]


class SglangWeights:
    """Puts versions of the weights into an engine of this process.

    Args:
        engine: The ``sglang.Engine``.
        folder: The folder with the model's safetensors files, whose names and shapes a version must
            have. None for the folder that the engine has started with.
        bucket_bytes: How many bytes of tensors the engine gets at a time, through shared memory. A
            larger tensor goes alone.

    Raises:
        ConfigError: The folder is not there, or has no safetensors files; or the release of SGLang
            is older than 0.5.23.
        IntegrityError: A file of the folder is damaged.
    """

    def __init__(
        self,
        engine: Any,
        folder: str | os.PathLike[str] | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        warn_of_untested("sglang", TESTED_RANGE, advice="compare what it generates after an update")
        if not hasattr(engine, "begin_weight_update"):
            raise ConfigError(
                f"{type(engine).__name__} has no begin_weight_update: install SGLang 0.5.23 or "
                "later, and give an sglang.Engine"
            )
        self._engine, self._bucket_bytes = engine, bucket_bytes
        self._shapes = _shapes_in(os.fspath(folder or engine.server_args.model_path))

    def update(self, version: Version) -> None:
        """Put a version into the engine, and empty its cache. Return when the engine serves it.

        The engine first answers the requests that it has. Send it none meanwhile.

        Raises:
            RestoreError: The version does not fit the model, and the weights stay as they are. Or
                the engine has refused the version, and its weights are not to be used until the
                next update.
        """
        weights = _weights_of_model(version, self._shapes)
        self._call(version, "begin_weight_update")
        try:
            buckets = list(_buckets(weights, self._bucket_bytes))
            for number, names in enumerate(buckets, 1):
                payload = FlattenedTensorBucket([(name, weights[name]) for name in names])
                self._send(version, payload, is_last=number == len(buckets))
        finally:
            self._call(version, "end_weight_update")
        _log.info("ckpt: SGLang has the weights of step %d", version.step)

    def _send(self, version: Version, bucket: Any, *, is_last: bool) -> None:
        content = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        workers = self._engine.server_args.tp_size
        self._call(
            version,
            "update_weights_from_tensor",
            [MultiprocessingSerializer.serialize(content) for _ in range(workers)],
            load_format=_FORMAT,
            flush_cache=is_last,
        )

    def _call(self, version: Version, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the engine. Raise ``RestoreError`` if it refuses the version."""
        success, message = getattr(self._engine, method)(*arguments, **options)
        if not success:
            raise RestoreError(
                f"SGLang has refused step {version.step} in {method}: {message}. Its weights may "
                "be those of two steps: update it again, or start it again"
            )


def _shapes_in(folder: str) -> Shapes:
    """Return the shapes of the tensors in the safetensors files of a folder, by name."""
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{folder} is not a folder: give SglangWeights(engine, folder) the local folder that "
            "has the model's safetensors files"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in choose_files(folder, "safetensors").names:
        tensors, _ = read_file(os.path.join(folder, name), _without_values)
        shapes |= {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if not shapes:
        raise ConfigError(
            f"{folder} has no safetensors files: give SglangWeights(engine, folder) a folder with "
            "those of the model, such as one of ckpt export --format hf"
        )
    return shapes


def _without_values(span: Span, data: memoryview) -> torch.Tensor:
    del data
    return torch.empty(span.shape, device="meta")


def _weights_of_model(version: Version, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return the tensors that the model has, of a version that has all of them.

    A tensor that is tied to one of these is left out, as the files of Hugging Face leave it out.

    Raises:
        RestoreError: The version lacks a tensor, has another one, or has one of another shape.
    """
    tensors = {
        name: value for name, value in version.weights.items() if isinstance(value, torch.Tensor)
    }
    weights = {name: value for name, value in tensors.items() if name in shapes}
    pointers = {value.data_ptr() for value in weights.values()}
    model_names = {name for name, value in tensors.items() if value.data_ptr() in pointers}
    missing_names = [name for name in shapes if name not in weights]
    surplus_names = [name for name in version.weights if name not in model_names]
    if missing_names or surplus_names:
        fault = (
            f"lacks {few(missing_names)}"
            if missing_names
            else f"has {few(surplus_names)}, which the model lacks"
        )
        raise RestoreError(
            f"step {version.step} {fault}: let names= of ckpt.follow give the tensors the names "
            "that the model's safetensors files have, and None to leave one out"
        )
    mismatches = [name for name, value in weights.items() if tuple(value.shape) != shapes[name]]
    if mismatches:
        raise RestoreError(
            f"step {version.step} has other shapes than the model for {few(mismatches)}: let the "
            "job write folders of Hugging Face with names='transformers', and load these"
        )
    return weights


def _buckets(weights: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[str]]:
    """Divide the names into lists whose tensors have at most ``limit`` bytes, or are alone.

    The tensors with the widest elements come first, so that each is aligned within its bucket.
    """
    names: list[str] = []
    size = 0
    for name, value in sorted(weights.items(), key=lambda item: -item[1].itemsize):
        if names and size + value.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += value.nbytes
    if names:
        yield names
